"""A recording as lines of text that are the same wherever the same was recorded.

Two recordings of one net differ where the forward has read something that no guard knows: a clock, a file,
random numbers. Recordings of two ranks differ where the ranks hold, or were given, something else.
"""

from __future__ import annotations

import collections
import enum
import hashlib
import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fivefold.parallel.graph.containers import Items
from fivefold.parallel.graph.effects import Effects, Set
from fivefold.parallel.graph.refs import Constant, Ref, Slot, StateRef, Value
from fivefold.parallel.graph.tape import Node, Tape
from fivefold.parallel.graph.values import is_plain

__all__ = ["Fingerprint", "calls", "difference", "fingerprint", "in_words", "reads", "results"]

_HASHED_BYTES = 1 << 26
"""of larger tensors only this much is looked at, from their beginning"""


@dataclass(frozen=True)
class Fingerprint:
    """A recording in lines, each with the place in the user's code that it comes from."""

    lines: tuple[tuple[str, str], ...]
    digest: int
    """of all lines, 62 bits"""


def fingerprint(tape: Tape, computed: Collection[str] = ()) -> Fingerprint:
    """The fingerprint of a recording; of numbers, those of tensors that are no parameters and no buffers, and
    were not `computed` by a forward.
    """
    lines = [
        (f"inputs {[(tape.shapes[i], str(tape.dtypes[i])) for i in tape.inputs]}", "the inputs"),
        *((_line(node), node.where) for node in tape.nodes),
        (f"returns {in_words(tape.outputs)}", "what the net returns"),
        *_effects(tape.effects),
        *_held(tape, computed),
    ]
    text = "\n".join(line for line, _ in lines).encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 2
    return Fingerprint(tuple(lines), digest)


def difference(one: Fingerprint, other: Fingerprint) -> str | None:
    """Where two recordings first differ, in words; None if they do not."""
    if one.digest == other.digest:
        return None
    for a, b in itertools.zip_longest(one.lines, other.lines, fillvalue=("nothing", "")):
        if a[0] != b[0]:
            return f"{a[1] or b[1]}: {a[0]} before, {b[0]} now"
    return "its order"


def results(tape: Tape) -> list[tuple[str, str]]:
    """What comes of a recording, in lines: what the net returns, and what it leaves behind."""
    return [(f"returns {in_words(tape.outputs)}", "what the net returns"), *_effects(tape.effects)]


def reads(node: Node) -> list[str]:
    """What a call reads, in words; of constants, a digest of their numbers."""
    return [_ref(ref) for ref in node.operands]


def calls(nodes: Iterable[Node]) -> list[tuple[str, str]]:
    """What a forward calls, in lines with their places, whether gradients flow or not."""
    return [(_line(replace(node, grad=True)), node.where) for node in nodes]


def _line(node: Node) -> str:
    name = getattr(node.function, "__qualname__", type(node.function).__qualname__)
    called = in_words((node.args, node.kwargs))
    told = f"{name} {called} of {[_ref(r) for r in node.operands]} -> {node.outputs} {node.output_shapes}"
    return f"{told} in {node.scope!r} {node.call} {node.draw} {node.grad} {node.autocast}"


def _ref(ref: Ref) -> str:
    if isinstance(ref, Value):
        return f"v{ref.index}"
    return ref.name if isinstance(ref, StateRef) else f"constant {_numbers(ref.tensor)}"


def _effects(effects: Effects) -> Iterable[tuple[str, str]]:
    for target, ref in effects.written:
        yield f"writes {_ref(target)} = {_ref(ref)}", f"what is written to {_ref(target)}"
    for one in effects.sets:
        if one.container.shared and not is_plain(one.value) and not any(one.refs()):
            continue  # what a library has loaded by its first call, which may have been earlier on some ranks
        path = _path(one)
        yield f"sets {path} = {in_words(one.value)}", f"{path}, which the forward sets"


def _path(one: Set) -> str:
    """How a message names what is set, alike on all ranks: torch numbers hooks as they come."""
    kind = one.container.kind if isinstance(one.container, Items) else ""
    return f"{one.container.path}{kind}" if "hooks" in kind else one.path


def _held(tape: Tape, computed: Collection[str]) -> Iterable[tuple[str, str]]:
    """The numbers of tensors that modules hold as plain attributes."""
    used = {r.name for node in tape.nodes for r in node.operands if isinstance(r, StateRef)}
    for name in sorted(used):
        if name.startswith(".") and name[1:] not in computed:
            yield f"{name} = {_numbers(tape.places[name].now())}", f"the tensor {name[1:]}"


def _numbers(tensor: Tensor) -> str:
    told = f"{tuple(tensor.shape)} {tensor.dtype}"
    if (
        tensor.is_meta
        or tensor.layout is not torch.strided
        or type(tensor) not in (Tensor, torch.nn.Parameter)
    ):
        return told
    flat = tensor.detach().reshape(-1)[: _HASHED_BYTES // tensor.element_size()]
    data = flat.cpu().contiguous().view(torch.uint8).numpy()
    return f"{told} {hashlib.blake2b(data.tobytes(), digest_size=8).hexdigest()}"


def in_words(value: Any) -> str:
    """A value in words that name no addresses; of a tensor, a digest of its numbers."""
    if isinstance(value, (Value, StateRef, Constant)):
        return _ref(value)
    if isinstance(value, Slot):
        return f"#{value.index}"
    if isinstance(
        value,
        (str, int, float, complex, bool, type(None), bytes, torch.dtype, torch.device, enum.Enum),
    ):
        return repr(value)
    if isinstance(value, slice):
        return f"{in_words(value.start)}:{in_words(value.stop)}:{in_words(value.step)}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{in_words(k)}: {in_words(v)}' for k, v in value.items())}}}"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(in_words, value)))}}}"
    if isinstance(value, (Sequence, collections.deque)):
        return f"{type(value).__name__}({', '.join(map(in_words, value))})"
    if isinstance(value, Tensor):
        return _numbers(value)
    if is_dataclass(value) and not isinstance(value, type):
        inner = ((f.name, getattr(value, f.name, None)) for f in fields(value))
        return f"{type(value).__name__}({', '.join(f'{k}={in_words(v)}' for k, v in inner)})"
    return getattr(value, "__qualname__", type(value).__qualname__)
