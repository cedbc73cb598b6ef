"""Who owns what: one rule for samples, rows and columns, and a note on tensors that are parts.

n = 8 samples over 3 parts:   0 1 | 2 3 4 | 5 6 7
                             part 0  part 1  part 2
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["TILE_DIMS", "Part", "attach", "owned", "part_of"]

TILE_DIMS = {"depth": -3, "height": -2, "width": -1}
"""which dim of an image each tile axis divides"""

_NOTE = "_fivefold_part"


def owned(n: int, parts: int, index: int) -> range:
    """What part `index` of `parts` owns of `n` things: [index*n//parts, (index+1)*n//parts).

    The parts are in order, cover everything once, and differ in size by at most one; with fewer things
    than parts some are empty.
    """
    assert 0 <= index < parts, f"part {index} of {parts}"
    return range(index * n // parts, (index + 1) * n // parts)


@dataclass(frozen=True)
class Part:
    """Which piece of a global tensor a local one is: 49 rows may be part of 97 or of 98."""

    shape: tuple[int, ...]
    """shape of the global tensor"""
    origin: tuple[int, ...]
    """where the piece starts in it, one index per dim"""


def attach(tensor: Tensor, part: Part) -> Tensor:
    """Note on `tensor` which part it is, and return it. Operations give new tensors without the note."""
    assert len(part.shape) == len(part.origin) == tensor.dim(), (part, tensor.shape)
    setattr(tensor, _NOTE, part)
    return tensor


def part_of(tensor: Tensor) -> Part | None:
    """The part noted by `attach`, if this very tensor carries one."""
    return getattr(tensor, _NOTE, None)
