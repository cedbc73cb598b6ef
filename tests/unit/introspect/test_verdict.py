"""Every rule speaks where its fault was put in, with its numbers, and is silent where it was not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fivefold.introspect.analysis import Analysis
from fivefold.introspect.document import document
from fivefold.introspect.findings import Finding
from fivefold.introspect.run import TracedRun
from fivefold.introspect.verdict import findings, verdict
from fivefold.trace.phases import Phase, Tag
from fivefold.trace.schema import KINDS, PHASES, TAGS, ProcessState
from traces import MS, Story

_GRADIENTS, _BATCH_NORM = TAGS.index(Tag.GRADIENTS), TAGS.index(Tag.BATCH_NORM)
_P = {name: number for number, name in enumerate(PHASES)}


def judged(story: Story, folder: Path) -> tuple[str, dict[str, Finding]]:
    """The verdict's text, and findings by id (the first of each)."""
    analysis = Analysis(TracedRun.load(story.write(folder)))
    found = findings(analysis)
    by_id = {finding.id: finding for finding in reversed(found)}
    return verdict(analysis, found)["text"], by_id


def test_a_rank_with_an_empty_loader_is_named(tmp_path: Path) -> None:
    text, found = judged(Story().slow_loader(3), tmp_path)
    late = found["straggler"]
    assert late.ranks == (3,)
    assert late.figures["cause"] == "loader"
    assert late.figures["phase"] == "load"
    assert late.gain_s == pytest.approx(12e-3, rel=0.1)
    assert late.figures["late_s"] == pytest.approx(12e-3, rel=0.05)
    assert late.figures["share_of_steps"] == 1.0
    assert "rank 3 arrives 12 ms late in 100 % of steps because its loader is empty" in text
    assert "exposed reduction of gradients" in text
    assert found.keys() <= {"straggler", "exposed"}


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("steps", [6, 10])
def test_few_steps_and_few_ranks_are_enough(ranks: int, steps: int, tmp_path: Path) -> None:
    _, found = judged(Story(ranks=ranks, steps=steps).slow_loader(1), tmp_path)
    assert found["straggler"].ranks == (1,)
    assert found["straggler"].figures["cause"] == "loader"


def test_a_sleep_is_named_with_its_line(tmp_path: Path) -> None:
    text, found = judged(Story().sleeps(2), tmp_path)
    assert found["straggler"].ranks == (2,)
    assert found["straggler"].figures["cause"] == "waits"
    assert "in forward at model.py:42 forward (time.sleep)" in text
    assert any(e["section"] == "stacks" for e in found["straggler"].evidence)


def throttled(story: Story) -> None:
    story.more(1, Phase.BACKWARD, 15 * MS, cpu=False).throttled[1] = 14 * MS


def delayed(story: Story) -> None:
    story.more(1, Phase.BACKWARD, 15 * MS, cpu=False).run_delay[1] = 14 * MS


def samples(story: Story) -> None:
    story.more(1, Phase.BACKWARD, 15 * MS, cpu=True).samples[1] = 48


def computes(story: Story) -> None:
    story.more(1, Phase.BACKWARD, 15 * MS, cpu=True)


def stopped(story: Story) -> None:
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE):
        story.work[1, :, _P[phase]] = 1.5 * story.work[1, :, _P[phase]]


@pytest.mark.parametrize("fault", [throttled, delayed, samples, computes, stopped])
def test_the_cause_of_a_late_rank_is_told(fault: Callable[[Story], None], tmp_path: Path) -> None:
    story = Story()
    fault(story)
    text, found = judged(story, tmp_path)
    assert found["straggler"].ranks == (1,)
    assert found["straggler"].figures["cause"] == fault.__name__
    assert "rank 1 arrives" in text


def test_a_stage_that_is_longer_is_told(tmp_path: Path) -> None:
    def of_stage(rank: int) -> dict[str, int]:
        return {"data": rank // 2, "pipe": rank % 2}

    story = Story(ranks=4, coordinates=of_stage)
    for rank in (1, 3):
        story.more(rank, Phase.BACKWARD, 15 * MS, cpu=True)
    _, found = judged(story, tmp_path)
    assert found["straggler"].ranks == (1, 3)
    assert found["straggler"].figures["cause"] == "stage"
    assert "pipeline.cut" in found["straggler"].advice


def test_ranks_with_the_same_cause_are_one_finding(tmp_path: Path) -> None:
    _, found = judged(Story(ranks=8).slow_loader(3).slow_loader(5), tmp_path)
    assert found["straggler"].ranks == (3, 5)
    assert found["straggler"].gain_s == pytest.approx(12e-3, rel=0.1)


def test_removing_one_of_two_stragglers_gains_nothing(tmp_path: Path) -> None:
    _, found = judged(Story(ranks=8).slow_loader(3).sleeps(5), tmp_path)
    assert found["straggler"].gain_s == pytest.approx(0, abs=1e-3)


def test_a_run_without_faults_is_good(tmp_path: Path) -> None:
    story = Story(transfer_ns=MS)
    analysis = Analysis(TracedRun.load(story.write(tmp_path)))
    assert findings(analysis) == []
    told = verdict(analysis, [])
    assert told["level"] == "good"
    assert "Computing fills 97 % of the step of 55 ms" in told["text"]


def test_ranks_that_are_late_by_turns(tmp_path: Path) -> None:
    story = Story(ranks=8, transfer_ns=MS)
    for step in range(story.steps):
        story.work[step % 8, step, _P["forward"]] += 15 * MS
    _, found = judged(story, tmp_path)
    assert "straggler" not in found
    assert found["jitter"].gain_s == pytest.approx(15e-3, rel=0.1)


def uneven_by_little(story: Story) -> None:
    for step in range(story.steps):
        story.work[step % 8, step, _P["forward"]] += MS


def always_the_same(story: Story) -> None:
    story.work[3, :, _P["forward"]] += 15 * MS


def all_at_once(story: Story) -> None:
    story.work[:, ::4, _P["forward"]] += 15 * MS


@pytest.mark.parametrize("well", [uneven_by_little, always_the_same, all_at_once])
def test_ranks_that_are_not_late_by_turns(well: Callable[[Story], None], tmp_path: Path) -> None:
    story = Story(ranks=8, transfer_ns=MS)
    well(story)
    assert "jitter" not in judged(story, tmp_path)[1]


def test_one_rank_alone_is_never_late(tmp_path: Path) -> None:
    story = Story(ranks=1, transfer_ns=0)
    story.work[0, ::3, _P["forward"]] += 30 * MS
    assert judged(story, tmp_path)[1].keys() <= {"loader"}


def test_exposed_communication_is_told_by_tag(tmp_path: Path) -> None:
    text, found = judged(Story(transfer_ns=30 * MS), tmp_path)
    assert found["exposed"].figures["tag"] == "parameters and gradients"
    assert found["exposed"].gain_s == pytest.approx(30e-3, rel=0.02)
    assert found["exposed"].figures["hidden_share"] == pytest.approx(3 / 33, rel=0.05)
    assert "36 % of the step is exposed communication of parameters and gradients" in text
    assert "backend fivefold instead of gloo" in found["exposed"].advice


class Norms(Story):
    """What is reduced bears the tag of batch norm."""

    kind = "all_gather"

    def _operation(self, row: NDArray[np.void], begin: NDArray[np.int64], end: NDArray[np.int64],
                   place: int, phase: Phase) -> None:  # fmt: skip
        super()._operation(row, begin, end, place, phase)
        row["kind"], row["tag"] = KINDS.index(self.kind), _BATCH_NORM

    def _windows(self, rank: int, begins: NDArray[np.int64], length: NDArray[np.int64],
                 blocked: NDArray[np.int64]) -> NDArray[np.void]:  # fmt: skip
        rows = super()._windows(rank, begins, length, blocked)
        for name in ("tag_ns", "tag_blocked_ns", "tag_bytes"):
            rows[name][:, _BATCH_NORM] = rows[name][:, _GRADIENTS]
            rows[name][:, _GRADIENTS] = 0
        return rows


def of_tile(rank: int) -> dict[str, int]:
    return {"data": 0, "height": rank}


@pytest.mark.parametrize(
    ("chosen", "kind", "told", "wrong"),
    [
        ("global", "all_gather", 'parallel.batch_norm = "replica" needs none of it between', ""),
        ("replica", "all_gather", "larger shares", "parallel.batch_norm"),
        (
            "global",
            "all_reduce",
            "larger shares",
            "parallel.batch_norm",
        ),  # buffers of instance norm
        ("global", "tiles", "larger shares", "parallel.batch_norm"),  # norms over a sample
        (None, "broadcast", "broadcast_buffers=False", "parallel.batch_norm"),
        (None, "all_reduce", "larger shares", "broadcast_buffers"),
    ],
)
def test_a_remedy_for_batch_norm_is_one_for_batch_norm(
    chosen: str | None, kind: str, told: str, wrong: str, tmp_path: Path
) -> None:
    story = Norms(transfer_ns=30 * MS)
    story.kind = "all_gather" if kind == "tiles" else kind
    if kind == "tiles":
        story.coordinates = of_tile
    if chosen is not None:
        story.meta = {"plan": {"parallel.batch_norm": {"value": chosen, "origin": "default"}}}
    exposed = judged(story, tmp_path)[1]["exposed"]
    assert exposed.figures["tag"] == Tag.BATCH_NORM
    assert told in exposed.advice
    assert not wrong or wrong not in exposed.advice


def test_all_loaders_are_empty(tmp_path: Path) -> None:
    text, found = judged(Story().slow_loader(slice(None)), tmp_path)
    assert "straggler" not in found
    assert found["loader"].gain_s == pytest.approx(12e-3, rel=0.05)
    assert "All ranks wait for data 18 % of the step" in text


def test_where_all_loaders_are_is_told(tmp_path: Path) -> None:
    places = {"load": [("data.py:7 __getitem__ (time.sleep)", 90), ("data.py:9 __getitem__", 10)]}
    story = Story(stacks=dict.fromkeys(range(8), places)).slow_loader(slice(None))
    text, found = judged(story, tmp_path)
    assert "of the step, most of it at data.py:7 __getitem__ (time.sleep)" in text
    assert any("seen at data.py:7" in str(one) for one in found["loader"].evidence)


def short_waits_for_data(story: Story) -> None:
    story.slow_loader(slice(None), MS)


def a_minority_that_waits_for_data(story: Story) -> None:
    story.slow_loader(slice(0, 4), 12 * MS)


@pytest.mark.parametrize("well", [short_waits_for_data, a_minority_that_waits_for_data])
def test_loaders_that_most_ranks_do_not_wait_for(
    well: Callable[[Story], None], tmp_path: Path
) -> None:
    story = Story(ranks=8)
    well(story)
    assert "loader" not in judged(story, tmp_path)[1]


@pytest.mark.parametrize("phase", [Phase.VALIDATE, Phase.CHECKPOINT])
def test_what_takes_less_than_a_twentieth_of_a_step(phase: Phase, tmp_path: Path) -> None:
    few = Story().more(slice(None), phase, 2 * MS, cpu=True)
    assert phase.value not in judged(few, tmp_path)[1]


@pytest.mark.parametrize("phase", [Phase.VALIDATE, Phase.CHECKPOINT])
def test_what_only_ranks_do_that_nobody_waits_for(phase: Phase, tmp_path: Path) -> None:
    # The others compute meanwhile, and longer: without it no step would be shorter.
    story = Story(ranks=4).more(0, phase, 10 * MS, cpu=True)
    story.more(slice(1, 4), Phase.BACKWARD, 15 * MS, cpu=True)
    assert phase.value not in judged(story, tmp_path)[1]


@pytest.mark.parametrize("phase", [Phase.VALIDATE, Phase.CHECKPOINT])
def test_what_training_waits_for(phase: Phase, tmp_path: Path) -> None:
    story = Story().more(slice(None), phase, 20 * MS, cpu=True)
    _, found = judged(story, tmp_path)
    assert found[phase.value].gain_s == pytest.approx(20e-3, rel=0.02)


def test_many_small_operations(tmp_path: Path) -> None:
    _, few = judged(Story(tiny=3, tiny_blocked_ns=MS // 5), tmp_path / "a")
    assert "tiny" not in few
    _, found = judged(Story(tiny=30, tiny_blocked_ns=MS // 5), tmp_path / "b")
    assert found["tiny"].figures["calls_per_step"] == 30
    assert found["tiny"].gain_s == pytest.approx(6e-3, rel=0.2)


def test_cores_are_not_enough(tmp_path: Path) -> None:
    story = Story()
    story.run_delay[:] = 12 * MS
    text, found = judged(story, tmp_path)
    assert found["cores"].gain_s == pytest.approx(12e-3, rel=0.01)
    assert "(1 thread per rank, 4 ranks on 4 cores of node0)" in text
    assert "something else runs on them" in found["cores"].advice
    story.meta = {"threads": 4}
    assert "fewer ranks or threads" in judged(story, tmp_path / "b")[1]["cores"].advice


def test_a_throttled_job(tmp_path: Path) -> None:
    story = Story()
    story.throttled[:] = 10 * MS
    story.run_delay[:] = 10 * MS
    _, found = judged(story, tmp_path)
    assert found["throttled"].gain_s == pytest.approx(10e-3, rel=0.01)
    assert "cores" not in found


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_is_throttled_without_being_late(ranks: int, tmp_path: Path) -> None:
    story = Story(ranks=ranks)
    story.throttled[1] = story.run_delay[1] = 20 * MS
    text, found = judged(story, tmp_path)
    assert found["throttled"].ranks == (1,)
    assert "The cgroup of rank 1 is throttled 35 % of the time" in text
    assert "cores" not in found
    assert "straggler" not in found


def test_idle_gpus(tmp_path: Path) -> None:
    story = Story()
    story.gpu_busy[:] = 0.3
    _, found = judged(story, tmp_path)
    assert found["gpu"].figures["gpu_busy"] == pytest.approx(0.3)
    story.gpu_busy[:] = 0.9
    assert "gpu" not in judged(story, tmp_path / "b")[1]


def test_a_leak(tmp_path: Path) -> None:
    story = Story(steps=100)
    story.rss[2] += np.arange(100) * (2 << 20)
    _, found = judged(story, tmp_path)
    assert found["memory"].ranks == (2,)
    assert found["memory"].figures["bytes_per_step"] == pytest.approx(2 << 20, rel=0.01)


def test_memory_that_stops_growing_is_no_leak(tmp_path: Path) -> None:
    story = Story(steps=100)
    story.rss[2] += np.minimum(np.arange(100), 20) * (10 << 20)
    assert "memory" not in judged(story, tmp_path)[1]


def links(slow: float) -> dict[str, object]:
    pairs = [(0, 1), (0, 2), (1, 2)]
    return {"links": [
        {"ranks": list(pair), "latency_s": 1e-5, "bytes_per_s": slow if 2 in pair else 1e9}
        for pair in pairs
    ]}  # fmt: skip


def test_a_slow_link_is_named(tmp_path: Path) -> None:
    text, found = judged(Story(ranks=3, per_node=1, meta=links(1e8), transfer_ns=20 * MS), tmp_path)
    assert text.startswith(
        "28 % of the step is exposed reduction of gradients, waiting included; the link"
    )
    assert found["slow-link"].ranks == (2,)
    assert found["slow-link"].figures["bytes_per_s"] == 1e8
    assert "node2 (rank 2)" in found["slow-link"].title


def test_equal_links_are_not(tmp_path: Path) -> None:
    story = Story(ranks=3, per_node=1, meta=links(8e8), transfer_ns=20 * MS)
    assert "slow-link" not in judged(story, tmp_path)[1]


def test_the_only_link_is_slow_for_any_cluster(tmp_path: Path) -> None:
    meta = {"links": [{"ranks": [0, 1], "latency_s": 1e-3, "bytes_per_s": 2e7}]}
    _, found = judged(Story(ranks=2, per_node=1, meta=meta, transfer_ns=20 * MS), tmp_path)
    assert found["slow-link"].ranks == (0, 1)


@pytest.mark.parametrize(("seconds", "fires"), [(5e-3, True), (18e-3, False)])
def test_slower_than_at_the_start(seconds: float, fires: bool, tmp_path: Path) -> None:
    meta = {"calibration": [
        {"op": "all_reduce", "group": 0, "size_bytes": 4 << 20, "seconds": seconds}
    ]}  # fmt: skip
    _, found = judged(Story(transfer_ns=20 * MS, hidden_ns=19 * MS, meta=meta), tmp_path)
    assert ("slow-network" in found) == fires
    if fires:
        assert found["slow-network"].figures["ratio"] == pytest.approx(0.25, rel=0.1)


def test_failures_come_first(tmp_path: Path) -> None:
    story = Story(state=ProcessState.FAILED).slow_loader(3)
    story.notes.append({"kind": "failure", "at_ns": 5, "text": "ValueError: no\nsecond line"})
    text, found = judged(story, tmp_path)
    assert text.startswith("Rank 0 failed: ValueError: no; ranks 1-3 failed as well")
    assert found["failure"].broken


def test_a_hang_that_the_run_noted(tmp_path: Path) -> None:
    story = Story(state=ProcessState.FAILED)
    story.notes.append({
        "kind": "hang", "at_ns": 5, "waiting": [0, 1, 2], "missing": [3],
        "text": "ranks 0-2 have waited 31 s in all_reduce number 7 for rank 3\n  rank 3: step 9",
        "states": [{"rank": 3, "phase": "load", "since_s": 31.0, "at": "reader.py:12 read"}],
    })  # fmt: skip
    text, found = judged(story, tmp_path)
    assert found["hang"].ranks == (3,)
    assert "for rank 3: rank 3 is in load at reader.py:12 read" in text


def test_a_hang_that_went_on_is_no_broken_run(tmp_path: Path) -> None:
    story = Story()
    for extra in (
        {"text": "ranks 0-2 wait"},
        {"resolved": True, "seconds": 12.0, "text": "goes on"},
    ):
        story.notes.append({"kind": "hang", "at_ns": 5, "waiting": [0], "missing": [3], **extra})
    _, found = judged(story, tmp_path)
    assert not found["hang"].broken
    assert found["hang"].title == "ranks stood still for 12 s until rank 3 came"


def test_a_second_hang_that_lasts_is_told(tmp_path: Path) -> None:
    story = Story()
    hang = {
        "kind": "hang",
        "at_ns": 5,
        "waiting": [0],
        "missing": [3],
        "text": "rank 0 waits for rank 3",
    }
    story.notes += [hang, {**hang, "resolved": True, "seconds": 3.0}, hang]
    text, found = judged(story, tmp_path)
    assert found["hang"].broken
    assert text.startswith("Rank 0 waits for rank 3")


def test_killed_processes(tmp_path: Path) -> None:
    text, found = judged(Story(state=ProcessState.RUNNING, host="").slow_loader(3), tmp_path)
    assert found["killed"].broken
    assert text.startswith("All ranks ended without a word, in step 40")


def test_every_finding_has_numbers_and_evidence(tmp_path: Path) -> None:
    story = (
        Story(ranks=6, transfer_ns=20 * MS, tiny=30, tiny_blocked_ns=MS).slow_loader(3).sleeps(2)
    )
    story.run_delay[:] = 30 * MS
    made = document(TracedRun.load(story.write(tmp_path)))
    assert len(made["findings"]) >= 4
    for finding in made["findings"]:
        assert finding["figures"]
        assert all(e["text"] and e["section"] in made for e in finding["evidence"])
        assert finding["advice"]
        for e in finding["evidence"]:
            section = made[e["section"]]
            assert not e["rows"] or max(e["rows"]) < len(section)
    gains = [f["gain_s_per_step"] or 0 for f in made["findings"]]
    assert gains == sorted(gains, reverse=True)
