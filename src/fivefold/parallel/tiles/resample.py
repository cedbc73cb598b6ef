"""Interpolation to another size, with the image's own coordinates.

output j looks at the input around     ratio (j + 1/2) - 1/2          align_corners=False
                                       ratio j                        align_corners=True, and nearest

ratio   inputs per output: 1 / scale_factor if that was given (and is not to be recomputed), else n / outputs

Where all dims that are cut grow or shrink by whole numbers, torch's own kernel runs on what a part needs,
and what comes of the margin is cut off. Otherwise every output of a cut dim is a weighted sum of a few rows,
whose indices and weights follow from its place in the whole image; torch does the other dims.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.parallel.graph.tape import Node
from fivefold.parallel.program.exchange import Segments
from fivefold.parallel.program.rule import Local, Operation, rule
from fivefold.parallel.program.spread import Range, Spread
from fivefold.parallel.tiles.lines import Line, lowered, placed

__all__ = ["Averaged", "Interpolate", "Nearest", "Scaled", "Weighted", "centre_bound"]

_NAMES = (
    "input", "size", "scale_factor", "mode", "align_corners", "recompute_scale_factor", "antialias",
)  # fmt: skip
_MARGINS = {"nearest": 0, "nearest-exact": 0, "linear": 1, "bicubic": 2}


def centre_bound(bound: int, before: int, after: int) -> int:
    """The output of `after` that is centred at `bound` of `before` inputs or behind it."""
    return (2 * bound * after + before) // (2 * before)


@dataclass(frozen=True)
class _Resized:
    """A dim of `before` rows that gets `n`, with `ratio` rows of the operand per row of the result."""

    before: int
    n: int
    ratio: float

    def bound(self, bound: int) -> int:
        """By where centres lie."""
        return centre_bound(bound, self.before, self.n)


@dataclass(frozen=True)
class Scaled(_Resized):
    """A dim that grows or shrinks by a whole number, for torch's own kernel."""

    margin: int
    """rows (of the smaller side) that the kernel looks beyond"""

    @property
    def up(self) -> int:
        """Rows of the result in one unit."""
        return max(self.n // self.before, 1)

    @property
    def down(self) -> int:
        """Rows of the operand in one unit."""
        return max(self.before // self.n, 1)

    def units(self, rows: Range) -> Range:
        """In which rows of the smaller side rows of the result lie, margin included."""
        start, stop = rows[0] // self.up - self.margin, -(-rows[1] // self.up) + self.margin
        return (max(start, 0), min(stop, self.before, self.n))

    def needs(self, rows: Range) -> Segments:
        """The operand's rows in these units."""
        start, stop = self.units(rows)
        return ((start * self.down, stop * self.down),)

    def crop(self, rows: Range) -> slice:
        """Where rows of the result lie in what comes of `needs`."""
        offset = self.units(rows)[0] * self.up
        return slice(rows[0] - offset, rows[1] - offset)

    def take(self, x: Tensor, dim: int, rows: Range) -> Tensor:  # noqa: ARG002 - see `Line`
        """Torch does it, for all dims at once."""
        return x


@dataclass(frozen=True)
class Nearest(_Resized):
    """A dim of which single rows are taken."""

    exact: bool
    factor: float | None
    """scale factor, if that was given rather than the size"""

    def needs(self, rows: Range) -> Segments:
        """One row more at both ends than exact arithmetic needs: kernels round in single precision."""
        half = 0.5 if self.exact else 0.0
        first, last = ((j + half) * self.ratio for j in (rows[0], rows[1] - 1))
        start = min(max(math.floor(first) - 1, 0), self.before - 1)
        return ((start, min(math.floor(last) + 2, self.before)),)

    def take(self, x: Tensor, dim: int, rows: Range) -> Tensor:
        """Those that torch's kernel takes: it is asked for them with numbered rows."""
        dtype = x.dtype if x.dtype == torch.float64 else torch.float32
        shape = [-1 if d == dim else 1 for d in range(x.dim())]
        numbers = torch.arange(self.before, dtype=dtype, device=x.device).view(shape)
        mode = "nearest-exact" if self.exact else "nearest"
        size = [self.n if d == dim else 1 for d in range(2, x.dim())]
        scale = [self.factor if d == dim else 1.0 for d in range(2, x.dim())]
        options: dict[str, Any] = {"size": size} if self.factor is None else {"scale_factor": scale}
        found = F.interpolate(numbers, mode=mode, **options)
        ((first, _),) = self.needs(rows)
        return x.index_select(dim, found.flatten()[slice(*rows)].long() - first)


@dataclass(frozen=True)
class Weighted(_Resized):
    """A dim whose rows are weighted sums of two (linear) or four (cubic) rows."""

    cubic: bool
    corners: bool

    def _source(self, row: int) -> tuple[int, float]:
        """The row below the place at which an output looks, and how far behind that it is."""
        place = row * self.ratio if self.corners else (row + 0.5) * self.ratio - 0.5
        if not self.cubic:
            place = max(place, 0.0)
        below = math.floor(place)
        return (
            (below, place - below) if self.cubic else (min(below, self.before - 1), place - below)
        )

    def _rows(self, row: int) -> list[int]:
        below, _ = self._source(row)
        around = range(below - 1, below + 3) if self.cubic else range(below, below + 2)
        return [min(max(i, 0), self.before - 1) for i in around]

    def _weights(self, row: int) -> list[float]:
        _, t = self._source(row)
        return (
            [_cubic(t + 1), _cubic(t), _cubic(1 - t), _cubic(2 - t)] if self.cubic else [1 - t, t]
        )

    def needs(self, rows: Range) -> Segments:
        """From the first to the last row with a weight."""
        return ((self._rows(rows[0])[0], self._rows(rows[1] - 1)[-1] + 1),)

    def take(self, x: Tensor, dim: int, rows: Range) -> Tensor:
        """Weighted sums of rows."""
        ((first, _),) = self.needs(rows)
        return weighted_sum(x, dim, first, *_taps(self, rows))

    def tap(self, row: int) -> tuple[list[int], list[float]]:
        """Rows of the operand and their weights."""
        return self._rows(row), self._weights(row)


def _cubic(distance: float) -> float:
    """The cubic convolution kernel with a = -3/4 (Keys 1981)."""
    a, t = -0.75, distance
    if t <= 1:
        return ((a + 2) * t - (a + 3)) * t * t + 1
    return ((a * t - 5 * a) * t + 8 * a) * t - 4 * a


@dataclass(frozen=True)
class Averaged(_Resized):
    """A dim whose rows are means of rows that may overlap: adaptive average pooling."""

    def window(self, row: int) -> Range:
        """The rows of which row `row` is the mean."""
        return (row * self.before // self.n, -(-(row + 1) * self.before // self.n))

    def needs(self, rows: Range) -> Segments:
        """From the first to the last window."""
        return ((self.window(rows[0])[0], self.window(rows[1] - 1)[1]),)

    def take(self, x: Tensor, dim: int, rows: Range) -> Tensor:
        """Means of rows."""
        ((first, _),) = self.needs(rows)
        return weighted_sum(x, dim, first, *_taps(self, rows))

    def tap(self, row: int) -> tuple[list[int], list[float]]:
        """Rows of the operand and their weights; zero where a window is shorter than others."""
        start, stop = self.window(row)
        taps = range(start, start + -(-self.before // self.n) + 1)
        weights = [1 / (stop - start) if i < stop else 0.0 for i in taps]
        return [min(i, stop - 1) for i in taps], weights


@functools.lru_cache(maxsize=256)
def _taps(line: Weighted | Averaged, rows: Range) -> tuple[list[list[int]], list[list[float]]]:
    found = [line.tap(row) for row in range(*rows)]
    return [taps for taps, _ in found], [weights for _, weights in found]


def weighted_sum(
    x: Tensor,
    dim: int,
    first: int,
    taps: Sequence[Sequence[int]],
    weights: Sequence[Sequence[float]],
) -> Tensor:
    """Row j of the result is the sum of weights[j][k] times row taps[j][k] - first of `x`; half precision
    adds in single precision, as torch's kernels do.
    """
    half = x.dtype in (torch.float16, torch.bfloat16)
    wide = x.float() if half else x
    shape = [-1 if d == dim else 1 for d in range(x.dim())]
    numbers = torch.tensor(weights, dtype=wide.dtype, device=x.device)
    rows = torch.tensor(taps, dtype=torch.long, device=x.device) - first
    total: Any = 0
    for k in range(rows.shape[1]):
        total = total + wide.index_select(dim, rows[:, k]) * numbers[:, k].view(shape)
    return total.to(x.dtype)


@rule("interpolate", "upsample", "upsample_nearest", "upsample_bilinear")
class Interpolate:
    """`F.interpolate` in every mode; with antialiasing, everything is gathered."""

    def _options(self, node: Node) -> dict[str, Any]:
        a = node.bound(_NAMES)
        mode = a.get("mode", "nearest")
        if node.name in {"upsample_nearest", "upsample_bilinear"}:
            mode = node.name.removeprefix("upsample_")
            a["align_corners"] = mode == "bilinear"
        a["kind"] = "linear" if mode in {"linear", "bilinear", "trilinear"} else mode
        a["mode"] = mode
        recompute = a.get("recompute_scale_factor") or mode == "area"
        a["factor"] = None if recompute else a.get("scale_factor")
        return a

    def _lines(self, op: Operation) -> dict[int, Line] | None:
        """For every dim that is cut; None if this cannot be done in parts."""
        a, given, shape = self._options(op.node), op.given[0], op.node.output_shapes[0]
        dims = len(shape) - 2
        rounds = op.node.output_bytes == 1 and not a["kind"].startswith("nearest")  # uint8
        if rounds or a.get("antialias") or len(op.given) != 1 or given.cuts[1] is not None:
            return None
        factors = None if a["factor"] is None else _factors(a["factor"], dims)
        lines: dict[int, Line] = {}
        for dim in (d for d in given.cut_dims if d > 1):
            before, n = given.shape[dim], shape[dim]
            lines[dim] = _line(a, before, n, None if factors is None else factors[dim - 2])
        whole = [_whole_scale(line, a) for line in lines.values()]
        if all(whole):
            return dict(zip(lines, [line for line in whole if line is not None], strict=True))
        return lines

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """Every output belongs where its centre is."""
        lines = self._lines(op)
        return None if lines is None else [placed(op.given[0], op.node.output_shapes[0], lines)]

    def lower(self, op: Operation) -> Local:
        """Torch's kernel on a part with a margin, or weighted sums of rows."""
        lines, a = self._lines(op), self._options(op.node)
        assert lines is not None
        held = op.made[0].held(op.here.grid, op.here.rank)
        crop = tuple(
            line.crop(held[dim]) if isinstance(line := lines.get(dim), Scaled) else slice(None)
            for dim in range(len(held))
        )
        resized = _Rest(a, op.node, lines)
        return lowered(op, lines, lambda x: resized(x)[crop])


def _factors(value: Any, dims: int) -> list[float]:
    return [float(f) for f in value] if isinstance(value, Sequence) else [float(value)] * dims


def _line(a: dict[str, Any], before: int, n: int, factor: float | None) -> Line:
    """A dim by weighted sums of rows."""
    kind, corners = a["kind"], bool(a.get("align_corners"))
    ratio = before / n if factor is None else 1 / factor
    if kind == "area":
        return Averaged(before, n, ratio)
    if kind in {"nearest", "nearest-exact"}:
        return Nearest(before, n, ratio, kind != "nearest", factor)
    if corners:
        ratio = (before - 1) / (n - 1) if n > 1 else 0.0
    return Weighted(before, n, ratio, kind == "bicubic", corners)


def _whole_scale(line: Line, a: dict[str, Any]) -> Scaled | None:
    """How torch's own kernel does a dim in parts, if it can."""
    if not isinstance(line, _Resized) or a.get("align_corners") or a["kind"] not in _MARGINS:
        return None
    before, n = line.before, line.n
    times = max(before, n) // min(before, n)
    if line.ratio != before / n or times * min(before, n) != max(before, n):
        return None
    # Thirds and the like are not what they seem: kernels may take the row before, and sizes get lost.
    inexact = a["kind"] == "nearest" if n > before else a["factor"] is not None
    if inexact and times.bit_count() > 1:
        return None
    margin = _MARGINS[a["kind"]]
    return Scaled(before, n, line.ratio, margin if n > before else margin // 2 if n < before else 0)


@dataclass(frozen=True)
class _Rest:
    """Torch's kernel for the dims that `lines` have not done."""

    a: dict[str, Any]
    node: Node
    lines: dict[int, Line]

    def __call__(self, x: Tensor) -> Tensor:
        before, after = self.node.shapes[0], self.node.output_shapes[0]
        sizes: list[int] = []
        factors: list[float] = []
        given = None if self.a["factor"] is None else _factors(self.a["factor"], x.dim() - 2)
        for dim in range(2, x.dim()):
            line = self.lines.get(dim)
            if isinstance(line, Scaled):
                sizes.append(x.shape[dim] * line.up // line.down)
                factors.append(line.up / line.down)
            else:
                done = line is not None
                sizes.append(x.shape[dim] if done else after[dim])
                factors.append(1.0 if done or given is None else given[dim - 2])
        left = [dim for dim in range(2, x.dim()) if dim not in self.lines]
        if not any(isinstance(line, Scaled) for line in self.lines.values()) and not left:
            return x
        options = {"mode": self.a["mode"]}
        if self.a["kind"] in {"linear", "bicubic"}:
            options["align_corners"] = self.a.get("align_corners")
        if self.a.get("antialias"):
            options["antialias"] = True
        assert all(before[dim] == x.shape[dim] for dim in left)
        if given is None:
            return F.interpolate(x, size=sizes, **options)
        return F.interpolate(x, scale_factor=factors, **options)
