"""Slices of a validation: every batch once, whatever becomes of helpers."""

from __future__ import annotations

from itertools import count

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from fivefold.offload.slices import Slices, added


def rows(batches: range | list[int], by: int = 0) -> np.ndarray:
    return np.array([[batch, by] for batch in batches], dtype=np.float64).reshape(-1, 2)


def test_what_is_free_is_granted_from_the_front() -> None:
    slices = Slices(7)
    assert slices.grant(0, helper=0, most=3, now_s=0.0) == range(3)
    assert slices.grant(1, helper=1, most=2, now_s=0.0) == range(3, 5)
    slices.lost(0)
    assert slices.grant(2, helper=1, most=9, now_s=0.0) == range(3), "no further than what is done"
    assert slices.take(9) == [5, 6]
    assert slices.grant(3, helper=1, most=1, now_s=0.0) is None


def test_the_first_answer_counts() -> None:
    slices = Slices(2)
    slices.grant(0, helper=0, most=2, now_s=0.0)
    assert slices.overdue(0.0)
    assert slices.late() == {0}
    assert not slices.overdue(9.0), "once"
    assert slices.grant(1, helper=1, most=2, now_s=1.0) == range(2)
    assert slices.done(1, rows(range(2), by=1))
    assert slices.complete
    assert not slices.done(0, rows(range(2), by=5))
    assert slices.late() == set()
    assert slices.by_helpers == 2
    assert slices.total() == [1.0, 2.0]


def test_what_a_helper_failed_at_is_for_the_trainer() -> None:
    slices = Slices(4)
    slices.grant(0, helper=0, most=2, now_s=0.0)
    slices.fail(0)
    assert slices.failed == 2
    assert slices.grant(1, helper=1, most=9, now_s=0.0) == range(2, 4)
    assert slices.take(1) == [1]
    assert slices.take(9) == [0]


def test_rows_are_added_in_their_order() -> None:
    found = [np.array([x]) for x in (1.0, 1e100, 1.0, -1e100)]
    assert added(found) == [0.0], "one after the other, not by pairs"


class Validation(RuleBasedStateMachine):
    """Whatever helpers do, every batch counts once, by the answer that came first."""

    @initialize(batches=st.integers(1, 20), most=st.integers(1, 5))
    def begin(self, batches: int, most: int) -> None:
        self.slices, self.batches, self.most = Slices(batches), batches, most
        self.out: dict[int, tuple[int, range]] = {}
        self.first: dict[int, float] = {}
        self.leases, self.now = count(), 0

    def answer(self, of: range | list[int]) -> np.ndarray:
        self.now += 1
        for batch in of:
            self.first.setdefault(batch, float(self.now))
        return rows(of, self.now)

    def chosen(self, value: int) -> int | None:
        return sorted(self.out)[value % len(self.out)] if self.out else None

    @rule(helper=st.integers(0, 2))
    def grant(self, helper: int) -> None:
        lease = next(self.leases)
        got = self.slices.grant(lease, helper, self.most, float(self.now))
        if got is not None:
            assert 1 <= len(got) <= self.most
            assert not self.first.keys() & set(got), "what is done is not granted"
            self.out[lease] = helper, got

    @rule(value=st.integers(0, 99))
    def done(self, value: int) -> None:
        if (lease := self.chosen(value)) is not None:
            self.slices.done(lease, self.answer(self.out.pop(lease)[1]))

    @rule(value=st.integers(0, 99), failed=st.booleans())
    def over(self, value: int, failed: bool) -> None:
        if (lease := self.chosen(value)) is not None:
            del self.out[lease]
            self.slices.fail(lease) if failed else self.slices.drop(lease)

    @rule(helper=st.integers(0, 2))
    def lost(self, helper: int) -> None:
        self.slices.lost(helper)
        self.out = {n: held for n, held in self.out.items() if held[0] != helper}

    @rule(ago=st.integers(0, 5))
    def late(self, ago: int) -> None:
        self.slices.overdue(float(self.now - ago))

    @rule()
    def take(self) -> None:
        taken = self.slices.take(self.most)
        assert len(taken) <= self.most
        self.slices.add(taken, self.answer(taken))

    def teardown(self) -> None:
        for lease, (_, got) in self.out.items():
            self.slices.done(lease, self.answer(got))
        while rest := self.slices.take(self.most):
            self.slices.add(rest, self.answer(rest))
        assert self.slices.complete
        expected = [np.array([b, self.first[b]]) for b in range(self.batches)]
        assert self.slices.total() == added(expected)


TestValidation = Validation.TestCase
