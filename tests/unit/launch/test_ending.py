"""When ranks are asked to save, as limits are known and change."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from fivefold.launch.ending import Ending
from fivefold.launch.progress import RankProgress
from fivefold.launch.time_left import Scheduler, TimeLeft, flux_left_s
from waiting import awaited


@pytest.mark.parametrize(
    ("limit_s", "told", "expected"),
    [
        (3600.0, "", (120.0, 5.0)),
        (600.0, "", (60.0, 5.0)),
        (60.0, "", (6.0, 1.5)),
        (3600.0, "300", (300.0, 5.0)),
        (60.0, "300", (30.0, 5.0)),
    ],
)
def test_how_long_before_the_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit_s: float,
    told: str,
    expected: tuple[float, float],
) -> None:
    monkeypatch.setenv("FIVEFOLD_END_S", told)
    ending = Ending(tmp_path, limit_s)
    assert (ending.lead_s, ending.spare_s) == expected


@pytest.mark.parametrize(
    ("limit_s", "took_ms", "lead_s"),
    [
        (3600.0, (5_000, 40_000), 90.0),
        (3600.0, (500, 800), 30.0),
        (60.0, (500, 800), 6.0),
        (60.0, (5_000, 40_000), 30.0),
        (3600.0, (100_000, -1), 200.0),
        (3600.0, (5_000, -1), 120.0),
    ],
)
def test_ranks_are_asked_as_early_as_they_need(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit_s: float,
    took_ms: tuple[int, int],
    lead_s: float,
) -> None:
    ranks = [RankProgress(), RankProgress(saving_ms=took_ms[0], copying_ms=took_ms[1])]
    ending = Ending(tmp_path, limit_s)
    ending.measured([*ranks, RankProgress(saving_ms=1)])
    ending.measured([RankProgress()] * 3)  # they start again
    assert ending.lead_s == lead_s
    monkeypatch.setenv("FIVEFOLD_END_S", "7")
    ending = Ending(tmp_path, limit_s)
    ending.measured(ranks)
    assert ending.lead_s == 7.0


def test_without_a_limit_nothing_ends(tmp_path: Path) -> None:
    ending = Ending(tmp_path)
    assert ending.look(pytest.fail) and not ending.why and not ending.over()
    assert 0 < ending.wait_s() <= 2.0


def limited(folder: Path, seconds: int, limit_s: float = math.inf) -> tuple[Ending, Path]:
    """An allocation whose scheduler says what a file holds."""
    (said := folder / "said").write_text(str(seconds))
    asked = TimeLeft((Scheduler("S", ("cat", str(said)), flux_left_s),))
    ending = Ending(folder, limit_s, asked)
    awaited(lambda: ending.look(print) and asked.end < math.inf, "an answer")
    return ending, said


def test_a_limit_that_was_extended_meanwhile_is_noticed_before_ranks_are_asked(
    tmp_path: Path,
) -> None:
    ending, said = limited(tmp_path, 12)
    with ending:
        said.write_text("1000")
        awaited(lambda: ending.look(print) and ending.left_s > 900, "the other limit")
        assert not ending.why


@pytest.mark.long
def test_a_scheduler_that_is_silent_at_last_does_not_keep_ranks_from_saving(tmp_path: Path) -> None:
    ending, said = limited(tmp_path, 12)
    said.unlink()
    told: list[str] = []
    with ending:
        awaited(lambda: ending.look(told.append) and ending.why, "the end")
    assert 0.5 < ending.end - time.monotonic() <= 1.2
    assert "what it said before holds" in told[0] and "the ranks are asked to save" in told[1]


@pytest.mark.parametrize(("limit_s", "most_s"), [(500.0, 495.0), (5000.0, 995.0)])
def test_the_earlier_limit_counts(tmp_path: Path, limit_s: float, most_s: float) -> None:
    ending, _ = limited(tmp_path, 1000, limit_s)
    ending.close()
    assert most_s - 20.0 < ending.left_s <= most_s
