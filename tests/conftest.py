"""What holds for every test: one thread per rank, reproducible examples, and nothing left behind.

The unit tier runs without torch, so nothing here imports it.
"""

from __future__ import annotations

import contextlib
import os

# Before any test imports torch: ranks share the cores, and a pool of threads per rank would fight.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from importlib.metadata import version
from pathlib import Path

import hypothesis
import psutil
import pytest

# In the background of a script Ctrl-C is ignored, and would be by all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# For every Python that a test starts.
_PATHS = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
_STARTUP = str(Path(__file__).parent / "python_startup")
if _STARTUP not in _PATHS:
    os.environ["PYTHONPATH"] = os.pathsep.join([_STARTUP, *_PATHS])

hypothesis.settings.register_profile("default", deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# How long a thread, process or file that is on its way out may take before it counts as leaked.
GRACE_S = 2.0

# Helpers that multiprocessing, and commands.py, start once per process and keep on purpose.
KEPT_HELPERS = (
    "tests/template.py",
    "from multiprocessing.resource_tracker import",
    "from multiprocessing.forkserver import",
)

# Written by pytest itself, and by libraries as they are imported.
FOREIGN_VARIABLES = ("PYTEST_", "KMP_", "TORCH", "_TORCHINDUCTOR", "PYTHONHASHSEED")


# What is looked for: who it is, and how to name it to people.
Key = Hashable
Look = Callable[[], Iterator[tuple[Key, str]]]

# To look at every process of the machine instead takes six times as long, twice for each test.
KERNEL_LISTS_CHILDREN = Path(f"/proc/self/task/{os.getpid()}/children").exists()


def pytest_report_header() -> str:
    """Name the versions that decide what a numerical test sees."""
    return f"torch {version('torch')}, numpy {version('numpy')}, psutil {psutil.__version__}"


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaks threads, processes, open files, a process group or variables.

    What fixtures of a wider scope hold (a pool of ranks, say) exists before the test and is theirs.
    """
    before = {name: {key for key, _ in look()} for name, look in _WATCHED.items()}
    variables = _variables()
    yield
    leaks = [
        f"{name}: {', '.join(sorted(leaked))}"
        for name, look in _WATCHED.items()
        if (leaked := _still_there(look, before[name]))
    ]
    if changed := _changed(variables, _variables()):
        leaks.append(f"environment variables: {', '.join(changed)}")
        _restore(variables)
    if leaks:
        pytest.fail("left behind by this test: " + "; ".join(leaks), pytrace=False)


def _still_there(look: Look, before: set[Key]) -> set[str]:
    end = time.monotonic() + GRACE_S
    while leaked := {told for key, told in look() if key not in before}:
        if time.monotonic() > end:
            return leaked
        time.sleep(0.02)
    return set()


def _threads() -> Iterator[tuple[Key, str]]:
    for thread in threading.enumerate():
        if not thread.daemon and thread.is_alive():
            yield thread.ident, f"{thread.name} ({thread.ident})"


def _children(pid: int) -> Iterator[int]:
    """Processes that a process has started, and theirs."""
    if not KERNEL_LISTS_CHILDREN:
        yield from (child.pid for child in psutil.Process(pid).children(recursive=True))
        return
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for child in map(int, path.read_text().split()):
                yield child
                yield from _children(child)


def _processes() -> Iterator[tuple[Key, str]]:
    for pid in _children(os.getpid()):
        try:
            child = psutil.Process(pid)
            command = " ".join(child.cmdline())
            # What a fork server forks shows the same command line, but is not our direct child.
            helper = child.ppid() == os.getpid() and any(h in command for h in KEPT_HELPERS)
            if not helper and child.status() != psutil.STATUS_ZOMBIE:
                # The command line is no key: on busy cores a new process has none yet.
                yield (pid, child.create_time()), f"{command[:80] or child.name()} (pid {pid})"
        except psutil.NoSuchProcess:
            continue


def _open_files() -> Iterator[tuple[Key, str]]:
    temporary = (tempfile.gettempdir(), "/dev/shm")
    for file in psutil.Process().open_files():
        if file.path.startswith(temporary):
            yield file.path, file.path


def _process_groups() -> Iterator[tuple[Key, str]]:
    torch_distributed = sys.modules.get("torch.distributed")
    if torch_distributed is not None and torch_distributed.is_initialized():
        yield "default", "torch's default group"


_WATCHED: dict[str, Look] = {
    "threads": _threads,
    "child processes": _processes,
    "open temporary files": _open_files,
    "process groups": _process_groups,
}


def _variables() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN_VARIABLES)}


def _changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))


def _restore(variables: dict[str, str]) -> None:
    for name in _changed(variables, _variables()):
        if name in variables:
            os.environ[name] = variables[name]
        else:
            del os.environ[name]
