"""The loop of the launcher: which ends it notices, and what it does later."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fivefold.launch.job import Job, Stopped
from fivefold.launch.watch import Watch

pytestmark = pytest.mark.timeout(60)  # what is not noticed is waited for without end


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    with Watch(Job(["true"], 1, tmp_path)) as made:
        yield made


def waiting() -> subprocess.Popen[bytes]:
    """A process that ends with its standard input."""
    return subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=True)


def let_end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()


def test_a_rank_that_ends_while_the_end_of_a_helper_is_dealt_with(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draining the pipes uses up the notice of the rank's end."""
    rank, drain, codes = waiting(), watch._drain, list[tuple[str, int]]()

    def drain_late() -> None:
        if rank.returncode is None:
            let_end(rank)
            os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
        drain()

    monkeypatch.setattr(watch, "_drain", drain_late)
    watch.start(rank, lambda code: codes.append(("rank", code)))
    helper = subprocess.Popen(["false"], start_new_session=True)
    watch.start(helper, lambda code: codes.append(("helper", code)), awaited=False)
    watch.wait()
    assert codes == [("helper", 1), ("rank", 0)]


def test_later_is_while_the_job_runs(watch: Watch) -> None:
    rank, codes = waiting(), list[int]()
    watch.start(rank, codes.append)
    watch.later(600.0, lambda: pytest.fail("the job has ended by then"))
    watch.later(0.05, lambda: let_end(rank))
    watch.wait()
    assert codes == [0]


def test_what_is_called_off_in_the_same_moment_is_not_called(watch: Watch) -> None:
    rank = waiting()
    watch.start(rank, lambda _: None)
    watch.later(0.0, lambda: watch._stop(signal.SIGTERM, 1.0))
    watch.later(0.0, lambda: pytest.fail("it was called off"))
    time.sleep(0.01)
    with pytest.raises(Stopped):
        watch.wait()
    let_end(rank)


def test_nobody_waits_for_a_helper(watch: Watch) -> None:
    helper, rank = waiting(), waiting()
    watch.start(helper, lambda _: None, awaited=False)
    watch.start(rank, lambda _: None)
    let_end(rank)
    watch.wait()
    helper.wait(30.0)
    assert helper.returncode < 0, "it was ended with the job"
    let_end(helper)
