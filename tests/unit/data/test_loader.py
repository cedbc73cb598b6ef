"""The loader in one process: shares, cursor, resumption and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from fivefold.data import BatchId, Cursor
from fivefold.errors import DataError, UsageError
from fivefold.mesh import Part, part_of
from fivefold.plan import Loader as LoaderPlan
from fivefold.plan import Plan
from fivefold.trace import Phase, recording
from streams import Drawing, Numbers, Seat, fingerprint, generator_states, make, whole_stream


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_together_read_the_stream_of_one(ranks: int, shuffle: bool) -> None:
    """Batches of 8, 8 and 3 over 3 ranks are uneven, and over 5 the last leaves ranks without samples."""
    options: dict[str, Any] = {"batch_size": 8, "seed": 3, "epochs": 2, "shuffle": shuffle}
    alone, _ = whole_stream(Drawing(19), ranks=1, **options)
    together, _ = whole_stream(Drawing(19), ranks=ranks, **options)
    assert together == alone


def test_tensors_know_which_part_of_the_batch_they_are() -> None:
    parts = [
        [part_of(x) for x, _ in make(Numbers(10), Seat(rank, 3), batch_size=8)] for rank in range(3)
    ]
    assert parts == [
        [Part((8, 3), (0, 0)), Part((2, 3), (0, 0))],
        [Part((8, 3), (2, 0)), Part((2, 3), (0, 0))],
        [Part((8, 3), (5, 0)), Part((2, 3), (1, 0))],
    ]


def test_a_rank_without_samples_gets_tensors_without_rows() -> None:
    (batch,) = make(Drawing(2), Seat(0, 3), batch_size=8)
    assert batch["torch"].shape == (0, 3)
    assert batch["torch"].dtype == torch.float32
    assert batch["index"].shape == (0,)
    assert batch["index"].dtype == torch.int64
    assert batch["name"] == []
    assert part_of(batch["torch"]) == Part((2, 3), (0, 0))


@pytest.mark.long
@given(length=st.integers(1, 30), batch_size=st.integers(1, 9), taken=st.integers(0, 40))
def test_a_resumed_stream_goes_on_where_it_stopped(
    length: int, batch_size: int, taken: int
) -> None:
    def after(first: Any, steps: int) -> list[Any]:
        batches = []
        while len(batches) < steps:
            for batch in first:
                batches.append(batch)
                if len(batches) == steps:
                    break
        return batches

    whole = make(Drawing(length), batch_size=batch_size)
    uninterrupted = after(whole, taken + 5)
    begun = make(Drawing(length), batch_size=batch_size)
    after(begun, taken)
    resumed = make(Drawing(length), batch_size=batch_size)
    resumed.load_state_dict(begun.state_dict())
    assert fingerprint(after(resumed, 5)) == fingerprint(uninterrupted[taken:])
    assert resumed.cursor == whole.cursor
    assert resumed.cursor.step == taken + 5


def test_the_cursor_is_the_last_batch_consumed() -> None:
    data = make(Numbers(10), batch_size=4)
    assert len(data) == 3
    assert (data.cursor, data.upcoming) == (Cursor(0, -1, 0), BatchId(0, 0))
    seen = [(data.cursor, data.upcoming) for _ in data]
    assert seen == [
        (Cursor(0, 0, 1), BatchId(0, 1)),
        (Cursor(0, 1, 2), BatchId(0, 2)),
        (Cursor(0, 2, 3), BatchId(1, 0)),
    ]
    next(iter(data))
    assert (data.cursor, data.upcoming) == (Cursor(1, 0, 4), BatchId(1, 1))


def test_a_broken_off_iteration_goes_on_after_its_last_batch() -> None:
    data = make(Drawing(10), batch_size=3)
    seen = []
    for batch in data:
        seen.append(batch)
        break
    seen += list(data)
    assert fingerprint(seen) == fingerprint(make(Drawing(10), batch_size=3))


def test_an_iteration_ends_when_another_begins() -> None:
    data = make(Numbers(10), batch_size=2)
    first = iter(data)
    next(first)
    next(iter(data))
    with pytest.raises(UsageError, match="use a second loader"):
        next(first)
    assert data.cursor == Cursor(0, 1, 2)


def test_producing_a_batch_moves_nothing() -> None:
    data = make(Drawing(10), Seat(1, 2), batch_size=4)
    batches = iter(data)
    mine = [next(batches)]
    data.produce(BatchId(7, 1))
    mine += list(batches)
    shares = [data.produce(BatchId(0, b), Seat(1, 2).share(n)) for b, n in enumerate((4, 4, 2))]
    assert fingerprint(shares) == fingerprint(mine)


def test_iterating_draws_nothing_from_the_process() -> None:
    before = generator_states()
    for _ in make(Drawing(10), batch_size=4):
        assert generator_states() == before


def test_drop_last_leaves_out_the_smaller_batch() -> None:
    data = make(Numbers(10), batch_size=4, drop_last=True)
    assert [len(y) for _, y in data] == [4, 4]
    assert data.upcoming == BatchId(1, 0)


def test_waiting_for_a_batch_is_the_load_phase() -> None:
    with recording() as recorder:
        for _ in make(Numbers(10), batch_size=4):
            pass
    assert recorder.stats[Phase.LOAD].count == 3


def test_a_state_is_plain_numbers() -> None:
    state = make(Numbers(10), batch_size=4, seed=9).state_dict()
    assert state == {
        "epoch": 0, "batch": -1, "step": 0, "seed": 9,
        "dataset_length": 10, "batch_size": 4, "shuffle": 1, "drop_last": 0,
    }  # fmt: skip
    assert {type(value) for value in state.values()} == {int}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 1}, "seed is 1, this loader's is 0"),
        ({"batch_size": 5}, "batch_size is 5, this loader's is 4"),
        ({"length": 11}, "dataset_length is 11, this loader's is 10"),
        ({"shuffle": False}, "shuffle is 0, this loader's is 1"),
        ({"drop_last": True}, "drop_last is 1, this loader's is 0"),
    ],
)
def test_the_state_of_another_stream_is_refused(options: dict[str, Any], message: str) -> None:
    chosen = {"length": 10, "batch_size": 4, **options}
    state = make(Numbers(chosen.pop("length")), **chosen).state_dict()
    with pytest.raises(UsageError, match=message):
        make(Numbers(10), batch_size=4).load_state_dict(state)


def test_a_state_that_makes_no_sense_is_refused() -> None:
    data = make(Numbers(10), batch_size=4)
    with pytest.raises(UsageError, match=r"not the state of a loader: it has no .*dataset_length"):
        data.load_state_dict({"epoch": 0, "batch": 0, "step": 1})
    with pytest.raises(UsageError, match=r"batch that does not exist.*batch=3"):
        data.load_state_dict({**data.state_dict(), "batch": 3})


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


class Lengthless:
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "options", "error", "message"),
    [
        (Numbers(0), {}, DataError, r"\(Numbers\) is empty"),
        (Endless(), {}, UsageError, "Endless .*map-style.*resumed run"),
        ({1, 2}, {}, UsageError, "set .*map-style"),
        (Lengthless(), {}, UsageError, "Lengthless has no length"),
        (Numbers(3), {"batch_size": 0}, UsageError, "batch_size is 0; it must be 1 or more"),
        (Numbers(3), {"batch_size": -2}, UsageError, "batch_size is -2"),
        (Numbers(3), {"workers": -1}, UsageError, "workers is -1; it must be 0 or more"),
        (Numbers(3), {"prefetch": 0}, UsageError, "prefetch is 0; it must be 1 or more"),
        (Numbers(3), {"seed": -1}, UsageError, "seed is -1"),
        (Numbers(3), {"drop_last": True}, UsageError, "no batch is left.*3 samples, a batch 4"),
    ],
)  # fmt: skip
def test_what_cannot_be_loaded(
    dataset: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(dataset, **{"batch_size": 4, **options})


def test_the_plan_says_how_many_workers_and_the_argument_overrules_it() -> None:
    plan = Plan(loader=LoaderPlan(workers=1, prefetch=5))
    assert make(Numbers(3), Seat(plan=plan), batch_size=1)._producer is not None
    assert make(Numbers(3), Seat(plan=plan), batch_size=1, workers=0)._producer is None
