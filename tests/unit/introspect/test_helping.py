"""Helpers in a report: figures of several trainers put together, who waits for whom, and what is advised."""

from __future__ import annotations

import io
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fivefold.introspect.analysis import Analysis
from fivefold.introspect.document import document
from fivefold.introspect.findings import Finding
from fivefold.introspect.run import TracedRun
from fivefold.introspect.text import show
from fivefold.introspect.verdict import findings
from fivefold.trace.helping import HelperFigures, SupplyFigures, read, tell
from fivefold.trace.reader import RankTrace
from fivefold.trace.trace import Trace
from traces import MS, Story


def helper(number: int = 0, **figures: Any) -> HelperFigures:
    """One that computes half of its time and waits for a third of it."""
    usual: dict[str, Any] = {
        "state": "serving",
        "connected_s": 10.0,
        "busy_s": 5.0,
        "waited_s": 3.3,
        "leases": 400,
    }
    return HelperFigures(
        number, f"helper {number} (dpu01:{21000 + number})", **{**usual, **figures}
    )


def told(story: Story, *helpers: HelperFigures, **supply: Any) -> Story:
    """The story of a trainer, and what it says of its helpers."""
    usual: dict[str, Any] = {"batches": 40, "own": 1, "occupancy": 2.0, "depth": 4.0}
    figures = SupplyFigures(**{**usual, **supply})
    story.meta["offload"] = {"helpers": [asdict(h) for h in helpers], "supply": asdict(figures)}
    return story


def found(story: Story, folder: Path) -> dict[str, Finding]:
    return {f.id: f for f in findings(Analysis(TracedRun.load(story.write(folder))))}


def test_what_is_told_is_read_back(tmp_path: Path) -> None:
    trace = Trace.create(tmp_path, {"rank": 0})
    helpers, supply = (
        [helper(0, lost=3), helper(1, state="lost")],
        SupplyFigures(7, 2, 1, 0.5, 1.5, 3),
    )
    tell(trace, [], SupplyFigures())
    tell(trace, helpers, supply)
    trace.close()
    assert read(RankTrace.load(trace.path).meta) == (helpers, supply)


@pytest.mark.parametrize("meta", [
    {}, {"offload": 3}, {"offload": {"helpers": [None, {"number": "x"}, {"number": 1}]}},
])  # fmt: skip
def test_a_run_without_helpers_has_none(meta: dict[str, Any]) -> None:
    assert read(meta) == ([], None)


def test_fields_of_other_versions_are_left_out() -> None:
    told = {"helpers": [{**asdict(helper()), "colour": "red"}], "supply": {"batches": 1, "mood": 2}}
    assert read({"offload": told}) == ([helper()], SupplyFigures(1))


def test_a_helper_of_two_trainers_is_one_row(tmp_path: Path) -> None:
    of = {
        0: [helper(1, connected_s=10.0, busy_s=4.0, waited_s=1.0, leases=40, bytes=7)],
        1: [helper(1, connected_s=8.0, busy_s=3.0, waited_s=0.5, leases=30, duplicates=2),
            helper(2, state="lost", why="its connection broke", connected_s=0.0)],
    }  # fmt: skip
    run = TracedRun.load(Story(ranks=2).write(tmp_path))
    for trace in run.ranks:
        trace.meta["offload"] = {
            "helpers": [asdict(h) for h in of[trace.rank]],
            "supply": asdict(SupplyFigures(10, 1, 5, 2.0, 0.5, 4.0)),
        }
    made = document(run)["offload"]
    first, second = made["helpers"]
    assert (first["number"], first["trainers"], first["leases"], first["duplicates"]) == (
        1,
        [0, 1],
        70,
        2,
    )
    assert (first["busy_share"], first["waited_share"]) == (0.7, 0.15)
    assert (second["state"], second["trainers"], second["busy_share"]) == ("lost", [], None)
    assert [row["rank"] for row in made["supply"]] == [0, 1]
    assert made["supply"][0] == {
        "rank": 0, "batches": 10, "own": 1, "empty_share": 0.5, "waited_s": 0.2, "occupancy": 0.5,
        "depth": 4.0,
    }  # fmt: skip


def test_too_few_helpers_are_told_with_how_many_would_do(tmp_path: Path) -> None:
    story = Story(ranks=1).slow_loader(slice(None), 25 * MS)
    told(story, helper(0, busy_s=9.0), helper(1, busy_s=9.5), empty=38, waited_s=1.0, occupancy=0.1)
    short = found(story, tmp_path)["helpers-short"]
    assert "add helpers: 3 instead of 2" in short.advice
    assert short.gain_s == pytest.approx(25e-3, rel=0.1)
    assert short.figures["busy_share"] == pytest.approx(0.925)
    assert "loader" not in found(story, tmp_path / "again"), "one cause is told once"


def test_helpers_with_time_left_are_not_too_few(tmp_path: Path) -> None:
    story = told(Story(ranks=1).slow_loader(slice(None), 30 * MS), helper(busy_s=5.0), empty=38)
    assert "more of them would not help" in found(story, tmp_path)["helpers-short"].advice


def test_who_has_no_helpers_for_batches_needs_workers(tmp_path: Path) -> None:
    story = told(Story(ranks=1).slow_loader(slice(None), 30 * MS), helper(), batches=40, own=40)
    assert {"loader", "helpers-short"} & found(story, tmp_path).keys() == {"loader"}


def test_idle_helpers_are_told(tmp_path: Path) -> None:
    helpers = [helper(n, busy_s=1.0, waited_s=8.0) for n in range(4)]
    idle = found(told(Story(ranks=1), *helpers, occupancy=3.9), tmp_path)["helpers-idle"]
    assert "idle 90 %" in idle.title
    assert "validation" in idle.advice and "take 1 instead of 4" in idle.advice
    evaluating = [helper(n, busy_s=1.0, evaluated=5) for n in range(4)]
    idle = found(told(Story(ranks=1), *evaluating), tmp_path / "evaluating")["helpers-idle"]
    assert "validation" not in idle.advice


def test_busy_helpers_that_keep_up_are_not_mentioned(tmp_path: Path) -> None:
    rules = {"helpers-short", "helpers-idle", "helper-gone", "helpers-twice"}
    assert not rules & found(told(Story(ranks=1), helper(0), helper(1)), tmp_path).keys()
    assert not rules & found(Story(), tmp_path / "none").keys()


@pytest.mark.parametrize(("state", "said"), [
    ("lost", "was lost: it is gone"), ("retired", "delayed more than it helped"),
    ("refused", "could not serve"),
])  # fmt: skip
def test_who_went_is_told(tmp_path: Path, state: str, said: str) -> None:
    story = told(Story(ranks=1), helper(0), helper(3, state=state, why="it is gone"))
    gone = found(story, tmp_path)["helper-gone"]
    assert said in gone.title and "helper 3 (dpu01:21003)" in gone.title
    assert gone.evidence[0]["rows"] == [1]


def test_work_done_twice_is_told_with_its_helper(tmp_path: Path) -> None:
    story = told(Story(ranks=1), helper(0), helper(1, duplicates=200))
    twice = found(story, tmp_path)["helpers-twice"]
    assert twice.figures == {"duplicates": 200, "leases": 800, "helper": 1}
    assert "25 %" in twice.title


def test_events_of_helpers_are_marks(tmp_path: Path) -> None:
    note = {
        "kind": "helper",
        "at_ns": 10**12,
        "event": "lost",
        "number": 1,
        "text": "helper 1 was lost",
    }
    made = document(TracedRun.load(Story(notes=[note]).write(tmp_path)))
    assert [(m["kind"], m["text"]) for m in made["marks"]] == [("helper", "helper 1 was lost")]


def test_the_terminal_shows_helpers(tmp_path: Path) -> None:
    story = told(Story(ranks=1), helper(0), waited_s=0.4, own=3)
    printed = io.StringIO()
    show(document(TracedRun.load(story.write(tmp_path))), Console(file=printed, width=200))
    text = printed.getvalue()
    row = next(line for line in text.splitlines() if line.startswith("helper 0"))
    assert row.split()[3:] == ["serving", "50", "%", "33", "%", "400", "0", "0", "0"]
    assert "rank 0 waits 10 ms per batch for helpers; 2.0 of 4.0 batches" in text
    assert "3 of 40 it made itself" in text
