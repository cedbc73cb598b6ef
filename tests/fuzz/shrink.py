"""A smaller case that comes to the same: fewer steps, events, blocks, settings, axes, rows and pixels."""

from __future__ import annotations

import copy
import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from fuzz.cases import Case, complete
from fuzz.compare import Outcome

__all__ = ["cause", "shrunk"]


def cause(outcome: Outcome) -> str:
    """What kind of trouble it is: cases of the same kind may be taken for each other."""
    text = outcome.text
    if outcome.kind == "traceback":
        return f"traceback {'refused' if text.startswith('refused') else text.split(':')[0]}"
    if outcome.kind != "wrong":
        return outcome.kind
    if "fake tensors" in text:
        return "wrong fakes" + (" refused" if text.startswith("refused") else "")
    for word in ("attribute", "outside", "evaluation", "differs from rank", "instead of"):
        if word in text:
            return f"wrong {word}"
    return "wrong numbers"


def shrunk(
    case: Case, outcome: Outcome, run: Callable[[Case], Outcome | None], budget_s: float = 90.0
) -> tuple[Case, Outcome]:
    """The smallest case found, and its outcome. `run` gives None for a case that is not valid."""
    until, wanted, tried = time.monotonic() + budget_s, cause(outcome), set[str]()

    def same(candidate: Case) -> Outcome | None:
        """The outcome of a candidate that is new, valid and of the same kind."""
        told = json.dumps(candidate, sort_keys=True)
        if told in tried or time.monotonic() > until:
            return None
        tried.add(told)
        try:
            complete(candidate)
        except Exception:  # noqa: BLE001 - it is not valid, for whatever reason
            return None
        found = run(candidate)
        return found if found is not None and cause(found) == wanted else None

    idle = 0
    while idle < len(_CHANGES):
        for change in _CHANGES:
            case, outcome, changed = _applied(change, case, outcome, same)
            idle = 0 if changed else idle + 1
    return case, outcome


def _applied(
    change: Callable[[Case], Iterator[Case]],
    case: Case,
    outcome: Outcome,
    same: Callable[[Case], Outcome | None],
) -> tuple[Case, Outcome, bool]:
    """One kind of change, as often as it helps."""
    changed, again = False, True
    while again:
        again = False
        for candidate in change(case):
            found = None if candidate == case else same(candidate)
            if found is not None:
                case, outcome, changed, again = candidate, found, True, True
                break
    return case, outcome, changed


def _changed(case: Case, **values: Any) -> Case:
    return {**copy.deepcopy(case), **copy.deepcopy(values)}


def _steps(case: Case) -> Iterator[Case]:
    steps = case["steps"]
    for count in range(1, len(steps)):
        yield _changed(case, steps=steps[:count])
    for number in range(len(steps) - 1):
        yield _changed(case, steps=steps[:number] + steps[number + 1 :])


def _layout(case: Case) -> Iterator[Case]:
    layout = case["layout"]
    for axis, size in layout.items():
        rest = {a: n for a, n in layout.items() if a != axis}
        plan = case["plan"]
        if axis == "pipe":
            plan = {k: v for k, v in plan.items() if not k.startswith("pipeline")}
        yield _changed(case, layout=rest, plan=plan)
        if axis in ("width", "depth") and "height" not in layout:
            yield _changed(case, layout={**rest, "height": size})
        if size > 2:
            yield _changed(case, layout={**layout, axis: 2})


def _settings(case: Case) -> Iterator[Case]:
    for key in case["plan"]:
        yield _changed(case, plan={k: v for k, v in case["plan"].items() if k != key})
    if "pipeline.schedule" in case["plan"] and case["plan"]["pipeline.schedule"] != "1f1b":
        yield _changed(case, plan={**case["plan"], "pipeline.schedule": "1f1b"})
    if case["plan"].get("pipeline.micro_batches", 2) > 2:
        yield _changed(case, plan={**case["plan"], "pipeline.micro_batches": 2})


def _events(case: Case) -> Iterator[Case]:
    for number, step in enumerate(case["steps"]):
        for key in ("events", "evaluate", "zero", "update", "clip"):
            if key in step:
                smaller = _changed(case)
                del smaller["steps"][number][key]
                if key in ("zero", "update"):
                    for other in smaller["steps"]:
                        other.pop("zero", None)
                        other.pop("update", None)
                yield smaller
        for index in range(len(step.get("events", ()))):
            smaller = _changed(case)
            del smaller["steps"][number]["events"][index]
            yield smaller


def _surroundings(case: Case) -> Iterator[Case]:
    net = case["net"]
    for key, plain in (("takes", "one"), ("returns", "tensor"), ("head", None)):
        if net.get(key, plain) != plain:
            smaller = _changed(case)
            smaller["net"][key] = plain
            if key == "returns":
                smaller["loss"].pop("picked", None)
            yield smaller
    if net.get("head") and net["head"].get("tied"):
        yield _changed(case, net={**net, "head": {"out": net["head"]["out"]}})
    if case["loss"]["name"] != "mse":
        picked = {"picked": True} if net.get("returns", "tensor") != "tensor" else {}
        yield _changed(case, loss={"name": "mse", **picked})
    if case["backend"] != "gloo":
        yield _changed(case, backend="gloo")
    if case["example"]:
        yield _changed(case, example=False)


def _sizes(case: Case) -> Iterator[Case]:
    batches = case["batches"]
    for number in range(1, len(batches)):
        steps = [{**s, "batch": 0 if s["batch"] == number else s["batch"]} for s in case["steps"]]
        yield _changed(case, steps=steps)
    rows, least_rows = max(one["rows"] for one in batches), 2 * case["layout"].get("data", 1)
    for fewer in sorted({least_rows, 2, 4, rows - 1}):
        if least_rows <= fewer < rows:
            yield _changed(case, batches=[{**b, "rows": min(b["rows"], fewer)} for b in batches])
    for least in (4, 6):
        if any(n > least for one in batches for n in one["size"]):
            less = [{**b, "size": [min(n, least) for n in b["size"]]} for b in batches]
            yield _changed(case, batches=less)


# ---- blocks


def _blocks(case: Case) -> Iterator[Case]:
    """With one block alone; without a block; with what is within a block in its place."""
    if len(case["net"]["blocks"]) > 2:
        for number in range(len(case["net"]["blocks"])):
            alone = case
            for other in reversed(range(len(case["net"]["blocks"]))):
                alone = (
                    alone if other == number else _without(alone, f"blocks.{other}", unwrap=False)
                )
            yield alone
    for path in sorted(_paths(case["net"]["blocks"], "blocks"), key=lambda p: p.count(".")):
        yield _without(case, path, unwrap=False)
        if _found(case["net"], path)[1].get("inner"):
            yield _without(case, path, unwrap=True)


def _paths(blocks: list[Any], prefix: str) -> Iterator[str]:
    for number, (_, args) in enumerate(blocks):
        yield f"{prefix}.{number}"
        yield from _paths(args.get("inner", []), f"{prefix}.{number}.inner")


def _siblings(net: dict[str, Any], path: str) -> tuple[list[Any], int]:
    *outer, last = [int(n) for n in re.findall(r"\d+", path)]
    siblings = net["blocks"]
    for number in outer:
        siblings = siblings[number][1]["inner"]
    return siblings, last


def _found(net: dict[str, Any], path: str) -> Any:
    siblings, number = _siblings(net, path)
    return siblings[number]


def _without(case: Case, path: str, *, unwrap: bool) -> Case:
    smaller = _changed(case)
    siblings, number = _siblings(smaller["net"], path)
    inner = siblings[number][1].get("inner", []) if unwrap else []
    siblings[number : number + 1] = inner
    for step in smaller["steps"]:
        moved = [_moved(event, path, len(inner)) for event in step.get("events", ())]
        if "events" in step:
            step["events"] = [event for event in moved if event is not None]
    return smaller


def _moved(event: dict[str, Any], path: str, unwrapped: int) -> dict[str, Any] | None:
    """An event at its new place, after the block at `path` gave way to those within; None if it is gone."""
    at, (prefix, _, number) = event.get("at", ""), path.rpartition(".")
    if at == path and not unwrapped:
        return None
    if at.startswith(f"{path}.inner."):
        first, _, rest = at.removeprefix(f"{path}.inner.").partition(".")
        new = f"{prefix}.{int(number) + int(first)}"
        return {**event, "at": f"{new}.{rest}" if rest else new} if unwrapped else None
    if at == path or not at.startswith(f"{prefix}."):
        return None if at == path else event
    own, _, rest = at.removeprefix(f"{prefix}.").partition(".")
    if int(own) <= int(number):
        return event
    new = f"{prefix}.{int(own) + unwrapped - 1}"
    return {**event, "at": f"{new}.{rest}" if rest else new}


_CHANGES = (_steps, _layout, _blocks, _settings, _events, _surroundings, _sizes)
"""what saves most first"""
