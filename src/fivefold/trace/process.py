"""The trace of this process from its beginning to its end, however that comes.

A process that ends by itself says so; one that an exception ends leaves its text. One that is killed says
nothing: its file stays as it was, of a process that is no more.
"""

from __future__ import annotations

import atexit
import errno
import os
import sys
import threading
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from fivefold.cluster.processes import process_stat
from fivefold.trace.current import current
from fivefold.trace.file import TraceError, name_of
from fivefold.trace.reader import RankTrace
from fivefold.trace.schema import ProcessState
from fivefold.trace.trace import Trace

__all__ = ["fail", "start", "stop"]

_lock = threading.Lock()
_hooked = False


def start(
    folder: Path, meta: Mapping[str, Any], rows: Mapping[str, int] | None = None
) -> Trace | None:
    """Begin the trace of this process; None if there is one already, which goes on.

    Call it in the thread that trains. Raises `OSError` when the file cannot be made, `FileExistsError` when
    another process of this node still writes it: a script that a rank has started, say, as the same rank.
    """
    global _hooked  # noqa: PLW0603 - hooks of the process
    with _lock:
        if current.trace is not None:
            return None
        _refuse_second(folder / name_of(int(meta["rank"])))
        began = process_stat(os.getpid())
        moment = {
            "started": datetime.now().astimezone().isoformat(timespec="seconds"),
            "monotonic_ns": time.monotonic_ns(),
            "wall_ns": time.time_ns(),
            "began": began.began if began else "",
        }
        current.trace = trace = Trace.create(folder, {**moment, **meta}, rows)
        if not _hooked:
            _hooked = True
            sys.excepthook = _telling(sys.excepthook)
            atexit.register(stop)
        return trace


def _refuse_second(path: Path) -> None:
    """Raise if another process writes this trace, which would be lost."""
    if not path.exists():
        return
    try:
        found = RankTrace.load(path)
    except TraceError:
        return
    pid, here = int(found.live["pid"]), found.meta.get("host") == os.uname().nodename
    if here and pid != os.getpid() and found.state == ProcessState.RUNNING and found.has_writer:
        raise FileExistsError(errno.EEXIST, f"process {pid} writes the trace of this rank there")


def stop(state: ProcessState = ProcessState.ENDED) -> None:
    """End the trace, if there is one."""
    with _lock:
        trace, current.trace = current.trace, None
        if trace is not None:
            trace.close(state)


def fail(problem: BaseException) -> None:
    """The process ends by `problem`: note it, and end the trace as failed."""
    trace = current.trace
    if trace is not None:
        trace.note("failure", text=f"{type(problem).__name__}: {problem}")
        stop(ProcessState.FAILED)


def _telling(hook: Any) -> Any:
    def told(
        kind: type[BaseException], problem: BaseException, where: TracebackType | None
    ) -> None:
        fail(problem)
        hook(kind, problem, where)

    return told
