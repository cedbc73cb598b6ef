"""The thread that watches a process: what a fork and the end of the interpreter make of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fivefold.trace.reader import RankTrace
from fivefold.trace.schema import ProcessState

SETUP = """
import os, sys, threading, time
from pathlib import Path
from fivefold.trace import process
from fivefold.trace.stacks import Watcher
trace = process.start(Path(sys.argv[1]), {"rank": 0})
watcher = Watcher(trace, every_s=0.002, write_s=0.01)
"""


def run(folder: Path, code: str, expect: int = 0) -> RankTrace:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", SETUP + code, str(folder)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == expect, done.stderr
    assert expect or not done.stderr
    return RankTrace.load(folder / "rank-00000.trace")


def test_children_of_a_fork_end_well_and_write_nothing(tmp_path: Path) -> None:
    found = run(tmp_path, """
children = []
for number in range(30):
    pid = os.fork()
    if not pid:
        beat = int(trace.live["heartbeat_ns"])
        assert [t.name for t in threading.enumerate()] == ["MainThread"]
        sys.exit(0)  # runs the hooks of the end, as a worker of a loader may
    children.append(pid)
    time.sleep(0.001)
for pid in children:
    end = time.monotonic() + 20
    while not os.waitpid(pid, os.WNOHANG)[0]:
        assert time.monotonic() < end, "a child does not end"
        time.sleep(0.001)
assert trace.live["state"] == 0
time.sleep(0.05)
""")  # fmt: skip
    assert found.state is ProcessState.ENDED
    assert found.stacks["outside"]


def test_the_interpreter_ends_while_the_thread_is_at_work(tmp_path: Path) -> None:
    for number in range(5):
        found = run(tmp_path, f"time.sleep({number / 500})")
        assert found.state is ProcessState.ENDED


def test_an_exception_and_a_hard_end(tmp_path: Path) -> None:
    assert run(tmp_path, "raise KeyError('x')", expect=1).state is ProcessState.FAILED
    found = run(tmp_path, "time.sleep(0.1); os._exit(3)", expect=3)
    assert found.state is ProcessState.RUNNING
    assert found.stacks["outside"]


BUSY = """
end = time.process_time() + 0.3
while time.process_time() < end:
    sum(range(20_000_000))  # holds the interpreter
"""
CROWDED = f"""
import subprocess
# Of this thread alone, which is preempted while it holds the interpreter.
os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
{BUSY}
for other in others:
    other.kill()
    other.wait()
"""
STOPPED = """
import signal
for _ in range(3):
    os.system(f"(sleep 0.2; kill -CONT {os.getpid()}) &")
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.long
@pytest.mark.parametrize("code", [BUSY, CROWDED, STOPPED], ids=["busy", "crowded", "stopped"])
def test_a_process_that_is_stopped_counts_it(tmp_path: Path, code: str) -> None:
    found = run(tmp_path, code + "time.sleep(0.05)")
    stopped_s = int(found.live["stopped_ns"]) / 1e9
    assert (stopped_s > 0.3) is (code is STOPPED), stopped_s
