"""What the comparison of two runs says: which is slower, and the cause that only one of them has."""

from __future__ import annotations

from pathlib import Path

from fivefold.introspect.compare import compared
from fivefold.introspect.document import document
from fivefold.introspect.run import TracedRun
from fivefold.introspect.shape import Comparison
from traces import MS, Story


def told(folder: Path, a: Story, b: Story) -> Comparison:
    return compared(*(
        document(TracedRun.load(story.write(folder / name))) for name, story in (("a", a), ("b", b))
    ))  # fmt: skip


def test_the_cause_that_has_gone_is_named(tmp_path: Path) -> None:
    found = told(tmp_path, Story().slow_loader(3), Story())
    assert found["verdict"]["level"] == "good"
    assert "Steps of b take 17 % less" in found["verdict"]["text"]
    assert "Only in a: rank 3 arrives 12 ms late" in found["verdict"]["text"]
    assert "straggler" in {f["id"] for f in found["only_a"]}
    assert found["only_b"] == []


def test_the_cause_that_has_come_is_named(tmp_path: Path) -> None:
    found = told(tmp_path, Story(), Story().sleeps(1))
    assert found["verdict"]["level"] == "bad"
    assert "Only in b: rank 1 arrives 12 ms late" in found["verdict"]["text"]
    assert "model.py:42 forward (time.sleep)" in found["verdict"]["text"]


def test_the_same_fault_on_another_rank_is_another(tmp_path: Path) -> None:
    a, b = Story().slow_loader(3), Story().slow_loader(1, 30 * MS)
    found = told(tmp_path, a, b)
    assert "Only in b: rank 1 arrives 30 ms late" in found["verdict"]["text"]


def test_what_both_have_is_no_cause(tmp_path: Path) -> None:
    a, b = Story().slow_loader(3), Story(transfer_ns=30 * MS).slow_loader(3)
    found = told(tmp_path, a, b)
    assert "rank 3" not in found["verdict"]["text"]
    assert "most of it in parameters and gradients" in found["verdict"]["text"]


def test_a_finding_that_explains_little_of_the_difference_is_no_cause(tmp_path: Path) -> None:
    # 7 ms of a late rank beside 40 ms that all compute longer.
    b = Story().slow_loader(3, 7 * MS)
    b.work[..., 2] += 40 * MS
    b.cpu[..., 2] += 40 * MS
    found = told(tmp_path, Story(), b)
    assert "straggler" in {f["id"] for f in found["only_b"]}
    assert "Only in" not in found["verdict"]["text"]


def test_equal_runs_have_no_cause(tmp_path: Path) -> None:
    found = told(tmp_path, Story().slow_loader(3), Story().slow_loader(3))
    assert found["verdict"]["text"].startswith("Steps take the same time")
    assert found["only_a"] == found["only_b"] == []
