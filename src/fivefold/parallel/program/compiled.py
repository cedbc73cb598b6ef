"""Nodes that follow each other as one graph each, compiled by `torch.compile`: `parallel.compile`.

    first step     every node runs as it is, and is watched
    second step    nodes become graphs, which are compiled, and compared with what they are made of
    from then on   halo ─ [conv norm relu conv] ─ sum of statistics ─ [norm relu add] ─ halo ─ ...

What talks to other ranks, draws random numbers or has a backward in Python stands between graphs, and runs as
it is. So does a graph that does not compile, or computes something else then; a warning names it. Where there
is nothing to fuse no graph is made, and one that takes longer than what it is made of is not used.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from fivefold.errors import warn
from fivefold.parallel.graph.refs import Ref, Value
from fivefold.parallel.program.gradient_paths import around
from fivefold.parallel.program.program import Compute, Program
from fivefold.parallel.program.rule import Moment
from fivefold.parallel.program.watched import FromCall, Given, Trace, watched
from fivefold.torch_private import pytree, version_of

__all__ = ["CompiledSpan", "Graph", "compiled_span"]

_BACKEND = "inductor"
_LIBRARY = frozenset({
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear",
    "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "einsum", "scaled_dot_product_attention",
})  # fmt: skip
"""calls that a compiler leaves to a library, and fuses nothing into"""
_VIEWS = frozenset({
    "reshape", "view", "flatten", "unflatten", "transpose", "permute", "squeeze", "unsqueeze", "expand",
    "chunk", "split", "unbind", "getattr", "__getitem__", "_leaf",
})  # fmt: skip
"""calls that compute nothing"""
_LOOSE, _LOOSEST = 4e5, 0.5
"""times the precision of a dtype: how far a compiled graph may be from what it is made of. Many layers
amplify what rounding does, to 2 % of the gradients of ResNet-50 in float32; a wrong kernel does more."""
_SLOWEST, _LOOKS = 1.0, 5
"""of the time of what it is made of: what a graph may take that is used; and how often both are timed. What
it stores for its backward, such as masks of booleans, can cost more than fusing gains."""
_SMALL = 1e-3
"""of the largest norm: what is smaller may be nothing but rounding"""
_NAMED = 3
"""graphs, or operations, that a warning names"""
_LOCK = threading.Lock()
"""While torch compiles, it never compiles what other threads make of fx, and it counts the frames that a call
runs by process: either raises "no compiled frames" (2.13)."""


def compiled_span(  # noqa: PLR0917 - what `carry_out` was given
    program: Program,
    span: range,
    keep: set[int],
    state: Mapping[str, Tensor],
    moment: Moment,
    device: str,
) -> CompiledSpan:
    """Steps of a program, as they are to be run at a moment: anew where something that they read differs."""
    key = (
        span, frozenset(keep), moment.note is None,
        torch.is_autocast_enabled(device), torch.get_autocast_dtype(device),
        tuple(tensor.requires_grad for tensor in state.values()),
        tuple(_settings(module) for module in program.modules),
    )  # fmt: skip
    known = program.compiled.setdefault(key, [])
    found = next((one for one in known if one.fits(moment)), None)
    if found is None:
        found = CompiledSpan(program, span, frozenset(keep))
        known.append(found)
    return found


def _settings(module: nn.Module) -> tuple[Any, ...]:
    """Numbers and switches of a module that is one node."""
    plain = (bool, int, float, str, tuple, types.NoneType)
    held = (pair for one in module.modules() for pair in vars(one).items())
    return tuple((name, value) for name, value in held if isinstance(value, plain))


class CompiledSpan:
    """Steps of a program, of which some are computed as graphs once they have been watched."""

    def __init__(self, program: Program, span: range, keep: frozenset[int]) -> None:
        self.graphs: dict[int, Graph] | None = None
        """by their first step; None until the steps have been watched"""
        self._program, self._span, self._keep = program, span, keep
        self._traces: dict[int, Trace] = {}
        self._failed = Counter[str]()
        self._facts: dict[str, Any] = {}

    def fits(self, moment: Moment) -> bool:
        """Whether what its graphs were made by holds."""
        return all(getattr(moment, name) == value for name, value in self._facts.items())

    def watch(self, number: int, moment: Moment, operands: Sequence[Tensor]) -> Any:
        """Compute a step as it is, and note what it calls."""
        step = self._program.steps[number]
        assert isinstance(step, Compute)
        result, self._traces[number] = watched(step, moment, operands)
        self._facts |= self._traces[number].facts
        return result

    def finish(self) -> None:
        """The steps have been watched."""
        if self.graphs is None:
            graphs = {steps.start: self._graph(steps) for steps in self._runs()}
            self.graphs = {start: graph for start, graph in graphs.items() if graph.fuses}
            self._tell()

    def _runs(self) -> Iterator[range]:
        """Steps that follow each other and may be one graph."""

        def kind(number: int) -> tuple[bool, Any]:
            trace = self._traces.get(number)
            fits = trace is not None and not trace.why
            return (True, self._node(number).autocast) if fits else (False, number)

        for (fits, _), group in itertools.groupby(self._span, kind):
            numbers = [*group]
            if fits:
                yield range(numbers[0], numbers[-1] + 1)

    def _graph(self, steps: range) -> Graph:
        last = self._program.last_use
        parts = [(cast(Compute, self._program.steps[n]), self._traces[n]) for n in steps]
        made = (index for step, _ in parts for index in step.node.outputs)
        gives = tuple(i for i in made if i in self._keep or last.get(i, -1) >= steps.stop)
        return Graph(steps, parts, gives, self._warn)

    def _node(self, number: int) -> Any:
        return cast(Compute, self._program.steps[number]).node

    def _tell(self) -> None:
        found = {
            f"{self._node(n).where} {trace.why}": 0
            for n, trace in self._traces.items()
            if trace.told
        }
        if found:
            more = f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
            warn(f"parallel.compile leaves as it is: {'; '.join([*found][:_NAMED])}{more}")

    def _warn(self, steps: range, why: str) -> None:
        """A graph is not used."""
        self._failed[why] += 1
        if self._failed[why] <= _NAMED:
            last = " (others are not named)" if self._failed[why] == _NAMED else ""
            warn(
                f"parallel.compile: from {self._node(steps[0]).where} to {self._node(steps[-1]).where} all "
                f"runs as it is{last}: {why}"
            )


@dataclass(frozen=True)
class _Own:
    """A parameter or buffer of a module that is one node."""

    module: nn.Module
    name: str

    def now(self) -> Tensor:
        """As it is now."""
        path, _, name = self.name.rpartition(".")
        return getattr(self.module.get_submodule(path), name)


class Graph:
    """Steps of a program that are computed at once."""

    def __init__(
        self,
        steps: range,
        parts: Sequence[tuple[Compute, Trace]],
        gives: tuple[int, ...],
        failed: Callable[[range, str], None],
    ) -> None:
        self.stop = steps.stop
        self._steps, self._gives, self._failed = steps, gives, failed
        self._run: Callable[..., Sequence[Tensor]] | None = None
        self._changes: list[int] = []
        """numbers of the inputs that are buffers, and statistics that the graph changes"""
        self._tried = False
        writer = _Writer()
        for step, trace in parts:
            writer.add(step, trace)
        with _LOCK:
            self._module = writer.finish(gives)
        self._sources = writer.in_order()

    @property
    def fuses(self) -> bool:
        """Whether a compiler would write one kernel for several of its calls."""
        calls = [node for node in self._module.graph.nodes if _name(node)]
        own = {node for node in calls if _name(node) not in _LIBRARY | _VIEWS}
        return any(_read(node) & own for node in own)

    @property
    def reads(self) -> list[Ref]:
        """What it is given of the program."""
        return [source for source in self._sources if not isinstance(source, _Own)]

    def usable(self, given: Sequence[Tensor]) -> bool:
        """Whether it may be run. At first it is compiled, and compared with its nodes, on what is `given`."""
        if not self._tried:
            self._tried = True
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter(
                        "ignore"
                    )  # a compiler's, of what is no concern of the user's
                    with _LOCK:
                        why = self._try(self._inputs(given))
            except Exception as problem:  # noqa: BLE001 - whatever a compiler may raise
                self._run = None
                why = f"{type(problem).__name__}: {str(problem).strip().partition(chr(10))[0]}"
            if why:
                self._failed(self._steps, why)
        return self._run is not None

    def __call__(self, given: Sequence[Tensor]) -> dict[int, Tensor]:
        """The values that it makes and others read."""
        assert self._run is not None
        inputs = self._inputs(given)
        # What an earlier micro-batch saved of them, compiled or not, is told by versions to have changed.
        copies = {n: inputs[n].clone() for n in self._changes}
        with _LOCK:
            made = self._run(*(copies.get(n, tensor) for n, tensor in enumerate(inputs)))
        for n, changed in copies.items():
            inputs[n].data.copy_(changed)
        return dict(zip(self._gives, made, strict=True))

    def _inputs(self, given: Sequence[Tensor]) -> list[Tensor]:
        rest = iter(given)
        return [one.now() if isinstance(one, _Own) else next(rest) for one in self._sources]

    def _try(self, inputs: Sequence[Tensor]) -> str:
        """Compile it; why it cannot be used, or nothing."""
        compiled = torch.compile(self._module, fullgraph=True, dynamic=False, backend=_BACKEND)
        right, reached = _outcome(self._module, _copies(inputs), apart=True)
        whole = all(itertools.chain.from_iterable(reached))
        run = compiled if whole else around(compiled, reached)
        given = _copies(inputs)
        found, _ = _outcome(run, given, apart=False)
        bound = min(_LOOSE * _precision([*inputs, *right["outputs"]]), _LOOSEST)
        for what, tensors in right.items():
            if (error := _error(tensors, found[what])) > bound:
                return f"compiled, its {what} differ by {error:.1g}"
        self._changes = [
            n
            for n, one in enumerate(self._sources)
            if isinstance(one, _Own) and version_of(given[n])
        ]
        # Then nothing may depend on what varies from run to run.
        settled = torch.are_deterministic_algorithms_enabled()
        if settled or _ratio(run, self._module, inputs) <= _SLOWEST:
            self._run = run
        return ""


class _Writer:
    """Writes the calls of steps into one graph; what they read of others is given to it."""

    def __init__(self) -> None:
        self._sources: dict[Ref | _Own, fx.Node] = {}
        self._graph = fx.Graph()
        self._values: dict[int, fx.Node] = {}

    def add(self, step: Compute, trace: Trace) -> None:
        """Add a step."""
        made: list[fx.Node] = []

        def known(leaf: Any) -> Any:
            if isinstance(leaf, FromCall):
                node = made[leaf.call]
                return (
                    node
                    if leaf.leaf is None
                    else self._graph.call_function(_leaf, (node, leaf.leaf))
                )
            if not isinstance(leaf, Given):
                return leaf
            if leaf.name:
                return self._source(_Own(cast(nn.Module, step.node.function), leaf.name))
            ref = step.operands[leaf.number]
            own = self._values.get(ref.index) if isinstance(ref, Value) else None
            return self._source(ref) if own is None else own

        for function, arguments in trace.calls:
            args, kwargs = pytree.tree_map(known, arguments)
            made.append(self._call(function, args, kwargs))
        self._values.update(zip(step.node.outputs, map(known, trace.results), strict=True))

    def _source(self, source: Ref | _Own) -> fx.Node:
        if source not in self._sources:
            with self._graph.inserting_before():  # what is given comes first
                self._sources[source] = self._graph.placeholder(f"given_{len(self._sources)}")
        return self._sources[source]

    def _call(self, function: Any, args: Any, kwargs: Any) -> fx.Node:
        if getattr(function, "__name__", "") == "__get__":  # as in `x.mT`
            return self._graph.call_function(getattr, (args[0], function.__self__.__name__))
        if isinstance(function, types.MethodDescriptorType | types.WrapperDescriptorType):
            return self._graph.call_method(function.__name__, args, kwargs)
        return self._graph.call_function(function, args, kwargs)

    def finish(self, gives: Sequence[int]) -> fx.GraphModule:
        """The graph, which returns these values."""
        self._graph.output(tuple(self._values[index] for index in gives))
        return fx.GraphModule(nn.Module(), self._graph)

    def in_order(self) -> list[Ref | _Own]:
        """What the graph is given."""
        places = {node: place for place, node in enumerate(self._graph.nodes)}
        return sorted(self._sources, key=lambda source: places[self._sources[source]])


def _name(node: fx.Node) -> str:
    """What it calls; nothing for what is given, and for what is returned."""
    if not node.op.startswith("call_"):
        return ""
    return node.target if isinstance(node.target, str) else node.target.__name__


def _read(node: fx.Node) -> set[fx.Node]:
    """What it reads, seen through views."""
    found = set[fx.Node]()
    for one in node.all_input_nodes:
        found |= _read(one) if _name(one) in _VIEWS else {one}
    return found


def _leaf(made: Any, number: int) -> Any:
    """A tensor of what a call returns."""
    return pytree.tree_leaves(made)[number]


_Outcome = dict[str, list[Tensor | None]]


def _outcome(
    run: Callable[..., Sequence[Tensor]], given: Sequence[Tensor], *, apart: bool
) -> tuple[_Outcome, list[list[bool]]]:
    """What a graph makes of its inputs, gradients included; and, with `apart`, which inputs each
    output depends on, of those that have gradients.
    """
    made = run(*given)
    trained = [tensor for tensor in given if tensor.requires_grad]
    roots = [tensor for tensor in made if tensor.requires_grad]
    seeds = [_pattern(tensor) for tensor in roots]
    if not trained or not roots:
        found: list[list[Tensor | None]] = []
    elif apart:
        found = [
            [*torch.autograd.grad(root, trained, seed, retain_graph=True, allow_unused=True)]
            for root, seed in zip(roots, seeds, strict=True)
        ]
    else:
        found = [[*torch.autograd.grad(roots, trained, seeds, allow_unused=True)]]
    sums = [_sum(column) for column in zip(*found, strict=True)]
    changed = [tensor.detach() for tensor in given if not tensor.requires_grad]
    outcome: _Outcome = {
        "outputs": [t.detach() for t in made],
        "gradients": sums,
        "buffers": [*changed],
    }
    return outcome, [[one is not None for one in row] for row in found]


def _ratio(
    run: Callable[..., Sequence[Tensor]],
    plain: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
) -> float:
    """Seconds that a graph takes, over those of what it is made of; backward included."""

    def seconds(one: Callable[..., Sequence[Tensor]]) -> float:
        given = _copies(inputs)
        trained = [tensor for tensor in given if tensor.requires_grad]
        began = _now(given)
        roots = [tensor for tensor in one(*given) if tensor.requires_grad]
        if trained and roots:
            torch.autograd.grad(roots, trained, [r.detach() for r in roots], allow_unused=True)
        return _now(given) - began

    both = [(seconds(run), seconds(plain)) for _ in range(_LOOKS)]
    return min(own for own, _ in both) / min(other for _, other in both)


def _now(tensors: Sequence[Tensor]) -> float:
    """Seconds, once all has been computed that was asked for."""
    if any(not tensor.is_cpu for tensor in tensors):
        torch.accelerator.synchronize()
    return time.perf_counter()


def _copies(inputs: Sequence[Tensor]) -> list[Tensor]:
    """One of each; what is given twice stays one tensor."""
    copies = {id(tensor): _copy(tensor) for tensor in inputs}
    return [copies[id(tensor)] for tensor in inputs]


def _copy(tensor: Tensor) -> Tensor:
    """One for which a graph need not be compiled anew: of the same type, and a leaf if it is one."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach().clone(), tensor.requires_grad)
    made = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return made if tensor.is_leaf else made.view_as(made)


def _pattern(tensor: Tensor) -> Tensor:
    """Numbers of either sign, without drawing any."""
    numbers = torch.arange(tensor.numel(), device=tensor.device, dtype=torch.float64)
    return (numbers * 0.7).sin().to(tensor.dtype).reshape(tensor.shape)


def _sum(column: Sequence[Tensor | None]) -> Tensor | None:
    found = [one for one in column if one is not None]
    return torch.stack(found).sum(0) if found else None


def _error(right: Sequence[Tensor | None], found: Sequence[Tensor | None]) -> float:
    """The largest relative one; infinite if something is missing, or whole numbers differ."""
    pairs = [(a, b) for a, b in zip(right, found, strict=True) if a is not None]
    norms = {n: float(a.norm()) for n, (a, _) in enumerate(pairs) if _rounded(a)}
    least = max(_SMALL * max(norms.values(), default=0.0), 1e-300)

    def error(n: int, a: Tensor, b: Tensor | None) -> float:
        if b is None or n not in norms:
            return 0.0 if b is not None and torch.equal(a, b) else math.inf
        found = float((a - b).norm()) / max(norms[n], least)
        return math.inf if math.isnan(found) else found

    return max((error(n, a, b) for n, (a, b) in enumerate(pairs)), default=0.0)


def _rounded(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _precision(tensors: Sequence[Tensor | None]) -> float:
    """Of the least precise numbers that are computed with."""
    dtypes = {t.dtype for t in tensors if t is not None and t.is_floating_point()}
    kinds = {tensor.device.type for tensor in tensors if tensor is not None}
    dtypes |= {torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
