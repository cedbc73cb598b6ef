"""Figures of a run as Prometheus reads them, and a Grafana dashboard that draws them.

Counters are those of the whole run, from its start; `METRICS` lists all with unit and labels. Text format:
https://prometheus.io/docs/instrumenting/exposition_formats, version 0.0.4. The dashboard is grafana.json
beside this file.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.trace.reader import RankTrace
from fivefold.trace.schema import BINS, KINDS, PHASES, TAGS, ProcessState
from fivefold.writing import opened_anew

__all__ = ["METRICS", "Metric", "dashboard", "text", "write_prometheus"]


@dataclass(frozen=True)
class Metric:
    """What a name stands for."""

    kind: str
    """counter, gauge or histogram"""
    labels: tuple[str, ...]
    about: str


METRICS = {
    "fivefold_run_info": Metric("gauge", ("backend", "engine", "size", "version"), "always 1"),
    "fivefold_rank_running": Metric(
        "gauge", ("rank", "host"), "1 while the rank records, 0 when it has ended or failed"
    ),
    "fivefold_steps_total": Metric("counter", ("rank",), "steps that have ended"),
    "fivefold_step_seconds": Metric("gauge", ("rank",), "mean time of the latest steps, seconds"),
    "fivefold_samples_total": Metric("counter", ("rank",), "samples that the rank has trained on"),
    "fivefold_phase_seconds_total": Metric(
        "counter", ("rank", "phase"), "time in a phase, phases within it not counted, seconds"
    ),
    "fivefold_communication_seconds_total": Metric(
        "counter", ("rank", "tag"), "operations from asking to end, seconds; they may overlap"
    ),
    "fivefold_communication_exposed_seconds_total": Metric(
        "counter", ("rank", "tag"), "time in which the rank could do nothing else, seconds"
    ),
    "fivefold_communication_bytes_total": Metric("counter", ("rank", "tag"), "bytes given"),
    "fivefold_operation_duration_seconds": Metric(
        "histogram", ("operation", "tag"), "operations of all ranks, seconds"
    ),
    "fivefold_loss": Metric("gauge", (), "loss of the latest step that read it"),
    "fivefold_memory_bytes": Metric("gauge", ("rank",), "resident memory, most in latest steps"),
    "fivefold_gpu_memory_bytes": Metric("gauge", ("rank",), "memory of the rank's GPU, bytes"),
    "fivefold_gpu_busy_ratio": Metric("gauge", ("rank",), "share of time, 0 to 1"),
    "fivefold_loader_ready_batches": Metric("gauge", ("rank",), "that the loader had when asked"),
    "fivefold_cpu_seconds_total": Metric("counter", ("rank",), "processor time, all threads"),
    "fivefold_run_delay_seconds_total": Metric(
        "counter", ("rank",), "ready to run, and another had the core, seconds"
    ),
    "fivefold_throttled_seconds_total": Metric(
        "counter", ("rank",), "stopped by the quota of the cgroup, seconds"
    ),
    "fivefold_energy_joules_total": Metric("counter", ("node",), "processors of a node"),
    "fivefold_network_sent_bytes_total": Metric("counter", ("node",), "loopback not counted"),
    "fivefold_network_received_bytes_total": Metric("counter", ("node",), "loopback not counted"),
    "fivefold_events_total": Metric(
        "counter", ("kind",), "checkpoints, failures, hangs, mismatches, recoveries, warnings"
    ),
}
"""every metric by name; labels `rank` and `node` are numbers"""
_EVENTS = ("checkpoint", "failure", "hang", "mismatch", "recovery", "warning")
_SHORTEST, _LONGEST = 13, 36
"""bins of durations that are told apart: 8 us to 69 s"""

Found = dict[str, list[tuple[dict[str, Any], float]]]
"""by metric: labels and value"""


def write_prometheus(traces: Sequence[RankTrace], out: Path) -> str:
    """Files fivefold.prom, for a node exporter's textfile collector, and grafana.json in the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    for name, content in (("fivefold.prom", text(traces)), ("grafana.json", dashboard())):
        with opened_anew(out / name) as file:
            file.write(content)
    return f"wrote fivefold.prom and grafana.json to {out}"


def dashboard() -> str:
    """The Grafana dashboard, JSON to import."""
    return (files("fivefold.introspect.exports") / "grafana.json").read_text(encoding="utf-8")


def text(traces: Sequence[RankTrace]) -> str:
    """All figures that are known, in Prometheus's text format."""
    found: Found = defaultdict(list)
    for trace in traces:
        _of_rank(trace, found)
    _of_run(traces, found)
    _of_nodes(traces, found)
    lines: list[str] = []
    for name, metric in METRICS.items():
        told = _histogram(traces) if metric.kind == "histogram" else _lines(name, found[name])
        if told:
            lines += [f"# HELP {name} {metric.about}", f"# TYPE {name} {metric.kind}", *told]
    return "\n".join(lines) + "\n"


def _of_rank(trace: RankTrace, found: Found) -> None:
    rank = {"rank": trace.rank}
    rows = trace.windows
    running = trace.state == ProcessState.RUNNING
    host = str(trace.meta.get("host", ""))
    found["fivefold_rank_running"].append(({**rank, "host": host}, float(running)))
    found["fivefold_steps_total"].append((rank, float(rows["steps"].sum())))
    if not len(rows):
        return
    last = rows[-1]
    for name, value in (
        ("step_seconds", (last["end_ns"] - last["begin_ns"]) / 1e9 / max(int(last["steps"]), 1)),
        ("samples_total", rows["samples"].sum()), ("cpu_seconds_total", rows["cpu_ns"].sum() / 1e9),
        ("run_delay_seconds_total", rows["run_delay_ns"].sum() / 1e9),
        ("throttled_seconds_total", rows["throttled_ns"].sum() / 1e9),
        ("memory_bytes", _if_known(last["rss_bytes"])), ("gpu_memory_bytes", _if_known(last["gpu_bytes"])),
        ("gpu_busy_ratio", last["gpu_busy"]), ("loader_ready_batches", last["ready"]),
    ):  # fmt: skip
        found[f"fivefold_{name}"].append((rank, float(value)))
    for name, field, label, words in (
        ("phase_seconds_total", "phase_ns", "phase", PHASES),
        ("communication_seconds_total", "tag_ns", "tag", TAGS),
        ("communication_exposed_seconds_total", "tag_blocked_ns", "tag", TAGS),
        ("communication_bytes_total", "tag_bytes", "tag", TAGS),
    ):
        totals = rows[field].sum(0) / (1 if field == "tag_bytes" else 1e9)
        for word, total in zip(words, totals, strict=False):
            if total:
                found[f"fivefold_{name}"].append(({**rank, label: word}, float(total)))


def _of_run(traces: Sequence[RankTrace], found: Found) -> None:
    if not traces:
        return
    meta = traces[0].meta
    about = {
        "backend": meta.get("backend", ""), "engine": meta.get("engine", ""),
        "size": meta.get("size", ""), "version": (meta.get("versions") or {}).get("fivefold", ""),
    }  # fmt: skip
    found["fivefold_run_info"].append((about, 1.0))
    losses = traces[0].windows["loss"]
    losses = losses[np.isfinite(losses)]
    if len(losses):
        found["fivefold_loss"].append(({}, float(losses[-1])))
    for kind in _EVENTS:
        times = sum(note["kind"] == kind for trace in traces for note in trace.notes)
        found["fivefold_events_total"].append(({"kind": kind}, float(times)))


def _of_nodes(traces: Sequence[RankTrace], found: Found) -> None:
    """What all ranks of a node read from the same counters is told by the first of them."""
    first: dict[int, RankTrace] = {}
    for trace in traces:
        first.setdefault(int(trace.meta.get("node") or 0), trace)
    for node, trace in first.items():
        for name, field in (
            ("energy_joules_total", "energy_j"), ("network_sent_bytes_total", "sent_bytes"),
            ("network_received_bytes_total", "received_bytes"),
        ):  # fmt: skip
            values = trace.windows[field].astype(float)
            values = values[np.isfinite(values) & (values >= 0)]
            if len(values):
                found[f"fivefold_{name}"].append(({"node": node}, float(values.sum())))


def _histogram(traces: Sequence[RankTrace]) -> list[str]:
    name = "fivefold_operation_duration_seconds"
    bins: dict[tuple[int, int], Any] = {}
    totals: dict[tuple[int, int], float] = defaultdict(float)
    for trace in traces:
        for row in trace.sums[trace.sums["kind"] > 0]:
            key = (int(row["kind"]), int(row["tag"]))
            bins[key] = bins.get(key, np.zeros(BINS, np.int64)) + row["histogram"]
            totals[key] += float(row["total_ns"]) / 1e9
    lines: list[str] = []
    for key, counts in sorted(bins.items()):
        about = {"operation": _word(KINDS, key[0]), "tag": _word(TAGS, key[1])}
        below = np.cumsum(counts)
        for b in range(_SHORTEST, _LONGEST + 1):
            edge = {**about, "le": f"{2.0**b / 1e9:.6g}"}
            lines.append(_line(f"{name}_bucket", edge, float(below[b])))
        lines.append(_line(f"{name}_bucket", {**about, "le": "+Inf"}, float(below[-1])))
        lines.append(_line(f"{name}_sum", about, totals[key]))
        lines.append(_line(f"{name}_count", about, float(below[-1])))
    return lines


def _lines(name: str, found: Iterable[tuple[Mapping[str, Any], float]]) -> list[str]:
    return [_line(name, labels, value) for labels, value in found if not math.isnan(value)]


def _line(name: str, labels: Mapping[str, Any], value: float) -> str:
    told = ",".join(f'{key}="{_escaped(str(label))}"' for key, label in labels.items())
    shown = repr(int(value)) if value == int(value) else repr(value)
    return f"{name}{{{told}}} {shown}" if told else f"{name} {shown}"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _if_known(value: Any) -> float:
    return float(value) if value >= 0 else math.nan


def _word(names: Sequence[str], number: int) -> str:
    return names[number] if number < len(names) else "other"
