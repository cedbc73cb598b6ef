"""Whether the samples of a batch depend on each other in a net, where replicas run it as it is.

A replica that calls the net on its own samples computes what one process computes only if no sample looks at
another, batch norm apart. Where the net can be recorded, that is found out by the rules that divide images:

    recorded for the whole batch, samples divided ──► an exchange or a sum over replicas?     they meet
    recorded for a replica's samples              ──► other calls, another number in a call?  they meet

    for i in range(3): x = x - x.mean(0)        a sum over replicas
    x / x.shape[0]                              another number
    if x.shape[0] > 4: ...                      other calls

Nets whose samples meet are computed from the recording, over all replicas.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fivefold.errors import UsageError, warn
from fivefold.mesh import Mesh
from fivefold.parallel.graph.fingerprint import reads, results
from fivefold.parallel.graph.record import LeftBehind
from fivefold.parallel.graph.refs import Value, refs_of
from fivefold.parallel.graph.tape import Node, Tape
from fivefold.parallel.intercept import Share, draws_mask, quietly, warn_layout
from fivefold.parallel.program.costs import Costs
from fivefold.parallel.program.net import ALIKE, RecordedNet, check_divided
from fivefold.parallel.program.program import Compute, Program, exchange_of
from fivefold.parallel.randomness import key_of
from fivefold.parallel.trained import check_read
from fivefold.parallel.trees import map_tensors
from fivefold.torch_private import AnyBatchNorm, pytree

__all__ = ["Rows"]

_BY_SHAPE = frozenset({
    "view", "reshape", "expand", "broadcast_to", "repeat", "tile", "unflatten", "zeros", "ones",
    "empty", "full",
    "new_zeros", "new_ones", "new_empty", "new_full", "rand", "randn", "split",
})  # fmt: skip
"""calls among whose numbers are sizes, which show in the shape of their result"""
_NEW = frozenset({
    "zeros", "ones", "empty", "full", "new_zeros", "new_ones", "new_empty", "new_full", "rand", "randn",
    "uniform", "exponential", "repeat", "tile", "expand", "broadcast_to",
})  # fmt: skip
"""calls that make a tensor of a shape of their own"""


class Rows:
    """Judges the net of a mesh with replicas and no other axis."""

    def __init__(self, net: Any, mesh: Mesh) -> None:
        self.tiles = RecordedNet(net, mesh, Costs())
        """the net over all replicas, for when samples meet"""
        self._net, self._agreement = net, mesh.agreement
        self._divides = mesh.plan.memory.shard != "none"
        self._problem = ""
        """why the net cannot be recorded"""
        self.found: str | None = None
        """where samples depend on each other in the latest step"""
        self._program: Program | None = None
        """of the latest batch"""

    def meet(self, call: Callable[..., Any], inputs: Any, share: Share) -> bool:
        """Whether samples depend on each other in a step; if so, `tiles` computes it. Collective.

        A net that cannot be recorded is taken for one whose samples do not, which is told. Raises
        `UsageError` on all ranks unless what they have recorded is the same.
        """
        program, found = self._judged(call, inputs, share)
        self.found = found
        mark = None if program is None else program.mark
        digest = -1 if mark is None else mark.digest
        said = (share.total, share.step, share.bounds, found is not None, digest)
        if not self._agreement.same(hash(said) & (2**62 - 1)):
            batch = f"{share.total} samples, shares {share.bounds}, step {share.step}"
            meeting = "apart" if found is None else f"meeting in {found}"
            lines = [
                (batch, "the batch"),
                (self._problem if program is None else "yes", "whether the net can be recorded"),
                (meeting, "whether samples depend on each other"),
            ]
            lines += [] if mark is None else mark.lines
            remedy = f'{ALIKE}; or vouch for the net with parallel.rows = "apart"'
            self._agreement.check(lines, "what they do", remedy, most=1)
        share.known = program is not None
        if program is not None:
            share.masks = {
                key_of(share.seed, share.step, *draw): follows
                for draw, follows in program.masks.items()
            }
        return found is not None

    def check_apart(
        self, call: Callable[..., Any], inputs: Any, share: Share, *, norms: bool
    ) -> None:
        """Raise `UsageError` where samples meet outside of a step, in which ranks do not wait for others.

        `norms`: batch norm may use the statistics of the batch, which are exchanged.
        """
        _, found = self._judged(call, inputs, share, norms=norms)
        if found is not None:
            raise UsageError(
                f"samples depend on each other in {found}, so what the net returns for this rank's "
                "samples is not what it returns for them in the whole batch: use model.step or "
                "model.evaluate, call model.module on whole batches, or vouch for them with "
                'parallel.rows = "apart"'
            )

    def _judged(
        self, call: Callable[..., Any], inputs: Any, share: Share, *, norms: bool = True
    ) -> tuple[Program | None, str | None]:
        """The net for the whole batch, if it can be recorded; and where samples meet, None if they do not.

        `norms` may join them.
        """
        given, share = share, _without_empty(share)
        inputs = _resized(inputs, share.rows)
        try:
            with quietly() as told:
                program = self.tiles.program_for(call, inputs, share)
        except LeftBehind:
            raise
        except UsageError as problem:
            self._program = None
            self._tell(problem)
            return None, None if norms else _norm_of_batches(self._net)
        check_read(program.tape)
        if self._divides:
            check_divided(program.tape)
        if norms not in program.meeting:
            with quietly():
                found = program.meeting[norms] = self._meeting(program, call, inputs, share, norms)
            for node in program.gathered if found else ():
                _tell_unknown(node)
            for what in dict.fromkeys(told) if found else ():
                warn_layout(what)  # replicas that compute apart tell it themselves
        meeting = program.meeting[norms]
        if not meeting and given is not share:
            meeting = _unlike(
                program.tape, self.tiles.recorded(call, _resized(inputs, given.total))
            )
        self._program = program
        return program, meeting or (None if norms else _statistics(program))

    def outputs_lie(self) -> list[tuple[int, int] | None] | None:
        """Of every tensor that the net returns for the latest batch: the dim that holds the samples, and how
        many rows each has there; None for one that all replicas have alike.

        None if the net cannot be recorded.
        """
        program = self._program
        if program is None:
            return None
        tape = program.tape
        total = tape.shapes[tape.inputs[0]][0]
        found: list[tuple[int, int] | None] = []
        for ref in refs_of(tape.outputs):
            spread = program.spreads[ref.index] if isinstance(ref, Value) else None
            dims = () if spread is None else spread.cut_dims
            found.append((dims[0], spread.shape[dims[0]] // total) if spread and dims else None)
        return found

    def note_left(self) -> None:
        """Note of which samples what the net's forward has left is, which has run as it is."""
        if self._program is not None:
            self.tiles.note_left(self._program)

    def _tell(self, problem: UsageError) -> None:
        told, self._problem = bool(self._problem), f"no, {problem}"
        if not told:
            warn(
                "whether the samples of a batch depend on each other in the net was not checked, as it "
                f"cannot be recorded: {problem}. If the net computes each sample by itself, all is exact, "
                'and parallel.rows = "apart" in the plan says so; if not, replicas compute something else '
                "than one process",
            )

    def _meeting(
        self, program: Program, call: Callable[..., Any], inputs: Any, share: Share, norms: bool
    ) -> str:
        """Where samples meet, in words; empty if nowhere."""
        found = _joined(program, norms)
        if found and not _fresh(program):
            return found
        sizes = {b - a: rank for rank, (a, b) in enumerate(itertools.pairwise(share.bounds))}
        alone: dict[int, Tape] = {}
        for rows, rank in sorted(sizes.items()):
            try:
                alone[rank] = self.tiles.recorded(call, _resized(inputs, rows), rank)
            except LeftBehind:
                raise
            except UsageError as problem:
                return found or f"a way that it cannot go with {rows} samples ({problem})"
        found = found or _different(program, alone, self.tiles)
        alike = _alike(program.tape, [*alone.values()]) if found else frozenset[int]()
        if alike:
            again = self.tiles.planned_with(program, share, alike)
            found = _joined(again, norms) or _different(again, alone, self.tiles)
        if not found:
            program.masks = _masks(program.tape, [*alone.values()])
        return found


def _tell_unknown(node: Node) -> None:
    warn(
        f"it is not known whether samples depend on each other in {node.where}, so every rank gathers the "
        "whole batch there, which is exact and slow: if they do not, parallel.rows = "
        '"apart" in the plan says so',
    )


def _norm_of_batches(net: nn.Module) -> str | None:
    """The first batch norm that uses the statistics of the batch in evaluation mode too."""
    for name, module in net.named_modules():
        if isinstance(module, AnyBatchNorm) and module.running_mean is None:
            return f"{name!r}, which has no running statistics"
    return None


def _without_empty(share: Share) -> Share:
    """A share of a batch of which every replica has something; what holds there holds for fewer samples."""
    sizes = [b - a for a, b in itertools.pairwise(share.bounds)]
    if min(sizes) > 0:
        return share
    most, own = max(sizes), share.bounds.index(share.origin)
    bounds = tuple(most * replica for replica in range(len(sizes) + 1))
    return dataclasses.replace(
        share, rows=most, origin=bounds[min(own, len(sizes) - 1)], total=bounds[-1], bounds=bounds
    )


def _joined(program: Program, norms: bool) -> str:
    """The first step in which replicas exchange something, but for the statistics of norms.

    `norms` that join replicas join weights too, which all of them have: that is one exchange too many.
    """
    for step in program.steps:
        if isinstance(step, Compute):
            by_samples = all(program.spreads[i].cut_dims in ((), (0,)) for i in step.node.outputs)
            norm = _is_norm(step.node)
            apart = step.local.collective is None or (by_samples and norm)
            if (step.local.differs_apart and (norms or not norm)) or not apart:
                return step.node.where
        moved = exchange_of(step)
        if moved is not None:
            reader = next(
                s.node for s in program.steps
                if isinstance(s, Compute) and any(
                    isinstance(r, Value) and r.index == getattr(step, "target", -1) for r in s.operands
                )
            ) if not isinstance(step, Compute) else step.node  # fmt: skip
            return reader.where
    tape = program.tape
    for target, ref in tape.effects.written:
        if isinstance(ref, Value) and not program.spreads[ref.index].is_whole:
            return f"what is written to {getattr(target, 'name', 'a tensor')}"
    for one in tape.effects.sets:
        if one.registered and any(
            isinstance(r, Value) and not program.spreads[r.index].is_whole for r in one.refs()
        ):
            return f"the buffer {one.path}"
    return ""


def _statistics(program: Program) -> str | None:
    """The first norm that uses the statistics of the batch."""
    return next(
        (
            step.node.where
            for step in program.steps
            if isinstance(step, Compute) and step.local.collective and _is_norm(step.node)
        ),
        None,
    )


def _is_norm(node: Node) -> bool:
    return node.name in {"batch_norm", "instance_norm"} or node.name.startswith(
        ("BatchNorm", "InstanceNorm")
    )


def _resized(inputs: Any, rows: int) -> Any:
    """Inputs of so many samples."""
    return map_tensors(
        lambda leaf: leaf if leaf.shape[0] == rows else leaf.new_empty((rows, *leaf.shape[1:])),
        inputs,
    )


def _fresh(program: Program) -> bool:
    """Whether new tensors lie by samples, which may have as many rows by chance."""
    return any(
        node.name in _NEW and not all(program.spreads[index].is_whole for index in node.outputs)
        for node in program.tape.nodes
    )


def _alike(whole: Tape, alone: Sequence[Tape]) -> frozenset[int]:
    """The values that have the same shape for a replica's samples as for the whole batch."""
    found: set[int] = {i for node in whole.nodes for i in node.outputs}
    for tape in alone:
        shapes = [[tuple(shape) for shape in node.output_shapes] for node in tape.nodes]
        for node, others in itertools.zip_longest(whole.nodes, shapes[: len(whole.nodes)]):
            same = others is not None and [tuple(s) for s in node.output_shapes] == others
            found -= set() if same else {*node.outputs}
    return frozenset(
        index for index in found if whole.shapes[index][:1] == whole.shapes[whole.inputs[0]][:1]
    )


def _different(program: Program, alone: Mapping[int, Tape], tiles: RecordedNet) -> str:
    """Where a rank that runs the net as it is does something else than the program; empty if nowhere."""
    found = (_apart(program, tape, tiles, rank) for rank, tape in alone.items())
    return next(filter(None, found), "")


def _masks(whole: Tape, alone: Sequence[Tape]) -> dict[tuple[str, int], bool | None]:
    """What depends on the number of samples in the shapes of masks."""
    found: dict[tuple[str, int], bool | None] = {}
    total = whole.shapes[whole.inputs[0]][0]
    for node, *others in zip(whole.nodes, *(tape.nodes for tape in alone), strict=True):
        if not draws_mask(node.function, node.args, node.kwargs):
            continue
        shape = node.output_shapes[0]
        shapes = [other.output_shapes[0] for other in others]
        rows = [tape.shapes[tape.inputs[0]][0] for tape in alone]
        if all(other == shape for other in shapes):
            found[node.scope, node.draw] = False
        elif all(
            other[1:] == shape[1:] and other[0] * total == shape[0] * n and not other[0] % n
            for other, n in zip(shapes, rows, strict=True)
        ):
            found[node.scope, node.draw] = True
        else:
            found[node.scope, node.draw] = None
    return found


def _apart(program: Program, alone: Tape, tiles: RecordedNet, rank: int) -> str:
    """Where a recording of one rank's samples is not that of all, but for their number; empty if nowhere."""

    def expected(node: Node) -> list[tuple[int, ...]]:
        return [program.spreads[index].local_shape(tiles.grid, rank) for index in node.outputs]

    return _unlike(program.tape, alone, expected)


def _unlike(
    whole: Tape, other: Tape, expected: Callable[[Node], list[tuple[int, ...]]] | None = None
) -> str:
    """The first place where two recordings of a net differ, sizes apart; empty if there is none.

    `expected` are the shapes of what a node of the first makes in the second; None: any.
    """
    for one, two in itertools.zip_longest(whole.nodes, other.nodes):
        if one is None:
            return two.where
        if two is None:
            return one.where
        same = one.function is two.function and (one.name, one.scope) == (two.name, two.scope)
        if not (same or _same_kind(one, two)):
            return two.where
        shapes = [tuple(shape) for shape in two.output_shapes]
        if expected is not None and expected(one) != shapes:
            return two.where
        if (one.outputs, one.grad, one.autocast) != (two.outputs, two.grad, two.autocast):
            return two.where
        if not _same_arguments(one, two) or reads(one) != reads(two):
            return two.where
    for (made, where), (made_too, _) in itertools.zip_longest(
        results(whole), results(other), fillvalue=("", "what the net leaves behind")
    ):
        if made != made_too:
            return where
    return ""


def _same_kind(one: Node, other: Node) -> bool:
    """Whether both call the same; functions of ours are made anew by every recording."""
    return (one.name, one.scope, type(one.function)) == (
        other.name,
        other.scope,
        type(other.function),
    )


def _same_arguments(one: Node, other: Node) -> bool:
    flat, tree = pytree.tree_flatten((one.args, one.kwargs))
    others, structure = pytree.tree_flatten((other.args, other.kwargs))
    if str(tree) != str(structure):
        return False
    sized = one.name in _BY_SHAPE
    if one.name in {"full", "new_full"} and _fill(one) != _fill(other):
        return False
    if one.name == "narrow":
        return _narrowed(one) == _narrowed(other)
    return all(_same(a, b, sized) for a, b in zip(flat, others, strict=True))


def _fill(node: Node) -> Any:
    """What a tensor is filled with."""
    names = ("size", "fill_value") if node.name == "full" else ("input", "size", "fill_value")
    return node.bound(names).get("fill_value")


def _narrowed(node: Node) -> tuple[Any, ...]:
    """What `narrow` is given but for the length, which shows in the shape."""
    given = node.bound(("input", "dim", "start", "length"))
    return tuple(given.get(name) for name in ("input", "dim", "start"))


def _same(one: Any, other: Any, sized: bool) -> bool:
    if sized and type(one) is int and type(other) is int:
        return True  # it shows in the shape
    if isinstance(one, Tensor) or callable(one):
        return one is other
    return type(one) is type(other) and bool(one == other)
