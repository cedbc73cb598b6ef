"""What a case came to: exact, refused, told, wrong, traceback, crash or hang."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fuzz.cases import Case, looseness
from fuzz.pool import Ended

__all__ = ["BAD", "OUTCOMES", "Outcome", "judged", "largest", "sensitivity"]

OUTCOMES = ("exact", "refused", "told", "wrong", "traceback", "crash", "hang")
BAD = ("wrong", "traceback", "crash", "hang")
TOLERANCE, CAP, FACTOR, FLOOR = 1e-8, 1e-6, 100.0, 1e-5
"""`FLOOR`: what cancels to zero is rounding: 1e-13 of all of them behind a norm of two samples"""
TOLD = re.compile(
    r"not (been )?checked|cannot be (checked|told|seen)|could not be checked|does not check"
    r"|not equal to a run under another layout|depends? on (its|the) layout"
)
"""warnings that say that something is not sure to be exact"""

Record = Mapping[str, Any]


@dataclass(frozen=True)
class _Limits:
    """What results of a case may be off by."""

    least: float
    most: float
    loose: float

    @classmethod
    def of(cls, case: Case) -> _Limits:
        least, most = case.get("tolerance", (TOLERANCE, CAP))
        return cls(least, most, looseness(case))

    def allowed(self, reaction: float) -> float:
        """A hundred times the reaction to a change of every input number by one ulp."""
        return max(self.loose, min(max(self.least, FACTOR * reaction), self.most))


@dataclass
class Outcome:
    """The kind of outcome, in a line what it is about, and all that was found."""

    kind: str
    text: str = ""
    details: list[str] = field(default_factory=list[str])
    ranks: list[Any] = field(default_factory=list[Any])

    @property
    def bad(self) -> bool:
        return self.kind in BAD


def judged(case: Case, truth: Record, ranks: Sequence[Any]) -> Outcome:
    """Compare what ranks tell with the truth."""
    ended = [rank for rank in ranks if isinstance(rank, Ended)]
    told = [rank for rank in ranks if not isinstance(rank, Ended)]
    raised = [rank for rank in told if rank["ended"] != "done"]
    lines = [_ending(number, rank) for number, rank in enumerate(ranks)]
    if any(rank.how == "crash" for rank in ended):
        return Outcome("crash", next(r.text for r in ended if r.how == "crash"), lines)
    if ended:
        text = raised[0]["text"].split("\n")[0] if raised else ended[0].text[:200]
        return Outcome("hang", text, lines)
    fakes = [path for rank in told for path in rank["fakes"]]
    if raised:
        return _of_raised(told, raised, fakes, lines)
    found = list(_differences(case, truth, told))
    if fakes:
        found.append(f"fake tensors are left: {', '.join(sorted(set(fakes)))}")
    if not found:
        return Outcome("exact")
    warned = sorted({w for rank in told for w in rank["warnings"] if TOLD.search(w)})
    kind = "told" if warned and not fakes else "wrong"
    return Outcome(kind, warned[0] if kind == "told" else found[0], found + warned)


def _ending(number: int, rank: Any) -> str:
    if isinstance(rank, Ended):
        return f"rank {number}: {rank.how}: {rank.text}"
    if rank["ended"] == "done":
        return f"rank {number}: done"
    return f"rank {number}: {rank['ended']}: {rank['kind']}: {rank['text']}"


def _of_raised(
    told: Sequence[Record], raised: Sequence[Record], fakes: list[str], lines: list[str]
) -> Outcome:
    # Who waits for one that refuses finds it gone: the launcher tells what was refused, in one line.
    refused = [rank for rank in raised if rank["ended"] == "refused"]
    if refused and all(
        rank["ended"] == "refused" or rank.get("kind") == "CommError" for rank in told
    ):
        told = raised = refused
    first = min(raised, key=lambda rank: (rank["kind"] == "CommError", rank["ended"] == "refused"))
    text = f"{first['kind']}: {(first['text'].strip() or '?').splitlines()[0]}"
    texts = {rank["text"] for rank in raised}
    alike = len(raised) == len(told) and len(texts) == 1 and "\n" not in first["text"].strip()
    if all(rank["ended"] == "refused" for rank in raised):
        if alike and not fakes:
            return Outcome("refused", text, lines)
        if alike:
            return Outcome("wrong", f"refused, but fake tensors are left: {fakes[0]}", lines)
        why = "in several lines" if "\n" in first["text"].strip() else "not alike on all ranks"
        return Outcome("traceback", f"refused {why}: {text}", lines)
    return Outcome("traceback", text, [*lines, *first["trace"].splitlines()])


# ---- numbers


def _wide(value: Tensor) -> Tensor:
    return value.detach().to(torch.complex128 if value.is_complex() else torch.float64)


def _norm(value: Any) -> float:
    return float(torch.linalg.vector_norm(_wide(value))) if isinstance(value, Tensor) else 0.0


def _error(got: Any, truth: Any, scale: float) -> float:
    if isinstance(got, str) or isinstance(truth, str):
        return 0.0 if got == truth else math.inf
    if not isinstance(got, Tensor) or not isinstance(truth, Tensor):
        return 0.0 if got is truth or _same(got, truth) else math.inf
    if got.shape != truth.shape or got.dtype != truth.dtype:
        return math.inf
    if not (truth.is_floating_point() or truth.is_complex()):
        return 0.0 if torch.equal(got, truth) else math.inf
    apart = _norm(_wide(got) - _wide(truth))
    if not math.isfinite(apart):
        return math.inf
    return apart / scale if scale > 0 else apart


def _same(got: Any, truth: Any, loose: float = 0.0) -> bool:
    """Plain values: equal, floats up to rounding."""
    if isinstance(got, float) and isinstance(truth, float):
        return math.isclose(got, truth, rel_tol=max(1e-6, loose), abs_tol=1e-12)
    if isinstance(got, list | tuple) and isinstance(truth, list | tuple):
        alike = len(got) == len(truth)
        return alike and all(_same(g, t, loose) for g, t in zip(got, truth, strict=True))
    if isinstance(got, dict) and isinstance(truth, dict):
        return got.keys() == truth.keys() and all(_same(got[k], truth[k], loose) for k in truth)
    return type(got) is type(truth) and got == truth


def _scales(quantity: str, truth: Mapping[str, Any]) -> dict[str, float]:
    norms = {name: _norm(value) for name, value in truth.items()}
    if quantity != "buffers":
        floor = FLOOR * math.hypot(*filter(math.isfinite, norms.values()))
        return {name: max(norm, floor) for name, norm in norms.items()}
    return {name: max(norm, 1e-3) for name, norm in norms.items()}


def _allowed(
    truth: Record, nudged: Record, quantity: str, scales: Mapping[str, float], limits: _Limits
) -> dict[str, float]:
    """What each tensor may be off by."""
    found: dict[str, float] = {}
    for name, value in truth[quantity].items():
        reaction = _error(nudged[quantity].get(name), value, scales.get(name, 0.0))
        found[name] = limits.allowed(reaction)
    return found


def sensitivity(truth: Record) -> float:
    """The largest reaction of anything to a change of every input number by one ulp."""
    worst = 0.0
    for step, nudged in zip(truth["steps"], truth["nudged"]["steps"], strict=True):
        worst = max(worst, _error(nudged["loss"], step["loss"], _norm(step["loss"])))
        for quantity in ("outputs", "gradients", "buffers", "weights"):
            scales = _scales(quantity, step[quantity])
            for name, value in step[quantity].items():
                worst = max(worst, _error(nudged[quantity].get(name), value, scales[name]))
    for outputs, nudged in zip(truth["evaluated"], truth["nudged"]["evaluated"], strict=True):
        scales = _scales("outputs", outputs)
        for path, value in outputs.items():
            if isinstance(value, Tensor):
                worst = max(worst, _error(nudged.get(path), value, scales[path]))
    return worst


def largest(truth: Record) -> float:
    """The largest finite number among weights, and outputs in eval mode: some nets mask with infinity."""
    named = [*(step["weights"] for step in truth["steps"]), *truth["evaluated"]]
    tensors = [value for each in named for value in each.values() if isinstance(value, Tensor)]
    finite = (_wide(tensor)[tensor.isfinite()].abs() for tensor in tensors)
    return max((float(numbers.max()) for numbers in finite if len(numbers)), default=0.0)


# ---- differences


def _differences(case: Case, truth: Record, told: Sequence[Record]) -> Iterator[str]:
    limits = _Limits.of(case)
    for number, step in enumerate(truth["steps"]):
        nudged, ranks = truth["nudged"]["steps"][number], [rank["steps"][number] for rank in told]
        found = [*_of_step(case, step, nudged, ranks, limits)]
        yield from (f"step {number}: {line}" for line in found)
        if found:
            return  # what follows starts elsewhere
    expected, nudged = truth["evaluated"][0], truth["nudged"]["evaluated"][0]
    pieces = [piece for rank in told for piece in rank["evaluated"][0]]
    for line in _of_outputs(expected, nudged, pieces, limits):
        yield f"evaluation: {line}"
    for number, rank in enumerate(told):
        if rank["outside"] is not None:
            whole = [{"path": p, "value": v, "origin": None} for p, v in rank["outside"].items()]
            for line in _of_outputs(truth["evaluated"][1], nudged, whole, limits):
                yield f"the plain net outside, on rank {number}: {line}"


def _of_step(
    case: Case, truth: Record, nudged: Record, ranks: Sequence[Record], limits: _Limits
) -> Iterator[str]:
    scale = _norm(truth["loss"])
    allowed_loss = limits.allowed(_error(nudged["loss"], truth["loss"], scale))
    for number, rank in enumerate(ranks):
        # `step` returns a scalar, also for a loss of one element.
        error = _error(rank["loss"].to(truth["loss"]), truth["loss"].reshape(()), scale)
        if error > allowed_loss:
            yield f"loss of rank {number} is off by {error:.1e}"
            break
    pieces = [piece for rank in ranks for piece in rank["outputs"]]
    yield from _of_outputs(truth["outputs"], nudged["outputs"], pieces, limits)
    for quantity in ("gradients", "buffers", "weights"):
        expected = truth[quantity]
        scales = _scales(quantity, expected)
        allowed = _allowed(truth, nudged, quantity, scales, limits)
        for number, rank in enumerate(ranks):
            lines = list(_of_tensors(quantity, rank[quantity], expected, scales, allowed))
            yield from (f"{line} on rank {number}" for line in lines)
            if lines:
                break
        else:
            yield from _replicas(quantity, ranks)
    yield from _states(case, truth["state"], ranks)


def _of_tensors(
    quantity: str,
    got: Mapping[str, Any],
    expected: Mapping[str, Any],
    scales: Mapping[str, float],
    allowed: Mapping[str, float],
) -> Iterator[str]:
    for name in [*expected, *(n for n in got if n not in expected)]:
        if name not in got or name not in expected:
            yield f"{name} ({quantity}) is {'missing' if name in expected else 'new'}"
            continue
        error = _error(got[name], expected[name], scales[name])
        if error > allowed[name]:
            yield f"{name} ({quantity}) {_words(got[name], expected[name], error)}"


def _words(got: Any, truth: Any, error: float) -> str:
    if math.isfinite(error):
        return f"is off by {error:.1e}"
    return f"is {_brief(got)} instead of {_brief(truth)}"


def _brief(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    if value.numel() == 1:
        return f"{value.item()} of shape {tuple(value.shape)}"
    kind = "zeros" if value.numel() and not value.any() else "a tensor"
    kind = "NaN" if value.is_floating_point() and value.isnan().any() else kind
    return f"{kind} of shape {tuple(value.shape)}, {str(value.dtype).removeprefix('torch.')}"


def _replicas(quantity: str, ranks: Sequence[Record]) -> Iterator[str]:
    for name, first in ranks[0][quantity].items():
        for number, rank in enumerate(ranks[1:], 1):
            other = rank[quantity].get(name)
            if (
                isinstance(first, Tensor)
                and isinstance(other, Tensor)
                and not torch.equal(first, other)
            ):
                yield f"{name} ({quantity}) of rank {number} differs from rank 0's"
                break


def _states(case: Case, expected: Mapping[str, Any], ranks: Sequence[Record]) -> Iterator[str]:
    """Plain attributes: as in one process on all ranks; with stages, on one that runs the module."""
    enough, loose = any if case["layout"].get("pipe", 1) > 1 else all, looseness(case)
    for name, value in expected.items():
        got = [rank["state"].get(name, "missing") for rank in ranks]
        if not enough(_same(each, value, loose) for each in got):
            wrong = next(each for each in got if not _same(each, value, loose))
            yield f"attribute {name} is {str(wrong)[:60]} instead of {str(value)[:60]}"


def _of_outputs(
    expected: Mapping[str, Any],
    nudged: Mapping[str, Any],
    pieces: Sequence[Record],
    limits: _Limits,
) -> Iterator[str]:
    by_path: dict[str, list[Record]] = {}
    scales = _scales("outputs", expected)
    for piece in pieces:
        by_path.setdefault(piece["path"], []).append(piece)
    for path, truth in expected.items():
        name = f"output {path}".strip()
        some = by_path.pop(path, [])
        if not some:
            yield f"{name} is missing"
        elif not isinstance(truth, Tensor):
            wrong = [p["value"] for p in some if not _same(p["value"], truth)]
            if wrong:
                yield f"{name} is {_brief(wrong[0])} instead of {truth!r}"
        else:
            reaction = _error(nudged.get(path), truth, scales[path])
            yield from _of_output(name, truth, some, scales[path], limits.allowed(reaction))
    for path in by_path:
        yield f"output {path} is new"


def _of_output(
    name: str, truth: Tensor, pieces: Sequence[Record], scale: float, allowed: float
) -> Iterator[str]:
    covered = torch.zeros(truth.shape, dtype=torch.bool)
    for piece in pieces:
        value, origin = piece["value"], piece.get("origin")
        if not isinstance(value, Tensor):
            yield f"{name} is {value!r} instead of {_brief(truth)}"
            return
        origin = [0] * value.dim() if origin is None else origin
        box = tuple(slice(o, o + n) for o, n in zip(origin, value.shape, strict=True))
        inside = value.dim() == truth.dim() and truth[box].shape == value.shape
        error = _error(value, truth[box], scale) if inside else math.inf
        if error > allowed:
            yield f"{name} {_words(value, truth[box] if inside else truth, error)}"
            return
        covered[box] = True
    if not covered.all():
        yield f"{name} is not whole: nobody has some of its elements"
