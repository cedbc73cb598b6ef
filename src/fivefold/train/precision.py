"""Precision and memory format: applied to a loop, and chosen where a recipe's wish would be a trap.

Where a processor computes in bfloat16 by itself, autocast to it about doubles the speed of a small network
on a CPU. Where it does not, oneDNN emulates it: three times slower than float32 with AVX-512, eight times
with AVX2.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor, nn

from fivefold import comm
from fivefold.mesh import Mesh, attach, part_of
from fivefold.plan import AXES, Numerics, Plan, Provenance
from fivefold.trace import Tag

__all__ = ["Arithmetic", "has_bfloat16", "settle_precision"]

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_CPU_FLAGS = {"avx512_bf16", "amx_bf16"}


class Arithmetic:
    """The precision and memory format of a loop: `net` and `images` lay out, `autocast` surrounds."""

    def __init__(self, numerics: Numerics, device: torch.device) -> None:
        self._device = device
        self._bfloat16 = numerics.precision == "bfloat16"
        self._channels_last = numerics.memory_format == "channels_last"

    def autocast(self) -> torch.autocast:
        """A context for one step. Not for several: it caches what weights were when first cast."""
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._bfloat16)

    def net(self, net: nn.Module) -> nn.Module:
        """The net with its weights laid out, which convolutions then keep to; before `parallelize`."""
        if self._channels_last:
            net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        return net

    def images(self, images: Tensor) -> Tensor:
        """The images laid out, still knowing which part of the global batch they are."""
        layout = _CHANNELS_LAST.get(images.dim()) if self._channels_last else None
        if layout is None:
            return images
        part, laid_out = part_of(images), images.contiguous(memory_format=layout)
        return laid_out if part is None else attach(laid_out, part)


def has_bfloat16(device: torch.device) -> bool:
    """Whether `device` has arithmetic of its own for bfloat16."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool(_CPU_FLAGS & _cpu_flags())


def settle_precision(plan: Plan, mesh: Mesh) -> Plan:
    """Replace a recipe's bfloat16 by float32 if any rank's processor would have to emulate it.

    What the user asked for stays as it is. Collective: all ranks call it, and agree.
    """
    if plan.numerics.precision != "bfloat16":
        return plan
    emulating = torch.tensor([0 if has_bfloat16(mesh.device) else 1], device=mesh.device)
    ranks = int(comm.all_reduce(emulating, mesh.group(*AXES), Tag.CONTROL).item())
    if not ranks or plan.origin("numerics.precision").kind == "user":
        return plan
    why = Provenance("recipe", f"{ranks} of {mesh.size} ranks would have to emulate bfloat16")
    return plan.replace({"numerics.precision": "float32"}, why)


@functools.cache
def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())
