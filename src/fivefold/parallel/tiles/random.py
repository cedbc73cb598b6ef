"""Random calls in tiles.

The mask of dropout is a function of (seed, step, module, number of its random call, global sample, global
pixel), so every rank draws its own box of it, margins included:

    mask of the whole batch   . x . . | x . . x      a rank of the right column draws just  x . . x
                              x . x . | . . x .                                             . . x .

Other random calls get numbers of our own, alike on all ranks that need them; these are not the numbers that
torch would draw in one process, which a warning says.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.parallel.graph.refs import Slot
from fivefold.parallel.graph.tape import Node
from fivefold.parallel.intercept import DROPOUTS, draws_mask, dropout_arguments, warn_layout
from fivefold.parallel.program.rule import (
    Local,
    Moment,
    Operation,
    Wants,
    as_held,
    call,
    rule,
    want_of,
)
from fivefold.parallel.program.spread import Box, Spread
from fivefold.parallel.randomness import uniform_box
from fivefold.parallel.tiles.pointwise import Pointwise, broadcast_wants
from fivefold.parallel.tiles.products import Products

__all__ = ["Attention", "Bernoulli", "Dropout", "Fresh", "Sampled", "Seeded"]

_Shape = tuple[int, ...]


def _uniform(  # noqa: PLR0917 - all of them are needed, and none has a default that fits
    moment: Moment, key: int, shape: _Shape, box: Box, device: torch.device, common: bool = False
) -> Tensor:
    """Numbers in [0, 1) for `box` of a tensor of `shape`, whose leading dim are the samples.

    With `common` (weights, say) they are not: the same for all samples.
    """
    rows = max(moment.rows, 1)
    each = shape[0] // rows if shape else 0  # rows of the tensor that a sample has
    starts, sizes = [start for start, _ in box], [stop - start for start, stop in box]
    if not shape or common or each * rows != shape[0] or not each:
        if shape and not common and moment.rows != moment.total:
            warn_layout(f"a mask of shape {shape}, whose leading dim is not the samples,")
        return uniform_box(starts, sizes, shape, key, device)
    parts: list[Tensor] = []
    for piece in moment.pieces:
        low, high = max(box[0][0], piece.start * each), min(box[0][1], piece.stop * each)
        if low < high or not moment.rows:
            shifted = low + (piece.origin - piece.start) * each
            own = [high - low, *sizes[1:]] if moment.rows else sizes
            parts.append(uniform_box([shifted, *starts[1:]], own, shape, key, device))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class Exactly:
    """Dropout as in data parallelism, with the same masks."""

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """As the input."""
        return [op.given[0].tight()]

    def lower(self, op: Operation) -> Local:
        """The box of the mask that belongs to what is held."""
        node = op.node
        a = dropout_arguments(node.function, node.args, node.kwargs)
        plainly, wants = call(node), (as_held(op.made[0]),)
        if a is None:
            return Local(wants, plainly)
        dims, apply = DROPOUTS[node.function]
        dims = len(node.shapes[0]) if dims is None else dims
        ones = len(node.shapes[0]) - dims
        shape = node.shapes[0][:dims] + (1,) * max(ones, 0)
        box = op.made[0].held(op.here.grid, op.here.rank)[:dims] + ((0, 1),) * max(ones, 0)
        p = float(a["p"])

        def run(moment: Moment, operands: Sequence[Tensor]) -> Any:
            key = _key(moment, node)
            if key is None:
                return plainly(moment, operands)
            x = operands[0]
            common = isinstance(x, nn.Parameter)
            kept = _uniform(moment, key, shape, box, x.device, common) >= p
            return apply(x, kept, p, False)

        return Local(wants, run)


def _own_generator(node: Node) -> bool:
    return node.kwargs.get("generator") is not None


def _numbered(node: Node) -> bool:
    return draws_mask(node.function, node.args, node.kwargs)


def _key(moment: Moment, node: Node) -> int | None:
    """What is not numbered must not disturb the numbers of what is."""
    if moment.key is None:
        return None
    if _numbered(node):
        return moment.key(node.scope, node.draw)
    return moment.key(f"{node.scope}:{node.name}", node.call)


_Sampler = Callable[[Tensor, Sequence[Any], Mapping[str, Any]], Tensor]


def _normal(u: Tensor) -> Tensor:
    """Standard normal numbers from those of `uniform_box`, by the inverse of their distribution."""
    return torch.erfinv(u.double().add_(2.0**-25).mul_(2.0).sub_(1.0)).mul_(math.sqrt(2.0))


def _option(
    args: Sequence[Any], kwargs: Mapping[str, Any], at: int, name: str, default: float
) -> Any:
    return kwargs.get(name, args[at] if len(args) > at else default)


_SAMPLERS: dict[str, _Sampler] = {
    "rand": lambda u, _a, _k: u,
    "rand_like": lambda u, _a, _k: u,
    "randn": lambda u, _a, _k: _normal(u),
    "randn_like": lambda u, _a, _k: _normal(u),
    "uniform": lambda u, a, k: (
        u * (_option(a, k, 2, "to", 1.0) - _option(a, k, 1, "from", 0.0))
        + _option(a, k, 1, "from", 0.0)
    ),
    "exponential": lambda u, a, k: -torch.log1p(-u.double()) / _option(a, k, 1, "lambd", 1.0),
}


@rule(*_SAMPLERS)
class Sampled:
    """Numbers that do not depend on how the batch is divided, but are not those of torch.

    `torch.rand` and `rand_like`, as stochastic depth is written too, exactly.
    """

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """As the tensor whose shape they take; whole if there is none."""
        if _own_generator(op.node):
            return [Spread.whole(shape) for shape in op.node.output_shapes]
        if not _numbered(op.node):
            warn_layout(op.node.where)
        return [op.given[0].tight() if op.given else op.here.fresh(op.node)]

    def lower(self, op: Operation) -> Local:
        """This rank's box of them; of a generator of the net's own, which all ranks have alike, all."""
        node, plainly, sampler = op.node, call(op.node), _SAMPLERS[op.node.name]
        if _own_generator(node):
            return Local(op.whole(), plainly)
        box = op.made[0].held(op.here.grid, op.here.rank)
        shape = node.output_shapes[0]

        def run(moment: Moment, operands: Sequence[Tensor]) -> Any:
            key = _key(moment, node)
            if key is None:
                return plainly(moment, operands)
            args, kwargs = node.arguments(operands)
            like = operands[0] if operands else None
            device = torch.device(
                kwargs.get("device") or (like.device if like is not None else "cpu")
            )
            dtype = kwargs.get("dtype") or (
                torch.get_default_dtype() if like is None else like.dtype
            )
            common = isinstance(like, nn.Parameter)
            return sampler(_uniform(moment, key, shape, box, device, common), args, kwargs).to(
                dtype
            )

        return Local(_nothing_but_type(op), run)


def _nothing_but_type(op: Operation) -> tuple[Wants, ...]:
    """Operands of which only shape, dtype and device count stay as they are."""
    return tuple(map(as_held, op.given))


@rule("bernoulli")
class Bernoulli:
    """`noise.bernoulli_(p)`, as stochastic depth is written: exactly. `torch.bernoulli(p)`: as `randn`."""

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """As the operands."""
        if op.node.function is not Tensor.bernoulli_:
            warn_layout(op.node.where)
        return Pointwise().place(op)

    def lower(self, op: Operation) -> Local:
        """This rank's box of the mask."""
        node, plainly, exact = op.node, call(op.node), op.node.function is Tensor.bernoulli_
        box, shape = op.made[0].held(op.here.grid, op.here.rank), node.output_shapes[0]
        wants = tuple(broadcast_wants(s, op.made[0]) for s in node.shapes)

        def run(moment: Moment, operands: Sequence[Tensor]) -> Any:
            key = _key(moment, node)
            if key is None:
                return plainly(moment, operands)
            args, kwargs = node.arguments(operands)
            own = not exact and len(args) + ("p" in kwargs) == 1  # torch.bernoulli(chances)
            chance = operands[0] if own else _option(args, kwargs, 1, "p", 0.5)
            x = operands[0]
            return (_uniform(moment, key, shape, box, x.device) < chance).to(x.dtype)

        return Local(wants, run)


_ALONE = threading.Lock()


class Seeded:
    """What draws its numbers out of our reach: gathered, and alike on all ranks, since all seed alike."""

    def drops(self, node: Node) -> bool:  # noqa: ARG002 - for those that depend on it
        """Whether it draws at all."""
        return True

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """Whole."""
        if not self.drops(op.node):
            return None
        warn_layout(op.node.where)
        return [Spread.whole(shape) for shape in op.node.output_shapes]

    def lower(self, op: Operation) -> Local:
        """The plain call, with torch's generators as the key says; afterwards they are as before."""
        node, plainly = op.node, call(op.node)

        def run(moment: Moment, operands: Sequence[Tensor]) -> Any:
            key = _key(moment, node)
            if key is None or _own_generator(node):
                return plainly(moment, operands)
            device = (
                operands[0].device if operands else torch.device(node.kwargs.get("device") or "cpu")
            )
            devices = [device] if device.type != "cpu" else []
            kind = device.type if devices else "cuda"
            with _ALONE, torch.random.fork_rng(devices, device_type=kind):
                torch.manual_seed(key ^ moment.pieces[0].origin)
                return plainly(moment, operands)

        return Local(op.whole(), run)


@rule(
    "binomial", "cauchy", "feature_dropout", "fractional_max_pool2d", "fractional_max_pool3d", "geometric",
    "gumbel_softmax", "log_normal", "multinomial", "native_dropout", "normal", "poisson", "randint",
    "randint_like", "random", "randperm",
)  # fmt: skip
class Others(Seeded):
    """Gathered, and drawn alike on all ranks; not the numbers that torch would draw."""


@rule("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
class Dropout:
    """Of torch.nn.functional: exactly. Of torch itself: gathered, and drawn alike on all ranks."""

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """See the class."""
        return (Exactly() if op.node.function in DROPOUTS else Seeded()).place(op)

    def lower(self, op: Operation) -> Local:
        """See the class."""
        return (Exactly() if op.node.function in DROPOUTS else Seeded()).lower(op)


@rule("rrelu")
class RandomLeaky(Seeded):
    """Pointwise in evaluation; random slopes in training are gathered, and drawn alike on all ranks."""

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """In evaluation as any pointwise operation."""
        return super().place(op) if self.drops(op.node) else Pointwise().place(op)

    def lower(self, op: Operation) -> Local:
        """In evaluation as any pointwise operation."""
        return super().lower(op) if self.drops(op.node) else Pointwise().lower(op)

    def drops(self, node: Node) -> bool:
        """Only in training."""
        return bool(node.bound(("input", "lower", "upper", "training")).get("training", False))


@rule("scaled_dot_product_attention", "multi_head_attention_forward")
class Attention(Seeded):
    """Queries where they are, keys and values of all; the longer one by samples. With dropout, gathered."""

    def drops(self, node: Node) -> bool:
        """Whether it drops attention."""
        position = 4 if node.function is F.scaled_dot_product_attention else 10
        p = _option(node.args, node.kwargs, position, "dropout_p", 0.0)
        return float(p) > 0.0 and bool(node.kwargs.get("training", True))

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """Without dropout as any product of matrices; the longer function by samples."""
        if self.drops(op.node):
            return super().place(op)
        if op.node.function is not F.scaled_dot_product_attention:
            return Heads().place(op)
        return None if op.node.kwargs.get("enable_gqa") else Products().place(op)

    def lower(self, op: Operation) -> Local:
        """The same."""
        if self.drops(op.node):
            return super().lower(op)
        long = op.node.function is not F.scaled_dot_product_attention
        return Heads().lower(op) if long else Products().lower(op)


@rule("gru", "lstm", "rnn_relu", "rnn_tanh")
class Recurrent(Seeded):
    """By samples. With dropout between layers, gathered, and drawn alike on all ranks."""

    def drops(self, node: Node) -> bool:
        """Whether there is dropout, the only float argument, and it trains."""
        at = next((i for i, given in enumerate(node.args) if isinstance(given, float)), None)
        return at is not None and node.args[at] > 0.0 and bool(node.args[at + 1])


@rule(
    "empty", "empty_like", "full", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "ones",
    "zeros",
)  # fmt: skip
class Fresh:
    """New tensors: in tiles where they have the shape of the tensor that they are made from, by samples where
    they have as many rows.
    """

    def _follows(self, op: Operation) -> bool:
        of = op.node.shapes[:1]
        return op.node.name != "new_tensor" and of == (op.node.output_shapes[0],)

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """As that tensor, or whole: they are the same everywhere."""
        if self._follows(op):
            return [op.given[0].tight()]
        whole = op.node.name == "new_tensor"
        return [Spread.whole(op.node.output_shapes[0]) if whole else op.here.fresh(op.node)]

    def lower(self, op: Operation) -> Local:
        """As many elements as are held."""
        node, wants = op.node, _nothing_but_type(op)
        if op.made[0].is_whole or node.name == "empty_like":
            wants = (as_held(op.made[0]), *wants[1:]) if node.name == "empty_like" else wants
            return Local(wants, call(node))
        shape = op.made[0].local_shape(op.here.grid, op.here.rank)

        def run(_moment: Moment, operands: Sequence[Tensor]) -> Tensor:
            args, kwargs = node.arguments(operands)
            options = {k: v for k, v in kwargs.items() if k not in {"size", "fill_value"}}
            at = 2 if operands else 1
            full = node.name.endswith("full")
            fill = [_option(args, kwargs, at, "fill_value", 0.0)] if full else []
            return getattr(operands[0] if operands else torch, node.name)(shape, *fill, **options)

        return Local(wants, run)


# ---- What nn.MultiheadAttention calls: its tensors have tokens on dim 0 and samples on dim 1
#
# query   tokens, samples, channels   ┐
# key     tokens, samples, channels   │ divided by samples: every sample by itself     anything else: gathered
# value   tokens, samples, channels   ┘
# padding        samples, tokens

_SAMPLES = {"query": 1, "key": 1, "value": 1, "key_padding_mask": 0}
"""where samples are"""


class Heads:
    """torch's `multi_head_attention_forward` without dropout."""

    def _samples(self, op: Operation) -> dict[int, int]:
        """The number of each operand that has samples, and the dim that they are on."""
        given = op.node.bound(("query", "key", "value"))
        slots = {name: given.get(name) for name in _SAMPLES}
        return {slot.index: _SAMPLES[n] for n, slot in slots.items() if isinstance(slot, Slot)}

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """By samples, as the queries are."""
        samples, tokens = self._samples(op), op.given[0]
        cut = tokens.cuts[1] if len(tokens.shape) == 3 else None
        if cut is None:
            return None
        for number, spread in enumerate(op.given):
            dim = samples.get(number)
            if spread.cut_dims != (() if dim is None else (dim,)):
                return None
            if dim is not None and not cut.same_as(spread.cuts[dim]):
                return None
            if dim is None and len(spread.shape) == 3:  # a mask of every sample and head
                return None
        shapes = op.node.output_shapes
        return [Spread.whole(s).with_cut(1 - n, cut) for n, s in enumerate(shapes)]

    def lower(self, op: Operation) -> Local:
        """The same call on the samples that are here."""
        samples, cut = self._samples(op), op.made[0].cuts[1]
        wants = tuple(
            tuple(
                want_of(n, cut if dim == samples.get(number) else None)
                for dim, n in enumerate(spread.shape)
            )
            for number, spread in enumerate(op.given)
        )
        return Local(wants, call(op.node))
