"""The table of leases: every batch arrives once and in order, whatever becomes of helpers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from fivefold.data.remote.leases import OWN, Grant, Leases
from fivefold.data.remote.loader_client import Rates, depth_for
from fivefold.data.workers import Key

OVERDUE_S = 1.0


def keys(count: int, first: int = 0) -> list[Key]:
    return [Key(0, batch, 0, 4) for batch in range(first, first + count)]


def table(count: int, depth: int) -> Leases:
    leases = Leases(itertools.count().__next__)
    leases.extend(keys(count))
    leases.depth = depth
    return leases


def granted(leases: Leases, helper: int, now_s: float = 0.0) -> Grant:
    grant = leases.grant(helper, now_s, overdue_s=OVERDUE_S)
    assert grant is not None
    return grant


def own(leases: Leases, now_s: float, *, ahead: bool, impatient: bool = False) -> Grant | None:
    return leases.take_own(now_s, ahead=ahead, impatient=impatient, overdue_s=OVERDUE_S)


def test_lost_leases_go_first_and_in_order() -> None:
    leases = table(10, 6)
    assert [granted(leases, h).position for h in (0, 0, 1, 0)] == [0, 1, 2, 3]
    leases.lost(0)
    assert [granted(leases, 1).position for _ in range(5)] == [0, 1, 3, 4, 5]
    assert leases.grant(2, 0.0, overdue_s=OVERDUE_S) is None, "the window ends at 6"


def test_an_overdue_lease_is_granted_once_more_and_the_second_answer_is_a_duplicate() -> None:
    leases = table(3, 2)
    first, _ = granted(leases, 0), granted(leases, 1, 0.9)
    assert leases.grant(1, OVERDUE_S, overdue_s=OVERDUE_S) is None
    again = granted(leases, 1, 1.5)
    assert (again.position, again.again) == (first.position, True)
    assert leases.grant(2, 1.6, overdue_s=OVERDUE_S) is None, "two at most hold it"
    assert leases.grant(0, 2.5, overdue_s=OVERDUE_S) is not None, "that of helper 1 is overdue too"
    assert leases.stalled(1.5, OVERDUE_S) == {0}
    assert leases.done(again.lease) == 0
    assert leases.done(first.lease) is None
    assert leases.done(first.lease) is None, "answered twice"
    assert leases.done(12345) is None, "of nobody's"


def test_what_the_consumer_makes_itself() -> None:
    leases = table(9, 4)
    mine = own(leases, 0.0, ahead=False)
    assert mine is not None and leases.done(mine.lease) == 0, "nobody held it"
    assert own(leases, 0.0, ahead=True) is None, "it is there"
    leases.consumed()
    granted(leases, 0, 0.0)
    assert own(leases, 0.1, ahead=False) is None, "somebody makes it"
    ahead = own(leases, 0.1, ahead=True)
    assert ahead is not None and ahead.position == 2
    none = leases.take_own(0.1, ahead=True, impatient=False, overdue_s=OVERDUE_S, end=3)
    assert none is None, "what lies ahead belongs to an epoch that may not come"
    hurried = own(leases, 0.2, ahead=False, impatient=True)
    assert hurried is not None and (hurried.position, hurried.again) == (1, True)


def test_what_a_helper_fails_at_waits_for_the_consumer() -> None:
    leases = table(5, 3)
    head, second = granted(leases, 0), granted(leases, 0)
    assert leases.failed(second.lease) == 1
    assert granted(leases, 1).position == 2, "no other helper gets it"
    leases.done(head.lease)
    leases.consumed()
    assert leases.grant(1, 9.0, overdue_s=OVERDUE_S) is not None, "the overdue one behind it"
    mine = own(leases, 0.0, ahead=True)
    assert mine is not None and mine.position == 1
    assert leases.done(mine.lease) == 1


def test_a_batch_that_makes_no_sense_is_made_by_the_consumer() -> None:
    leases = table(2, 2)
    leases.done(granted(leases, 0).lease)
    leases.spoiled()
    assert granted(leases, 0).position == 1
    mine = own(leases, 0.0, ahead=False)
    assert mine is not None and mine.position == 0


def test_a_row_goes_on_behind_its_end() -> None:
    leases = table(2, 8)
    for _ in range(2):
        leases.done(granted(leases, 0).lease)
        leases.consumed()
    assert leases.grant(0, 0.0, overdue_s=OVERDUE_S) is None
    assert own(leases, 0.0, ahead=True) is None
    leases.extend(keys(3, first=7))
    assert granted(leases, 0).key == Key(0, 7, 0, 4)
    assert leases.coming() == keys(3, first=7)


class Job(RuleBasedStateMachine):
    """Helpers that join, die, stall, fail and answer twice; a consumer that is never left waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.leases = Leases(itertools.count().__next__)
        self.total = 0
        self.now_s = 0.0
        self.alive: set[int] = set()
        self.names = itertools.count()
        self.positions: dict[int, int] = {}
        self.delivered: list[int] = []

    helpers = Bundle("helpers")
    held = Bundle("held")

    @rule(more=st.integers(0, 12))
    def keys_come(self, more: int) -> None:
        self.leases.extend(keys(more, first=self.total))
        self.total += more

    @rule(depth=st.integers(1, 8))
    def depth_changes(self, depth: int) -> None:
        self.leases.depth = depth

    @rule(seconds=st.floats(0.0, 3.0))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(target=helpers)
    def a_helper_joins(self) -> int:
        name = next(self.names)
        self.alive.add(name)
        return name

    @rule(target=held, helper=helpers)
    def a_helper_gets_a_lease(self, helper: int) -> object:
        if helper not in self.alive:
            return multiple()
        grant = self.leases.grant(helper, self.now_s, overdue_s=OVERDUE_S)
        if grant is None:
            return multiple()
        new = grant.position not in self.positions.values()
        assert self.leases.head <= grant.position
        assert not new or grant.position < self.leases.head + self.leases.depth
        assert grant.key.batch == grant.position
        assert grant.position not in self.delivered
        assert grant.lease not in self.positions
        self.positions[grant.lease] = grant.position
        return grant.lease

    @rule(lease=held)
    def it_answers(self, lease: int) -> None:
        """Perhaps not for the first time, perhaps after it was given up."""
        self._arrive(lease)

    @rule(lease=consumes(held))
    def it_fails(self, lease: int) -> None:
        self.leases.failed(lease)

    @rule(lease=consumes(held))
    def it_gives_back(self, lease: int) -> None:
        self.leases.returned(lease)

    @rule(helper=consumes(helpers))
    def it_dies(self, helper: int) -> None:
        self.alive.discard(helper)
        self.leases.lost(helper)

    @precondition(lambda self: self.leases.head < self.total)
    @rule(ahead=st.booleans(), makes=st.sampled_from(["it", "an error"]))
    def the_consumer_asks(self, ahead: bool, makes: str) -> None:
        if not self.leases.has_arrived(self.leases.head):
            grant = self.leases.take_own(
                self.now_s, ahead=ahead, impatient=False, overdue_s=OVERDUE_S
            )
            if grant is None:
                assert self.leases.holder(self.leases.head) in self.alive, "it waits for nobody"
                return
            self.positions[grant.lease] = grant.position
            if makes == "it":
                self._arrive(grant.lease)
            else:
                self.leases.failed(grant.lease)
        self._consume()

    def _arrive(self, lease: int) -> None:
        position = self.leases.done(lease)
        if position is not None:
            assert position == self.positions[lease] >= self.leases.head

    def _consume(self) -> None:
        while self.leases.has_arrived(self.leases.head):
            self.delivered.append(self.leases.head)
            self.leases.consumed()

    @invariant()
    def every_batch_is_delivered_once_and_in_order(self) -> None:
        assert self.delivered == list(range(self.leases.head))

    def teardown(self) -> None:
        """All helpers die: the consumer gets the rest alone."""
        for helper in self.alive:
            self.leases.lost(helper)
        while self.leases.head < self.total:
            self._consume()
            if self.leases.head < self.total:
                grant = own(self.leases, self.now_s, ahead=False)
                assert grant is not None and grant.position == self.leases.head
                assert self.leases.done(grant.lease) is not None
        assert self.delivered[: self.total] == list(range(len(self.delivered)))


Job.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestJob = Job.TestCase


@pytest.mark.parametrize(
    ("latency_s", "rate", "helpers", "most", "expected"),
    [(0.5, 10.0, 1, 64, 7), (0.001, 10.0, 4, 64, 8), (60.0, 10.0, 4, 16, 16), (0.0, 0.0, 0, 0, 1)],
)  # fmt: skip
def test_how_far_ahead(
    latency_s: float, rate: float, helpers: int, most: int, expected: int
) -> None:
    assert depth_for(latency_s, rate, helpers, most) == expected


def test_rates() -> None:
    rates = Rates()
    assert rates.overdue_s == 0.25
    assert not rates.suffices([0]), "nobody knows yet"
    rates.own_s.add(1.0)
    assert (rates.patience_s, rates.overdue_s) == (2.0, 6.0)
    for count in range(1, 5):  # two leases at a time: latency 0.4 s, an answer each 0.2 s
        rates.answered(0, 0.2 * count - 0.4, 0.2 * count)
    rates.of(0).service_s.add(0.2)
    assert rates.latency_s == pytest.approx(0.4)
    rates.step_s.add(0.3)
    assert rates.suffices([0])
    for slow in (3.0, 0.1, 0.1, 0.1):  # one step saved a checkpoint
        rates.step_s.add(slow)
    assert not rates.suffices([0])


def test_a_helper_that_delays_is_found_after_eight_answers() -> None:
    rate = Rates().of(3)
    rate.delayed_s = 5.0
    for count in range(8):
        assert not rate.delays()
        rate.answered(count, count + 1.0)
    assert rate.delays()
    rate.saved_s = 4.5
    assert not rate.delays()


def test_a_lease_of_the_trainer_is_never_overdue() -> None:
    leases = table(2, 2)
    assert own(leases, 0.0, ahead=False) is not None
    assert granted(leases, 0).position == 1
    assert leases.grant(1, 99.0, overdue_s=OVERDUE_S) is not None, "that of helper 0"
    assert leases.stalled(99.0, OVERDUE_S) == {0, 1} - {1}
    assert leases.holder(0) == OWN
