"""What a schedule says of itself, and which mistakes are found in one."""

from __future__ import annotations

import pytest

from fivefold.errors import PlanError
from fivefold.parallel.pipeline.check import check
from fivefold.parallel.pipeline.schedule import Action, Op, Schedule, walk


def table(text: str, micro_batches: int, stages: int = 0, chains: int = 1) -> Schedule:
    """A schedule from one line per rank; by default with one stage per rank."""
    rows = tuple(
        tuple(Action.parse(word) for word in line.split()) for line in text.strip().splitlines()
    )
    return Schedule("mine", len(rows), stages or len(rows), micro_batches, rows, chains)


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Action(0, 2, Op.FORWARD, 5), "F2.5"),
        (Action(1, 10, Op.WEIGHT, 0), "w10.0"),
        (Action(1, 3, Op.REDUCE), "r3"),
    ],
)
def test_actions_are_written_and_read(action: Action, text: str) -> None:
    assert str(action) == text
    assert Action.parse(text) == action


@pytest.mark.parametrize("text", ["", "F2", "R2.1", "X1.0", "F1.-1", "F1.0 B1.0"])
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match=r"is no action: write F2\.5"):
        Action.parse(text)


PAIR = """
    F0.0 B0.0 f2.1 b2.1 r2 R0
    F1.0 B1.0 f1.1 b1.1 R1 r1
    F2.0 B2.0 R2 f0.1 b0.1 r0
"""


def test_two_chains_run_against_each_other() -> None:
    pair = table(PAIR, 2, chains=2)
    check(pair)
    assert pair.held(0) == ((0, 0), (1, 2))
    assert pair.held(1) == ((0, 1), (1, 1))
    assert pair.stages_of(1) == {1}
    assert pair.ranks_of(0) == {0, 2}
    assert [list(pair.micros_of(chain)) for chain in (0, 1)] == [[0], [1]]
    assert [pair.peers(rank) for rank in range(3)] == [{1}, {0, 2}, {1}]
    assert pair.peers(0, skips=[(0, 2)]) == {1, 2}


def test_ranks_with_several_stages() -> None:
    both = Schedule("mine", ranks=2, stages=4, micro_batches=1, rows=((), ()))
    assert both.held(1) == ((0, 1), (0, 3))
    assert both.wires(skip for skip in [(0, 3)]) == {(0, 1), (1, 2), (2, 3), (0, 3)}
    assert both.peers(1, skips=[(1, 3)]) == {0}


@pytest.mark.parametrize("skip", [(1, 1), (2, 0), (0, 4), (-1, 2)])
def test_impossible_skips_are_refused(skip: tuple[int, int]) -> None:
    with pytest.raises(PlanError, match="leads to a later one of the 4 stages"):
        Schedule("mine", ranks=2, stages=4, micro_batches=1, rows=((), ())).wires([skip])


def test_actions_come_behind_what_they_wait_for() -> None:
    steps = walk(table("F0.0 I0.0 W0.0 R0\nF1.0 B1.0 R1", 1))
    assert " ".join(f"{rank}:{action}" for rank, action in steps) == (
        "0:F0.0 1:F1.0 1:B1.0 1:R1 0:I0.0 0:W0.0 0:R0"
    )


@pytest.mark.parametrize(
    ("rows", "micro_batches", "message"),
    [
        ("F0.0", 1, "rank 0 follows F0.0 by no backward; valid: B, or I and W"),
        ("F0.0 I0.0", 1, "rank 0 follows F0.0 by I;"),
        ("F0.0 B0.0 W0.0", 1, "rank 0 follows F0.0 by BW;"),
        ("B0.0", 1, "rank 0 never does F0.0"),
        ("F0.0 B0.0", 2, "rank 0 never does F0.1"),
        ("F0.0 F0.0 B0.0", 1, "rank 0 does F0.0, 2 times; once is enough"),
        ("F0.0 B0.0 R0 R0", 1, "rank 0 does R0, 2 times"),
        ("F0.0 B0.0 F0.1 B0.1", 1, "rank 0 does F0.1, but that micro-batch is not on its chain"),
        ("F0.0 B0.0 F2.0\nF1.0 B1.0", 1, "rank 0 does F2.0, but there is no such stage"),
        ("f0.0 b0.0", 1, "rank 0 does f0.0, but there is no such stage"),
        ("F1.0 B1.0\nF0.0 B0.0", 1, "rank 0 does F1.0, but rank 1 holds that stage"),
        ("B0.0 F0.0", 1, "standstill: rank 0 at B0.0 waits for F0.0, which it does later itself"),
        ("F0.0 W0.0 I0.0", 1, r"rank 0 at W0.0 waits for I0.0 \(or B0.0\), which it does later itself"),
        (
            "F0.0 B0.0 F0.1 B0.1\nF1.0 F1.1 B1.0 B1.1", 2,
            r"rank 0 at B0.0 waits for I1.0 \(or B1.0\) of rank 1; rank 1 at F1.1 waits for F0.1 of rank 0",
        ),
        ("F0.1 F0.0 B0.0 B0.1", 2, "rank 0 does F0.0 behind F0.1; the statistics of batch norms"),
        (
            "F0.0 F0.1 B0.0 B0.1\nF1.0 F1.1 B1.1 B1.0", 2,
            "rank 0 awaits the result of I1.0 before that of I1.1, but rank 1 sends them the other way",
        ),
        ("F0.0 R0 B0.0", 1, "rank 0 does B0.0 behind R0, the sum"),
        ("F0.0 I0.0 R0 W0.0", 1, "rank 0 does W0.0 behind R0, the sum"),
    ],
)  # fmt: skip
def test_mistakes_are_named(rows: str, micro_batches: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check(table(rows, micro_batches))


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("r2 R0", "R0 r2", r"rank 0 sums the stages \[0, 2\], rank 2, .* \[2, 0\]; .* same order"),
        ("r2 R0", "R0", r"rank 0 sums the stages \[0\], rank 2, .* \[2, 0\]"),
        ("F0.0 B0.0 ", "f0.0 b0.0 ", "rank 0 does f0.0, but rank 2 holds that stage"),
        ("f2.1 b2.1", "f2.2 b2.2", "rank 0 does f2.2, but that micro-batch is not on its chain"),
    ],
)
def test_mistakes_between_two_chains_are_named(right: str, wrong: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check(table(PAIR.replace(right, wrong), 2, chains=2))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (Schedule("mine", 2, 2, 1, ((),)), "1 rows for 2 ranks"),
        (Schedule("mine", 0, 2, 1, ()), "2 stages cannot be shared evenly by 0 ranks"),
        (Schedule("mine", 2, 3, 1, ((), ())), "3 stages cannot be shared evenly by 2 ranks"),
        (Schedule("mine", 1, 2, 2, ((),), chains=2), "2 chains of 2 stages on 1 ranks; valid"),
    ],
)
def test_impossible_shapes_are_named(schedule: Schedule, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check(schedule)
