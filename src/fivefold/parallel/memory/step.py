"""What the steps of a model hold under `memory.budget`: decided when a batch is new, and again when measured.

    a step without memory ──► what it holds ──► choice ──► the same step under it ──► does it fit?
    real steps            ──► seconds of nodes, and on GPUs their workspaces ──► choice

Each rank decides for itself, since what it holds differs with its tile or stage: nothing of a choice takes
part in communication.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fivefold.arena import available_bytes
from fivefold.errors import UsageError, warn
from fivefold.launch.environment import locate
from fivefold.mesh import Mesh
from fivefold.parallel.memory.budget import Budgeted, NodeTimes
from fivefold.parallel.memory.choice import Choice
from fivefold.parallel.memory.decide import decided, least
from fivefold.parallel.memory.file import FileStore
from fivefold.parallel.memory.link import measured_link, seen_link
from fivefold.parallel.memory.optimizers import OptimizerStates
from fivefold.parallel.memory.pinned import PinnedStore
from fivefold.parallel.memory.profile import Held, Profile, profile_of
from fivefold.parallel.memory.simulate import Simulator, State
from fivefold.parallel.memory.slots import Slot
from fivefold.parallel.memory.spill import Pool, Store, WeightlessStore
from fivefold.parallel.memory.table import choices_of
from fivefold.parallel.memory.workspace import (
    NodePeaks,
    Workspace,
    device_count,
    rehearsed_peaks,
    with_workspaces,
)
from fivefold.parallel.program.costs import Costs, measured_processor
from fivefold.parallel.program.memory import Predicted, Rehearse
from fivefold.parallel.program.program import Program
from fivefold.parallel.program.recompute import measured_span
from fivefold.parallel.sharded import local
from fivefold.parallel.trees import kinds, leaves
from fivefold.plan import Memory
from fivefold.sections import bytes_of

__all__ = ["Decision", "StepBudget", "store_of"]

_TIMED = 2
"""real steps that are timed before a choice is made again; where workspaces count there is one between"""
_TRIES = 5
_PART = 100
"""of the limit: after a choice that does not fit, at least so much less is aimed at"""
_NEAR = 0.98
"""of the limit: a choice that holds less is tried to be bettered"""
_ALONE = 0.5
"""of the time that nodes take while copies are made: at least so much they take without"""
_PINNED = 0.75
"""of what is available on a node: the most that its ranks pin if memory.host is not set"""
_LEAST = 4
"""ways to hold little that are tried before a budget is refused"""

_T = TypeVar("_T")
_Found = tuple[State, Predicted]
_Look = Callable[[Rehearse], _Found]


class Rehearsed(Protocol):
    """Makes steps without memory on such a batch; see `rehearsed` of `program.memory`."""

    def __call__(self, inputs: Any, targets: Any, work: Callable[[Rehearse], _T]) -> _T:
        """What `work` returns."""
        ...


@dataclass
class Decision:
    """For one program and one kind of batch."""

    profile: Profile
    free: Predicted
    """without a budget"""
    times: NodeTimes
    state: State
    choice: Choice
    predicted: Predicted
    """under the choice"""
    pool: Pool | None = None
    peaks: NodePeaks | None = None
    """of the step in which workspaces are measured, until it is known what they take"""
    workspaces: dict[Slot, int] = field(default_factory=dict[Slot, int])
    """bytes, by node"""
    steps: int = 0
    due: bool = False
    """whether more is known than when it was made"""
    seen: bool = False
    """whether a step under it has been measured"""
    last: int = -1
    """number of the last step that asked for it"""


@dataclass(frozen=True)
class _Batch:
    """What a step is given."""

    kind: tuple[Any, ...]
    """equal for batches that are alike"""
    noted: Callable[[], tuple[Any, Any]]
    """inputs and targets without numbers"""
    number: int = 0
    """of the step"""


class StepBudget:
    """Of one model.

    Args:
        mesh: where it computes.
        net: the plain net.
        rehearsed: makes steps without memory.
        costs: that nodes are told to take before any step is timed.

    Raises `UsageError` where nothing can be spilled to what the plan names.
    """

    def __init__(self, mesh: Mesh, net: nn.Module, rehearsed: Rehearsed, costs: Costs) -> None:
        memory = mesh.plan.memory
        self.budget_bytes = bytes_of(memory.budget)
        self.rank = mesh.rank
        self._mesh, self._net, self._rehearsed = mesh, net, rehearsed
        if mesh.device.type != "cpu":  # costs that nobody has measured are those of a CPU
            flops_per_s, copied = measured_processor(mesh.device)
            costs = replace(costs, flops_per_s=flops_per_s, copied_bytes_per_s=copied)
        self._costs, self._span_s = costs, measured_span(mesh.device)
        self._store = store_of(memory, mesh.device)
        self._link = None if self._store is None else measured_link(self._store, mesh.device)
        self._known: dict[tuple[Any, ...], Decision] = {}
        self._batch: _Batch | None = None
        self._steps = 0
        self._count = device_count(mesh.device)
        self._workspace = Workspace(mesh.device, self._count, self.budget_bytes)
        self._measured = _TIMED + (self._count is not None)
        """steps before a choice is made again"""
        self._optimizers = OptimizerStates(net, mesh.device, self._more_known)

    # ---- in a step

    @contextmanager
    def step(self, inputs: Any, targets: Any, noted: Callable[[Any], Any]) -> Generator[None]:
        """Within the block a step is made on such a batch, of which `noted` makes trees without numbers."""
        self._batch = _Batch(
            kinds(inputs, targets), lambda: (noted(inputs), noted(targets)), self._steps
        )
        self._steps += 1
        self._workspace.before(self._present(inputs, targets))
        try:
            yield
        finally:
            asked = [one for one in self._known.values() if one.last == self._batch.number]
            self._batch = None
            for one in asked:
                if one.peaks is not None:
                    one.peaks.close()
            if any(not one.seen and one.steps > self._measured for one in asked):
                most = (self._standing(one.free) + one.predicted.peak_bytes for one in asked)
                self._workspace.ended(max(most))
                for one in asked:
                    one.seen, one.due = True, one.due or not self._fits(one)

    def _present(self, inputs: Any, targets: Any) -> Iterator[Tensor]:
        """What of the model and of a batch is there."""
        for tensor in (*self._net.parameters(), *self._net.buffers()):
            yield local(tensor)
            if tensor.is_leaf and tensor.grad is not None:
                yield local(tensor.grad)
        yield from leaves((inputs, targets))

    def budgeted(self, program: Program) -> Budgeted | None:
        """What the runs of a program do in the step that is made.

        Raises `UsageError` where no choice fits.
        """
        batch = self._batch
        if batch is None:
            return None
        key = (batch.kind, *(node.name for node in program.tape.nodes))
        decision = self._known.get(key)
        if decision is None:
            decision = self._known[key] = self._decided(batch)
        if decision.last != batch.number:
            decision.last = batch.number
            if decision.steps == self._measured:
                self._look_back(decision, batch)
            if decision.due:
                self.choose(decision, lambda look: self._rehearsed(*batch.noted(), look))
            decision.steps += 1
            if self._count is not None and decision.steps == _TIMED:
                decision.peaks = NodePeaks(lambda: self._count)
            if decision.steps > self._measured and not decision.seen:
                self._workspace.began()
        peaks = decision.peaks if decision.steps == _TIMED else None
        times = decision.times if peaks is None and decision.steps <= self._measured else None
        return Budgeted(decision.choice, decision.pool, watch=peaks, times=times)

    def _look_back(self, decision: Decision, batch: _Batch) -> None:
        """At steps that were measured."""
        if (seconds := decision.times.seconds()) is None:
            return
        decision.profile = decision.profile.timed(*self._alone(decision, *seconds))
        decision.due = True
        if decision.peaks is not None:
            self._rehearsed(
                *batch.noted(), partial(self._note_workspaces, decision, decision.peaks)
            )
            decision.peaks = None

    def _note_workspaces(self, decision: Decision, seen: NodePeaks, rehearse: Rehearse) -> None:
        """What nodes took beside what they take in a rehearsal of the same step."""
        window = decision.state.window_bytes
        peaks, told = rehearsed_peaks(rehearse, decision.choice, self._weightless(window))
        decision.workspaces = {
            slot: size - peaks.bytes.get(slot, 0)
            for slot, size in seen.bytes.items()
            if size > peaks.bytes.get(slot, 0)
        }
        decision.profile = decision.profile.with_workspaces(decision.workspaces)
        free = Choice.keep_all(len(decision.profile.nodes))
        decision.free = with_workspaces(rehearse, free, self._weightless(0), decision.workspaces)
        more = peaks.more_bytes(decision.workspaces)
        decision.predicted = replace(told, peak_bytes=told.peak_bytes + more)
        known = self._standing(decision.free) + decision.predicted.peak_bytes
        self._workspace.ended(known, seen.most_bytes)

    def _weightless(self, window_bytes: int) -> Pool:
        """For a rehearsal."""
        edge_bytes = 0 if self._store is None else self._store.edge_bytes
        return Pool(WeightlessStore(edge_bytes), window_bytes)

    def _alone(
        self, decision: Decision, forward: Sequence[float], backward: Sequence[float]
    ) -> tuple[Sequence[float], Sequence[float]]:
        """Seconds of nodes while nothing is copied, from those of steps that made copies."""
        whole = sum(forward) + sum(backward)
        if self._link is None or not whole:
            return forward, backward
        spilled = float(Simulator(decision.profile, None).held(decision.state)[1].sum())
        part = max(1 - 2 * spilled * self._link.drag_s_per_byte / whole, _ALONE)
        return [part * s for s in forward], [part * s for s in backward]

    def told(self, inputs: Any, targets: Any) -> Predicted:
        """What a step on such a batch needs, decided as for a step, with a table of it."""
        batch = _Batch(kinds(inputs, targets), lambda: (inputs, targets))
        known = (one for key, one in self._known.items() if key[0] == batch.kind)
        decision = max(known, key=lambda one: one.last, default=None)
        if decision is None:
            decision = self._decided(batch)
        simulator = Simulator(decision.profile, self._link)
        standing = self._standing(decision.free)
        told = choices_of(
            simulator, decision.state, standing, self._workspace.bytes, self.budget_bytes
        )
        return replace(decision.predicted, choices=told)

    def pool(self, window_bytes: int) -> Pool:
        """To spill to."""
        assert self._store is not None
        return Pool(self._store, window_bytes)

    # ---- deciding

    def _decided(self, batch: _Batch) -> Decision:
        """From a look at a step that keeps everything."""

        def work(rehearse: Rehearse) -> Decision:
            held, found = Held(), list[Program]()

            def keep_all(program: Program) -> Budgeted:
                found.append(program)
                return Budgeted(Choice.keep_all(len(program.tape.nodes)), watch=held)

            free = rehearse(keep_all)
            held.close()
            program, here = found[0], found[0].here
            assert here is not None, "plans are made for ranks"
            nodes = program.tape.nodes
            seconds = [self._costs.forward_s(node) / here.grid.size for node in nodes]
            profile = profile_of(program, here, held, seconds)
            profile = replace(profile, span_s=self._span_s)
            times, choice = NodeTimes(len(nodes), self._mesh.device), Choice.keep_all(len(nodes))
            state = Simulator(profile, None).start()
            decision = Decision(profile, free, times, state, choice, free)
            self.choose(decision, lambda work: work(rehearse))
            return decision

        return self._rehearsed(*batch.noted(), work)

    def choose(self, decision: Decision, rehearsed: Callable[[_Look], _Found]) -> None:
        """Find a choice that fits, of those the fastest, and put it into the decision.

        Raises `UsageError` if there is none.
        """
        free, limit = decision.free, self._limit(decision.free)
        if self._store is not None and self._link is not None:
            self._link = seen_link(self._link, self._store.rates)
        simulator = Simulator(decision.profile, self._link)
        fits = free.peak_bytes <= limit
        found = None if fits else rehearsed(partial(self._best, decision, simulator, limit))
        decision.due, decision.seen, decision.peaks = False, False, None
        decision.state, decision.predicted = found or (simulator.start(), free)
        over = decision.predicted.peak_bytes - limit
        # Libraries take smaller workspaces where memory lacks.
        if over > self._workspace.bytes + max(decision.workspaces.values(), default=0):
            self._refuse(free, decision.predicted)
        if over > 0 and decision.steps >= self._measured:
            warn(
                f"with workspaces of kernels steps hold up to {_mib(over)} more than "
                f"memory.budget = {self._mesh.plan.memory.budget}"
            )
        if decision.pool is not None:
            decision.pool.settle()
        if self._count is not None:  # what is cached of the last choice is cut otherwise
            torch.cuda.empty_cache()
        decision.choice = simulator.choice(decision.state)
        spills = bool(decision.state.spilled.any())
        decision.pool = self.pool(decision.state.window_bytes) if spills else None

    def _best(
        self, decision: Decision, simulator: Simulator, limit: int, rehearse: Rehearse
    ) -> _Found:
        """The best that is found, or what the last search found, which may have been luckier."""

        def under(state: State) -> Predicted:
            choice, pool = simulator.choice(state), self._weightless(state.window_bytes)
            return with_workspaces(rehearse, choice, pool, decision.workspaces)

        fastest = partial(_fastest, simulator, limit, decision.free.peak_bytes, under)
        if decision.steps > self._measured:  # it was the best, and a little has changed
            found = fastest(decision.state)
            if found[1].peak_bytes <= limit:
                return found
        found, last = fastest(), (decision.state, decision.predicted)
        fits = [one for one in (found, last) if one[1].peak_bytes <= limit]
        return min(fits or [found], key=lambda one: float(simulator.run([one[0]]).seconds[0]))

    def _refuse(self, free: Predicted, told: Predicted) -> None:
        standing, room = self._standing(free), ""
        if self._link is not None and self._link.room_bytes < free.saved_bytes:
            room = f", with room to spill {_mib(self._link.room_bytes)}"
        raise UsageError(
            f"memory.budget = {self._mesh.plan.memory.budget} is too little: a step holds at least "
            f"{_mib(standing + self._workspace.bytes + told.peak_bytes)}{room}, of which "
            f"{_mib(standing)} are parameters, gradients, the optimiser's state and the batch; allow so "
            "much, take smaller batches, or divide more"
        )

    def _limit(self, free: Predicted) -> int:
        """The most that a step may make."""
        return self.budget_bytes - self._standing(free) - self._workspace.bytes

    def _standing(self, free: Predicted) -> int:
        """Bytes before a step; of the optimiser's state, until it is seen, twice those that are trained."""
        state = self._optimizers.bytes_of(2 * free.trained_bytes)
        return free.total_bytes - free.peak_bytes + state

    def _more_known(self) -> None:
        """Of the optimiser. Before nodes are timed, only choices that do not fit any more are due."""
        for decision in self._known.values():
            decision.due |= decision.steps >= self._measured or not self._fits(decision)

    def _fits(self, decision: Decision) -> bool:
        return decision.predicted.peak_bytes <= self._limit(decision.free)


def _fastest(
    simulator: Simulator,
    limit: int,
    free_peak: int,
    under: Callable[[State], Predicted],
    near: State | None = None,
) -> _Found:
    """The fastest of those that fit in truth, which the simulation is held to; or what holds the least.

    With `near`, neighbours of a choice are looked at.
    """

    def simulated(state: State) -> int:
        return int(simulator.run([state]).peak_bytes[0])

    def leanest() -> _Found:
        tried = [(state, under(state)) for state in least(simulator)[:_LEAST]]
        return min(tried, key=lambda one: one[1].peak_bytes)

    target = limit + simulated(simulator.start()) - free_peak
    fitting: list[_Found] = []
    tried: Sequence[int] = ()
    for _ in range(_TRIES):
        state = None if target in tried else decided(simulator, target, near)
        tried = (*tried, target)
        if state is not None:
            told, near = under(state), state
            room = limit - told.peak_bytes
            target += room if room >= 0 else min(room, -(limit // _PART))
        elif fitting:
            break
        else:  # what is simulated to be too much may fit
            state, told = leanest()
            if told.peak_bytes > limit:
                return state, told
            fitting.append((state, told))
            target = limit + simulated(state) - told.peak_bytes
            near, tried = (state, ()) if target in tried else (None, tried)
            continue
        if told.peak_bytes <= limit:
            fitting.append((state, told))
            if told.peak_bytes >= _NEAR * limit:
                break
    if not fitting:
        return leanest()
    return min(fitting, key=lambda one: float(simulator.run([one[0]]).seconds[0]))


def store_of(memory: Memory, device: torch.device) -> Store | None:
    """Where a plan lets tensors be spilled. Raises `UsageError` for a disk beside a GPU."""
    limit = bytes_of(memory.host) if memory.host else None
    ranks = locate().local_size
    if device.type == "cuda":
        if memory.disk:
            raise UsageError(
                "memory.disk is what CPUs spill to; GPUs spill to pinned memory of the host: leave it out"
            )
        return PinnedStore(device, limit or int(_PINNED * available_bytes()) // ranks)
    return FileStore(Path(memory.disk), limit, ranks) if memory.disk else None


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.0f} MiB"
