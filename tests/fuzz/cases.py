"""A case: a net, a layout with its plan, batches, and what happens between steps. Plain data, from a seed.

{"seed": 7, "net": {...}, "loss": {...}, "layout": {"data": 2}, "plan": {"memory.shard": "none"},
 "backend": "gloo", "example": true, "batches": [{"rows": 5, "size": [9, 8], "target": {...}}],
 "steps": [{"batch": 0, "events": [...], "evaluate": null, "zero": true, "update": true}]}

Instead of "net" and "loss" it may name functions that make them, as `judge.made_by` tells, in folders "path".
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Generator, Iterator
from typing import Any

import torch

import fuzz.blocks  # noqa: F401 - makes the blocks known
from fuzz import data, drawing, losses, nets
from fuzz.drawing import draw_net
from fuzz.events import ANYTIME
from fuzz.grammar import BLOCKS

__all__ = [
    "Case", "coarse", "complete", "label", "looseness", "micro_batches", "random_case", "ranks_of", "tags",
]  # fmt: skip

Case = dict[str, Any]

_LAYOUTS = (
    ({"data": 2}, 14), ({"data": 3}, 9), ({"data": 4}, 2), ({"pipe": 2}, 14), ({"pipe": 3}, 4),
    ({"data": 2, "pipe": 2}, 7), ({"height": 2}, 7), ({"width": 2}, 5), ({"height": 3}, 3),
    ({"height": 2, "width": 2}, 4), ({"data": 2, "height": 2}, 4), ({"data": 2, "width": 2}, 3),
    ({"pipe": 2, "width": 2}, 3), ({"pipe": 2, "height": 2}, 3), ({}, 2),
)  # fmt: skip
_SOLID = (({"depth": 2}, 3), ({"depth": 2, "width": 2}, 2), ({"data": 2, "depth": 2}, 1))
_NOTABLE = ("affine", "bias", "track_running_stats")
"""options that are on unless a case says otherwise"""
_COARSE = 1e-2
_FLAG, _LOOKS = "deterministic", 3
"""the event that sets a flag of torch; steps in which nets are recorded again"""
_PAIRED = ("gems", "gems-overlap", "chimera")
_BUDGETS = 0.35
"""part of the cases that are computed under a memory budget, whatever the layout"""
_COMPILED = 0.2
"""of the others, that are compiled"""
_SCHEDULES = (
    "layer",
    "gpipe",
    "1f1b",
    "1f1b",
    "interleaved",
    "zero-bubble",
    "zero-bubble",
    *_PAIRED,
)


def random_case(seed: int, only: dict[str, int] | None = None) -> Case:
    """A case from a seed, of any layout or of one `only`.

    It may not be valid in one process: whoever asks has to see.
    """
    rng = random.Random(seed)
    kind = rng.choices(["image", "volume", "vector", "tokens", "ids"], [45, 4, 22, 20, 9])[0]
    if only and not only.keys() <= {"data", "pipe"}:
        kind = "volume" if "depth" in only else "image"
    layout = _layout(rng, kind) if only is None else dict(only)
    net = draw_net(rng, kind)
    case: Case = {
        "seed": seed,
        "net": net,
        "loss": {},
        "layout": layout,
        "plan": _budgeted(rng, _plan(rng, layout)),
        "backend": "gloo" if rng.random() < 0.7 else "fivefold",
        "example": rng.random() < 0.3,
    }
    case["batches"] = [_batch(rng, kind, net, layout)]
    case["steps"] = _steps(rng, case)
    case["loss"] = _loss(rng, case)
    return complete(case)


def _layout(rng: random.Random, kind: str) -> dict[str, int]:
    flat = kind in ("image", "volume") or rng.random() < 0.04
    fit = [(told, w) for told, w in _LAYOUTS if flat or not {"height", "width"} & told.keys()]
    if kind == "volume":
        fit += [(told, w * 6) for told, w in _SOLID]
    return dict(rng.choices([told for told, _ in fit], [w for _, w in fit])[0])


def _plan(rng: random.Random, layout: dict[str, int]) -> dict[str, Any]:
    plan: dict[str, Any] = {}
    tiles = {"height", "width", "depth"} & layout.keys()
    if "pipe" in layout:
        schedule = rng.choice(_SCHEDULES)
        plan["pipeline.schedule"] = schedule
        if schedule == "interleaved" or (schedule == "zero-bubble" and rng.random() < 0.3):
            plan["pipeline.stages_per_rank"] = 2
        if rng.random() < 0.15:
            first = rng.choice(["blocks.1", "blocks.1, blocks.2", "measured"])
            plan["pipeline.cut"] = first
        if schedule != "layer" and rng.random() < 0.7:
            fit = [2, 4] if schedule in _PAIRED else [1, 2, 3, 4]
            plan["pipeline.micro_batches"] = rng.choice(fit)
    if ("pipe" in layout or tiles) and rng.random() < 0.4:
        plan["memory.recompute"] = rng.choice(["auto", "all", 2])
    if "data" in layout and rng.random() < 0.3:
        each = ["optimizer", "parameters"] if "pipe" not in layout or rng.random() < 0.1 else []
        plan["memory.shard"] = rng.choice(each or ["optimizer"])
    if tiles:
        plan["tiles.fuse"] = rng.choice(["never", "never", "1", "2", "4"])
    if rng.random() < 0.05:
        plan["numerics.memory_format"] = "channels_last"
    if rng.random() < 0.3:
        plan["numerics.seed"] = rng.randrange(1, 100)
    return plan


def _budgeted(rng: random.Random, plan: dict[str, Any]) -> dict[str, Any]:
    """Some plans under a memory budget, see `choices`; and of the others some that are compiled."""
    own = random.Random(str(rng.getstate()[1][:4]))  # what else a seed draws stays as it was
    if "memory.recompute" not in plan and own.random() < _BUDGETS:
        plan["memory.budget"], plan["memory.disk"] = "1TiB", "."
    elif "memory.recompute" not in plan and own.random() < _COMPILED:
        plan["parallel.compile"] = True
    return plan


def _batch(
    rng: random.Random, kind: str, net: dict[str, Any], layout: dict[str, int]
) -> dict[str, Any]:
    pipe = layout.get("pipe", 1)
    rows = rng.choice([3, 4, 5, 6, 7] if pipe == 1 else [4, 5, 7, 8, 9])
    if rng.random() < 0.12:
        rows = rng.choice([1, 2])
    if kind == "image":
        size = [rng.choice([7, 9, 11, 13]), rng.choice([8, 9, 12])]
    elif kind == "volume":
        size = [rng.choice([5, 6]), rng.choice([5, 7]), rng.choice([4, 6])]
    else:
        size = [] if kind == "vector" else [rng.choice([3, 4, 5])]
    return {"rows": rows, "size": size, **_extras(rng, net)}


def _extras(rng: random.Random, net: dict[str, Any]) -> dict[str, Any]:
    takes = net.get("takes")
    if takes == "mixed":
        extras = {
            "scale": rng.choice([0.5, 2.0]),
            "flag": rng.random() < 0.5,
            "mode": rng.choice(["none", "sin"]),
            "extra": rng.choice([None, None, 0.3]),
        }
        return {"extras": extras}
    return {"order": rng.sample(["a", "b", "c"], 3)} if takes == "bag" else {}


def _steps(rng: random.Random, case: Case) -> list[dict[str, Any]]:
    offered = [
        {"at": path, **event}
        for path, name, args in drawing.paths(case["net"])
        for event in BLOCKS[name].events(rng, args)
    ]
    steps: list[dict[str, Any]] = []
    for number in range(rng.choice([2, 2, 3, 3, 4])):
        step: dict[str, Any] = {"batch": 0}
        if number:
            if rng.random() < 0.3:
                step["batch"] = _other_batch(rng, case)
            pool = offered if offered and rng.random() < 0.75 else list(ANYTIME)
            if rng.random() < 0.45:
                step["events"] = [dict(rng.choice(pool))]
            if rng.random() < 0.1:
                step["evaluate"] = 0
            if rng.random() < 0.08:
                step["clip"] = 0.1
            if rng.random() < 0.1:
                step["zero"] = False
                steps[-1]["update"] = False
        steps.append(step)
    return _later(steps)


def _later(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Flags of torch change after the steps in which nets are recorded again: these see it as well."""
    flags = [any(e["do"] == _FLAG for e in step.get("events", ())) for step in steps]
    before = _LOOKS - flags.index(True) if any(flags) else 0
    return [*({"batch": steps[0]["batch"]} for _ in range(before)), *steps]


def _other_batch(rng: random.Random, case: Case) -> int:
    """Another batch, of another size maybe; its number."""
    first = case["batches"][0]
    other = {**first, **_extras(rng, case["net"])}
    if rng.random() < 0.5:
        other["rows"] = max(1, first["rows"] + rng.choice([-2, -1, 1, 2]))
    if rng.random() < 0.3 and first["size"]:
        other["size"] = [max(3, n + rng.choice([0, 1, 2, -1])) for n in first["size"]]
    case["batches"].append(other)
    return len(case["batches"]) - 1


def _loss(rng: random.Random, case: Case) -> dict[str, Any]:
    shape = list(_outputs(case, 0).shape)
    fit = [name for name in losses.TORCH if len(shape) > 1 and shape[1] > 1]
    fit = fit or ["mse", "smooth_l1", "bce"]
    own = [name for name in losses.LOSSES if name not in losses.TORCH]
    if len(shape) != 3 or shape[2] < 2:
        own.remove("flat")
    elif rng.random() < 0.4:
        return {"name": "flat"}
    used = [name for _, name, _ in drawing.paths(case["net"])]
    if "balanced" in used and rng.random() < 0.7:
        return {"name": "auxiliary"}
    at_once = micro_batches(case, 8) is None
    name = rng.choice(fit if rng.random() < (0.6 if at_once else 0.85) else own)
    told: dict[str, Any] = {"name": name}
    if case["net"].get("returns", "tensor") != "tensor" and name in losses.TORCH:
        told["picked"] = True
    if name == "annealed" and rng.random() < 0.5:
        step = case["steps"][-1]
        step["events"] = [*step.get("events", ()), {"do": "loss", "name": "weight", "value": 0.25}]
    return told


@contextlib.contextmanager
def _float64() -> Generator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            yield
    finally:
        torch.set_default_dtype(before)


def _outputs(case: Case, number: int) -> torch.Tensor:
    with _float64():
        torch.manual_seed(case["seed"])
        net = nets.build(case["net"]).eval()
        inputs = data.inputs_of(case, number)
        if isinstance(inputs, dict):
            return nets.main_output(net(**inputs))
        return nets.main_output(net(*inputs) if isinstance(inputs, tuple) else net(inputs))


def complete(case: Case) -> Case:
    """The case with targets that fit its outputs, and without batches that no step uses.

    Raises whatever the net raises in one process.
    """
    used = sorted({s["batch"] for s in case["steps"]} | {0})
    told = {old: new for new, old in enumerate(used)}
    case["batches"] = [case["batches"][number] for number in used]
    for step in case["steps"]:
        step["batch"] = told[step["batch"]]
    loss = case["loss"]
    for number, one in enumerate(case["batches"]):
        output = _outputs(case, number)
        one["target"] = data.target_shape(losses.TARGETS[loss["name"]], output)
        loss["classes"] = one["target"].get("classes", 0)
    return case


def ranks_of(case: Case) -> int:
    """How many processes its layout has."""
    count = 1
    for size in case["layout"].values():
        count *= size
    return count


def _owned(n: int, parts: int, part: int) -> range:
    return range(part * n // parts, (part + 1) * n // parts)


def micro_batches(case: Case, rows: int) -> list[list[int]] | None:
    """Samples of each micro-batch by the documented rule; None where a layout takes the batch at once."""
    pipe, data_ranks, plan = (
        case["layout"].get("pipe", 1),
        case["layout"].get("data", 1),
        case["plan"],
    )
    schedule = plan.get("pipeline.schedule", "1f1b")
    if pipe == 1 or schedule == "layer":
        return None
    usual = plan.get("pipeline.micro_batches", 0) or 2 * pipe
    count = min(usual, -(-rows // data_ranks))
    if schedule in _PAIRED:
        count -= count % 2
    shares = [_owned(rows, data_ranks, replica) for replica in range(data_ranks)]
    return (
        [
            [share[i] for share in shares for i in _owned(len(share), count, number)]
            for number in range(max(count, 1))
        ]
        if count > 0
        else None
    )


def looseness(case: Case) -> float:
    """The relative error that rounding within regions of low precision may cause; 0 in most cases."""
    if "net" not in case:
        return 0.0
    return max((BLOCKS[name].loose for _, name, _ in drawing.paths(case["net"])), default=0.0)


def coarse(case: Case) -> float:
    """The same where low precision is trained with, whose rounding goes on into all that follows."""
    loose = looseness(case)
    return loose if loose > _COARSE else 0.0


def label(case: Case) -> str:
    """Its layout and schedule, in short."""
    axes = ",".join(f"{axis}={n}" for axis, n in case["layout"].items()) or "alone"
    schedule = case["plan"].get("pipeline.schedule")
    return f"{axes} {schedule}" if schedule else axes


def tags(case: Case) -> list[str]:
    """All features of a case by name: blocks, options of theirs, events, losses, settings."""
    net = case["net"]
    found = {tag for _, name, args in drawing.paths(net) for tag in _of_block(name, args)}
    found |= {f"takes.{net.get('takes', 'one')}", f"returns.{net.get('returns', 'tensor')}"}
    found |= {f"input.{net['input']['kind']}", f"loss.{case['loss']['name']}"}
    if net.get("head") and net["head"].get("tied"):
        found.add("tied_head")
    for step in case["steps"]:
        for event in step.get("events", ()):
            found.add(f"event.{event['do']}")
        found |= {f"step.{k}" for k in ("evaluate", "zero", "clip") if step.get(k) is not None}
    first = case["batches"][0]
    if any(b["rows"] != first["rows"] for b in case["batches"]):
        found.add("rows.change")
    if any(b["size"] != first["size"] for b in case["batches"]):
        found.add("size.change")
    if any(b["rows"] < case["layout"].get("data", 1) for b in case["batches"]):
        found.add("rows.few")
    found |= {f"{key}={value}" for key, value in case["plan"].items() if key != "numerics.seed"}
    return sorted(found)


def _of_block(name: str, args: dict[str, Any]) -> Iterator[str]:
    yield name
    for key, value in args.items():
        if isinstance(value, str):
            yield f"{name}.{value}"
        elif value is True:
            yield f"{name}.{key}"
        elif value is False and key in _NOTABLE:
            yield f"{name}.no_{key}"
