"""`Validator`: validation beside training, by helpers where there are some.

validator = ff.Validator(model, tests, score=score, figures=figures, delay=1)
for epoch in range(epochs):
    ...                                                   train
    for result in validator.submit(epoch, step):          snapshot now; results of the epoch before
        print(result.epoch, result.figures)
for result in validator.finish(): ...                     the rest

trainer   train 0 ──► snapshot 0 ─ train 1 ──► result 0, snapshot 1 ─ train 2 ──► result 1 ...
helpers                    └──── evaluate 0 ────┘        └──── evaluate 1 ────┘
"""

from __future__ import annotations

import itertools
import json
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fivefold import comm
from fivefold.closing import Closing
from fivefold.data import Loader
from fivefold.errors import OffloadWarning, UsageError, warn
from fivefold.mesh.duty import help_instead
from fivefold.offload.evaluation import Evaluator, Score
from fivefold.offload.results import Result, Stand, UnderWay
from fivefold.offload.slices import Slices, Sums, added
from fivefold.offload.snapshot import Packing, Snapshot, divided
from fivefold.offload.validator_client import (
    Turn,
    ValidationRun,
    ValidatorClient,
    arithmetic_fields,
)
from fivefold.parallel import ParallelModel
from fivefold.parallel.arithmetic import Arithmetic
from fivefold.plan import AXES, Numerics
from fivefold.trace import Phase, Tag, recording, span

__all__ = ["Validator"]

MOST_DELAY = 2

Figures = Callable[[Sequence[float]], Mapping[str, float]]
"""the sums over all test batches to figures by name"""


class Validator(Closing):
    """Evaluates a model at moments that the script chooses, and gives the results after a stated delay.

    Where helpers run (`fivefold run --helpers`), a copy of the weights and buffers goes to them, and training
    goes on. None is skipped: `submit` waits for a result that is due and not there yet. Without helpers, or
    when all have died, this process or mesh evaluates the same batches itself, and results come with the same
    delay, so decisions are those of any other run. Making one and every method is collective over all ranks.

    A helper evaluates whole batches with the same number of threads, so in one process, and wherever batches
    are evaluated whole, results are equal bit for bit on the same kind of processor. Where tiles, stages or
    sharded parameters divide the net, a batch that the mesh evaluates itself is rounded otherwise; so it is
    on a GPU. Without helpers, several ranks share every batch, which rounds otherwise, too. Helpers compute
    on CPUs: what is trained on a GPU they evaluate only if the plan says `offload.validation = true` itself.

    Give it to a `Checkpointer` by name, and a resumed run gets every result that the save's had not got yet:
    a save holds the weights that are under way. Submit an epoch before the save of its last step.

    Args:
        model: what `parallelize` returned.
        tests: yields pairs (inputs, targets). Validation number n reads epoch n of it.
        score: (outputs, targets) to the sums of a batch: 1-D, float64, such as [loss, correct, samples].
        figures: the sums over all batches to figures by name.
        delay: how many calls of `submit` later a result comes: 0 at once, 1, or 2. None: 1 where helpers
            evaluate and else 0, for figures by which nothing is decided.
        numerics: precision and memory format; the plan's by default.
        between: called after every batch that the ranks share, and while they wait for helpers.

    Raises `UsageError` for another delay, or a net of which no snapshot can be made.
    """

    def __init__(
        self,
        model: ParallelModel,
        tests: Loader,
        *,
        score: Score,
        figures: Figures,
        delay: int | None = 1,
        numerics: Numerics | None = None,
        between: Callable[[], None] | None = None,
    ) -> None:
        if delay is not None and not 0 <= delay <= MOST_DELAY:
            raise UsageError(
                f"delay is {delay}; results come 0, 1 or {MOST_DELAY} calls of submit later"
            )
        self._mesh, self._model, self._figures = model.mesh, model, figures
        self._numerics = numerics or model.mesh.plan.numerics
        self._arithmetic = Arithmetic(self._numerics, model.mesh.device)
        self._evaluator = Evaluator(model, tests, score)
        self.tests = tests
        self.between = between
        self._packing = Packing(model.module)
        if self._packing.problem and delay:
            raise UsageError(
                f"results with a delay need a copy of the net: {self._packing.problem}; or use delay=0"
            )
        self._divided = divided(model) or model.mesh.layout.tiles > 1
        self._under_way: deque[UnderWay] = deque()
        self._spent: list[Snapshot] = []
        self._stand = Stand()
        self._versions = itertools.count()
        self._leasing: ValidatorClient | None = None
        self.helped = self._begin()
        """whether helpers are to evaluate"""
        self.delay = int(self.helped) if delay is None else delay
        """how many calls of `submit` later a result comes"""

    def _begin(self) -> bool:
        """Let helpers know of this validator, or trainers if this process is one; whether helpers help."""
        if self._mesh.role == "helper":
            from fivefold.helpers.service import offer
            from fivefold.offload.serving import ValidatorServing

            offer(
                "validator",
                ValidatorServing(self._evaluator, self._packing, self._identity(), self._numerics),
            )
            return False
        if self._mesh.rank == 0 and os.environ.get("FIVEFOLD_HELPERS"):
            self._leasing = self._leased()
        told = comm.broadcast_text(
            "helped" if self._leasing else "alone", self._mesh.group(*AXES), self._mesh.device
        )
        return told == "helped"

    def _leased(self) -> ValidatorClient | None:
        from fivefold.helpers.dispatcher import Dispatcher

        dispatcher = Dispatcher.of(self._mesh)
        if dispatcher is None:
            return None
        problem = self._packing.problem
        if problem:
            warn(f"helpers do not validate: {problem}", OffloadWarning)
        if problem or not self._wanted():
            dispatcher.number("validator")  # both sides count
            return None
        same_bits = not self._divided and self._mesh.device.type == "cpu"
        return ValidatorClient(dispatcher, self._identity(), joins=same_bits)

    def _wanted(self) -> bool:
        """Whether helpers, which have no GPU, are to evaluate what is trained on one: only if asked."""
        plan = self._mesh.plan
        asked = plan.origin("offload.validation").kind != "default"
        return plan.offload.validation and (asked or self._mesh.device.type == "cpu")

    def _identity(self) -> dict[str, Any]:
        from fivefold.data.remote.serving import identity_of

        stream = identity_of(self._evaluator.tests.source)
        return {"tensors": self._packing.digest(), **{f"tests.{k}": v for k, v in stream.items()}}

    # ---- for scripts

    @property
    def helpers(self) -> int:
        """On the first rank, how many helpers are there now for this validator."""
        return 0 if self._leasing is None else self._leasing.helpers

    def submit(self, epoch: int, step: int) -> list[Result]:
        """Validate the model as it is now, and return the results that are due, oldest first.

        With a delay of 1, the result of one call comes with the next. Waits for it if need be, so no more
        than two validations are ever under way. Every rank gets the same. In a helper, serves and never
        returns.
        """
        help_instead()
        due: list[Result] = []
        while len(self._under_way) > max(self.delay - 1, 0):
            due.append(self._deliver())
        self._take(epoch, step)
        while len(self._under_way) > self.delay:
            due.append(self._deliver())
        self._settle(self._stand.count + 1, step)
        return due

    def finish(self) -> list[Result]:
        """The results that are still due, oldest first."""
        help_instead()
        due = [self._deliver() for _ in range(len(self._under_way))]
        self._settle(self._stand.count, self._stand.step)
        return due

    @property
    def waiting(self) -> int:
        """How many results are still due."""
        return len(self._under_way)

    @property
    def submitted(self) -> int | None:
        """The step that was submitted last; None if none was since it was made, and no state says."""
        return self._stand.step

    def state_dict(self) -> dict[str, Any]:
        """What is under way, with its weights: equal on every rank, whose number may change.

        In the middle of a call (`between`) it is that before the call. Collective where the layout divides
        the net.
        """
        stand = self._stand
        return {
            "count": stand.count,
            "step": -1 if stand.step is None else stand.step,
            "under_way": {str(n): one.state_dict() for n, one in enumerate(stand.under_way)},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there: what was under way is evaluated again, by helpers where there are some."""
        self._drop()
        waiting = state_dict["under_way"]
        for number in sorted(waiting, key=int):
            told = waiting[number]
            snapshot = Snapshot(self._model, self._packing, told["weights"])
            one = UnderWay(told["epoch"], told["step"], told["test_epoch"], snapshot)
            one.total = told["total"]
            if one.total is None and self.helped:
                self._lease(one)
            self._under_way.append(one)
        self._settle(state_dict["count"], state_dict["step"])

    def close(self) -> None:
        """Drop what is under way; helpers are asked no more."""
        self._drop()
        if self._leasing is not None:
            self._leasing.close()
            self._leasing = None

    def _settle(self, count: int, step: int | None) -> None:
        """A call is over."""
        self._stand = Stand(tuple(self._under_way), count, step)
        for snapshot in self._spent:
            snapshot.release()
        self._spent.clear()

    def _drop(self) -> None:
        self._under_way.clear()
        if self._leasing is not None:
            self._leasing.drop()

    # ---- one validation

    def _take(self, epoch: int, step: int) -> None:
        copy = self.helped or self.delay > 0
        with span(Phase.VALIDATE):
            snapshot = Snapshot(self._model, self._packing) if copy else None
        one = UnderWay(epoch, step, self._stand.count, snapshot)
        if self.helped:
            self._lease(one)
        else:
            one.total = self._together(one, self.between)
        self._under_way.append(one)

    def _lease(self, one: UnderWay) -> None:
        """Let helpers evaluate it."""
        if self._leasing is not None:
            assert one.snapshot is not None
            slices = Slices(len(self.tests))
            told = arithmetic_fields(self._numerics.precision, self._numerics.memory_format)
            one.work = ValidationRun(
                next(self._versions), one.test_epoch, one.snapshot, slices, told
            )
            self._leasing.begin(one.work)

    def _together(self, one: UnderWay, between: Callable[[], None] | None = None) -> list[float]:
        """The sums of all batches, which ranks share, by the net as it is."""
        every = self._evaluator.read(one.test_epoch, range(len(self.tests)), whole=False)
        return added(list(self._evaluator.together(every, self._arithmetic, between)))

    def _deliver(self) -> Result:
        one = self._under_way[0]
        total, by_helpers = self._awaited(one) if one.total is None else (one.total, 0)
        self._under_way.popleft()
        if one.snapshot is not None:
            self._spent.append(one.snapshot)
        figures = self._figures(total)
        copied = (one.snapshot, self._model)
        return Result(one.epoch, one.step, figures, tuple(total), by_helpers, *copied)

    def _awaited(self, one: UnderWay) -> tuple[list[float], int]:
        """The sums, and how many batches helpers evaluated; the ranks evaluate what they do not."""
        if not self.helped:  # the run that was saved had helpers
            assert one.snapshot is not None
            with one.snapshot.installed():
                return self._together(one), 0
        while True:
            with span(Phase.VALIDATE), recording():
                turn = self._next_turn(one)
                if turn.total is not None:
                    return turn.total, turn.by_helpers
                if turn.batches:
                    self._evaluate(one, turn.batches)
            if self.between is not None:
                self.between()

    def _next_turn(self, one: UnderWay) -> Turn:
        """What the first rank decides, on all ranks."""
        told = None
        if self._leasing is not None:
            assert one.work is not None
            share = 1 if self._divided else self._mesh.size
            turn = self._leasing.next_turn(one.work, share)
            told = json.dumps([turn.batches, turn.total, turn.by_helpers])
        text = comm.broadcast_text(told, self._mesh.group(*AXES), self._mesh.device)
        return Turn(*json.loads(text))

    def _evaluate(self, one: UnderWay, batches: list[int]) -> None:
        assert one.snapshot is not None
        with one.snapshot.installed():
            sums = (self._by_mesh if self._divided else self._by_ranks)(one, batches)
        if self._leasing is not None:
            assert one.work is not None
            self._leasing.add(one.work, batches, sums)

    def _by_mesh(self, one: UnderWay, batches: Sequence[int]) -> Sums:
        """All ranks share every batch."""
        read = self._evaluator.read(one.test_epoch, batches, whole=False)
        return self._evaluator.together(read, self._arithmetic)

    def _by_ranks(self, one: UnderWay, batches: Sequence[int]) -> Sums:
        """Every rank evaluates some of the batches whole, as a helper would."""
        mesh = self._mesh
        own = range(len(batches))[mesh.rank :: mesh.size]
        sums = np.zeros((0, 0))
        if own:
            mine = [batches[at] for at in own]
            read = self._evaluator.read(one.test_epoch, mine, whole=True)
            sums = self._evaluator.alone(read, self._arithmetic)
        if mesh.size == 1:
            return sums
        # The first rank has a batch in every turn, so it knows how many sums there are.
        width = int(comm.broadcast_text(str(sums.shape[1]), mesh.group(*AXES), mesh.device))
        every = torch.zeros(len(batches), width, dtype=torch.float64)
        if own:
            every[list(own)] = torch.from_numpy(sums)
        every = every.to(mesh.device)
        return comm.all_reduce(every, mesh.group(*AXES), Tag.LOSS).cpu().numpy()
