"""Operations that look at one element at a time, broadcasting included."""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.parallel.program.exchange import Want
from fivefold.parallel.program.in_place import changes_its_operand
from fivefold.parallel.program.rule import MARKED, Local, Operation, Wants, as_held, call, rule
from fivefold.parallel.program.spread import Spread

__all__ = ["POINTWISE", "Converted", "Pointwise", "broadcast", "broadcast_wants"]

POINTWISE = (
    "abs", "absolute", "acos", "acosh", "add", "addcdiv", "addcmul", "alias", "angle", "arccos", "arccosh",
    "arcsin", "arcsinh", "arctan", "arctan2", "arctanh", "asin", "asinh", "atan", "atan2", "atanh",
    "bfloat16", "bitwise_and", "bitwise_left_shift", "bitwise_not", "bitwise_or", "bitwise_right_shift",
    "bitwise_xor", "bool", "byte", "cdouble", "ceil", "celu", "cfloat", "char", "clamp", "clamp_max",
    "clamp_min", "clip", "clone", "complex", "conj", "conj_physical", "contiguous", "copy", "copysign",
    "cos", "cosh", "cpu", "cuda", "data", "deg2rad", "detach", "digamma", "div", "divide", "double", "elu",
    "eq", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "fill", "fix", "float", "float_power", "floor",
    "floor_divide", "fmax", "fmin", "fmod", "frac", "full_like", "gcd", "ge", "gelu", "greater",
    "greater_equal", "gt", "half", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "heaviside",
    "hypot", "i0", "igamma", "igammac", "imag", "int", "isclose", "isfinite", "isinf", "isnan", "isneginf",
    "isposinf", "isreal", "lcm", "ldexp", "le", "leaky_relu", "lerp", "less", "less_equal", "lgamma", "log",
    "log10", "log1p", "log2", "logaddexp", "logaddexp2", "logical_and", "logical_not", "logical_or",
    "logical_xor", "logit", "logsigmoid", "long", "lt", "masked_fill", "maximum", "minimum", "mish", "mul",
    "multiply", "nan_to_num", "ne", "neg", "negative", "nextafter", "not_equal", "ones_like", "polar",
    "polygamma", "positive", "pow", "rad2deg", "real", "reciprocal", "relu", "relu6", "remainder",
    "renumbered", "requires_grad", "resolve_conj", "resolve_neg", "round", "rpow", "rsqrt", "rsub",
    "rtruediv", "selu", "sgn", "short", "sigmoid", "sign", "signbit", "silu", "sin", "sinc", "sinh",
    "softplus", "softshrink",
    "softsign", "special_digamma", "special_entr", "special_erf", "special_erfc", "special_erfcx",
    "special_erfinv", "special_exp2", "special_expit", "special_expm1", "special_gammaln", "special_i0",
    "special_i0e", "special_i1", "special_i1e", "special_log1p", "special_log_ndtr", "special_logit",
    "special_ndtr", "special_ndtri", "special_psi", "special_round", "special_sinc", "special_xlog1py",
    "special_xlogy", "sqrt", "square", "sub", "subtract", "tan", "tanh", "tanhshrink", "threshold",
    "true_divide", "trunc", "type", "where", "xlogy", "zero", "zeros_like",
)  # fmt: skip


def broadcast(given: Sequence[Spread], shape: tuple[int, ...]) -> Spread:
    """How a result of `shape` lies: every dim as in the first operand that has it cut, unless another dim is
    cut along the same axes already: both would need a diagonal.
    """
    made = Spread.whole(shape)
    for spread in given:
        for dim in spread.cut_dims:
            there, cut = dim + len(shape) - len(spread.shape), spread.cuts[dim]
            free = cut is not None and not set(cut.axes) & set(made.axes)
            if free and made.cuts[there] is None and spread.shape[dim] == shape[there]:
                made = made.with_cut(there, cut)
    return made.tight()


def broadcast_wants(shape: tuple[int, ...], made: Spread) -> Wants:
    """What is wanted of an operand of `shape`, to combine it with what `made` holds."""
    shift = len(made.shape) - len(shape)
    wants: list[Want] = []
    for dim, n in enumerate(shape):
        cut = made.cuts[dim + shift]
        stretched = n != made.shape[dim + shift]
        wants.append(
            Want.all_of(n) if cut is None or stretched else Want.ranges(cut.axes, cut.held)
        )
    return tuple(wants)


@rule(MARKED, *POINTWISE)
class Pointwise:
    """The same call on the parts, which are cut as the operands are."""

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """Cut as the operands are. Axes must not repeat: two dims cut along one would need a diagonal."""
        if len(op.node.outputs) != 1:
            return None
        made = broadcast(op.given, op.node.output_shapes[0])
        axes = [axis for cut in made.cuts if cut is not None for axis in cut.axes]
        return [made] if len(axes) == len(set(axes)) else None

    def lower(self, op: Operation) -> Local:
        """Every operand where the result is."""
        wants = tuple(broadcast_wants(shape, op.made[0]) for shape in op.node.shapes)
        return Local(wants, call(op.node), in_place=changes_its_operand(op.node))


@rule("to", "type_as")
class Converted:
    """Another dtype or device; of a second operand only these count."""

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """As the operand."""
        return [op.given[0].tight()]

    def lower(self, op: Operation) -> Local:
        """The same call on the parts."""
        others = tuple(as_held(spread) for spread in op.given[1:])
        return Local((as_held(op.made[0]), *others), call(op.node))
