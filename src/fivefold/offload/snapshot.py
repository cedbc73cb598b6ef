"""What a net was at one moment: its parameters and buffers, in one flat piece of memory.

    name            dtype     shape            bytes of the flat copy
    conv1.weight    float32   (16, 3, 3, 3)    0 ...
    bn1.running_var float32   (16,)            1728 ...       each begins at a multiple of 64

Batch norm's statistics and other buffers are of the same moment as the weights.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fivefold import comm
from fivefold.checkpoint.staging import wait_for_copies
from fivefold.parallel import ParallelModel
from fivefold.parallel.sharded import local, placed, whole
from fivefold.plan import AXES
from fivefold.torch_private import is_dtensor
from fivefold.trace import Tag

__all__ = ["Packing", "Snapshot", "divided", "gathered", "load", "tensors_of"]

_ALIGNED = 64


def tensors_of(net: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a net by name, shared ones under each; buffers that state_dict omits, too."""
    return {
        **{name: p.detach() for name, p in net.named_parameters(remove_duplicate=False)},
        **dict(net.named_buffers(remove_duplicate=False)),
    }


def divided(model: ParallelModel) -> bool:
    """Whether a rank holds a part of the net only."""
    own = tensors_of(model.module).values()
    return model.stages is not None or any(is_dtensor(tensor) for tensor in own)


def gathered(model: ParallelModel) -> dict[str, Tensor]:
    """As `tensors_of` the plain net, whole on every rank. Collective where ranks hold parts."""
    model.named_parameters()  # as they are between steps
    found = {name: whole(tensor) for name, tensor in tensors_of(model.module).items()}
    if model.stages is None:
        return found
    every = model.stages.everywhere(found)
    return {name: tensor for name, tensor in every.items() if tensor is not None}


@dataclass(frozen=True)
class _Place:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Packing:
    """Where the tensors of a net lie in a flat copy: the same for the same net, whoever holds parts."""

    def __init__(self, net: nn.Module) -> None:
        places: list[_Place] = []
        at = 0
        for name, tensor in tensors_of(net).items():
            places.append(_Place(name, tensor.dtype, tuple(tensor.shape), at))
            at += -(-places[-1].bytes // _ALIGNED) * _ALIGNED
        self._places = tuple(places)
        self.size_bytes = at
        self.problem = _problem(net)
        """why no copy of the net can be made; empty if one can"""

    def digest(self) -> str:
        """Tells nets with other tensors apart."""
        listed = ((p.name, str(p.dtype), p.shape) for p in self._places)
        return hashlib.blake2b(repr(list(listed)).encode(), digest_size=16).hexdigest()

    def empty(self) -> Tensor:
        """Memory for a flat copy: uint8, on the CPU."""
        return torch.empty(self.size_bytes, dtype=torch.uint8)

    def packed(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """A flat copy of whole tensors."""
        flat = self.empty()
        for name, view in self.views(flat).items():
            view.copy_(tensors[name].detach())
        return flat

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The tensors in a flat copy, by name."""
        return {
            p.name: flat[p.offset : p.offset + p.bytes].view(p.dtype).view(p.shape)
            for p in self._places
        }


def _problem(net: nn.Module) -> str:
    for name, tensor in tensors_of(net).items():
        if tensor.layout != torch.strided:
            return f"{name} is {tensor.layout}, which has no flat copy"
    plain = nn.Module.get_extra_state
    for name, module in net.named_modules():
        if type(module).get_extra_state is not plain:
            return (
                f"the module {name!r} ({type(module).__name__}) keeps state beside its parameters and "
                "buffers (get_extra_state), which a copy would miss: keep it in a buffer"
            )
    return ""


@torch.no_grad()
def load(net: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Overwrite parameters and buffers in place."""
    for name, own in tensors_of(net).items():
        own.copy_(tensors[name])


class Snapshot:
    """The net of a model as it is now. Collective where ranks hold parts of it.

    The first rank keeps it whole, in `flat`; others keep their part: all of it if nothing is divided.

    `tensors`: what `tensors` of an earlier one gave, to be that one again.
    """

    def __init__(
        self, model: ParallelModel, packing: Packing, tensors: Mapping[str, Tensor] | None = None
    ) -> None:
        self._model, self._packing = model, packing
        self._parts: dict[str, Tensor] | None = None
        every = gathered(model) if tensors is None else tensors
        whole_here = model.mesh.rank == 0 or not divided(model)
        self.flat = packing.packed(every) if whole_here else None
        if divided(model):
            self._parts = {
                name: local(placed(every[name], tensor)).clone()
                for name, tensor in tensors_of(model.module).items()
                if not tensor.is_meta
            }

    def tensors(self) -> dict[str, Tensor]:
        """All of it by name, on the CPU, alike on every rank. Collective where ranks hold parts."""
        flat = self.flat
        if self._parts is not None:
            mesh = self._model.mesh
            flat = (self._packing.empty() if flat is None else flat).to(mesh.device)
            comm.broadcast_all([flat], mesh.group(*AXES), Tag.CHECKPOINT)
            flat = flat.cpu()
        assert flat is not None, "whole where ranks hold no parts"
        return self._packing.views(flat)

    def release(self) -> None:
        """Nobody will send it any more: where ranks hold parts, the first need not keep it whole."""
        if self._parts is not None:
            self.flat = None

    def state_dict(self) -> dict[str, Any]:
        """The plain net's whole state_dict of that moment, on the CPU. Collective where ranks hold parts."""
        with self.installed():
            state = self._model.full_state_dict()
            return {
                name: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
                for name, value in state.items()
            }

    @contextmanager
    def installed(self) -> Generator[None]:
        """Let the model compute with the snapshot. What it was is put back afterwards, bit for bit.

        Tensors that ranks divide among them are overwritten meanwhile, once a checkpoint has copied them;
        others lie untouched where they are, so that one that is being staged does not notice.
        """
        if self._parts is not None:
            wait_for_copies()
        self._model.named_parameters()  # as they are between steps
        with torch.no_grad():
            kept = self._install()
        try:
            yield
        finally:
            with torch.no_grad():
                self._model.named_parameters()
                for tensor, before in kept:
                    if is_dtensor(tensor):
                        tensor.to_local().copy_(before)
                    else:
                        tensor.data = before

    def _install(self) -> list[tuple[Tensor, Tensor]]:
        """Put it into the model's tensors; each of these, and what is to be put back."""
        values = self._parts
        if values is None:
            assert self.flat is not None
            values = self._packing.views(self.flat)
        kept: dict[int, tuple[Tensor, Tensor]] = {}
        for name, tensor in _objects(self._model.module).items():
            if tensor.is_meta or id(tensor) in kept:
                continue
            if is_dtensor(tensor):
                part = tensor.to_local()
                kept[id(tensor)] = tensor, part.clone()
                part.copy_(values[name])
            else:
                kept[id(tensor)] = tensor, tensor.data
                tensor.data = torch.empty_like(tensor.data).copy_(values[name])
        return list(kept.values())


def _objects(net: nn.Module) -> dict[str, Any]:
    """The very tensors of a net: assigning to `.data` of a detached one would change nothing."""
    return {
        **dict(net.named_parameters(remove_duplicate=False)),
        **dict(net.named_buffers(remove_duplicate=False)),
    }
