"""The recording of a process: nothing is lost, added twice, or torn."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.trace import Phase, span
from fivefold.trace.current import usage
from fivefold.trace.fold import KEY, folded, merge
from fivefold.trace.process import start, stop
from fivefold.trace.reader import RankTrace
from fivefold.trace.schema import (
    BINS,
    EVENT,
    NOTHING,
    PHASES,
    SUM,
    TAGS,
    WINDOW,
    ProcessState,
    bucket,
)
from fivefold.trace.trace import Trace
from fivefold.trace.windows import UNKNOWN, combined

_SMALL = {"events": 64, "windows": 8}


def begun(folder: Path, **rows: int) -> Trace:
    return Trace.create(folder, {"rank": 3}, {**_SMALL, **rows})


def test_a_file_is_called_after_its_rank_and_has_a_fixed_size(tmp_path: Path) -> None:
    trace = begun(tmp_path)
    size = trace.path.stat().st_size
    for _ in range(500):
        trace.ended(trace.issue(1, 0, 0, 0, 100, 1))
    trace.close()
    assert trace.path.name == "rank-00003.trace"
    assert trace.path.stat().st_size == size


@pytest.mark.parametrize("operations", [1, 15, 16, 17, 64, 65, 1000])
def test_no_operation_is_lost_when_the_ring_wraps(tmp_path: Path, operations: int) -> None:
    trace = begun(tmp_path)
    for number in range(operations):
        trace.ended(trace.issue(1, 0, 0, number, 100, 1))
    trace.step_ended(samples=5)
    found = RankTrace.load(trace.path)
    assert not found.problems
    assert found.sums["count"].sum() == operations
    assert found.windows["tag_bytes"].sum() == found.sums["size_bytes"].sum() == 100 * operations
    assert found.windows["tag_ns"].sum() == found.sums["total_ns"].sum()
    assert [*found.events["number"]] == [*range(max(0, operations - 64), operations)]
    assert found.windows["samples"].sum() == 5


def test_an_operation_that_ends_much_later_is_counted_once(tmp_path: Path) -> None:
    trace = begun(tmp_path)
    slow = trace.issue(2, 1, 0, 0, 7, 1)
    for _ in range(40):
        trace.ended(trace.issue(1, 0, 0, 0, 100, 1))
    trace.step_ended()
    trace.ended(slow, 17)
    trace.step_ended()
    trace.close()
    found = RankTrace.load(trace.path)
    assert found.sums["count"].sum() == 41
    assert [*found.windows["tag_bytes"][:, 1]] == [0, 7]
    assert found.windows["tag_blocked_ns"][1, 1] == 17


def test_what_a_thread_beside_training_waits_for_is_not_exposed(tmp_path: Path) -> None:
    trace = begun(tmp_path)

    def beside() -> None:
        usage.background = True
        trace.ended(trace.issue(2, 1, 0, 0, 7, 1), 5000)

    thread = threading.Thread(target=beside)
    thread.start()
    thread.join()
    trace.ended(trace.issue(2, 1, 0, 0, 7, 1), 17)
    trace.step_ended()
    trace.close()
    row = RankTrace.load(trace.path).windows[0]
    assert row["tag_blocked_ns"][1] == 17 and row["tag_bytes"][1] == 14


def test_totals_stay_when_rows_of_steps_are_merged(tmp_path: Path) -> None:
    trace = begun(tmp_path)
    assert sum(trace.totals()["tag_blocked_ns"]) == 0
    for step in range(1, 101):  # there is room for 8 rows
        trace.ended(trace.issue(2, 1, 0, 0, 7, 1), 10)
        trace.push(0)
        trace.pop()
        trace.step_ended()
        assert trace.totals()["tag_blocked_ns"][1] == 10 * step
    trace.close()
    found = RankTrace.load(trace.path)
    assert trace.totals()["phase_ns"] == [*found.windows["phase_ns"].sum(0)]


def test_an_operation_whose_row_was_written_over_is_told(tmp_path: Path) -> None:
    trace = begun(tmp_path)
    slow = trace.issue(2, 1, 0, 0, 7, 1)
    for _ in range(200):
        trace.ended(trace.issue(1, 0, 0, 0, 100, 1))
    trace.ended(slow)
    trace.close()
    found = RankTrace.load(trace.path)
    assert found.sums["count"].sum() == 200
    assert "1 events found no room" in found.problems


def test_threads_record_at_the_same_time(tmp_path: Path) -> None:
    trace = begun(tmp_path, events=4096)
    each, threads = 3000, 4

    def work(kind: int) -> None:
        for number in range(each):
            trace.ended(trace.issue(kind, 0, 0, number, 1, 1))

    running = [threading.Thread(target=work, args=(kind,)) for kind in range(1, threads + 1)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    trace.step_ended()
    trace.close()
    found = RankTrace.load(trace.path)
    lost = int(found.live["lost_events"])
    counts = {int(row["kind"]): int(row["count"]) for row in found.sums}
    assert sum(counts.values()) + lost == each * threads
    assert found.windows["tag_bytes"].sum() == sum(counts.values())


_events = st.lists(
    st.tuples(
        st.integers(1, 3), st.integers(0, 2), st.sampled_from([0, 5, NOTHING]),
        st.integers(0, 1 << 40), st.integers(0, 1 << 45), st.integers(0, 1 << 30),
    ),
    max_size=60,
)  # fmt: skip


def _as_events(told: list[tuple[int, ...]]) -> np.ndarray:
    rows = np.zeros(len(told), EVENT)
    for row, (kind, tag, phase, size, took, blocked) in zip(rows, told, strict=True):
        row["kind"], row["tag"], row["phase"], row["size_bytes"] = kind, tag, phase, size
        row["begin_ns"], row["end_ns"], row["blocked_ns"] = 1000, 1000 + took, blocked
    return rows


@given(_events, _events)
def test_folding_equals_a_plain_sum(
    first: list[tuple[int, ...]], second: list[tuple[int, ...]]
) -> None:
    sums = np.zeros(200, SUM)
    used, lost = merge(sums, 0, folded(_as_events(first)))
    used, lost = merge(sums, used, folded(_as_events(second)))
    assert not lost
    plain: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for event in [*first, *second]:
        kind, tag, phase, size, *_ = event
        plain.setdefault((kind, tag, phase, 0, 0, bucket(size)), []).append(event)
    assert {tuple(int(row[name]) for name in KEY) for row in sums[:used]} == set(plain)
    for row in sums[:used]:
        events = plain[tuple(int(row[name]) for name in KEY)]
        took = [event[4] for event in events]
        assert row["count"] == len(events)
        assert (row["total_ns"], row["min_ns"], row["max_ns"]) == (sum(took), min(took), max(took))
        assert row["size_bytes"] == sum(event[3] for event in events)
        assert row["blocked_ns"] == sum(event[5] for event in events)
        bins = [min(t.bit_length(), BINS - 1) for t in took]
        assert [*row["histogram"]] == [bins.count(b) for b in range(BINS)]


def test_sums_without_room_are_counted() -> None:
    sums = np.zeros(2, SUM)
    events = _as_events([(kind, 0, 0, 0, 5, 0) for kind in (1, 2, 3, 3, 1)])
    assert merge(sums, 0, folded(events)) == (2, 2)


def test_time_of_a_phase_is_its_own(tmp_path: Path) -> None:
    start(tmp_path, {"rank": 0})
    try:
        with span(Phase.VALIDATE):
            time.sleep(0.01)
            with span(Phase.LOAD):
                time.sleep(0.03)
        thread = threading.Thread(target=lambda: span(Phase.FORWARD).__enter__())
        thread.start()
        thread.join()
        with span("no phase"):
            pass
    finally:
        trace = _ended(tmp_path)
    own = {PHASES[n]: ns / 1e9 for n, ns in enumerate(trace.windows["phase_ns"][0][: len(PHASES)])}
    assert own["load"] >= 0.03
    assert 0.01 <= own["validate"] < own["load"]
    assert own["forward"] == 0
    assert len(trace.events) == 2


def _ended(folder: Path) -> RankTrace:
    from fivefold.trace import active

    trace = active()
    assert trace is not None
    trace.step_ended()
    stop()
    assert active() is None
    return RankTrace.load(trace.path)


def test_steps_follow_each_other_and_rows_are_merged_when_all_are_used(tmp_path: Path) -> None:
    trace = begun(tmp_path)
    for step in range(1, 60):
        trace.push(PHASES.index(Phase.FORWARD))
        trace.pop()
        trace.step_ended(samples=step, loss=float(step))
    trace.close()
    windows = RankTrace.load(trace.path).windows
    assert len(windows) <= 8
    assert windows["steps"].sum() == 59
    assert windows["samples"].sum() == sum(range(1, 60))
    assert windows["first_step"][0] == 1
    ends = windows["first_step"] + windows["steps"]
    assert [*ends[:-1]] == [*windows["first_step"][1:]]
    assert [*windows["end_ns"][:-1]] == [*windows["begin_ns"][1:]]
    assert np.average(windows["loss"], weights=windows["steps"]) == pytest.approx(30.0)


@given(st.lists(st.tuples(st.integers(1, 9), st.one_of(st.none(), st.floats(-5, 5)),
                          st.integers(-1, 100)), min_size=1, max_size=20))  # fmt: skip
def test_neighbours_made_one_keep_sums_means_and_what_is_unknown(
    told: list[tuple[int, float | None, int]],
) -> None:
    rows = np.zeros(len(told), WINDOW)
    for row, (steps, loss, sent) in zip(rows, told, strict=True):
        for name, value in UNKNOWN.items():
            row[name] = value
        row["steps"], row["sent_bytes"] = steps, sent
        row["loss"] = np.nan if loss is None else loss
    made = combined(rows)
    assert made["steps"].sum() == rows["steps"].sum()
    for number, row in enumerate(made):
        pair = told[2 * number : 2 * number + 2]
        known = [(steps, loss) for steps, loss, _ in pair if loss is not None]
        if known:
            mean = sum(s * loss for s, loss in known) / sum(s for s, _ in known)
            assert row["loss"] == pytest.approx(mean, abs=1e-9)
        else:
            assert np.isnan(row["loss"])
        sent = [bytes_ for *_, bytes_ in pair]
        assert row["sent_bytes"] == (-1 if -1 in sent else sum(sent))


def test_samplers_fill_rows_that_are_complete(tmp_path: Path) -> None:
    trace = begun(tmp_path)

    def sampler(row: np.void) -> None:
        row["rss_bytes"] = 123

    trace.samplers.append(sampler)
    trace.ready(1)
    trace.ready(4)
    trace.step_ended()
    windows = RankTrace.load(trace.path).windows
    assert (windows["rss_bytes"][0], windows["ready"][0]) == (123, 2.5)
    assert windows["gpu_bytes"][0] == -1


def test_notes_and_meta_are_read_back_and_bounded(tmp_path: Path) -> None:
    trace = begun(tmp_path)
    group = trace.new_group("data", [0, 1], "gloo", "7")
    trace.update_meta(host="here", large="x" * 200_000)
    for step in range(5000):
        trace.note("loss", step=step, value=0.5)
    trace.note("failure", text="<b>\n")
    found = RankTrace.load(trace.path)
    assert found.meta == {"rank": 3, "host": "here"}
    kinds = [note["kind"] for note in found.notes]
    assert kinds[0] == "group" and found.notes[0]["index"] == group == 0
    assert "warning" in kinds
    assert found.notes[-1]["text"] == "<b>\n"
    assert found.live["lost_notes"] > 0


_BEGIN = """
import os
from fivefold.trace.process import start
trace = start(Path(sys.argv[1]), {"rank": 0, "host": os.uname().nodename})
"""
_KILLED = f"""
import signal, sys, time
from pathlib import Path
from fivefold.trace import Phase, Tag, span
{_BEGIN}
for step in range(50):
    for _ in range(200):
        trace.ended(trace.issue(1, 0, 0, step, 10, 1))
    trace.step_ended()
under_way = trace.issue(2, 0, 0, 0, 10, 1)
%s
"""


def _child(folder: Path, ending: str) -> tuple[int, RankTrace]:
    done = subprocess.run(
        [sys.executable, "-c", _KILLED % ending, str(folder)],
        check=False, timeout=60, capture_output=True,
    )  # fmt: skip
    return done.returncode, RankTrace.load(folder / "rank-00000.trace")


def test_a_process_that_is_killed_leaves_all_it_recorded(tmp_path: Path) -> None:
    code, found = _child(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    assert code == -signal.SIGKILL
    assert found.state == ProcessState.RUNNING
    assert not Path(f"/proc/{found.live['pid']}").exists()
    assert found.sums["count"].sum() == 10_000
    assert found.windows["steps"].sum() == 50
    assert found.events[-1]["end_ns"] == 0


@pytest.mark.parametrize(
    ("ending", "state"),
    [
        ("raise ValueError('no such thing')", ProcessState.FAILED),
        ("", ProcessState.ENDED),
        ("sys.exit(3)", ProcessState.ENDED),
    ],
)
def test_the_end_of_a_process_is_told(tmp_path: Path, ending: str, state: ProcessState) -> None:
    _, found = _child(tmp_path, ending)
    assert found.state == state
    failures = [note["text"] for note in found.notes if note["kind"] == "failure"]
    assert failures == (["ValueError: no such thing"] if state == ProcessState.FAILED else [])


def test_a_child_does_not_write_into_its_parents_trace(tmp_path: Path) -> None:
    code, found = _child(
        tmp_path,
        "from fivefold.trace import active\n"
        "if not (pid := os.fork()):\n"
        "    os._exit(0 if active() is None else 9)\n"
        "assert os.waitpid(pid, 0)[1] == 0 and active() is trace",
    )
    assert code == 0
    assert found.state == ProcessState.ENDED


def test_a_script_that_a_rank_starts_does_not_take_its_trace(tmp_path: Path) -> None:
    again = f"import sys; from pathlib import Path; {_BEGIN}"
    code, found = _child(
        tmp_path,
        "import subprocess\n"
        f"done = subprocess.run([sys.executable, '-c', {again!r}, sys.argv[1]], capture_output=True)\n"
        "assert f'process {os.getpid()} writes the trace of this rank'.encode() in done.stderr",
    )
    assert (code, found.state) == (0, ProcessState.ENDED)
    assert found.windows["steps"].sum() == 50


def test_the_trace_of_a_process_that_is_no_more_is_replaced(tmp_path: Path) -> None:
    _, killed = _child(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    code, found = _child(tmp_path, "")
    assert (code, found.state) == (0, ProcessState.ENDED)
    assert found.live["pid"] != killed.live["pid"]


def test_the_heartbeat_and_the_step_are_there_for_who_watches(tmp_path: Path) -> None:
    trace = begun(tmp_path)
    trace.begin_at(41)
    trace.push(PHASES.index(Phase.BACKWARD))
    live = RankTrace.load(trace.path).live
    assert (live["step"], live["phase"]) == (41, PHASES.index(Phase.BACKWARD))
    assert live["pid"] == os.getpid()
    trace.pop()
    trace.step_ended()
    live = RankTrace.load(trace.path).live
    assert (live["step"], live["phase"]) == (42, NOTHING)
    assert time.monotonic_ns() - live["heartbeat_ns"] < 60_000_000_000
    assert TAGS[-1] == "other"
