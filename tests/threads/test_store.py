"""What ranks agree on through a store: the answer, who is missing, and how many requests that takes."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fivefold.comm.meeting import Apart, meet
from fivefold.comm.store import agree, all_differ
from fivefold.errors import LaunchError

LIMIT = timedelta(seconds=20)


class Counting(dist.Store):
    """A store whose requests are counted, and the bytes that they bring."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dist.HashStore()
        self.requests: list[str] = []
        self.read_bytes = 0

    def set(self, key: str, value: Any) -> None:
        self.requests.append("set")
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        self.requests.append("get")
        return self._read([self.inner.get(key)])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.requests.append("multi_get")
        return self._read(self.inner.multi_get(keys))

    def wait(self, keys: list[str], timeout: timedelta = LIMIT) -> None:
        self.requests.append("wait")
        self.inner.wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        self.requests.append("check")
        return self.inner.check(keys)

    def _read(self, values: list[bytes]) -> list[bytes]:
        self.read_bytes += sum(map(len, values))
        return values


def everyone(function: Any, ranks: int) -> list[Any]:
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(function, range(ranks)))


def joined(store: dist.Store, rank: int, size: int, timeout: timedelta = LIMIT) -> str:
    return agree(store, rank, size, str(rank), "+".join, timeout=timeout, what="testing")


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
@pytest.mark.parametrize("ranks", [1, 5])
def test_all_get_what_the_first_decides(kind: str, ranks: int, tmp_path: Path) -> None:
    server, shared = dist.TCPStore("127.0.0.1", 0, 1, True), dist.HashStore()
    clients = {
        "hash": lambda: shared,
        "file": lambda: dist.FileStore(str(tmp_path / "store"), ranks),
        "tcp": lambda: dist.TCPStore("127.0.0.1", server.port),
    }
    stores = [dist.PrefixStore("a", clients[kind]()) for _ in range(ranks)]
    told = everyone(lambda rank: joined(stores[rank], rank, ranks), ranks)
    assert told == ["+".join(map(str, range(ranks)))] * ranks


@pytest.mark.parametrize("ranks", [2, 8, 32])
def test_a_rank_makes_few_requests_however_many_there_are(ranks: int) -> None:
    store = Counting()
    everyone(lambda rank: joined(store, rank, ranks), ranks)
    assert len(store.requests) == 3 * ranks + 1
    assert "check" not in store.requests


@pytest.mark.parametrize("ranks", [2, 8, 32])
def test_a_group_that_is_made_asks_the_store_a_few_times_per_rank(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fivefold.comm.meeting._own_problem", lambda _: "it has none")
    store = Counting()
    found = everyone(
        lambda rank: meet(dist.PrefixStore("g", store), rank, ranks, LIMIT, "g"), ranks
    )
    assert found == [Apart("rank 0 cannot share memory: it has none")] * ranks
    assert len(store.requests) == 3 * ranks + 1
    assert store.read_bytes < 1000 * 2 * ranks  # what all have told is read once


@pytest.mark.parametrize("missing", [[0], [1], [2, 3], [0, 2]])
def test_who_does_not_come_is_named(missing: list[int]) -> None:
    store, timeout = dist.HashStore(), timedelta(seconds=0.3)

    def outcome(rank: int) -> str:
        if rank in missing:
            return ""
        with pytest.raises(LaunchError) as told:
            joined(store, rank, 4, timeout)
        return str(told.value)

    plural = "s" if len(missing) > 1 else ""
    named = f"rank{plural} {', '.join(map(str, missing))} did not come within 0.3 s"
    for rank, text in enumerate(everyone(outcome, 4)):
        assert rank in missing or text.startswith(f"rank {rank} of 4: testing: {named}")


def test_who_comes_after_the_first_has_given_up_need_not_wait() -> None:
    store = dist.HashStore()
    with pytest.raises(LaunchError, match="rank 0 of 2: testing: rank 1 did not come"):
        joined(store, 0, 2, timedelta(seconds=0.1))
    began = time.monotonic()
    with pytest.raises(LaunchError, match="rank 1 of 2: testing: rank 1 did not come"):
        joined(store, 1, 2)
    assert time.monotonic() - began < LIMIT.total_seconds() / 2


@pytest.mark.parametrize(("things", "different"), [("abc", True), ("aba", False), ("a", True)])
def test_ranks_find_out_whether_they_share_a_gpu(things: str, different: bool) -> None:
    store, ranks = dist.HashStore(), len(things)

    def told(rank: int) -> bool:
        return all_differ(store, rank, ranks, things[rank], timeout=LIMIT, what="naming GPUs")

    assert everyone(told, ranks) == [different] * ranks
