r"""Python processes that have imported torch already: each is a fork of one that did, inside a node or not.

with Template() as template, Nodes(4, template=template) as nodes:
    nodes.job([sys.executable, "script.py"])          # there in milliseconds instead of seconds

test ──a line──► template ──fork──► watcher: enters the node ──fork──► script.py
                                      └── waits, and writes down how it ended
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Self

__all__ = ["Forked", "Order", "Template"]

# DistributedDataParallel imports the compiler when it is made.
PRELOAD = ("torch._dynamo", "torch.nn.parallel", "torch.optim", "fivefold.checkpoint.checkpointer")
SPACES = ("user", "net", "mnt", "uts", "pid")
START_LIMIT_S = 60.0  # it imports torch first, maybe on busy cores
END_LIMIT_S = 30.0


@dataclass(frozen=True)
class Order:
    """A process to start."""

    argv: Sequence[str]
    """script and arguments"""
    env: Mapping[str, str]
    folder: str
    log: str
    """what it prints goes here; beside it lie .pid and, once it has ended, .code"""
    node: int | None = None
    """a process whose namespaces it enters"""
    errors: str = ""
    """where its standard error goes, if not to the log as well"""


class Forked:
    """A process that a template has started, as `subprocess.Popen` would show it."""

    def __init__(self, log: Path) -> None:
        self._log = log

    @property
    def pid(self) -> int:
        """Its number here."""
        end = time.monotonic() + START_LIMIT_S
        while not (text := self._said(".pid")):
            assert time.monotonic() < end, "the template starts nothing"
            time.sleep(0.002)
        if self.poll() is not None:
            raise ProcessLookupError(f"process {text} has ended")
        return int(text)

    def poll(self) -> int | None:
        """How it ended, negative for a signal; None while it runs."""
        text = self._said(".code")
        return int(text) if text else None

    def wait(self, timeout: float) -> int:
        """The same, once it has ended."""
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a forked process", timeout)
            time.sleep(0.01)
        return code

    def _said(self, kind: str) -> str:
        try:
            return self._log.with_suffix(kind).read_text()
        except FileNotFoundError:
            return ""


class Template:
    """The process that the others are forked from. A context manager."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )

    def start(self, order: Order) -> Forked:
        """Have it fork."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(order)).encode() + b"\n")
        self._process.stdin.flush()
        return Forked(Path(order.log))

    def close(self) -> None:
        """End it; what it has forked is not its business."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(END_LIMIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main() -> None:
    """Import, then fork for every line until there are no more."""
    for name in PRELOAD:
        import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for watchers
    # Not through a buffer: what it had read ahead would be a child's too.
    with os.fdopen(0, "rb", buffering=0, closefd=False) as lines:
        for line in lines:
            if os.fork() == 0:
                order = Order(**json.loads(line))
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os._exit(_run(order) if _watch(order) else 0)


def _watch(order: Order) -> bool:
    """True in the new process; False in its watcher, when it has ended."""
    log = Path(order.log)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    if order.errors:
        err = os.open(order.errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(err, 2)
        os.close(err)
    kept = os.open(log.parent, os.O_DIRECTORY)  # this folder by any name
    try:
        if order.node is not None:
            _enter(order.node)
        os.setsid()
        child = os.fork()
    except OSError as problem:  # the node has ended meanwhile
        print(problem, flush=True)
        _write(kept, f"{log.stem}.pid", os.getpid())
        _write(kept, f"{log.stem}.code", 1)
        return False
    if child == 0:
        os.close(kept)
        return True
    _write(kept, f"{log.stem}.pid", child)
    _, status = os.waitpid(child, 0)
    _write(kept, f"{log.stem}.code", os.waitstatus_to_exitcode(status))
    return False


def _write(folder: int, name: str, number: int) -> None:
    """All of it or nothing, for whoever reads it."""
    file = os.open(f"{name}.tmp", os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=folder)
    os.write(file, str(number).encode())
    os.close(file)
    os.rename(f"{name}.tmp", name, src_dir_fd=folder, dst_dir_fd=folder)


def _enter(node: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    spaces = [os.open(f"/proc/{node}/ns/{space}", os.O_RDONLY) for space in SPACES]
    for space in spaces:
        if libc.setns(space, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(space)


def _run(order: Order) -> int:
    """What the interpreter does with a script, but for taking itself apart, which lasts after torch."""
    code = _ran(order)
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    sys.stdout.flush()
    return code


def _ran(order: Order) -> int:
    os.setpgid(0, 0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.environ.clear()
    os.environ.update(order.env)
    os.chdir(order.folder)
    sys.argv = list(order.argv)
    sys.path[0] = str(Path(order.argv[0]).resolve().parent)
    try:
        runpy.run_path(order.argv[0], run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, int) or ended.code is None:
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
    os._exit(0)  # taking torch apart lasts, on busy cores longer than anybody waits
