"""Where the training thread is seen: the user's line, the call in it, by phase."""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fivefold.trace import Phase
from fivefold.trace import stacks as stacks_module
from fivefold.trace.frames import position, stack, where
from fivefold.trace.reader import RankTrace
from fivefold.trace.schema import PHASES
from fivefold.trace.stacks import OUTSIDE, Watcher
from fivefold.trace.trace import Trace

HERE = Path(__file__).name
LOAD = PHASES.index(Phase.LOAD)


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def seen_in(wait: Callable[[threading.Event], object]) -> tuple[str, list[str]]:
    """Where a thread is seen that executes `wait(event)`."""
    event = threading.Event()
    thread = threading.Thread(target=wait, args=(event,), daemon=True)
    thread.start()
    time.sleep(0.05)
    assert thread.ident is not None
    frame = sys._current_frames()[thread.ident]
    found = where(frame), stack(frame)
    event.set()
    thread.join()
    return found


def test_a_call_into_the_library_is_told_from_the_users_line() -> None:
    def loading(event: threading.Event) -> None:
        event.wait(10)

    place, lines = seen_in(loading)
    line = loading.__code__.co_firstlineno + 1
    assert place == f"{HERE}:{line} loading (event.wait)"
    assert f"{HERE}:{line} loading" in lines
    assert lines[0].startswith("threading.py:")


def test_a_call_into_c_has_no_frame_and_is_told_from_the_source() -> None:
    def slowly(event: threading.Event) -> None:
        time.sleep(0.2)

    line = slowly.__code__.co_firstlineno + 1
    assert seen_in(slowly)[0] == f"{HERE}:{line} slowly (time.sleep)"


def test_calls_over_several_lines_and_loops() -> None:
    def spread(event: threading.Event) -> None:
        for _ in range(2):
            event.wait(
                5.0,
            )

    assert seen_in(spread)[0].endswith(" spread (event.wait)")


def test_code_without_source_is_no_mistake() -> None:
    scope: dict[str, Callable[[threading.Event], object]] = {}
    exec(compile("def made(event):\n    event.wait(10)\n", "/nowhere/made.py", "exec"), scope)
    assert seen_in(scope["made"])[0] == "made.py:2 made (threading.py wait)"


def test_a_thread_that_waits_has_not_moved() -> None:
    def two(event: threading.Event) -> None:
        event.wait(10)

    event = threading.Event()
    thread = threading.Thread(target=two, args=(event,), daemon=True)
    thread.start()
    time.sleep(0.05)
    assert thread.ident is not None
    first = position(sys._current_frames()[thread.ident])
    time.sleep(0.05)
    assert position(sys._current_frames()[thread.ident]) == first
    event.set()
    thread.join()


@pytest.fixture(autouse=True)
def maps_are_closed() -> Iterator[None]:
    """The map of a trace is an open file, as long as a cycle keeps the trace."""
    yield
    gc.collect()


@contextmanager
def traced(folder: Path) -> Iterator[Trace]:
    """A trace whose map, an open file, is gone with the test."""
    trace = Trace.create(folder, {"rank": 0})
    try:
        yield trace
    finally:
        trace.close()


def test_counts_are_by_phase_and_in_the_file(tmp_path: Path) -> None:
    with traced(tmp_path) as trace:
        watcher = Watcher(trace, every_s=0.005, write_s=0.02)
        trace.push(LOAD)
        time.sleep(0.15)
        trace.pop()
        until(lambda: OUTSIDE in RankTrace.load(trace.path).stacks)
        watcher.close()
        stacks = RankTrace.load(trace.path).stacks
        (place, count), *_ = stacks["load"]
        assert place.startswith(HERE)
        assert place.endswith("(time.sleep)")
        assert count >= 5


def test_the_heart_beats_while_the_process_lives(tmp_path: Path) -> None:
    with traced(tmp_path) as trace:
        before = int(trace.live["heartbeat_ns"])
        watcher = Watcher(trace, every_s=0.005)
        until(lambda: int(trace.live["heartbeat_ns"]) > before)
        trace.close()
        last = int(trace.live["heartbeat_ns"])
        time.sleep(0.05)
        assert int(trace.live["heartbeat_ns"]) == last
        watcher.close()  # once more is no mistake


def test_closing_the_trace_writes_the_last_counts(tmp_path: Path) -> None:
    with traced(tmp_path) as trace:
        Watcher(trace, every_s=0.005, write_s=1e9)
        time.sleep(0.1)
        trace.close()
        assert RankTrace.load(trace.path).stacks[OUTSIDE]


def test_a_watcher_that_fails_is_called_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with traced(tmp_path) as trace:
        calls: list[int] = []

        def failing() -> None:
            calls.append(1)
            raise ValueError("of no use")

        watcher = Watcher(trace, every_s=0.005)
        watcher.watchers.append(failing)
        until(lambda: not watcher.watchers)
        before = int(trace.live["heartbeat_ns"])
        until(lambda: int(trace.live["heartbeat_ns"]) > before)
        watcher.close()
        assert calls == [1]
        assert "watches no more" in caplog.text
        caplog.clear()  # its record keeps the exception, and that this frame


def test_many_places_stay_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with traced(tmp_path) as trace:
        names = iter(range(10**6))
        monkeypatch.setattr(stacks_module, "where", lambda _: f"{next(names):0160d}")
        watcher = Watcher(trace, every_s=1e9)
        for phase in [*range(len(PHASES)), 255]:
            trace.phase = phase
            for _ in range(600):
                watcher._look()
        watcher.close()
        found = RankTrace.load(trace.path).stacks
        assert set(found) == {*PHASES, OUTSIDE}
        assert all(0 < len(places) <= 50 for places in found.values())
        assert len(json.dumps(found)) < 64 << 10
        assert all(len(counts) <= 500 for counts in watcher._seen.values())
