"""One job writes to a directory; a job that has died does not keep others out."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fivefold.checkpoint.lease import LEASE, Lease, this_process
from fivefold.checkpoint.opening import Opened
from fivefold.checkpoint.place import LocalPlace, Place, place_at
from fivefold.checkpoint.ranks import Ranks
from fivefold.checkpoint.run import RunHistory
from fivefold.checkpoint.store import PersistentStore
from fivefold.errors import CheckpointError, InUse, UsageError


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivefold.checkpoint.lease._SETTLE_S", 0.3)


@pytest.fixture(params=["path", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return place_at(tmp_path if request.param == "path" else f"memory:/{tmp_path}")


def left(place: Place, *, age_s: float = 0.0, **changes: Any) -> None:
    """The lease of some other process."""
    content = {**this_process(), "job": "", "start": 0, "token": "x", **changes}
    place.make_dir()
    place.write(LEASE, [json.dumps({**content, "time_s": time.time() - age_s}).encode()])
    if isinstance(place, LocalPlace):
        then = time.time() - age_s
        os.utime(place.path(LEASE), (then, then))


def test_a_second_job_is_refused_with_the_remedy(place: Place) -> None:
    with Lease(place, job="17"), pytest.raises(InUse) as caught:
        Lease(place, job="18")
    told = str(caught.value)
    assert f"is written to by process {os.getpid()} on" in told and "job 17" in told
    assert "wait 15 s, or remove" in told and LEASE in told
    assert isinstance(caught.value, UsageError) and caught.value.exit_code == 2
    with Lease(place):
        pass
    assert not place.exists(LEASE)


def test_a_job_on_another_node_is_believed_until_it_is_silent(place: Place) -> None:
    left(place, host="elsewhere", age_s=12)
    with pytest.raises(InUse, match="on elsewhere"):
        Lease(place)
    left(place, host="elsewhere", age_s=70, stale_s=90.0)
    with pytest.raises(InUse, match="wait 90 s"):  # it asked for more patience than ours
        Lease(place)
    left(place, host="elsewhere", age_s=70, stale_s=0.1)
    Lease(place).close()


def test_clocks_of_hosts_that_write_to_an_object_store_may_differ(tmp_path: Path) -> None:
    place = place_at(f"memory:/{tmp_path}")
    with Lease(place, beat_s=0.05):
        content = json.loads(place.read(LEASE))
        for behind_s in (40.0, -4000.0):
            left(place, age_s=behind_s, **{**content, "host": "elsewhere"})
            with pytest.raises(InUse):
                Lease(place, stale_s=5.0)
    left(place, host="elsewhere", age_s=-4000.0)
    began = time.monotonic()
    Lease(place, wait_s=20.0, stale_s=0.5, beat_s=0.1).close()
    assert 0.5 <= time.monotonic() - began < 15


def test_waiting_outlasts_a_job_that_has_died(place: Place) -> None:
    left(place, host="elsewhere")
    Lease(place, wait_s=20.0, stale_s=0.3, beat_s=0.1).close()


def test_waiting_ends_when_the_other_job_is_seen_to_live(place: Place) -> None:
    with Lease(place, beat_s=0.05):
        began = time.monotonic()
        with pytest.raises(InUse):
            Lease(place, wait_s=60.0, beat_s=0.05)
        assert time.monotonic() - began < 30


def test_an_earlier_start_of_the_same_job_is_over(place: Place) -> None:
    left(place, host="elsewhere", job="17", start=1)
    for job, start in (("", 2), ("18", 2), ("17", 1), ("17", 0)):
        with pytest.raises(InUse):
            Lease(place, job=job, start=start)
    Lease(place, job="17", start=2).close()


def test_an_earlier_start_of_the_same_launch_is_left_behind(place: Place) -> None:
    with Lease(place, launch="ab", restart=1, beat_s=60.0) as first:
        for launch, restart in (("", 2), ("cd", 2), ("ab", 1), ("ab", 0)):
            with pytest.raises(InUse):
                Lease(place, launch=launch, restart=restart)
        with (
            Lease(place, launch="ab", restart=2),
            pytest.raises(CheckpointError, match="took over from this job"),
        ):
            first.check()


def test_a_process_of_this_host_that_has_ended_is_over(tmp_path: Path) -> None:
    place = LocalPlace(tmp_path)
    code = (
        "import os, sys\nfrom pathlib import Path\n"
        "from fivefold.checkpoint.lease import Lease\nfrom fivefold.checkpoint.place import LocalPlace\n"
        "Lease(LocalPlace(Path(sys.argv[1])))\nos._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    assert place.exists(LEASE)
    Lease(place).close()
    left(place, pid=os.getpid(), began="1")  # the number was given to another process meanwhile
    Lease(place).close()
    left(place, pid=2**22 + 1, namespace="pid:[1]")  # cannot be seen from here
    with pytest.raises(InUse):
        Lease(place)


def test_nonsense_is_nobodys(place: Place) -> None:
    place.make_dir()
    for content in (b"", b"{", b"[1]", b"\xff"):
        place.write(LEASE, [content])
        Lease(place).close()


def test_it_is_renewed_while_it_is_held(place: Place) -> None:
    with Lease(place, beat_s=0.02) as lease:
        first = json.loads(place.read(LEASE))["beats"]
        end = time.monotonic() + 20
        while json.loads(place.read(LEASE))["beats"] <= first + 1:
            assert time.monotonic() < end
            time.sleep(0.01)
        lease.check()


def is_lost(lease: Lease) -> bool:
    try:
        lease.check()
    except CheckpointError:
        return True
    return False


def test_who_was_taken_over_notices_and_leaves_the_other_alone(place: Place) -> None:
    with Lease(place, beat_s=0.02) as lease:
        # Written over and over: a beat that was under way may come after it.
        end = time.monotonic() + 20
        while not is_lost(lease) and time.monotonic() < end:
            left(place, host="elsewhere")
            time.sleep(0.01)
        with pytest.raises(CheckpointError, match="it took over from this job"):
            lease.check()
        assert is_lost(lease), "for good"
    assert json.loads(place.read(LEASE))["host"] == "elsewhere"


def test_who_was_taken_over_while_it_was_stopped_learns_of_it_before_it_writes(
    place: Place,
) -> None:
    with Lease(place, beat_s=1000.0) as lease:
        lease.check()
        left(place, host="elsewhere")
        assert is_lost(lease)


def test_a_lease_that_cannot_be_read_allows_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Lease(place, beat_s=1000.0) as lease:
        monkeypatch.setattr(type(place), "read", fails)
        with pytest.raises(
            CheckpointError, match=r"lease\.json cannot be read.*Input/output error"
        ):
            lease.check()
        monkeypatch.undo()
        lease.check()


def test_a_job_that_was_requeued_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    store = PersistentStore(tmp_path)
    for start in (0, 1):
        left(store.place, host="elsewhere", job="17", start=start)
        with Opened(store, RunHistory("r", ())) as opened:
            opened.claim(Ranks(None))
    left(store.place, host="elsewhere", job="17", start=2, beats=1)
    monkeypatch.setenv("FIVEFOLD_LEASE_S", "0.5")
    began = time.monotonic()
    with Opened(store, RunHistory("r", ())) as opened:
        opened.claim(Ranks(None))  # another step of the same allocation: it is waited for
        assert time.monotonic() - began > 0.3


def test_a_directory_that_cannot_be_written_to_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="file"):
        Lease(LocalPlace(tmp_path / "file"))


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("links", [True, False])
def test_of_jobs_that_start_at_once_one_gets_it(
    stale: bool, links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "no hard links here")

    if not links:
        monkeypatch.setattr(Path, "hardlink_to", refuse)
    jobs = 6
    start = threading.Barrier(jobs)

    def attempt(place: LocalPlace) -> Lease | None:
        start.wait(timeout=20)
        try:
            return Lease(place)
        except InUse:
            return None

    with ThreadPoolExecutor(jobs) as pool:
        for number in range(10 if links else 2):
            place = LocalPlace(tmp_path / str(number))
            if stale:
                left(place, host="elsewhere", age_s=100)
            leases = [lease for lease in pool.map(attempt, [place] * jobs) if lease is not None]
            assert len(leases) == 1
            leases[0].close()
            assert place.list() == []
