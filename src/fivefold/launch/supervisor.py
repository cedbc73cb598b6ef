"""One loop that reads what processes write, and notices when they end.

Nothing here polls where the kernel has pidfds (Linux 5.3); older kernels are asked ten times a second.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Protocol, Self, TypeVar, cast

from fivefold.cluster.processes import process_stat
from fivefold.launch.guard import Guard

__all__ = ["STOPPING", "SWEEP_GRACE_S", "Supervised", "Supervisor"]

SWEEP_GRACE_S = 1.0
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)
_CHUNK_BYTES = 65536
_LONGEST_S = 3600.0
_File = TypeVar("_File", bound=IO[bytes])


class Supervised(Protocol):
    """A process, as `subprocess.Popen` shows it; it leads its own process group."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """How it ended; None while it runs."""
        ...

    def wait(self) -> int:
        """The same, once it has ended."""
        ...

    def send_signal(self, sig: int, /) -> None:
        """Send it a signal, unless it has ended."""
        ...


class Supervisor:
    """Supervises processes, each the leader of its group; a context manager that leaves none behind.

    Subclasses say what follows from an end (`_turned`) and from a signal (`_signalled`).
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._guard = Guard()
        self._on_exit: dict[Supervised, Callable[[int], None]] = {}
        self._groups: set[int] = set()
        self._due: list[tuple[float, Callable[[], object]]] = []
        self._pumps: dict[int, object] = {}
        """descriptors that are read from"""
        self._attached: set[int] = set()
        """descriptors that others own"""
        self._poll_s: float | None = None
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._undo.enter_context(self._signals())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._sweep(0.0 if value else SWEEP_GRACE_S)
        for process in self._on_exit:
            process.wait()
        self._guard.dismiss()
        self._undo.close()
        for fd in [*self._attached]:
            self.detach(fd)
        for key in list(self._selector.get_map().values()):
            self._forget(key.fd)
        self._selector.close()

    def start(
        self, process: Supervised, on_exit: Callable[[int], None], after_s: float = 0.0
    ) -> None:
        """Supervise a process that leads its own process group; `on_exit` gets its return code.

        If the launcher is killed, it has `after_s` seconds to end by itself.
        """
        self._on_exit[process] = on_exit
        self.add_group(process.pid, after_s)
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError:
            self._poll_s = 0.1
        else:
            self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._forget(pidfd))

    def add_group(self, group: int, after_s: float = 0.0) -> None:
        """End this process group too when the job ends; `after_s` as of `start`."""
        self._groups.add(group)
        self._guard.add(group, after_s)

    def drop_group(self, group: int) -> None:
        """It has ended, and its number may become another's."""
        self._groups.discard(group)
        self._guard.drop(group)

    def guard_folder(self, folder: Path) -> None:
        """Remove this folder if the launcher is killed."""
        self._guard.add_folder(folder)

    def later(self, pause_s: float, function: Callable[[], object]) -> None:
        """Call `function` after a pause."""
        self._due.append((time.monotonic() + pause_s, function))

    def callback(self, function: Callable[[], object]) -> None:
        """Call `function` when the job has ended."""
        self._undo.callback(function)

    def keep(self, file: _File) -> _File:
        """Close `file` when the job has ended."""
        self._undo.callback(file.close)
        return file

    def read(self, source: IO[bytes] | socket.socket, sink: Callable[[bytes], None]) -> int:
        """Pass what arrives from `source` to `sink` until its end, and close it. A number for `leave`."""
        with source:
            fd = os.dup(source.fileno())
        os.set_blocking(fd, False)
        pump = partial(self._pump, fd, sink)
        self._selector.register(fd, selectors.EVENT_READ, pump)
        self._pumps[fd] = pump
        return fd

    def leave(self, numbers: Iterable[int]) -> None:
        """Read no more from these, as far as they have not ended."""
        for fd in numbers:
            if fd in self._pumps:
                self._forget(fd)

    def attach(self, fd: int, ready: Callable[[], object]) -> None:
        """Call `ready` when something can be read from `fd`, which stays its owner's, until `detach`."""
        self._attached.add(fd)
        self._selector.register(fd, selectors.EVENT_READ, ready)

    def detach(self, fd: int) -> None:
        """No longer look at `fd`. Calling it again does nothing."""
        if fd in self._attached:
            self._attached.remove(fd)
            self._selector.unregister(fd)

    def _turn(self) -> None:
        """Wait for something to happen, and deal with it."""
        self._handle(self._selector.select(self._most()))
        # Again until none is found: draining uses up the notice of a process that ended meanwhile.
        while gone := [p for p in self._on_exit if p.poll() is not None]:
            self._drain()  # its last words come before the news of its end
            for process in gone:
                on_exit = self._on_exit.pop(process)
                on_exit(process.wait())
        self._turned()
        for due in [due for due in self._due if due[0] <= time.monotonic()]:
            if due in self._due:  # one before may have called the others off
                self._due.remove(due)
                due[1]()

    def _handle(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        for key, _ in ready:
            if key.fd in self._selector.get_map():  # unless one before has ended it
                cast(Callable[[], None], key.data)()

    def _turned(self) -> None:
        """What follows from the ends of processes."""

    def _signalled(self, signum: int) -> None:
        """This process has got a signal: one of `STOPPING`, SIGUSR1 or SIGUSR2."""

    def _timeout(self) -> float | None:
        until = min([when for when, _ in self._due], default=float("inf")) - time.monotonic()
        limits = [s for s in (self._poll_s, until) if s is not None and s != float("inf")]
        return max(0.0, min(limits)) if limits else None

    def _most(self) -> float | None:
        """What the selector takes: it knows no time beyond some weeks."""
        wanted = self._timeout()
        return None if wanted is None else min(wanted, _LONGEST_S)

    def _kill(self, signum: int) -> None:
        for group in self._groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signum)

    def _sweep(self, grace_s: float) -> None:
        """End whatever the ranks left behind in their process groups."""
        end = time.monotonic() + grace_s
        if any(map(_alive, self._groups)):
            self._kill(signal.SIGTERM)
            while time.monotonic() < end and any(map(_alive, self._groups)):
                time.sleep(0.02)
            self._kill(signal.SIGKILL)
        self._groups.clear()

    def _drain(self) -> None:
        """Read what a process that has ended left in its pipes."""
        # A pipe holds no more than a chunk or two; a rank that never stops writing must not keep us.
        for _ in range(4):
            self._handle(self._selector.select(0))

    def _pump(self, fd: int, sink: Callable[[bytes], None]) -> None:
        try:
            chunk = os.read(fd, _CHUNK_BYTES)
        except BlockingIOError:
            return
        if chunk:
            sink(chunk)
        else:
            self._forget(fd)

    def _forget(self, fd: int) -> None:
        self._pumps.pop(fd, None)
        self._selector.unregister(fd)
        os.close(fd)

    @contextlib.contextmanager
    def _signals(self) -> Generator[None]:
        """Turn signals into bytes on a socket that the loop reads. Only the main thread gets signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        # What nohup or the shell told us to ignore stays ignored.
        ours = [s for s in (*STOPPING, *_FORWARDED) if signal.getsignal(s) != signal.SIG_IGN]
        before = {s: signal.signal(s, _wake) for s in ours}
        wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self.read(reader, self._signals_came)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for signum, handler in before.items():
                signal.signal(signum, handler)
            writer.close()

    def _signals_came(self, numbers: bytes) -> None:
        for signum in numbers:
            if signum in (*STOPPING, *_FORWARDED):
                self._signalled(signum)


def _wake(_signum: int, _frame: FrameType | None) -> None:
    """Python writes the signal's number to the wake-up socket only if it has a handler."""


def _alive(group: int) -> bool:
    """Whether a process group has members that are more than zombies.

    Orphans leave a zombie behind until process 1 collects it; in a container it may never do so.
    """
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    found = (process_stat(int(path.name)) for path in Path("/proc").glob("[0-9]*"))
    return any(each.group == group and not each.ended for each in found if each)
