"""Batches as a pure function of (data set, seed, epoch, batch)."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from fivefold.data.seeding import isolated, permutation, seed_sample
from fivefold.data.source import BatchId, LoadError, Source
from fivefold.errors import DataError, UsageError
from fivefold.mesh import owned
from streams import Drawing, Numbers, fingerprint, generator_states, joined

FIRST = BatchId(0, 0)


def test_the_order_of_an_epoch_is_frozen() -> None:
    """A run that resumes under another numpy goes on in the same order."""
    assert permutation(0, 0, 8).tolist() == [7, 0, 6, 5, 4, 3, 1, 2]
    digest = hashlib.sha256(permutation(7, 3, 10_000).astype("<i8").tobytes()).hexdigest()
    assert digest[:16] == "113d87732a851eb4"


def test_the_randomness_of_a_sample_is_frozen() -> None:
    with isolated():
        seed_sample(1, 2, 3)
        drawn = (
            int(torch.randint(1 << 30, ())),
            int(np.random.randint(1 << 30)),  # noqa: NPY002
            random.random(),
        )
    assert drawn == (438076895, 626990049, 0.3619152635607574)


@given(st.integers(0, 2**64 - 1), st.integers(0, 10**6), st.integers(1, 200))
def test_an_epoch_visits_every_sample_once(seed: int, epoch: int, length: int) -> None:
    assert sorted(permutation(seed, epoch, length).tolist()) == list(range(length))


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(permutation(seed, epoch, 50)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


@given(
    length=st.integers(1, 40),
    batch_size=st.integers(1, 17),
    ranks=st.integers(1, 9),
    drop_last=st.booleans(),
)
def test_shares_together_are_the_batch(
    length: int, batch_size: int, ranks: int, drop_last: bool
) -> None:
    source = Source(Drawing(length), batch_size=batch_size, seed=5, drop_last=drop_last)
    seen: list[int] = []
    for number in range(len(source)):
        batch_id = BatchId(1, number)
        whole = source.produce(batch_id)
        n = source.size(batch_id)
        shares = [source.produce(batch_id, owned(n, ranks, rank)) for rank in range(ranks)]
        assert fingerprint([joined(shares)]) == fingerprint([whole])
        seen += whole["index"].tolist()
    assert len(seen) == length - (length % batch_size if drop_last else 0)
    assert len(set(seen)) == len(seen)


def test_randomness_does_not_depend_on_the_batch_size() -> None:
    def by_index(batch_size: int) -> dict[int, float]:
        source = Source(Drawing(12), batch_size=batch_size)
        batches = [source.produce(BatchId(0, number)) for number in range(len(source))]
        return {
            int(i): float(p) for b in batches for i, p in zip(b["index"], b["python"], strict=True)
        }

    assert by_index(1) == by_index(5) == by_index(12)


def test_a_sample_looks_different_in_another_epoch() -> None:
    source = Source(Drawing(4), batch_size=4, shuffle=False)
    first, second = (source.produce(BatchId(epoch, 0)) for epoch in (0, 1))
    assert first["index"].tolist() == second["index"].tolist() == [0, 1, 2, 3]
    for name in ("torch", "numpy", "python"):
        assert not (first[name] == second[name]).any()
        assert first[name].unique().numel() == first[name].numel(), "samples share randomness"


def test_the_generators_of_the_process_go_on_undisturbed() -> None:
    before = generator_states()
    Source(Drawing(4), batch_size=4).produce(FIRST)
    assert generator_states() == before
    with pytest.raises(LoadError):
        Source(Failing(4), batch_size=4).produce(FIRST)
    assert generator_states() == before


def test_a_large_sum_does_not_depend_on_the_number_of_threads() -> None:
    class Mean(Numbers):
        def __getitem__(self, index: int) -> Any:
            return torch.rand(300_000).mean()

    source = Source(Mean(2), batch_size=2)
    threads = torch.get_num_threads()
    try:
        means = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            means.append(fingerprint([source.produce(FIRST)]))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert len(set(means)) == 1


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Scan:
    volume: torch.Tensor
    patient: str


pytree.register_dataclass(Scan)


@pytest.mark.parametrize(
    ("sample", "batch"),
    [
        ((torch.ones(2), 1), (torch.ones(3, 2), torch.tensor([1, 1, 1]))),
        (torch.ones(2, dtype=torch.uint8), torch.ones(3, 2, dtype=torch.uint8)),
        ({"a": 0.5, "b": ["n", None]}, {"a": torch.tensor([0.5] * 3).double(),
                                        "b": [["n"] * 3, [None] * 3]}),
        (Point(np.float32(1), np.arange(2)), Point(torch.ones(3), torch.arange(2).repeat(3, 1))),
        (Scan(torch.zeros(1, 2), "p7"), Scan(torch.zeros(3, 1, 2), ["p7"] * 3)),
    ],
)  # fmt: skip
def test_samples_of_any_structure_keep_it(sample: Any, batch: Any) -> None:
    class Same(Numbers):
        def __getitem__(self, index: int) -> Any:
            return sample

    source = Source(Same(3), batch_size=3)
    produced, empty = source.produce(FIRST), source.produce(FIRST, range(2, 2))
    assert fingerprint([produced]) == fingerprint([batch])
    assert type(produced) is type(batch)
    for whole, nothing in zip(pytree.tree_leaves(batch), pytree.tree_leaves(empty), strict=False):
        if isinstance(whole, torch.Tensor):
            assert nothing.shape == (0, *whole.shape[1:])
            assert nothing.dtype == whole.dtype
    if isinstance(empty, Scan):
        assert empty.patient == []


class Failing(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index == 2:
            raise ValueError("no such slice")
        return super().__getitem__(index)


def test_an_error_in_the_data_set_names_sample_and_batch() -> None:
    source = Source(Failing(4), batch_size=2, shuffle=False)
    source.produce(FIRST)
    with pytest.raises(LoadError, match=r"sample 2 \(batch 1 of epoch 5\).*ValueError: no such"):
        source.produce(BatchId(5, 1))


def test_a_damaged_file_stays_a_data_error() -> None:
    class Damaged(Numbers):
        def __getitem__(self, index: int) -> Any:
            raise DataError("scan.png is truncated")

    with pytest.raises(DataError, match=r"^scan\.png is truncated") as caught:
        Source(Damaged(4), batch_size=2, shuffle=False).produce(FIRST)
    assert caught.value.__notes__ == ["while reading sample 0 for batch 0 of epoch 0"]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([torch.ones(3, 4), torch.ones(3, 5)], r"shape.*\(3, 4\), \(3, 5\).*collate="),
        ([(1, 2), (1, 2, 3)], r"structure.*\(int, int\).*\(int, int, int\)"),
        ([object(), object()], r"'object'.*cannot be stacked"),
    ],
)
def test_samples_that_do_not_fit_together(samples: list[Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Source(samples, batch_size=2, shuffle=False).produce(FIRST)


def test_a_collate_of_the_users_own() -> None:
    def padded(samples: list[tuple[torch.Tensor, int]]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True)

    assert Source(Numbers(4), batch_size=4, collate=padded).produce(FIRST).shape == (4, 3)
    with pytest.raises(UsageError, match=r"shape \(\) from 4 samples"):
        Source(Numbers(4), batch_size=4, collate=lambda s: torch.tensor(len(s))).produce(FIRST)
    with pytest.raises(LoadError, match=r"collate failed on batch 0.*samples 0, 1.*KeyError"):
        Source(Numbers(2), batch_size=2, shuffle=False, collate=lambda _: {}["x"]).produce(FIRST)


@pytest.mark.parametrize("batch_id", [BatchId(-1, 0), BatchId(0, -1), BatchId(0, 3)])
def test_a_batch_that_does_not_exist(batch_id: BatchId) -> None:
    with pytest.raises(UsageError, match="from 0 to 2"):
        Source(Numbers(10), batch_size=4).produce(batch_id)


@pytest.mark.parametrize("share", [range(3), range(-1, 1), range(0, 2, 2)])
def test_a_share_that_does_not_exist(share: range) -> None:
    with pytest.raises(UsageError, match="batch 2 of epoch 0 has 2 samples"):
        Source(Numbers(10), batch_size=4).produce(BatchId(0, 2), share)
