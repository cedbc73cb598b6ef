"""Parameters that the replicas of the data axis divide among them, by torch's `fully_shard` (FSDP2).

Between steps each rank holds a part of every parameter, of its gradient and of what the optimiser keeps for
it. A step gathers them whole, and afterwards sums the gradients so that each rank gets its part of the sum:

    begin    parts ── gather ──► whole parameters      forward, backward: as always, gradients whole
    finish   whole gradients ── sum, scatter ──► parts of gradients, added to what earlier steps left there

`fully_shard` acts in hooks of a module's forward and backward. Nets in tiles and stages are computed without
calling their modules; so what is sharded is a holder around the net, which is called for these hooks' sake.
Ranks of tile axes hold the same parts (hybrid sharding).

Source: Rajbhandari et al. 2020, ZeRO, section 5; torch.distributed.fsdp.fully_shard.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fivefold import comm
from fivefold.errors import UsageError
from fivefold.parallel.trees import map_tensors
from fivefold.torch_private import (
    base_of,
    is_dtensor,
    memory_of,
    own_parameters,
    refuse_numbers,
    version_of,
)
from fivefold.trace import Tag

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

__all__ = [
    "Holder",
    "Parts",
    "Shards",
    "averages",
    "check_unchanged",
    "held",
    "joint_norm",
    "local",
    "placed",
    "refuse_write",
    "unviewed",
    "whole",
]

CHUNK_BYTES = 25 << 20
"""Parameters that are gathered in one message, and whose gradients are summed in one"""


# ---- parts of tensors


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, in the memory where it lies; all of it where none is."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """A tensor of which ranks hold parts, whole on each. Collective over these ranks."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def placed(value: Tensor, like: Tensor) -> Tensor:
    """A tensor that every rank has whole, in parts as those of `like` if that is in parts."""
    if not is_dtensor(like) or is_dtensor(value):
        return value
    there = value.to(like.device)
    # Every rank has it: nothing is to be sent.
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(there, like.device_mesh, like.placements, src_data_rank=None)


def joint_norm(
    parts: Sequence[Tensor], order: float, group: dist.ProcessGroup, device: torch.device
) -> Tensor:
    """The norm of all that the ranks of `group` hold, float64; `parts` is this rank's. Collective."""
    if order == 0:
        raise UsageError(
            "clip_grad_norm_ with norm_type = 0 counts tensors, of which ranks hold parts here: use another "
            "norm, such as 2.0 or inf"
        )
    # Detached: of the gradients of stages themselves torch may not compute a norm.
    norm = torch.nn.utils.get_total_norm([part.detach() for part in parts if part.numel()], order)
    every = comm.all_gather(norm.double().to(device), group, Tag.CONTROL)
    return torch.linalg.vector_norm(every, order)


# ---- holders


class Holder(nn.Module):
    """What `fully_shard` is applied to: a net, or some of its parameters. Its forward is given to it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, run: Callable[[], Any]) -> Any:
        """Whatever `run` returns; around it, the hooks that gather and scatter."""
        return unviewed(run())


def held(net: nn.Module, names: Iterable[str], mesh: DeviceMesh, *, keep: bool) -> FSDPModule:
    """A holder of some parameters of `net`, which the ranks of `mesh` divide from now on.

    `keep`: they stay whole from forward to backward. The net itself is not changed otherwise.
    """
    from torch.distributed.fsdp import fully_shard

    refuse_numbers(mesh, _refuse_number)
    mine, found = set(names), dict(net.named_parameters())
    for name in mine:  # `fully_shard` needs the usual order of dims
        found[name].data = found[name].data.contiguous()
    others = {parameter for name, parameter in found.items() if name not in mine}
    made = fully_shard(
        Holder(net), mesh=mesh, reshard_after_forward=not keep, ignored_params=others
    )
    made.set_force_sum_reduction_for_comms(True)  # gloo cannot average
    return made


def _refuse_number() -> NoReturn:
    raise UsageError(
        "a number was asked of a tensor of which this rank has a part (.item(), float(), bool(), if), as "
        "memory.shard divides parameters and their gradients: it would be that of the part. Call "
        "full_tensor() on the tensor before, on all ranks"
    )


def averages(holders: Iterable[FSDPModule], divisor: int) -> None:
    """Let gradients be divided by `divisor` where they are summed."""
    for made in holders:
        made.set_gradient_divide_factor(float(divisor))


def unviewed(tree: Any) -> Any:
    """A tree of outputs of which none is a view: what changes a view in place drops the hooks of FSDP2."""

    def own(leaf: Tensor) -> Tensor:
        return leaf if base_of(leaf) is None else leaf.clone()

    return map_tensors(own, tree)


class Parts:
    """Where the parts of a net's parameters lie between steps: they are written to, and stay the same.

    The net's `load_state_dict` takes whole tensors as well, which every rank has to load.
    """

    def __init__(self, net: nn.Module, names: Iterable[str] | None = None) -> None:
        self._net, self._names = net, None if names is None else set(names)
        for module in net.modules():
            module.register_load_state_dict_pre_hook(_in_parts)
        self._before: dict[str, tuple[int, ...]] = {}

    def note(self) -> None:
        """Parameters were divided, or a step has ended."""
        self._before = self._now()

    def check(self) -> None:
        """Raise `UsageError` for a parameter that has come, gone, or been given other memory since."""
        now = self._now()
        if now != self._before:
            name = next(n for n in {**self._before, **now} if self._before.get(n) != now.get(n))
            raise UsageError(
                f"the parameter {name!r} has become another tensor since it was divided, or used last, whose "
                "numbers replicas do not use: write into it (with torch.no_grad(): "
                'p.copy_(...)), call parallelize anew for a changed net, or set memory.shard = "none"'
            )

    def _now(self) -> dict[str, tuple[int, ...]]:
        named = self._net.named_parameters(remove_duplicate=False)
        return {
            name: (id(p), memory_of(p), local(p).untyped_storage().data_ptr())
            for name, p in named
            if self._names is None or name in self._names
        }


def _in_parts(module: nn.Module, loaded: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in own_parameters(module).items():
        value = loaded.get(prefix + name)
        if parameter is not None and isinstance(value, Tensor) and value.shape == parameter.shape:
            loaded[prefix + name] = placed(value.detach(), parameter)


class Shards:
    """Some parameters of a net by name, whole within a step and divided between steps.

    Replicas hold equal values when this is made. Making it, `begin`, `finish` and `around` are collective
    over `mesh`.
    """

    def __init__(
        self, net: nn.Module, names: Sequence[str], mesh: DeviceMesh, parts: Parts | None = None
    ) -> None:
        self._net, self._names, self._mesh = net, list(names), mesh
        self._holders = [held(net, chunk, mesh, keep=True) for chunk in _chunks(net, self._names)]
        self._had: list[bool] = []
        self._versions: list[int] = []
        self._parts = parts or Parts(net, names)  # others may hold the rest, whole just now
        self._parts.note()
        device = next((p.device for p in self.parameters()), torch.device("cpu"))
        self._nothing = torch.zeros((), device=device, requires_grad=True)

    def parameters(self) -> list[nn.Parameter]:
        """The parameters as they are now: in parts, or within a step whole."""
        found = dict(self._net.named_parameters())
        return [found[name] for name in self._names]

    def begin(self) -> None:
        """Start a step: make the parameters whole, without gradients."""
        self.rest()
        self._parts.check()
        self._had = [parameter.grad is not None for parameter in self.parameters()]
        averages(self._holders, 1)
        for made in self._holders:
            made.unshard()
        for parameter in self.parameters():  # of a step that was broken off
            parameter.grad = None
        self._versions = [version_of(parameter) for parameter in self.parameters()]

    def finish(self) -> list[bool]:
        """Sum the gradients over all ranks and go back to parts; which parameters this rank has used.

        Gradients that no rank has are zero afterwards; `forget` takes them away.
        """
        check_unchanged(self._names, self.parameters(), self._versions)
        used = [parameter.grad is not None for parameter in self.parameters()]
        for parameter in self.parameters():
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        for made in self._holders:
            # Its backward ends by scattering what its parameters have come to hold as gradients.
            cast(Any, made)(lambda: self._nothing * 1).backward()
        self._nothing.grad = None
        self.rest()
        self._parts.note()
        return used

    def forget(self, used: Sequence[float]) -> None:
        """Parameters that no rank has used are left without the zeros that `finish` gave them."""
        for parameter, is_used, had in zip(self.parameters(), used, self._had, strict=True):
            if not (is_used or had):
                parameter.grad = None

    def rest(self) -> None:
        """Go back to parts, if the parameters are whole. Not collective."""
        for made in self._holders:
            made.reshard()

    def around(self, run: Callable[[], Any]) -> Any:
        """What `run` returns, with whole parameters; a backward pass through it averages gradients."""
        self._parts.check()
        averages(self._holders, self._mesh.size())
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # later steps write into what is made here
                for made in self._holders:
                    made.unshard()
        for made in self._holders:
            run = functools.partial(cast(Any, made), run)
        outputs = run()
        if not torch.is_grad_enabled():
            self.rest()
            self._parts.note()
        return outputs


def check_unchanged(
    names: Iterable[str], parameters: Iterable[Tensor], versions: Iterable[int]
) -> None:
    """Raise `UsageError` for a whole parameter that was written to since it had that version."""
    for name, parameter, before in zip(names, parameters, versions, strict=True):
        if version_of(parameter) != before:
            refuse_write(name)


def refuse_write(name: str) -> NoReturn:
    """Raise `UsageError` for a parameter that the forward writes: it is let go with the step."""
    raise UsageError(
        f"the net changes its parameter {name!r} in its forward, which replicas cannot keep that divide "
        'parameters among them: register it as a buffer, or set memory.shard = "none"'
    )


def _chunks(net: nn.Module, names: Sequence[str]) -> list[list[str]]:
    """Names of parameters of one dtype, some megabytes each."""
    found, chunks = dict(net.named_parameters()), list[list[str]]()
    room_bytes, dtype = 0, None
    for name in names:
        parameter = found[name]
        if parameter.dtype != dtype or room_bytes <= 0:
            chunks.append([])
            room_bytes, dtype = CHUNK_BYTES, parameter.dtype
        chunks[-1].append(name)
        room_bytes -= parameter.numel() * parameter.element_size()
    return chunks
