"""Samples that cannot be read, where they may be left out: counted, told, alike for all who produce."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fivefold.data import BatchId
from fivefold.data.source import LoadError, Source
from fivefold.errors import DataError, DataWarning, UsageError
from fivefold.mesh import Part, part_of
from fivefold.plan import Layout, Offload, Plan
from streams import Drawing, Seat, fingerprint, make


class Damaged(Drawing):
    """Some samples cannot be read."""

    def __init__(self, length: int, bad: set[int]) -> None:
        super().__init__(length)
        self.bad = bad

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)  # draws first, as a transform that fails late
        if index in self.bad:
            raise DataError(f"{index}.png is damaged") if index % 2 else ValueError(f"no {index}")
        return sample


def skipping(dataset: Any, **options: Any) -> Source:
    return Source(dataset, batch_size=4, shuffle=False, on_error="skip", **options)


def test_the_others_are_what_they_are_without_it() -> None:
    made = skipping(Damaged(8, {1, 2})).make(BatchId(0, 0))
    whole = Source(Drawing(8), batch_size=4, shuffle=False).produce(BatchId(0, 0))
    assert [(s.index, s.why) for s in made.skipped] == [
        (1, "1.png is damaged"),
        (2, "sample 2 (batch 0 of epoch 0) could not be read: ValueError: no 2"),
    ]
    assert made.batch["name"] == ["sample 0", "sample 3"]
    assert torch.equal(made.batch["torch"], whole["torch"][[0, 3]])
    assert skipping(Damaged(8, {1})).make(BatchId(0, 1)).skipped == ()


def test_a_share_of_which_nothing_is_left_is_empty() -> None:
    made = skipping(Damaged(8, {1, 2})).make(BatchId(0, 0), range(1, 3))
    assert made.batch["torch"].shape == (0, 3)
    assert made.batch["name"] == []
    assert len(made.skipped) == 2


def test_a_batch_of_which_nothing_is_left_is_an_error() -> None:
    with pytest.raises(LoadError, match="no 4"):
        skipping(Damaged(8, {4, 5, 6, 7})).make(BatchId(0, 1))


@pytest.mark.parametrize("workers", [0, 2])
def test_it_is_counted_and_told_at_the_end_of_an_epoch(workers: int) -> None:
    seat = Seat(plan=Plan(offload=Offload(on_error="skip")))
    with make(Damaged(10, {1, 6, 7}), seat, batch_size=4, workers=workers) as data:
        with pytest.warns(DataWarning, match=r'3 samples were left out, as on_error = "skip" all'):
            found = list(data)
        assert data.skipped == 3
        parts = [part_of(batch["torch"]) for batch in found]
        sizes = [len(batch["name"]) for batch in found]
        assert parts == [Part((size, 3), (0, 0)) for size in sizes]
        assert sum(sizes) == 7
    with pytest.warns(DataWarning, match="left out"):
        plain = list(make(Damaged(10, {1, 6, 7}), batch_size=4, on_error="skip"))
    assert fingerprint(found) == fingerprint(plain)


def test_shares_say_nothing_of_the_whole_where_other_ranks_may_have_skipped() -> None:
    """A step then counts the samples of all ranks."""
    found = []
    for rank in range(2):
        with pytest.warns(DataWarning, match="left out") if rank == 0 else _silent():
            data = make(
                Damaged(4, {0}), Seat(rank, 2), batch_size=4, on_error="skip", shuffle=False
            )
            found += list(data)
    assert [len(batch["name"]) for batch in found] == [1, 2]
    assert [part_of(batch["torch"]) for batch in found] == [None, None]


class _silent:  # noqa: N801 - reads like the pytest.warns beside it
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_another_policy_is_another_stream() -> None:
    stopping, skips = (make(Drawing(8), batch_size=4, on_error=how) for how in ("stop", "skip"))
    assert skips.state_dict()["skip_errors"] == 1
    skips.load_state_dict(skips.state_dict())
    with pytest.raises(UsageError, match="skip_errors is 1, this loader's is 0"):
        stopping.load_state_dict(skips.state_dict())
    with pytest.raises(UsageError, match="skip_errors is 0, this loader's is 1"):
        skips.load_state_dict(stopping.state_dict())


def test_ranks_with_tiles_of_one_sample_cannot_skip() -> None:
    class Tiled(Seat):
        @property
        def layout(self) -> Layout:
            return Layout(data=2, height=2)

    with pytest.raises(UsageError, match=r'on_error = "skip" cannot be used here'):
        make(Drawing(8), Tiled(), batch_size=4, on_error="skip")
