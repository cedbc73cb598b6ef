"""The loader with worker processes: the same stream, no matter who computes it, and nobody left behind."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from fivefold.data import BatchId, Cursor, LoadError
from fivefold.errors import DataError, UsageError
from fivefold.mesh import part_of
from fivefold.plan import Comm, Plan
from streams import (
    Drawing,
    Numbers,
    Seat,
    fingerprint,
    generator_states,
    joined,
    make,
    whole_stream,
)

pytestmark = [
    # Three workers on two cores are the point of some tests.
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    # Python 3.12 warns when a process with threads forks; DataLoader forks by default.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

LENGTH, BATCH_SIZE, EPOCHS = 19, 8, 2


@pytest.fixture(scope="module")
def reference() -> str:
    stream, _ = whole_stream(Drawing(LENGTH), ranks=1, batch_size=BATCH_SIZE, epochs=EPOCHS)
    return stream


@pytest.mark.long(every=8)
@pytest.mark.parametrize(("ranks", "workers"), [(1, 1), (1, 3), (2, 1), (3, 1), (2, 3), (5, 1)])
def test_the_stream_is_the_same_for_any_ranks_and_workers(
    reference: str, ranks: int, workers: int
) -> None:
    """Batches of 8, 8 and 3: uneven shares, and ranks without samples."""
    before = generator_states()
    stream, loaders = whole_stream(
        Drawing(LENGTH), ranks=ranks, workers=workers, batch_size=BATCH_SIZE, epochs=EPOCHS
    )
    for loader in loaders:
        loader.close()
    assert stream == reference
    assert generator_states() == before


def test_the_next_epoch_is_another_and_the_workers_stay() -> None:
    with make(Process(6), batch_size=2, workers=2) as data:
        first, second = list(data), list(data)
    workers = [set(torch.cat([b["pid"] for b in epoch]).tolist()) for epoch in (first, second)]
    assert workers[0] == workers[1]
    assert os.getpid() not in workers[0]
    drawn = [torch.cat([b["torch"] for b in epoch]) for epoch in (first, second)]
    assert not torch.equal(drawn[0].sort(dim=0)[0], drawn[1].sort(dim=0)[0])


class Process(Drawing):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "pid": os.getpid()}


def test_a_resumed_stream_goes_on_from_every_position(reference: str) -> None:
    """One loader is moved to every position in turn; prefetched batches of the last are dropped."""
    total = 3 * EPOCHS
    whole = list_steps(make(Drawing(LENGTH), batch_size=BATCH_SIZE), total)
    assert fingerprint(whole) == reference
    states = []
    with make(Drawing(LENGTH), batch_size=BATCH_SIZE, workers=1) as data:
        states.append(data.state_dict())
        for _ in range(EPOCHS):
            states += [data.state_dict() for _ in data]
        assert [state["step"] for state in states] == list(range(total + 1))
        for state in reversed(states[:-1]):
            data.load_state_dict(state)
            rest = list_steps(data, total - state["step"])
            assert fingerprint(rest) == fingerprint(whole[state["step"] :])


def list_steps(data: Any, steps: int) -> list[Any]:
    batches: list[Any] = []
    while len(batches) < steps:
        for batch in data:
            batches.append(batch)
            if len(batches) == steps:
                break
    return batches


def test_prefetched_batches_are_not_consumed() -> None:
    with make(Numbers(40), batch_size=2, workers=2, prefetch=4) as data:
        batches = iter(data)
        next(batches)
        time.sleep(0.2)  # the workers are far ahead by now
        assert data.cursor == Cursor(0, 0, 1)
        assert fingerprint(data) == fingerprint(list(make(Numbers(40), batch_size=2))[1:])


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_names_sample_and_batch_and_can_be_survived(workers: int) -> None:
    with make(Fragile(8), batch_size=2, shuffle=False, workers=workers) as data:
        seen = []
        with pytest.raises(LoadError, match=r"sample 5 \(batch 2 of epoch 0\).*no such slice") as e:
            seen += [y.tolist() for _, y in data]
        assert data.cursor == Cursor(0, 1, 2)
        assert "__getitem__" in str(e.value.__cause__) or workers == 0
        data.load_state_dict({**data.state_dict(), "batch": 2})
        assert [y.tolist() for _, y in data] == [[6, 7]]


class Fragile(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise ValueError("no such slice")
        return super().__getitem__(index)


class Files(Numbers):
    """Reads its samples from files, and says which one is damaged."""

    def __init__(self, root: Path, length: int) -> None:
        super().__init__(length)
        self.root = root
        for index in range(length):
            np.save(root / f"{index}.npy", np.full(4, index))

    def __getitem__(self, index: int) -> Any:
        path = self.root / f"{index}.npy"
        try:
            return np.load(path)
        except ValueError as error:
            raise DataError(f"{path} is truncated") from error


def test_a_truncated_file_is_named_from_inside_a_worker(tmp_path: Path) -> None:
    dataset = Files(tmp_path, 6)
    damaged = tmp_path / "3.npy"
    damaged.write_bytes(damaged.read_bytes()[:-8])
    with make(dataset, batch_size=2, workers=1) as data:
        with pytest.raises(DataError, match=r"^\S+3\.npy is truncated$") as caught:
            list(data)
        assert "while reading sample 3" in str(caught.value.__cause__)


def test_samples_that_do_not_fit_are_a_usage_error_from_inside_a_worker() -> None:
    samples = [torch.ones(2), torch.ones(3)]
    with (
        make(samples, batch_size=2, workers=1) as data,
        pytest.raises(UsageError, match=r"shape.*\(2,\), \(3,\)"),
    ):
        list(data)


class Deadly(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_worker_that_is_killed_is_reported() -> None:
    with make(Deadly(8), batch_size=2, shuffle=False, workers=1, prefetch=1) as data:
        with pytest.raises(LoadError, match=r"worker died.*try fewer \(loader\.workers\)"):
            list(data)
        assert workers_of_this_process() == []
        data.load_state_dict({**data.state_dict(), "batch": 1})
        assert [y.tolist() for _, y in data] == [[4, 5], [6, 7]]


class Stuck(Numbers):
    def __getitem__(self, index: int) -> Any:
        if index == 3:
            time.sleep(60)
        return super().__getitem__(index)


@pytest.mark.long
def test_a_worker_that_hangs_is_reported() -> None:
    plan = Plan(comm=Comm(timeout_s=1.0))
    with make(Stuck(4), Seat(plan=plan), batch_size=2, shuffle=False, workers=1) as data:
        began = time.monotonic()
        with pytest.raises(LoadError, match="no batch within 1 s"):
            list(data)
        assert time.monotonic() - began < 15


def workers_of_this_process() -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process().children()
        if child.status() != psutil.STATUS_ZOMBIE
        and child.name() == "pt_data_worker"  # not the pool's server, nor what other tests keep
    ]


def test_close_ends_the_workers_and_iterating_starts_new_ones() -> None:
    data = make(Numbers(8), batch_size=2, workers=2)
    assert workers_of_this_process() == []
    batches = iter(data)
    first = next(batches)
    assert len(workers_of_this_process()) == 2
    data.close()
    assert workers_of_this_process() == []
    with pytest.raises(UsageError, match="closed"):
        next(batches)
    rest = list(data)
    assert fingerprint([first, *rest]) == fingerprint(make(Numbers(8), batch_size=2))
    data.close()
    data.close()


def test_a_loader_that_nobody_holds_ends_its_workers() -> None:
    data = make(Numbers(8), batch_size=2, workers=1)
    next(iter(data))
    assert len(workers_of_this_process()) == 1
    del data
    assert workers_of_this_process() == []


def test_own_draws_between_batches_do_not_change_the_stream(reference: str) -> None:
    """What dropout and the like draw in the process has no say in what the samples look like."""
    loaders = [
        make(Drawing(LENGTH), Seat(rank, 2), batch_size=BATCH_SIZE, workers=rank)
        for rank in range(2)
    ]
    together = []
    for _ in range(EPOCHS):
        for shares in zip(*loaders, strict=True):
            together.append(joined(shares))
            torch.rand(7), np.random.rand(3), random.random()  # noqa: NPY002
    for loader in loaders:
        loader.close()
    assert fingerprint(together) == reference


def test_workers_and_produce_agree() -> None:
    with make(Drawing(10), Seat(1, 3), batch_size=4, workers=1) as data:
        mine = list(data)
        share = [data.produce(BatchId(0, b), Seat(1, 3).share(n)) for b, n in enumerate((4, 4, 2))]
    assert fingerprint(mine) == fingerprint(share)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_arrive_on_the_gpu_with_their_structure(workers: int) -> None:
    device = torch.device("cuda")
    seat = Seat(1, 2, device=device)
    with make(Numbers(6), seat, batch_size=4, workers=workers) as data:
        batches = list(data)
    for batch in batches:
        assert type(batch) is tuple
        assert {x.device.type for x in batch} == {"cuda"}
        assert part_of(batch[0]) is not None
    on_cpu = [tuple(x.cpu() for x in batch) for batch in batches]
    assert fingerprint(on_cpu) == fingerprint(make(Numbers(6), Seat(1, 2), batch_size=4))
