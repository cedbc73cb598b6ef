"""Who writes to a persistent directory: one job at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, cast

from fivefold.checkpoint.files import FileOps
from fivefold.checkpoint.place import LocalPlace, Place
from fivefold.closing import Closing
from fivefold.cluster import reading
from fivefold.cluster.processes import process_stat
from fivefold.errors import CheckpointError, InUse

__all__ = ["BEAT_S", "LEASE", "STALE_S", "Lease", "this_process"]

LEASE = "lease.json"
STALE_S = 15.0
"""without a beat for so long, the job that wrote it counts as gone"""
BEAT_S = 2.5
_SKEW_S = 45.0
"""by how much the clocks of hosts may differ that write to an object store"""

_SETTLE_S = 1.0
"""how long others may be busy writing theirs, where nothing is atomic"""
_TURN_S = 10.0
"""how long others may take over a directory before this one does not wait for them"""


class _NoLinks(Exception):
    """The file system has no hard links."""


class Lease(Closing):
    """A file in a directory that says who writes there. It is renewed by a thread, and removed by `close`.

    Taken over at once where its owner is known to have ended: a process of this host that is gone, or an
    earlier start of the same job; or where nobody waits for it any more: an earlier start of the same launch,
    which may live in another half of a network that is cut in two. Else after `stale_s` without a beat, or as
    long as its owner asked for if that is longer. The clock is the file system's own; over an object store,
    which has none, time counts from the first look, or from a minute ago by the owner's clock. Where the
    owner beats meanwhile, waiting ends.

    Args:
        place: the directory; it is made if it is missing.
        job: what the owner is part of, such as a Slurm job; empty where nothing is known.
        start: how often that job was started; a later start ends the claim of an earlier one.
        launch: what has started this process; empty where nothing is known.
        restart: the same of a launch as `start` of a job.
        wait_s: how long to wait for a lease to become stale, before giving up.
        beat_s: how often it is renewed.
        stale_s: how long it is honoured without.

    Raises:
        InUse: another job writes there.
        OSError: the directory cannot be written to.
    """

    def __init__(
        self,
        place: Place,
        *,
        job: str = "",
        start: int = 0,
        launch: str = "",
        restart: int = 0,
        wait_s: float = 0.0,
        beat_s: float = BEAT_S,
        stale_s: float = STALE_S,
    ) -> None:
        self._place, self._beat_s, self._stale_s = place, beat_s, stale_s
        self._mine = {
            **this_process(),
            "job": job,
            "start": start,
            "launch": launch,
            "restart": restart,
            "stale_s": stale_s,
            "token": secrets.token_hex(8),
        }
        self._beats = 0
        self._seen: tuple[object, object] = None, None
        """token and beats of another job's lease"""
        self._seen_at = 0.0
        self._ended = threading.Event()
        self._lost = ""
        place.make_dir()
        self._wait(wait_s)
        self._take()
        self._thread = threading.Thread(target=self._beat, name="fivefold-lease", daemon=True)
        self._thread.start()

    def _wait(self, wait_s: float) -> None:
        """Until nobody holds the directory. Raises `InUse`."""
        begun = time.monotonic()
        first: Mapping[str, Any] | None = None
        while (other := self._rival()) is not None:
            first = first or other
            end = begun + (max(wait_s, 1.2 * self._believed_s(other)) if wait_s else 0.0)
            if other.get("beats") != first.get("beats") or time.monotonic() >= end:
                raise self._refusal(other)
            time.sleep(min(1.0, self._beat_s, max(0.0, end - time.monotonic())))

    def _take(self) -> None:
        """Of several that find it free, one gets it; the others raise `InUse`."""
        if isinstance(self._place, LocalPlace):
            with contextlib.suppress(_NoLinks), _alone(self._place.root):
                self._take_file(self._place.path(LEASE), self._place.files)
                return
        # Who writes last has it; by then the others have written.
        self._write()
        time.sleep(_SETTLE_S)
        if (now := self._read()) and now.get("token") != self._mine["token"]:
            raise self._refusal(now)

    def _take_file(self, path: Path, files: FileOps) -> None:
        if (other := self._rival()) is not None:  # another one was quicker
            raise self._refusal(other)
        files.remove(path)
        self._beats += 1
        try:
            won = files.claim(path, self._content())
        except OSError as problem:
            if problem.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                raise _NoLinks from None
            raise
        if not won:
            raise self._refusal(self._read() or {})

    def check(self) -> None:
        """Raise `CheckpointError` if the lease was lost: another job took it over. Asked before a write.

        Looks at the file itself: a process that was stopped for a while learns of it before its next beat.
        """
        if not self._lost and not self._ended.is_set():
            try:
                self._look()
            except OSError as problem:
                raise CheckpointError(
                    f"{self._place.where(LEASE)} cannot be read, so nothing tells whether this job still may "
                    f"write there: {problem.strerror or problem}"
                ) from problem
        if self._lost:
            raise CheckpointError(self._lost)

    def _look(self) -> None:
        """See whether another job took over; one that was removed by hand is renewed by the next beat."""
        now = self._read()
        if now is not None and now.get("token") != self._mine["token"]:
            self._lost = f"{self._told(now)}: it took over from this job, which saves no more"

    def close(self) -> None:
        """Leave the directory to others."""
        if not self._ended.is_set():
            self._ended.set()
            self._thread.join()
            with contextlib.suppress(OSError):  # it becomes stale by itself
                if (now := self._read()) and now.get("token") == self._mine["token"]:
                    self._place.remove(LEASE)

    def _rival(self) -> Mapping[str, Any] | None:
        """The owner of a lease that holds."""
        now = self._read()
        if now is None or _known_to_be_gone(now, self._mine):
            return None
        return None if self._age_s(now) > self._believed_s(now) else now

    def _believed_s(self, other: Mapping[str, Any]) -> float:
        """How long another job is believed without a beat: as long as it asked for, if that is longer."""
        asked = other.get("stale_s")
        return max(self._stale_s, asked) if isinstance(asked, int | float) else self._stale_s

    def _read(self) -> Mapping[str, Any] | None:
        try:
            return _parsed(self._place.read(LEASE))
        except FileNotFoundError:
            return None

    def _age_s(self, lease: Mapping[str, Any]) -> float:
        """Seconds since the last beat."""
        if not isinstance(self._place, LocalPlace):
            seen = lease.get("token"), lease.get("beats")
            if seen != self._seen:
                self._seen, self._seen_at = seen, time.monotonic()
            beat = lease.get("time_s")
            told = time.time() - beat - _SKEW_S if isinstance(beat, int | float) else float("inf")
            return max(told, time.monotonic() - self._seen_at)
        path = self._place.path(LEASE)
        probe = path.with_name(f"lease.{self._mine['token']}.tmp")
        try:
            probe.touch()
            return probe.stat().st_mtime - path.stat().st_mtime
        except FileNotFoundError:
            return float("inf")
        finally:
            probe.unlink(missing_ok=True)

    def _content(self) -> bytes:
        content = {**self._mine, "beats": self._beats, "time_s": time.time()}
        return json.dumps(content, indent=1).encode()

    def _write(self) -> None:
        self._beats += 1
        self._place.write(LEASE, [self._content()])

    def _beat(self) -> None:
        while not self._ended.wait(self._beat_s):
            # A full or absent disk: the next beat may find it well.
            with contextlib.suppress(OSError):
                self._look()
                if self._lost:
                    return
                self._write()

    def _refusal(self, other: Mapping[str, Any]) -> InUse:
        return InUse(
            f"{self._told(other)}; let that job end, or use another directory. If it has died, wait "
            f"{self._believed_s(other):g} s, or remove {self._place.where(LEASE)}"
        )

    def _told(self, other: Mapping[str, Any]) -> str:
        job = f", job {other['job']}" if other.get("job") else ""
        who = f"process {other.get('pid')} on {other.get('host')}{job}"
        return f"{self._place.where()} is written to by {who}"


@contextlib.contextmanager
def _alone(folder: Path) -> Generator[None]:
    """One at a time, where the file system can lock a directory; elsewhere a moment is left to chance."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        end = time.monotonic() + _TURN_S
        while time.monotonic() < end:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                break
        yield
    finally:
        os.close(fd)  # and with it the lock


def _parsed(data: bytes) -> Mapping[str, Any] | None:
    """A lease, or None of what was torn on an object store: that is nobody's."""
    try:
        read = json.loads(data)
    except ValueError:
        return None
    return cast("dict[str, Any]", read) if isinstance(read, dict) else None


def this_process() -> dict[str, Any]:
    """What tells this process from every other one, on any node and after a reboot."""
    return {
        "host": socket.gethostname(),
        "boot": reading.text(Path("/proc/sys/kernel/random/boot_id")) or "",
        "namespace": _link("/proc/self/ns/pid"),
        "pid": os.getpid(),
        "began": _began(os.getpid()),
    }


def _known_to_be_gone(lease: Mapping[str, Any], mine: Mapping[str, Any]) -> bool:
    for name, count in (("job", "start"), ("launch", "restart")):
        same, times = bool(mine[name]) and lease.get(name) == mine[name], lease.get(count)
        if same and isinstance(times, int) and times < mine[count]:
            return True
    pid = lease.get("pid")
    seen_from_here = all(lease.get(n) == mine[n] for n in ("host", "boot", "namespace"))
    return seen_from_here and isinstance(pid, int) and _began(pid) != lease.get("began")


def _began(pid: int) -> str:
    """When a process began, in ticks since the boot; empty if there is none of that number."""
    found = process_stat(pid)
    return found.began if found and not found.ended else ""


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""
