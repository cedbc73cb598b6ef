"""Steps as a page draws them: timeline, heat map, figures over time, a row per rank."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fivefold.cluster.reading import spans
from fivefold.introspect.arrivals import Meetings
from fivefold.introspect.efficiency import counted_once
from fivefold.introspect.facts import first_told
from fivefold.introspect.numbers import column, plain
from fivefold.introspect.run import FULL, TracedRun
from fivefold.introspect.steps import Floats, Steps
from fivefold.introspect.tables import (
    Heat,
    Numbers,
    Quantiles,
    RankSeries,
    RankTable,
    Series,
    Timeline,
)
from fivefold.trace.schema import PHASES, TAGS

__all__ = ["heat", "outstanding", "rank_table", "series", "timeline"]

_STANDING_OUT = 16
_CELLS = 256
"""most rows of cells of the heat map"""


def outstanding(run: TracedRun, steps: Steps | None, met: Meetings) -> list[int]:
    """Ranks that are told in full: all of up to 64; else those that are late, idle, large, broken, and 0."""
    ranks = [trace.rank for trace in run.ranks]
    if len(ranks) <= FULL or steps is None:
        return ranks[:FULL]
    late, phases = steps.mean(steps.late), steps.mean(steps.computing)
    rss = np.nan_to_num(steps.mean(steps.levels["rss_bytes"]))
    found = [rank for rank in ranks if run.states[rank] in ("failed", "killed")][:4]
    orders = [np.nan_to_num(late), np.nan_to_num(met.late_s), -np.nan_to_num(late), rss]
    orders += [
        np.nan_to_num(phases[:, phase]) for phase in range(len(PHASES)) if phases[:, phase].any()
    ]
    picks = [np.argsort(-values, kind="stable") for values in orders]
    of = [steps.ranks, met.ranks, *[steps.ranks] * (len(orders) - 2)]
    found += [int(of[0][i]) for i in picks[0][:6]] + [ranks[0]]
    for depth in range(_STANDING_OUT):
        found += [int(names[order[depth]]) for names, order in zip(of, picks, strict=True)]
    return sorted(list(dict.fromkeys(found))[:_STANDING_OUT])


def timeline(steps: Steps | None, chosen: list[int]) -> Timeline:
    """Steps in order: quantiles over ranks, and the chosen ranks in full."""
    if steps is None:
        nothing = _quantiles(np.zeros((1, 0)))
        return {"first_step": [], "steps": [], "at_s": [], "phases": [], "tags": [], "ranks": {},
                "step_s": nothing, "work_s": nothing, "phase_s": {}, "exposed_s": {}}  # fmt: skip
    phases = [i for i in range(len(PHASES)) if np.nansum(steps.phase[..., i]) > 0]
    spent = [float(np.nansum(steps.exposed[..., i])) for i in range(len(TAGS))]
    used = [i for i in range(len(TAGS)) if np.nansum(steps.operations[..., i]) > 0]
    tags = sorted(used, key=lambda i: -spent[i])
    at = {int(rank): i for i, rank in enumerate(steps.ranks)}
    return {
        "first_step": steps.first_step.tolist(), "steps": steps.count.max(0).tolist(),
        "at_s": column(steps.begin_s), "phases": [str(PHASES[i]) for i in phases],
        "tags": [str(TAGS[i]) for i in tags],
        "ranks": {str(r): _one(steps, at[r], phases, tags) for r in chosen if r in at},
        "step_s": _quantiles(steps.wall), "work_s": _quantiles(steps.work),
        "phase_s": {str(PHASES[i]): _quantiles(steps.phase[..., i]) for i in phases},
        "exposed_s": {str(TAGS[i]): _quantiles(steps.exposed[..., i]) for i in tags},
    }  # fmt: skip


def _one(steps: Steps, at: int, phases: list[int], tags: list[int]) -> RankSeries:
    return {
        "step_s": column(steps.wall[at]), "work_s": column(steps.work[at]),
        "phase_s": {str(PHASES[i]): column(steps.phase[at, :, i]) for i in phases},
        "exposed_s": {str(TAGS[i]): column(steps.exposed[at, :, i]) for i in tags},
        "rss_bytes": column(steps.levels["rss_bytes"][at]), "ready": column(steps.levels["ready"][at]),
        "cpu_share": column(steps.scalars["cpu_ns"][at] / 1e9 / steps.wall[at]),
        "gpu_busy": column(steps.levels["gpu_busy"][at]),
    }  # fmt: skip


def _quantiles(values: Floats) -> Quantiles:
    if not values.shape[1]:
        return {"least": [], "p25": [], "median": [], "p75": [], "most": []}
    empty = np.isnan(values).all(0)
    filled = np.where(empty, 0.0, values)
    least, p25, median, p75, most = np.nanquantile(filled, (0, 0.25, 0.5, 0.75, 1), axis=0)
    for part in (least, p25, median, p75, most):
        part[empty] = np.nan
    return {"least": column(least), "p25": column(p25), "median": column(median),
            "p75": column(p75), "most": column(most)}  # fmt: skip


def heat(steps: Steps | None) -> Heat:
    """Ranks by steps; where there are many ranks, neighbours share a row of cells."""
    if steps is None:
        return {
            "ranks": [],
            "first_step": [],
            "steps": [],
            "late_s": [],
            "work_s": [],
            "exposed_s": [],
        }
    size = len(steps.ranks)
    starts = np.arange(0, size, -(-size // _CELLS))
    exposed = steps.exposed.sum(2)

    def cells(values: Floats, *, most: bool) -> list[Numbers]:
        combine = np.fmax if most else np.fmin
        return [column(row) for row in combine.reduceat(values, starts, axis=0)]

    ends = np.append(starts[1:], size) - 1
    return {
        "ranks": [[int(steps.ranks[a]), int(steps.ranks[b])] for a, b in zip(starts, ends, strict=True)],
        "first_step": steps.first_step.tolist(), "steps": steps.count.max(0).tolist(),
        "late_s": cells(steps.late, most=True), "work_s": cells(steps.work, most=True),
        "exposed_s": cells(exposed, most=False),
    }  # fmt: skip


def series(run: TracedRun, steps: Steps | None) -> Series:
    """Figures over time, all ranks together."""
    losses = {
        int(n["step"]): n["value"] for t in reversed(run.ranks) for n in t.notes
        if n["kind"] == "loss" and isinstance(n.get("step"), int)
    }  # fmt: skip
    if not losses and steps is not None:
        means = (
            np.nanmean(steps.levels["loss"], axis=0)
            if _known(steps.levels["loss"])
            else np.zeros(0)
        )
        losses = {
            int(s): v for s, v in zip(steps.first_step, means, strict=False) if np.isfinite(v)
        }
    ordered = sorted(losses)
    found: Series = {
        "at_s": [], "first_step": [], "samples_per_s": [], "rss_bytes": [], "rss_total_bytes": [],
        "gpu_bytes": [], "gpu_busy": [], "cpu_share": [], "energy_w": [], "sent_bytes_per_s": [],
        "received_bytes_per_s": [], "ready": [],
        "loss_step": ordered, "loss": plain([losses[step] for step in ordered]),
        "metrics": _metrics(run), "epochs": plain(run.epochs),
        "energy_note": str(note) if (note := first_told(run, "energy")) else None,
    }  # fmt: skip
    if steps is not None:
        found.update(_over_time(run, steps))
    return found


def _over_time(run: TracedRun, steps: Steps) -> Any:
    wall = np.fmax.reduce(steps.wall, axis=0)
    nodes = _first_of_nodes(run, steps)
    samples = np.nansum(steps.scalars["samples"], axis=0) * counted_once(run)

    def over(name: str) -> Floats:
        return _sum(steps.scalars[name][nodes]) / wall

    levels = steps.levels
    return {
        "at_s": column(steps.begin_s), "first_step": steps.first_step.tolist(),
        "samples_per_s": column(np.where(samples > 0, samples, np.nan) / wall),
        "rss_bytes": column(np.fmax.reduce(levels["rss_bytes"], axis=0)),
        "rss_total_bytes": column(_sum(levels["rss_bytes"])),
        "gpu_bytes": column(np.fmax.reduce(levels["gpu_bytes"], axis=0)),
        "gpu_busy": column(_mean(levels["gpu_busy"])),
        "cpu_share": column(_mean(steps.scalars["cpu_ns"] / 1e9 / steps.wall)),
        "energy_w": column(over("energy_j")), "sent_bytes_per_s": column(over("sent_bytes")),
        "received_bytes_per_s": column(over("received_bytes")),
        "ready": column(np.fmin.reduce(levels["ready"], axis=0)),
    }  # fmt: skip


def _first_of_nodes(run: TracedRun, steps: Steps) -> NDArray[np.int64]:
    """One rank of each host: what is counted per node must not be added up twice."""
    host = {t.rank: str(t.meta.get("host") or t.meta.get("node") or "") for t in run.ranks}
    _, first = np.unique([host[int(rank)] for rank in steps.ranks], return_index=True)
    return first


def _known(values: Floats) -> bool:
    return bool(np.isfinite(values).any())


def _sum(values: Floats) -> Floats:
    return np.where(np.isnan(values).all(0), np.nan, np.nansum(values, axis=0))


def _mean(values: Floats) -> Floats:
    known = (~np.isnan(values)).sum(0)
    return np.where(known > 0, np.nansum(values, axis=0) / np.maximum(known, 1), np.nan)


def _metrics(run: TracedRun) -> dict[str, list[list[float | None]]]:
    found: dict[str, list[list[float | None]]] = {}
    for note in (
        note for trace in run.ranks[:1] for note in trace.notes if note["kind"] == "metric"
    ):
        found.setdefault(str(note.get("name")), []).append(
            [note.get("step"), plain(note.get("value"))]
        )
    return found


def rank_table(run: TracedRun, steps: Steps | None, met: Meetings, chosen: list[int]) -> RankTable:
    """A row per rank that was read."""
    ranks = [trace.rank for trace in run.ranks]
    at = {int(rank): i for i, rank in enumerate(steps.ranks)} if steps else {}
    where = np.array([at.get(rank, -1) for rank in ranks])

    def per_rank(values: Floats | None) -> Numbers:
        if values is None:
            return [None] * len(ranks)
        return column(np.where(where < 0, np.nan, values[where]))

    means = {name: per_rank(values) for name, values in (_means(steps) if steps else {}).items()}
    phases = steps.mean(steps.phase) if steps else np.zeros((0, len(PHASES)))
    table: Any = {
        "rank": ranks, "host": [str(t.meta.get("host") or "unknown") for t in run.ranks],
        "node": [int(t.meta.get("node") or 0) for t in run.ranks],
        "local_rank": [t.meta.get("local_rank") for t in run.ranks],
        "pid": [t.meta.get("pid") or int(t.live["pid"]) or None for t in run.ranks],
        "coordinates": [_coordinates(t.meta) for t in run.ranks],
        "state": [run.states[rank] for rank in ranks], "step": [int(t.live["step"]) for t in run.ranks],
        "phase": [_phase(int(t.live["phase"])) for t in run.ranks],
        "cores": [_cores(t.meta.get("cores")) for t in run.ranks],
        "phase_s": {str(PHASES[i]): per_rank(phases[:, i]) for i in range(len(PHASES)) if phases[:, i].any()},
        "late_s": column(met.late_s), "last_share": column(met.last_share),
        "outstanding": [rank in set(chosen) and len(ranks) > FULL for rank in ranks],
    }  # fmt: skip
    nothing: Numbers = [None] * len(ranks)
    return cast("RankTable", {**dict.fromkeys(_MEANS, nothing), **table, **means})


_MEANS = ("step_s", "work_s", "exposed_s", "cpu_share", "run_delay_share", "throttled_share", "samples",
          "ready", "rss_bytes", "rss_growth_bytes", "gpu_busy", "gpu_bytes")  # fmt: skip


def _means(steps: Steps) -> dict[str, Floats]:
    wall, samples = steps.mean(steps.wall), steps.mean(steps.scalars["samples"])
    found = {
        "step_s": wall, "work_s": steps.mean(steps.work), "exposed_s": steps.mean(steps.exposed.sum(2)),
        "samples": np.where(samples > 0, samples, np.nan), "ready": steps.mean(steps.levels["ready"]),
        "gpu_busy": steps.mean(steps.levels["gpu_busy"]),
        "rss_bytes": np.fmax.reduce(steps.levels["rss_bytes"], axis=1),
        "gpu_bytes": np.fmax.reduce(steps.levels["gpu_bytes"], axis=1),
        "rss_growth_bytes": steps.growth(steps.levels["rss_bytes"]),
    }  # fmt: skip
    for name in ("cpu", "run_delay", "throttled"):
        found[f"{name}_share"] = steps.mean(steps.scalars[f"{name}_ns"]) / 1e9 / wall
    found["cpu_share"][found["cpu_share"] == 0] = np.nan  # nobody recorded it
    return found


def _coordinates(meta: dict[str, Any]) -> str:
    """On axes that are longer than 1."""
    told, layout = meta.get("coordinates"), meta.get("layout")
    lengths: dict[str, Any] = layout if isinstance(layout, dict) else {}
    found = told.items() if isinstance(told, dict) else ()
    return ", ".join(f"{axis} {n}" for axis, n in found if lengths.get(axis) != 1)


def _phase(number: int) -> str | None:
    return str(PHASES[number]) if number < len(PHASES) else None


def _cores(told: Any) -> str:
    """Core numbers as 0-3, 8."""
    cores = (c for c in told if isinstance(c, int)) if isinstance(told, list) else ()
    return spans(cores).replace(",", ", ")
