"""Reducers of nets whose parameters the replicas divide among them: whole for a step, or for a layer's time.

    memory.shard     parameters are whole                   gradients are whole
    "optimizer"      from begin to end of a step            until the end of backward
    "parameters"     while their unit of layers computes    until backward leaves the unit

See `sharded` for the first, `units_of` for what a unit is.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fivefold import comm
from fivefold.errors import PlanError, UsageError
from fivefold.mesh import Mesh
from fivefold.mesh.ownership import TILE_DIMS
from fivefold.parallel.pipeline.schedules import PAIRED
from fivefold.parallel.reduce import Reducer, without_effect
from fivefold.parallel.sharded import Parts, Shards, averages, check_unchanged, held, unviewed
from fivefold.torch_private import backend_of_device, version_of
from fivefold.trace import Tag

__all__ = [
    "PARTS", "WholeForLayers", "WholeForStep", "check_divisible", "check_shard", "gathering_reducer",
    "units_of",
]  # fmt: skip


def check_shard(net: nn.Module, mesh: Mesh) -> None:
    """Raise `PlanError` for a layout, or `UsageError` for a net, that does not allow what the plan says."""
    shard, layout, schedule = mesh.plan.memory.shard, mesh.layout, mesh.plan.pipeline.schedule
    if shard == "none" or layout.data == 1:
        return
    if shard == "parameters" and (layout.pipe > 1 or layout.tiles > 1):
        raise PlanError(
            f'memory.shard = "parameters" gathers layer by layer on the data axis only, and the layout is '
            f'{layout}: memory.shard = "optimizer" works with all axes, and gathers for a step at once'
        )
    if layout.pipe > 1 and schedule in PAIRED:
        raise PlanError(
            f"memory.shard = {shard!r} does not go with pipeline.schedule = {schedule!r}: schedules of two "
            f"directions ({', '.join(sorted(PAIRED))}) hold every stage on two ranks of a replica; use "
            'another schedule, or memory.shard = "none"'
        )
    if mesh.device.type == "cuda" and (
        backend_of_device(mesh.group("data"), mesh.device).name() == "gloo"
    ):
        raise PlanError(
            f"memory.shard = {shard!r} needs a GPU for every rank, and ranks share one here: start as many "
            'ranks as there are GPUs, or use memory.shard = "none"'
        )
    check_divisible(net)


def check_divisible(net: nn.Module) -> None:
    """Raise `UsageError` for parameters that replicas cannot divide among them."""
    for name, module in net.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise UsageError(
                f"the module {name!r} has sparse gradients, which replicas cannot divide among them: use "
                'sparse=False, or memory.shard = "none"'
            )
    for name, parameter in net.named_parameters():
        if not parameter.dim():
            raise UsageError(
                f"the parameter {name!r} has no dim along which replicas could divide it: give it the shape "
                '(1,), or use memory.shard = "none"'
            )
        if not parameter.numel():
            raise UsageError(
                f"the parameter {name!r} has no elements, which replicas cannot divide among them: use "
                'memory.shard = "none"'
            )
        if parameter.is_complex():
            raise UsageError(
                f"the parameter {name!r} is complex, which replicas cannot divide among them: hold real and "
                'imaginary parts in a real parameter, or use memory.shard = "none"'
            )


def gathering_reducer(net: nn.Module, mesh: Mesh, share_buffers: bool) -> Reducer | None:
    """The reducer that `memory.shard` asks for; None if each replica keeps its own parameters. Collective."""
    trains = any(parameter.requires_grad for parameter in net.parameters())
    if mesh.plan.memory.shard == "none" or mesh.layout.data == 1 or not trains:
        return None
    kind = WholeForStep if mesh.plan.memory.shard == "optimizer" else WholeForLayers
    return kind(net, mesh, share_buffers)


class _Gathering:
    """What both reducers do alike."""

    def __init__(self, net: nn.Module, mesh: Mesh, share_buffers: bool) -> None:
        self._net, self._share_buffers = net, share_buffers
        self._everyone = mesh.group("data", *TILE_DIMS)
        self._tell([*net.parameters(), *net.buffers()])

    def begin(self) -> None:
        """Share buffers."""
        if self._share_buffers and torch.is_grad_enabled():
            self._tell(list(self._net.buffers()))

    def _tell(self, tensors: Sequence[Tensor]) -> None:
        comm.broadcast_all([t.detach() for t in tensors], self._everyone, Tag.GRADIENTS)

    def _agreed(
        self, share: Tensor, used: Sequence[bool], *, count: bool = False
    ) -> tuple[Tensor, Sequence[float]]:
        """The sum of all ranks' shares, and for each parameter whether a rank has used it.

        With `count`, how many ranks have.
        """
        told = torch.tensor([0.0, *used], dtype=torch.float64, device=share.device)
        told[0] = share.detach()
        comm.all_reduce(told, self._everyone, Tag.LOSS)
        total = told[0].to(share.dtype)
        # Reading the answer would wait for a GPU, and is of no use where this rank has used them all.
        return total, used if all(used) and not count else told[1:].tolist()


class WholeForStep(_Gathering):
    """Parameters are gathered at the begin of a step, and their gradients scattered at its end."""

    def __init__(self, net: nn.Module, mesh: Mesh, share_buffers: bool) -> None:
        super().__init__(net, mesh, share_buffers)
        self._shards = Shards(
            net, [name for name, _ in net.named_parameters()], mesh.own_replicas(), Parts(net)
        )

    def forward(self, run: Callable[[], Any], *, step: bool) -> Any:
        """See `Reducer`."""
        if not step:
            return self._shards.around(run)
        self._shards.begin()
        return run()

    def backward(
        self, share: Tensor, scaled: Callable[[Tensor], Tensor], *, counted: bool = True
    ) -> Tensor:
        """See `Reducer`."""
        with without_effect(() if counted else self._shards.parameters()):
            scaled(share).backward()
        total, used = self._agreed(share, self._shards.finish())
        self._shards.forget(used)
        return total

    def rest(self) -> None:
        """See `Reducer`."""
        self._shards.rest()


class WholeForLayers(_Gathering):
    """Every unit of layers gathers its parameters when it computes, and scatters gradients when done."""

    def __init__(self, net: nn.Module, mesh: Mesh, share_buffers: bool) -> None:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        super().__init__(net, mesh, share_buffers)
        replicas, names = mesh.own_replicas(), {p: n for n, p in net.named_parameters()}
        self._units: list[FSDPModule] = []
        left = dict(names)
        for unit in units_of(net):
            for parameter in unit.parameters():
                left.pop(parameter, None)
                parameter.data = parameter.data.contiguous()
            unit.register_forward_hook(_unviewed)  # ahead of those of `fully_shard`
            self._units.append(fully_shard(unit, mesh=replicas))
            self._units[-1].set_force_sum_reduction_for_comms(True)
        self._order = Order(replicas)
        for number, unit in enumerate(self._units, start=1):
            # Ahead of the hook that gathers.
            cast(Any, unit).register_forward_pre_hook(self._order.hook(number), prepend=True)
        self._holder = held(net, left.values(), replicas, keep=True)
        self._units.append(self._holder)
        self._zeros = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
        """whether ranks that use different parameters of a unit can send the same; older versions of torch
        have no way"""
        for unit in self._units if self._zeros else ():
            unit.set_reduce_scatter_unused_params(True)
        self._replicas = replicas.size()
        self._whole = self._gathered_once()
        self._had: list[bool] = []
        self._versions: list[int] = []
        self._used: set[int] = set()
        self._hooks: list[Any] = []
        self._trained: list[bool] = []
        self._parts = Parts(net)
        self._parts.note()

    def _gathered_once(self) -> list[nn.Parameter]:
        """The parameters as they are when they are whole: the same tensors every time."""
        for unit in self._units:
            unit.unshard()
        found = list(self._net.parameters())
        self.rest()
        return found

    def forward(self, run: Callable[[], Any], *, step: bool) -> Any:
        """See `Reducer`."""
        self.rest()
        self._parts.check()
        averages(self._units, 1 if step else self._replicas)
        self._had = [parameter.grad is not None for parameter in self._net.parameters()]
        self._follow()
        self._versions = [version_of(parameter) for parameter in self._whole]
        ends = not torch.is_grad_enabled()
        try:
            with explained():
                return cast(Any, self._holder)(lambda: self._order.to_the_end(run))
        except BaseException:
            ends = True  # the next step begins with parts, as this one did
            raise
        finally:
            if ends:
                self.rest()
                self._parts.note()

    def _follow(self) -> None:
        """Watch which parameters get a gradient, also after some were frozen or thawed."""
        self._used.clear()
        trained = [parameter.requires_grad for parameter in self._net.parameters()]
        if trained == self._trained:
            return
        for hook in self._hooks:
            hook.remove()
        own: weakref.ref[WholeForLayers] = weakref.ref(self)
        self._trained, self._hooks = trained, []
        for number, (parameter, trains) in enumerate(zip(self._whole, trained, strict=True)):
            parameter.requires_grad_(trains)
            if trains:
                note = functools.partial(_note, own, number)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(note))

    def backward(
        self, share: Tensor, scaled: Callable[[Tensor], Tensor], *, counted: bool = True
    ) -> Tensor:
        """See `Reducer`."""
        with without_effect(() if counted else self._whole):
            scaled(share).backward()
        names = (name for name, _ in self._net.named_parameters())
        check_unchanged(names, self._whole, self._versions)
        self.rest()
        self._parts.note()
        own = [number in self._used for number in range(len(self._whole))]
        total, used = self._agreed(share, own, count=not self._zeros)
        if not self._zeros and any(0 < ranks < self._replicas for ranks in used):
            raise UsageError(
                "ranks use different parameters of a module, which this version of torch cannot sum layer by "
                'layer: torch 2.13 can, or memory.shard = "optimizer", which gathers for a whole step'
            )
        for parameter, ranks, had in zip(self._net.parameters(), used, self._had, strict=True):
            if not (ranks or had):
                parameter.grad = None
        return total

    def note(self, number: int) -> None:
        """A parameter got a gradient."""
        self._used.add(number)

    def rest(self) -> None:
        """See `Reducer`."""
        for unit in self._units:
            unit.reshard()


def _note(reducer: weakref.ref[WholeForLayers], number: int, _parameter: Tensor) -> None:
    alive = reducer()
    if alive is not None:
        alive.note(number)


def _unviewed(_module: nn.Module, _inputs: Any, outputs: Any) -> Any:
    return unviewed(outputs)


# ---- Which modules of a net gather their parameters together, each for the time that it computes
#
# From the net downwards, what holds more than an eighth of all parameters is taken apart, and what is smaller
# is a unit; so at most about a quarter is whole at a time, the next unit being gathered while one computes.
#
#     net 100 ──┬── stem 1                                 small: stays with the net
#               ├── layer1 9                      unit
#               ├── layer2 40 ──┬── block 12      unit
#               │               └── ...
#               └── head 8                        unit

PARTS = 8
"""What holds more than such a part of all parameters is taken apart"""
LEAST_BYTES = 1 << 16
"""What is smaller is not worth a message of its own"""

_LISTS = (nn.ModuleList, nn.ModuleDict)
"""modules that are not called"""


def units_of(net: nn.Module) -> list[nn.Module]:
    """The modules of `net` that gather on their own; what belongs to none of them is the net's."""
    limit = max(_bytes(net) // PARTS, LEAST_BYTES)
    owners = Counter(id(p) for m in net.modules() for p in m.parameters(recurse=False))
    return list(dict.fromkeys(_divided(net, limit, owners)))  # one may stand at two places


def _divided(module: nn.Module, limit: int, owners: Counter[int]) -> Iterator[nn.Module]:
    for child in module.children():
        if _bytes(child) < LEAST_BYTES:
            continue
        small = _bytes(child) <= limit or not _divisible(child)
        if small and not isinstance(child, _LISTS) and _closed(child, owners):
            yield child
        elif _divisible(child):
            yield from _divided(child, limit, owners)


def _divisible(module: nn.Module) -> bool:
    """Whether the children are called as modules; torch's attention, say, takes the weights of its own."""
    ours = not type(module).__module__.startswith("torch.nn.")
    return ours or isinstance(module, (nn.Sequential, *_LISTS))


def _closed(module: nn.Module, owners: Counter[int]) -> bool:
    """Whether no parameter in it is used by a module outside as well."""
    inside = Counter(id(p) for m in module.modules() for p in m.parameters(recurse=False))
    return all(owners[key] == count for key, count in inside.items())


def _bytes(module: nn.Module) -> int:
    return sum(map(_size, module.parameters()))


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# ---- What nets may not do whose layers gather their parameters one after the other, and how that is told
#
# All ranks have to gather the same at the same time. A rank that calls other modules than the others would
# get parameters mixed from two modules, or end the process within the backend; so ranks tell each other what
# they are going to gather: some bytes, and on a GPU no wait for it, as the processors tell each other.

T = TypeVar("T")

_INSTEAD = 'memory.shard = "optimizer", which gathers for a whole step, works'
_END = 0


class Order:
    """The order in which units are called, which has to be that of all ranks of `replicas`. Collective."""

    def __init__(self, replicas: DeviceMesh) -> None:
        self._group = replicas.get_group("data")
        self._device = torch.device("cpu")
        try:
            self._told(_END)
        except (comm.CommError, RuntimeError):  # all ranks have a backend for GPUs only
            self._device = torch.device(replicas.device_type)

    def hook(self, number: int) -> Callable[[nn.Module, Any], None]:
        """A hook to run before the forward of unit `number`, from 1 on."""

        def check(_module: nn.Module, _inputs: Any) -> None:
            self._check(number)

        return check

    def to_the_end(self, run: Callable[[], T]) -> T:
        """What `run` returns, a forward pass; afterwards no rank calls another unit."""
        made = run()
        self._check(_END)
        return made

    def _check(self, number: int) -> None:
        if bool((self._told(number) != number).any()):
            raise UsageError(
                "ranks call different modules, as their samples differ, or in another order, so they cannot "
                f"gather parameters layer by layer: {_INSTEAD}"
            )

    def _told(self, number: int) -> Tensor:
        own = torch.tensor([number], device=self._device)
        return comm.all_gather(own, self._group, Tag.CONTROL)


_EXPLAINED = {
    "mixed torch.Tensor and DTensor": (
        "the net computes with parameters of a module without calling it, so they were not gathered"
    ),
    r"RegisterPostBackwardFunction\w* is a view and is being modified inplace": (
        "a module changes its input in place as the first thing it does, which layers that gather their "
        "parameters cannot allow: set inplace=False there"
    ),
}


@contextmanager
def explained() -> Generator[None]:
    """Errors of torch's within the block that have a remedy here say so."""
    try:
        yield
    except RuntimeError as problem:
        for said, meant in _EXPLAINED.items():
            if re.search(said, str(problem)):
                raise UsageError(f"{meant}; or {_INSTEAD}") from problem
        raise
