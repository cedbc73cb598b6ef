"""Precision: chosen where a recipe's wish would be a trap.

Where a processor computes in bfloat16 by itself, autocast to it about doubles the speed of a small network
on a CPU. Where it does not, oneDNN emulates it: three times slower than float32 with AVX-512, eight times
with AVX2.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from fivefold import comm
from fivefold.mesh import Mesh
from fivefold.parallel.arithmetic import Arithmetic
from fivefold.plan import AXES, Plan, Provenance
from fivefold.trace import Tag

__all__ = ["Arithmetic", "has_bfloat16", "settle_precision"]

_CPU_FLAGS = {"avx512_bf16", "amx_bf16"}


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
