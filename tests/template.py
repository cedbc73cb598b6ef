r"""Python processes that have imported torch already: each is a fork of one that did, inside a node or not.

with Template() as template, Nodes(4, template=template) as nodes:
    nodes.job([sys.executable, "script.py"])          # there in milliseconds instead of seconds

subprocess.run([commands.python(), "script.py"])      # the same, by a program that has it forked

test ──order──► template ──fork──► watcher: enters the node ──fork──► script.py
                                      └── waits, and tells how it ended
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Self

import become
import shim

__all__ = ["Forked", "Order", "Template"]

# DistributedDataParallel imports the compiler when it is made.
TORCH = ("torch._dynamo", "torch.distributed", "torch.nn.parallel", "torch.optim")
OTHERS = ("numpy", "tyro", "cattrs", "rich.console", "rich.progress", "rich.table")
CHECKPOINTS = "fivefold.checkpoint.checkpointer"
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
    log: str = ""
    """what it prints goes here; beside it lie .pid and, once it has ended, .code. Without one it has the
    standard files of who asks for it, who is told both"""
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
    """The process that the others are forked from. A context manager.

    `modules` are imported beforehand, with the first order.
    """

    def __init__(self, *modules: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fivefold-template-")
        self.path = f"{self._folder.name}/socket"
        self.programs = Path(self._folder.name, "programs")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.path)
            listener.listen(64)
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    __file__,
                    str(listener.fileno()),
                    *(modules or (*TORCH, CHECKPOINTS)),
                ],
                stdin=subprocess.PIPE,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
                },
                pass_fds=[listener.fileno()],
            )
        self._program("python", [])
        self._program("fivefold", [str(Path(sys.executable).with_name("fivefold"))])

    def _program(self, name: str, before: Sequence[str]) -> None:
        """Write one that stands in for what the template forks."""
        program = self.programs / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(
            f"#!{sys.executable} -IS\nimport sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
            f"from shim import stand_in\nstand_in({self.path!r}, {before!r} + sys.argv[1:])\n"
        )
        program.chmod(0o755)

    def start(self, order: Order) -> Forked:
        """Have it fork."""
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(self.path)
            shim.order(line, asdict(order), [])
        return Forked(Path(order.log))

    def close(self) -> None:
        """End it; what it has forked is not its business."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(END_LIMIT_S)
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main(listener: socket.socket, modules: Sequence[str]) -> None:
    """Import, then fork for every order until nobody is there to give one."""
    waiting = select.poll()
    waiting.register(0)
    waiting.register(listener, select.POLLIN)
    prepared = False
    while True:
        ready = dict(waiting.poll())
        if listener.fileno() not in ready:
            return
        if not prepared:
            prepared = True
            before = set(sys.modules)
            for name in modules:
                import_module(name)
            packages = {name.partition(".")[0] for name in sys.modules.keys() - before}
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for watchers
            become.prepare(listener.fileno(), packages - sys.stdlib_module_names)
        line, _ = listener.accept()
        with line:
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                with contextlib.suppress(EOFError, ConnectionError):
                    _serve(line)
                os._exit(0)


def _serve(line: socket.socket) -> None:
    head, given, _, _ = socket.recv_fds(line, 8, 3)
    if not head:
        raise EOFError
    (size,) = struct.unpack("Q", head)
    text = bytearray()
    while len(text) < size:
        text += line.recv(size - len(text))
    order = Order(**json.loads(text))
    for number, file in enumerate(given):
        os.dup2(file, number)
    if _watch(order, line):
        os.chdir(order.folder)
        if not become.startable(order.argv, order.env):
            os.execve(sys.executable, [sys.executable, *order.argv], dict(order.env))
        become.become(order.argv, order.env)


def _watch(order: Order, line: socket.socket) -> bool:
    """True in the new process; False in its watcher, when it has ended."""
    kept = _kept(order) if order.log else -1

    def tell(kind: str, number: int) -> None:
        if kept >= 0:
            _write(kept, f"{Path(order.log).stem}.{kind}", number)
        else:
            line.sendall(f"{number}\n".encode())

    try:
        if order.node is not None:
            _enter(order.node)
        os.setsid()
        child = os.fork()
    except OSError as problem:  # the node has ended meanwhile
        print(problem, flush=True)
        tell("pid", os.getpid())
        tell("code", 1)
        return False
    if child == 0:
        os.setpgid(0, 0)
        if kept >= 0:
            os.close(kept)
        return True
    tell("pid", child)
    if kept < 0:
        # Who asked is a process that has this one in its place: with it, it ends.
        ended, asks = os.pidfd_open(child), select.poll()
        asks.register(ended, select.POLLIN)
        asks.register(line, select.POLLHUP)
        if ended not in dict(asks.poll()):
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    tell("code", os.waitstatus_to_exitcode(status))
    return False


def _kept(order: Order) -> int:
    """The log becomes what the process prints to; the folder of the log, by any name."""

    def opened(path: str, flags: int, *numbers: int) -> None:
        file = os.open(path, flags, 0o644)
        for number in numbers:
            os.dup2(file, number)
        os.close(file)

    written = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    opened(os.devnull, os.O_RDONLY, 0)
    opened(order.log, written, 1, 2)
    if order.errors:
        opened(order.errors, written, 2)
    return os.open(Path(order.log).parent, os.O_DIRECTORY)


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


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt), socket.socket(fileno=int(sys.argv[1])) as given:
        main(given, sys.argv[2:])
    os._exit(0)  # taking torch apart lasts, on busy cores longer than anybody waits
