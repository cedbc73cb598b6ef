"""What exports hold, read by the programs that they are for, or as those read them."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fivefold.errors import UsageError
from fivefold.introspect.exports import FORMATS, export, perfetto, prometheus, read
from fivefold.introspect.exports.tensorboard import scalars
from fivefold.trace.phases import Phase
from fivefold.trace.reader import RankTrace
from traces import MS, Story

NOTES = [
    {"kind": "checkpoint", "at_ns": 10**12 + 5 * MS, "step": 3, "level": "local", "seconds": 0.1},
    {"kind": "failure", "at_ns": 10**12 + 9 * MS, "text": 'rank 1 said "no",\nand left'},
]


@pytest.fixture
def traces(tmp_path: Path) -> list[RankTrace]:
    story = Story(ranks=3, steps=12, tiny=1, notes=NOTES, meta={"size": 3})
    run = story.more(2, Phase.LOAD, 8 * MS, cpu=False).write(tmp_path / "run")
    return read(run)[0]


def exported(traces: list[RankTrace], out: Path) -> list[dict[str, Any]]:
    told = export("perfetto", traces, out)
    assert "https://ui.perfetto.dev" in told
    return json.loads((out / "trace.json").read_text())["traceEvents"]


def test_perfetto_has_every_event_once_and_none_overlaps(
    traces: list[RankTrace], tmp_path: Path
) -> None:
    events = exported(traces, tmp_path / "out")
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == sum(len(t.events) for t in traces)
    assert min(e["ts"] for e in slices) == 0.0
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for e in slices:
        if e["cat"] != "phase":
            lanes[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    for lane in lanes.values():
        ordered = sorted(lane)
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(ordered))
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in slices} <= named


def test_perfetto_arrows_lead_from_the_first_to_the_last_rank(
    traces: list[RankTrace], tmp_path: Path
) -> None:
    events = exported(traces, tmp_path / "out")
    flows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for e in events:
        if e["ph"] in "stf":
            flows[e["id"]].append(e)
    assert len(flows) == 12 * 3
    for flow in flows.values():
        assert [e["ph"] for e in flow] == ["s", "t", "f"]
        assert {e["pid"] for e in flow} == {0, 1, 2}
        assert [e["ts"] for e in flow] == sorted(e["ts"] for e in flow)
    assert sum(flow[-1]["pid"] == 2 for flow in flows.values()) >= 24, "rank 2 is late"


def test_perfetto_leaves_out_the_oldest_and_says_so(
    traces: list[RankTrace], tmp_path: Path
) -> None:
    told = perfetto.write_perfetto(traces, tmp_path / "few.json", limit=50)
    events = json.loads((tmp_path / "few.json").read_text())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    total = sum(len(t.events) for t in traces)
    assert 50 <= len(slices) < 60
    assert f"{total - len(slices):,} older events are left out" in told
    assert min(e["args"]["step"] for e in slices) > 8


def test_perfetto_shows_operations_under_way(traces: list[RankTrace], tmp_path: Path) -> None:
    traces[0].events[-1]["end_ns"] = 0
    events = exported(traces, tmp_path / "out")
    assert [e["pid"] for e in events if e.get("args", {}).get("under way")] == [0]
    assert all(e["dur"] >= 0 for e in events if e["ph"] == "X")


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_tables_hold_what_the_traces_hold(
    kind: str, traces: list[RankTrace], tmp_path: Path
) -> None:
    export(kind, traces, tmp_path / "out")

    def rows(name: str) -> list[dict[str, Any]]:
        path = tmp_path / "out" / f"{name}.{kind}"
        if kind == "csv":
            with path.open(newline="") as file:
                return list(csv.DictReader(file))
        parquet = pytest.importorskip("pyarrow.parquet")
        return parquet.read_table(path).to_pylist()

    steps = rows("steps")
    assert len(steps) == 36
    forward = [t.windows["phase_ns"][:, 2].sum() for t in traces]
    told = [sum(float(r["forward_s"]) for r in steps if int(r["rank"]) == k) for k in range(3)]
    np.testing.assert_allclose(told, np.array(forward) / 1e9)
    assert all(r["gpu_bytes"] in ("", None) for r in steps), "unknown is empty"
    operations = [r for r in rows("operations") if r["kind"] == "all_reduce"]
    assert sum(int(r["count"]) for r in operations) == 3 * 12 * 3
    assert {r["tag"] for r in operations} == {"parameters and gradients"}
    assert len(rows("events")) == sum(len(t.events) for t in traces)
    notes = rows("notes")
    assert [json.loads(r["note"])["kind"] for r in notes if int(r["rank"]) == 0] == [
        "group",
        "checkpoint",
        "failure",
    ]


LINE = re.compile(r'([a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\\n]|\\.)*",?)*)\})? (\S+)')


def test_prometheus_text_is_well_formed_and_complete(traces: list[RankTrace]) -> None:
    traces[0].meta["backend"] = 'a "b"\\\nc'
    text = prometheus.text(traces)
    values: dict[str, list[float]] = defaultdict(list)
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        found = LINE.fullmatch(line)
        assert found, line
        name = re.sub(r"_(bucket|sum|count)$", "", found[1])
        metric = prometheus.METRICS[name if name in prometheus.METRICS else found[1]]
        labels = {word.partition("=")[0] for word in re.findall(r'[a-z]+="', found[2] or "")}
        assert labels - {"le"} == set(metric.labels)
        values[found[1]].append(float(found[3]))
    assert values["fivefold_samples_total"] == [12 * 32] * 3
    assert sum(values["fivefold_operation_duration_seconds_count"]) == 3 * 12 * 3
    assert "fivefold_gpu_memory_bytes" not in values, "unknown is not told"
    assert 'kind="failure"} 1' in text


def test_prometheus_buckets_grow(traces: list[RankTrace]) -> None:
    counts = [
        (float(le), int(count))
        for le, count in re.findall(r'_bucket\{.*le="([^"]+)"\} (\d+)', prometheus.text(traces))
    ]
    assert counts == sorted(counts)
    assert counts[-1] == (float("inf"), 3 * 12 * 3)


def test_the_dashboard_asks_for_metrics_and_labels_that_exist() -> None:
    panels = json.loads(prometheus.dashboard())["panels"]
    assert len(panels) > 10
    asked: set[str] = set()
    for panel in panels:
        for target in panel["targets"]:
            names = re.findall(r"fivefold_[a-z_]+", target["expr"])
            assert names
            for name in names:
                base = re.sub(r"_bucket$", "", name)
                metric = prometheus.METRICS[base]
                assert (metric.kind == "histogram") == name.endswith("_bucket")
                rated = f"rate({name}" in target["expr"]
                counted = metric.kind != "gauge" and name != "fivefold_events_total"
                assert rated == counted, f"{panel['title']}: counters are rates, gauges are not"
                asked.add(base)
                for labels in re.findall(r"by \(([^)]*)\)", target["expr"]):
                    assert set(labels.split(", ")) <= {*metric.labels, "le"}
    assert len(asked) >= 15


def test_the_documentation_lists_every_metric() -> None:
    page = Path(__file__).parents[3] / "docs" / "how-to" / "export-traces.md"
    rows = re.findall(
        r"^\| `(fivefold_\w+)` \| (\w+) \| (.*?) \| (.*?) \|$", page.read_text(), re.MULTILINE
    )
    assert {
        name: prometheus.Metric(kind, tuple(re.findall(r"`(\w+)`", labels)), about)
        for name, kind, labels, about in rows
    } == prometheus.METRICS


def test_tensorboard_reads_the_scalars(traces: list[RankTrace], tmp_path: Path) -> None:
    loader: Any = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    told = export("tensorboard", traces, tmp_path / "tb")
    assert "12 rows" in told
    (file,) = (tmp_path / "tb").iterdir()
    found = [e for e in loader.EventFileLoader(str(file)).Load() if e.HasField("summary")]
    assert [e.step for e in found] == list(range(12))
    names = {v.tag for v in found[3].summary.value}
    assert {"loss", "step/seconds", "phase/forward", "exposed/parameters and gradients"} <= names


def test_scalars_are_per_step_and_of_rows_that_all_ranks_have(traces: list[RankTrace]) -> None:
    rows = {step: found for step, _, found in scalars(traces)}
    expected = max(int(t.windows[4]["end_ns"] - t.windows[4]["begin_ns"]) for t in traces) / 1e9
    assert rows[4]["step/seconds"] == pytest.approx(expected)
    assert rows[4]["loss"] == pytest.approx(0.2)
    traces[1].windows["first_step"] += 1
    assert len(list(scalars(traces))) == 11


def test_a_missing_package_is_said_with_the_remedy(
    traces: list[RankTrace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pyarrow", "tensorboard", "tensorboard.compat.proto"):
        monkeypatch.setitem(sys.modules, name, None)
    for kind in ("parquet", "tensorboard"):
        with pytest.raises(UsageError, match=r"fivefold\[exports\]"):
            export(kind, traces, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_mistakes_are_said(traces: list[RankTrace], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"did you mean .*Valid: {', '.join(FORMATS)}"):
        export("perfeto", traces, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        export("csv", traces, tmp_path / "file" / "out")


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    run = Story(ranks=2, steps=3).write(tmp_path / "run")
    (run / "trace" / "rank-00001.trace").write_bytes(b"fivefold trace\n\0")
    found, problems = read(run)
    assert [t.rank for t in found] == [0]
    assert len(problems) == 1 and "rank-00001" in problems[0]
    (run / "trace" / "rank-00000.trace").write_bytes(b"")
    with pytest.raises(UsageError):
        read(run)
