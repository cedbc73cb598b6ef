"""One loop that reads what processes write, notices when they end, and stops the rest.

    running --- a rank fails ------------------> stopping: SIGTERM to every process started
       |    --- SIGINT, SIGTERM, SIGHUP -------> stopping: the same signal to every rank
       |                                            | grace is over, or a second signal
       |                                         killing: SIGKILL to every process group
       +--- all have ended ---> sweep: what they left behind in their groups is ended too

Nothing here polls where the kernel has pidfds (Linux 5.3); older kernels are asked ten times a second.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Self, TypeVar, cast

from fivefold.cluster.processes import process_stat
from fivefold.errors import UsageError
from fivefold.launch.guard import Guard
from fivefold.launch.job import Job, RankFailure, Resumable, Stopped, log_path, tail
from fivefold.launch.output import Display
from fivefold.launch.variables import read_seconds

__all__ = ["Watch"]

FAILURE_GRACE_S = 3.0
SWEEP_GRACE_S = 1.0
CAUSE_S = 2.0
"""how long a rank that failed since another one had gone waits for that one to end"""
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)
_CHUNK_BYTES = 65536
_File = TypeVar("_File", bound=IO[bytes])


class Watch:
    """Supervises the processes of one job; a context manager that leaves none behind.

    `start` processes and `read` their pipes, then `wait`. Report a rank's end with `ended`.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.display = Display(job.output)
        self._grace_s = read_seconds("FIVEFOLD_GRACE_S", 5.0)
        self._selector = selectors.DefaultSelector()
        self._guard = Guard()
        self._on_exit: dict[subprocess.Popen[bytes], Callable[[int], None]] = {}
        self._awaited: list[subprocess.Popen[bytes]] = []
        self._groups: set[int] = set()
        self._shims: dict[int, int] = {}
        """by rank, of the ranks that a foreign launcher started: the process that passes signals on to it"""
        self._ended: list[tuple[int, int]] = []
        self._codes: dict[int, int] = {}
        """by rank, of all that have ended"""
        self._first: tuple[int, int] | None = None
        self._follower: tuple[int, int] | None = None
        """the first that failed, where that was the failure of another one"""
        self._stopping = False
        self._stopped_by = 0
        self._deadline = float("inf")
        self._due: list[tuple[float, Callable[[], object]]] = []
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
        for key in list(self._selector.get_map().values()):
            self._forget(key.fd)
        self._selector.close()

    def start(
        self,
        process: subprocess.Popen[bytes],
        on_exit: Callable[[int], None],
        *,
        awaited: bool = True,
    ) -> None:
        """Supervise a process that leads its own process group; `on_exit` gets its return code.

        One that is not `awaited` ends with the others, and nothing ends with it.
        """
        self._on_exit[process] = on_exit
        if awaited:
            self._awaited.append(process)
        self.add_group(process.pid)
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError:
            self._poll_s = 0.1
        else:
            self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._forget(pidfd))

    def add_group(self, group: int) -> None:
        """End this process group too when the job ends."""
        self._groups.add(group)
        self._guard.add(group)

    def add_shim(self, rank: int, pid: int) -> None:
        """Send signals for `rank` to this process, not through the launcher that started it.

        torchrun and mpirun kill ranks a second after a signal or send it twice: no time to save.
        """
        self._shims[rank] = pid

    def guard_folder(self, folder: Path) -> None:
        """Remove this folder if the launcher is killed."""
        self._guard.add_folder(folder)

    def later(self, pause_s: float, function: Callable[[], object]) -> None:
        """Call `function` after a pause, unless the job has ended, or is being stopped, by then."""
        if not self._stopping:
            self._due.append((time.monotonic() + pause_s, function))

    def callback(self, function: Callable[[], object]) -> None:
        """Call `function` when the job has ended."""
        self._undo.callback(function)

    def keep(self, file: _File) -> _File:
        """Close `file` when the job has ended."""
        self._undo.callback(file.close)
        return file

    def read(self, source: IO[bytes] | socket.socket, sink: Callable[[bytes], None]) -> None:
        """Pass what arrives from `source` to `sink` until its end, and close it."""
        with source:
            fd = os.dup(source.fileno())
        os.set_blocking(fd, False)
        self._selector.register(fd, selectors.EVENT_READ, lambda: self._pump(fd, sink))

    def ended(self, rank: int, code: int) -> None:
        """A rank has ended: with an exit code, or with minus the signal that killed it."""
        self._ended.append((rank, code))
        if rank in self._shims:
            self._shims[rank] = 0

    def wait(self) -> None:
        """Return when all processes have ended well.

        Raises `RankFailure` for the first rank that did not, `UsageError` with its message if that
        rank ended with code 2 after `error: ...`, `Resumable` if with code 75, and `Stopped`
        if a signal stopped the launcher, unless all ranks then saved and ended with code 75.
        """
        while self._awaited:
            self._turn()
        self._sweep(SWEEP_GRACE_S)
        self._drain()
        self._first = self._first or self._follower
        if self._first is not None:
            raise self._failure(*self._first)
        if self._stopped_by:
            codes = list(self._codes.values())
            saved = codes == [Resumable.exit_code] * self.job.processes
            raise Resumable(self.job) if saved else Stopped(self._stopped_by, self.job)

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._timeout()):
            cast(Callable[[], None], key.data)()
        # Again until none is found: draining uses up the notice of a process that ended meanwhile.
        while gone := [p for p in self._on_exit if p.poll() is not None]:
            self._drain()  # its last words come before the news of its end
            for process in gone:
                if process in self._awaited:
                    self._awaited.remove(process)
                self._on_exit.pop(process)(process.returncode)
        self._judge()
        for when, function in [due for due in self._due if due[0] <= time.monotonic()]:
            self._due.remove((when, function))
            function()
        if self.display.broken and not self._stopping:
            self._stop(signal.SIGPIPE, self._grace_s)
        if time.monotonic() >= self._deadline:
            self._deadline = float("inf")
            self._kill(signal.SIGKILL)

    def _timeout(self) -> float | None:
        until = min([self._deadline, *(when for when, _ in self._due)]) - time.monotonic()
        limits = [s for s in (self._poll_s, until) if s is not None and s != float("inf")]
        return max(0.0, min(limits)) if limits else None

    def _judge(self) -> None:
        """Find the rank that failed first among those that ended since the last turn."""
        # A rank whose peer was killed fails too, milliseconds later: a signal is the likelier cause.
        self._codes.update(self._ended)
        failed = sorted((code > 0, rank, code) for rank, code in self._ended if code != 0)
        if failed and not self._stopping:
            self._note(failed)
        usage = self._first is not None and _usage_error(self.job, *self._first) is not None
        for rank, _ in self._ended:
            self.display.close(rank, usage_error=usage)
        self._ended.clear()
        if self._first is not None and not self._stopping:
            self._stop(signal.SIGTERM, FAILURE_GRACE_S)

    def _note(self, failed: list[tuple[bool, int, int]]) -> None:
        """Who failed first; a rank that another one has left often ends before that one."""
        causes = [(rank, code) for _, rank, code in failed if not _followed(self.job, rank)]
        if causes:
            self._first = causes[0]
        elif self._follower is None:
            self._follower = failed[0][1:]
            self.later(CAUSE_S, self._take_follower)

    def _take_follower(self) -> None:
        self._first = self._follower
        self._stop(signal.SIGTERM, FAILURE_GRACE_S)

    def _stop(self, signum: int, grace_s: float) -> None:
        self._stopping = self.display.silent = True
        self._due.clear()
        self._deadline = time.monotonic() + grace_s
        if self._first is None:
            self._stopped_by = signum
        self._signal(signal.SIGTERM if signum == signal.SIGPIPE else signum)

    def _signal(self, signum: int) -> None:
        """Send a signal to the ranks, or to what starts them where a rank has not started or has failed."""
        if self._first is None and len(self._shims) == self.job.processes:
            for pid in filter(None, self._shims.values()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)
        else:
            for process in self._awaited:
                process.send_signal(signum)

    def _failure(self, rank: int, code: int) -> Exception:
        if code == Resumable.exit_code:
            return Resumable(self.job)
        told = _usage_error(self.job, rank, code)
        return UsageError(told) if told is not None else RankFailure(rank, code, self.job)

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
            for key, _ in self._selector.select(0):
                cast(Callable[[], None], key.data)()

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
        ours = [s for s in (*_STOPPING, *_FORWARDED) if signal.getsignal(s) != signal.SIG_IGN]
        before = {s: signal.signal(s, _wake) for s in ours}
        wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self.read(reader, self._signalled)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for signum, handler in before.items():
                signal.signal(signum, handler)
            writer.close()

    def _signalled(self, numbers: bytes) -> None:
        for signum in numbers:
            if signum in _FORWARDED:
                self._signal(signum)
            elif signum in _STOPPING and self._stopping:
                self._deadline = 0.0  # asked again: no more patience
            elif signum in _STOPPING:
                self._stop(signum, self._grace_s)


def _wake(_signum: int, _frame: FrameType | None) -> None:
    """Python writes the signal's number to the wake-up socket only if it has a handler."""


def _followed(job: Job, rank: int) -> bool:
    """Whether a rank says that it failed in talking with the others."""
    return any("CommError: " in line for line in tail(log_path(job.log_dir, rank)))


def _usage_error(job: Job, rank: int, code: int) -> str | None:
    """The text after `error: ` if the rank told a user's mistake and ended with code 2."""
    if code != UsageError.exit_code:
        return None
    told = [line for line in tail(log_path(job.log_dir, rank)) if line.startswith("error: ")]
    return told[-1].removeprefix("error: ") if told else None


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
