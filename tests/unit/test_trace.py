import threading
import time

from fivefold.trace import Phase, Recorder, recording, span


def test_spans_are_added_up_by_name() -> None:
    with recording() as recorder:
        for _ in range(3):
            with span(Phase.FORWARD):
                time.sleep(0.002)
    stats = recorder.stats["forward"]
    assert stats.count == 3
    assert 0.002 <= stats.min_s <= stats.mean_s <= stats.max_s
    assert abs(stats.total_s - 3 * stats.mean_s) < 1e-9
    assert recorder.total_s("load") == 0.0


def test_without_a_recorder_nothing_is_kept() -> None:
    recorder = Recorder()
    with span(Phase.LOAD):
        pass
    with recording(recorder):
        pass
    with span(Phase.LOAD):
        pass
    assert recorder.stats == {}


def test_recorders_nest_and_threads_stay_apart() -> None:
    seen: list[int] = []

    def other() -> None:
        with span(Phase.LOAD):
            pass
        with recording() as mine, span(Phase.UPDATE):
            pass
        seen.append(len(mine.stats))

    with recording() as outer:
        with recording() as inner, span(Phase.BACKWARD):
            pass
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        with span(Phase.REDUCE):
            pass
    assert list(inner.stats) == ["backward"]
    assert list(outer.stats) == ["reduce"]
    assert seen == [1]


def test_a_span_that_raises_is_counted() -> None:
    with recording() as recorder:
        try:
            with span(Phase.FORWARD):
                raise KeyError
        except KeyError:
            pass
    assert recorder.stats["forward"].count == 1
