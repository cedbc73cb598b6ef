"""Interval arithmetic of sliding windows: which inputs an output needs, and who owns which output.

output j looks at inputs   j s - p,  j s - p + d,  ...,  j s - p + d (k - 1)

k kernel size, s stride, p padding in front, d dilation; all in elements of one dim
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fivefold.parallel.program.spread import Division, Range

__all__ = ["Window", "follow"]


@dataclass(frozen=True)
class Window:
    """A sliding window along one dim."""

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    @property
    def extent(self) -> int:
        """How many inputs lie between the first and the last that a window sees, both included."""
        return self.dilation * (self.kernel - 1) + 1

    def needs(self, outputs: Range) -> Range:
        """The inputs that outputs [start, stop) look at, padding included: may lie outside the image."""
        start, stop = outputs
        if stop <= start:
            return (start * self.stride, start * self.stride)
        first = start * self.stride - self.padding
        return (first, (stop - 1) * self.stride - self.padding + self.extent)

    def owner_bound(self, bound: int) -> int:
        """The first output whose window's centre lies at input `bound` or behind it, unclamped."""
        # centre of output j, doubled to stay in integers: 2 j s - 2 p + d (k - 1)
        doubled = 2 * (bound + self.padding) - (self.extent - 1)
        return -(-doubled // (2 * self.stride))

    def cut(self, before: Division, n: int) -> Division:
        """How `n` outputs are divided, given how the inputs are: every output belongs where its centre is."""
        return follow(before, n, self.owner_bound)


def follow(before: Division, n: int, bound: Callable[[int], int]) -> Division:
    """A cut of `n` elements whose inner bounds are those of `before`, mapped and clamped to [0, n]."""
    inner = [min(max(bound(b), 0), n) for b in before.bounds[1:-1]]
    return Division.at(before.axes, (0, *inner, n))
