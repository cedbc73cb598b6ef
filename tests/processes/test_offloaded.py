"""Streams whose batches helpers produce: real processes, real sockets and shared memory."""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.errors import OffloadWarning, UsageError
from fivefold.mesh import part_of
from fivefold.plan import Layout, Offload, Plan
from fivefold.trace.current import current
from fivefold.trace.helping import read as told_figures
from fivefold.trace.reader import RankTrace
from fivefold.trace.trace import Trace
from helping import Helpers, Nursery, free_port, is_running
from offloading import (
    BATCHES,
    LONGER,
    OPTIONS,
    alone,
    alone_batches,
    desk_here,
    here,
    joined,
    leases,
    read,
)
from streams import Seat, fingerprint
from waiting import awaited


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_stream_is_the_same_for_every_number_of_helpers(
    start: Callable[..., Helpers], count: int
) -> None:
    start(count)
    data = here()
    joined(count)
    assert read(data, epochs=3) == alone(epochs=3)
    assert sum(leases()) > count, "helpers produced batches"
    assert all(leases()), "all of them did"
    data.close()


def test_over_tcp_it_is_the_same(start: Callable[..., Helpers]) -> None:
    start(addresses=[f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"])
    data = here()
    joined(2)
    assert read(data, epochs=2) == alone(epochs=2)
    assert all(leases())
    data.close()


def test_without_any_helper_the_trainer_does_all(start: Callable[..., Helpers]) -> None:
    start(2, present=False)
    data = here()
    assert read(data) == alone()
    assert desk_here().supply.own == BATCHES
    data.close()


def test_two_trainers_share_a_helper(
    start: Callable[..., Helpers], nursery: Nursery, tmp_path: Path
) -> None:
    helpers = start(1)
    data = here(Seat(0, 2))
    joined()
    path = tmp_path / "second.json"
    options = {"options": OPTIONS, "rank": 1, "ranks": 2, "epochs": 2, "path": str(path)}
    other = nursery.start("helping:hash_stream", helpers.environ, **options)
    first = read(data, epochs=2)
    awaited(lambda: not is_running(other), "the second trainer")
    second = json.loads(path.read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("FIVEFOLD_HELPERS")
        assert first == read(here(Seat(0, 2)), epochs=2)
        assert second["batches"] == read(here(Seat(1, 2)), epochs=2)
    assert leases()[0] > 1 and second["leases"] > 1
    data.close()


def test_a_helper_without_the_files_is_sent_samples(
    start: Callable[..., Helpers], tmp_path: Path
) -> None:
    path = tmp_path / "samples"
    path.write_bytes(bytes(range(80)))
    changes: dict[str, Any] = {"dataset": "remote_sets:OnTrainers", "arguments": [80, str(path)]}
    start(1, {**OPTIONS, **changes})
    data = here(**changes)
    joined()
    assert read(data, epochs=3) == alone(epochs=3, **changes)
    assert leases()[0] > 1
    data.close()


def test_it_goes_on_in_the_middle(start: Callable[..., Helpers]) -> None:
    start(1)
    expected = alone(epochs=3)
    data = here()
    joined()
    seen = []
    for batch in data:
        seen.append(fingerprint([batch]))
        if len(seen) == 5:
            break
    state = data.state_dict()
    seen += read(data)
    assert seen == expected[:BATCHES]
    data.load_state_dict(state)
    assert read(data, epochs=2) == expected[5 : 2 * BATCHES]
    data.close()
    assert read(data) == expected[2 * BATCHES :], "after closing, it begins again"
    data.close()


def test_an_iteration_ends_when_another_begins(start: Callable[..., Helpers]) -> None:
    start(1)
    data = here()
    joined()
    first = iter(data)
    seen = [fingerprint([next(first)])]
    second = iter(data)
    seen.append(fingerprint([next(second)]))
    with pytest.raises(UsageError, match="use a second loader"):
        next(first)
    seen += [fingerprint([batch]) for batch in second]
    assert seen == alone()
    data.close()


@pytest.mark.long
def test_a_user_may_keep_all_batches(start: Callable[..., Helpers]) -> None:
    """Buffers are few: what is kept is copied out in time, and nothing is overwritten."""
    start(2, LONGER)
    data = here(arguments=[400])
    joined(2)
    kept = list(data)
    assert [fingerprint([batch]) for batch in kept] == alone(arguments=[400])
    assert all(leases())
    data.close()
    assert fingerprint(kept) == fingerprint(list(alone_batches(arguments=[400])))


def test_several_loaders_share_the_helpers(start: Callable[..., Helpers]) -> None:
    second = {**OPTIONS, "seed": 8, "batch_size": 4}
    start(2, second, before=[OPTIONS])
    one, two = here(), here(seed=8, batch_size=4)
    joined(2)
    seen = [(fingerprint([a]), fingerprint([b])) for a, b in zip(one, two, strict=False)]
    expected = list(zip(alone(), alone(seed=8, batch_size=4), strict=False))
    assert seen == expected
    assert all(leases())
    one.close()
    two.close()


def test_a_loader_that_nobody_holds_is_forgotten(start: Callable[..., Helpers]) -> None:
    start(1)
    data = here()
    joined()
    iterator = iter(data)
    next(iterator)
    with desk_here().lock:
        assert len(desk_here()._present()) == 1  # pyright: ignore[reportPrivateUsage]
    del data, iterator
    gc.collect()
    with desk_here().lock:
        assert desk_here()._present() == []  # pyright: ignore[reportPrivateUsage]


AHEAD = 8
"""batches that one helper may be ahead: 4 * helpers + 4 buffers"""


def test_the_trace_tells_of_helpers(
    start: Callable[..., Helpers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(1)
    trace = Trace.create(tmp_path, {"rank": 0}, {"events": 64, "windows": 64})
    monkeypatch.setattr(current, "trace", trace)
    data = here()
    joined()
    for _ in data:
        trace.step_ended(8)
    data.close()
    monkeypatch.setattr(current, "trace", None)
    trace.close()
    fields = RankTrace.load(trace.path)
    helpers, supply = told_figures(fields.meta)
    assert (helpers[0].name, helpers[0].state) == ("helper 0 (this node)", "serving")
    assert supply is not None
    # The helper makes the first one too, to be compared, and goes on with those of the next pass.
    ahead = supply.own + helpers[0].leases - (BATCHES + 1)
    assert supply.batches == BATCHES and 1 <= supply.own <= BATCHES and 0 <= ahead <= AHEAD
    assert helpers[0].busy_s > 0 and helpers[0].bytes > 0
    assert [n["event"] for n in fields.notes if n["kind"] == "helper"] == ["joined"]
    assert (fields.windows["ready"] >= 0).all()


@dataclass(frozen=True)
class TileSeat(Seat):
    """One of four tiles of every image."""

    tile: tuple[int, int] = (0, 0)

    @property
    def layout(self) -> Layout:
        return Layout(height=2, width=2)

    def coordinate(self, axis: str) -> int:
        return {"height": self.tile[0], "width": self.tile[1]}.get(axis, 0)


@pytest.mark.parametrize("tile", [(0, 0), (1, 0)])
def test_a_helper_reads_the_tile_of_its_trainer(
    start: Callable[..., Helpers], tile: tuple[int, int]
) -> None:
    """Steps of the transform are put off as well, so that bytes travel."""
    changes: dict[str, Any] = {"dataset": "remote_sets:fields", "arguments": [90]}
    start(1, {**OPTIONS, **changes})
    data = here(TileSeat(tile=tile), **changes)
    joined()
    found = [batch for _ in range(3) for batch in data]
    assert leases()[0] > 1
    data.close()
    expected = alone_batches(TileSeat(tile=tile), epochs=3, **changes)
    assert fingerprint(found) == fingerprint(expected)
    assert [part_of(batch[0]) for batch in found] == [part_of(batch[0]) for batch in expected]
    assert found[0][0].dtype == torch.float32
    assert found[0][0].shape == (8, 3, 12 - (tile[0] == 0), 8)


def test_workers_are_not_used_beside_helpers(start: Callable[..., Helpers]) -> None:
    start(1)
    with pytest.warns(OffloadWarning, match="workers=2 is not used: helpers produce the batches"):
        here(workers=2).close()


def test_the_plan_may_keep_helpers_from_loaders(start: Callable[..., Helpers]) -> None:
    start(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = here(Seat(plan=Plan(offload=Offload(augmentation=False))))
        assert read(data) == alone()
    assert leases() == [0]
