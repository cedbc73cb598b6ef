"""A memory budget for nets that cannot be recorded: everything is kept, or each child is computed again.

    first step      children are computed again; what that makes tells how much keeping it would take
    later steps     keep everything if it fits, else as the first

A child runs again as it ran: what it has done besides computing, to buffers, attributes and lists, is wound
back before and put as it was after. What it received of other ranks it is given again. See
`torch.utils.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fivefold import comm
from fivefold.errors import UsageError, warn
from fivefold.mesh import Mesh
from fivefold.parallel.gathering import units_of
from fivefold.parallel.graph.reach import Reach
from fivefold.parallel.memory.optimizers import OptimizerStates
from fivefold.parallel.memory.table import StepChoices
from fivefold.parallel.program.memory import Predicted, storage_bytes
from fivefold.parallel.program.weightless import Count
from fivefold.parallel.sharded import local
from fivefold.parallel.trees import kinds, leaves
from fivefold.sections import bytes_of
from fivefold.torch_private import resizes_told

__all__ = ["PlainBudget", "blocks_of"]

_UNCALLED = (nn.ModuleList, nn.ModuleDict)
_PARAMETERS = "parameters"


@dataclass
class _Measured:
    """What the steps of one kind of batch were found to make."""

    peak_bytes: int = 0
    """with children computed again"""
    kept_bytes: list[int] = field(default_factory=list[int])
    """by child that ran again: what it made for its backward"""
    again: bool = True

    @property
    def free_bytes(self) -> int:
        """The most without that: of what children make, one after the other was there already."""
        return self.peak_bytes + sum(self.kept_bytes) - max(self.kept_bytes, default=0)


class PlainBudget:
    """Of one model.

    Args:
        mesh: where it computes.
        net: the plain net.
        why: it cannot be recorded.
    """

    def __init__(self, mesh: Mesh, net: nn.Module, why: str) -> None:
        self._mesh, self._net, self._why = mesh, net, why
        self._divides = mesh.plan.memory.shard == _PARAMETERS and mesh.layout.data > 1
        self._budget_bytes = bytes_of(mesh.plan.memory.budget)
        self._blocks = blocks_of(net, units_of(net) if self._divides else ())
        self._optimizers = OptimizerStates(net, mesh.device)
        self._known: dict[tuple[Any, ...], _Measured] = {}
        self._now: _Measured | None = None
        self._measuring = False
        self._alive: Callable[[], int] = int
        """bytes that are alive, while a step is measured"""
        warn(
            f"memory.budget = {mesh.plan.memory.budget} can only choose whether everything is kept, or each "
            f"of {len(self._blocks)} modules is computed again, since {why}",
        )

    @contextmanager
    def step(
        self,
        inputs: Any,
        targets: Any,
        noted: Callable[[Any], Any],  # noqa: ARG002
    ) -> Generator[None]:
        """Within the block a step is made. Raises `UsageError` on all ranks if it has held too much."""
        kind = kinds(inputs, targets)
        first = kind not in self._known
        self._now = self._known.setdefault(kind, _Measured())
        if not first:
            yield
            return
        batch = leaves((inputs, targets))
        problem: UsageError | None = None
        with self._measured(batch):
            yield
        limit = self._budget_bytes - self._standing(batch)
        if self._now.peak_bytes > limit:
            least = self._budget_bytes - limit + self._now.peak_bytes
            problem = UsageError(
                f"memory.budget = {self._mesh.plan.memory.budget} is too little: a step held "
                f"{least / 2**20:,.0f} MiB, though each of {len(self._blocks)} modules was computed again; "
                "allow so much, take smaller batches, or divide more"
            )
        self._mesh.agreement.check_problem(problem)
        self._now.again = self._now.free_bytes > limit

    @contextmanager
    def _measured(self, batch: list[Tensor]) -> Generator[None]:
        """Note the most that the block makes."""
        assert self._now is not None
        device, self._measuring = self._mesh.device, True
        try:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
                self._alive = lambda: torch.cuda.memory_allocated(device)
                before = self._alive()
                yield
                self._now.peak_bytes = torch.cuda.max_memory_allocated(device) - before
                return
            own = [*self._net.parameters(), *self._net.buffers(), *batch]
            own += [p.grad for p in self._net.parameters() if p.grad is not None]
            with (
                Count([local(tensor) for tensor in own], device.type) as count,
                resizes_told(count.resized),
            ):
                before, self._alive = count.now(), count.now
                yield
                self._now.peak_bytes = count.most() - before
        finally:
            self._measuring = False

    def children(self) -> AbstractContextManager[None]:
        """Within the block the net runs, and backward: children are computed again, or not."""
        if self._now is None or not self._now.again:
            return nullcontext()
        return self._patched()

    @contextmanager
    def _patched(self) -> Generator[None]:
        with ExitStack() as patches:
            for module in self._blocks:
                patches.callback(_put_back, module, vars(module).get("forward"))
                vars(module)["forward"] = self._again(module, module.forward)
            yield

    def _again(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            log, before = comm.Log(), _State(module)
            if not before.whole:
                return forward(*args, **kwargs)

            def body(*args: Any, **kwargs: Any) -> Any:
                with log.turn() as again:
                    if not again:
                        return forward(*args, **kwargs)
                    with before.around(), self._kept():
                        return forward(*args, **kwargs)

            return checkpoint(body, *args, use_reentrant=False, **kwargs)

        return run

    @contextmanager
    def _kept(self) -> Generator[None]:
        """Note what the block makes and leaves, as a child is computed again."""
        if not self._measuring or self._now is None:
            yield
            return
        before = self._alive()
        try:
            yield
        finally:  # torch ends it by an exception once it has all that it wants
            self._now.kept_bytes.append(self._alive() - before)

    def told(self, inputs: Any, targets: Any) -> Predicted:
        """What a step on such a batch needs. Raises `UsageError` before there was one."""
        found = self._known.get(kinds(inputs, targets))
        if found is None or not found.peak_bytes:
            raise UsageError(
                "how much memory a step takes is measured in the first one, and not told before, since "
                f"{self._why}"
            )
        batch = leaves((inputs, targets))
        parameters, trained = self._parameters()
        what = "each is computed again" if found.again else "everything is kept"
        peak = found.peak_bytes if found.again else found.free_bytes
        return Predicted(
            self._mesh.rank,
            self._mesh.layout,
            parameters_bytes=parameters,
            gradients_bytes=trained,
            buckets_bytes=trained if self._mesh.layout.data > 1 and not self._divides else 0,
            batch_bytes=sum(map(storage_bytes, batch)),
            saved_bytes=peak,
            peak_bytes=peak,
            trained_bytes=trained,
            choices=StepChoices(f"{len(self._blocks)} modules, of which {what}: {self._why}"),
        )

    def _parameters(self) -> tuple[int, int]:
        """Bytes of what this rank holds of parameters and buffers, and of what is trained."""
        held = sum(storage_bytes(local(t)) for t in (*self._net.parameters(), *self._net.buffers()))
        trained = (p for p in self._net.parameters() if p.requires_grad)
        return held, sum(storage_bytes(local(p)) for p in trained)

    def _standing(self, batch: list[Tensor]) -> int:
        """Bytes before a step."""
        held, trained = self._parameters()
        buckets = trained if self._mesh.layout.data > 1 and not self._divides else 0
        state = self._optimizers.bytes_of(2 * trained)
        return held + trained + buckets + state + sum(map(storage_bytes, batch))


def _put_back(module: nn.Module, forward: Callable[..., Any] | None) -> None:
    if forward is None:
        del vars(module)["forward"]
    else:
        vars(module)["forward"] = forward


def blocks_of(net: nn.Module, units: Sequence[nn.Module] = ()) -> list[nn.Module]:
    """The children of a net that have children; of lists of such, theirs.

    Modules that hold one of `units`, which gather their parameters as they are called, are opened as well.
    """
    return list(dict.fromkeys(_blocks(net, frozenset(units))))


def _blocks(module: nn.Module, units: frozenset[nn.Module]) -> Iterator[nn.Module]:
    for child in module.children():
        inner = [one for one in child.modules() if one is not child]
        flat = all(not any(True for _ in one.children()) for one in child.children())
        opened = isinstance(child, _UNCALLED) or (isinstance(child, nn.Sequential) and not flat)
        if opened or not units.isdisjoint(inner):
            yield from _blocks(child, units)
        elif inner:
            yield child


class _State:
    """What a module's forward can read and write, as it is now."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._reach = Reach(module)
        self._tensors = self._copies()

    @property
    def whole(self) -> bool:
        """Whether all of it can be wound back."""
        return not (self._reach.truncated or self._reach.iterators)

    def _copies(self) -> list[tuple[Tensor, Tensor]]:
        found = {id(one.tensor): one.tensor for one in self._reach.tensors}
        own = [t for t in found.values() if not isinstance(t, nn.Parameter) and t.is_leaf]
        return [(tensor, tensor.detach().clone()) for tensor in own]

    @contextmanager
    def around(self) -> Generator[None]:
        """Within the block it is so again, afterwards as before the block."""
        now = _State(self._module)
        self.restore()
        try:
            yield
        finally:
            now.restore()

    def restore(self) -> None:
        """Let it be so again."""
        self._reach.restore()
        for tensor, copy in self._tensors:
            if tensor.shape == copy.shape:
                tensor.data.copy_(copy)  # beside autograd, which may have saved it
