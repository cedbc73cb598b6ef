"""How a trainer and a helper meet: both prove that they know the job's key, then say HELLO.

HELLO tells versions, machine and process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from fivefold import wire
from fivefold.closing import Closing
from fivefold.errors import FivefoldError, OffloadWarning, UsageError, warn
from fivefold.helpers.arena_link import ArenaLink
from fivefold.helpers.link import Link
from fivefold.helpers.messages import Kind
from fivefold.helpers.stream_link import StreamLink
from fivefold.helpers.versions import versions
from fivefold.launch.environment import locate
from fivefold.wire import KEY_BYTES, OtherKey, OtherProtocol, OtherVersion, Protocol
from fivefold.wire.frames import LinkClosed, LinkError

__all__ = [
    "Address",
    "HandshakeError",
    "TrainerListener",
    "Unreachable",
    "connect",
    "listen",
    "parse_key",
]

_PROTOCOL = Protocol("fivefold help", "004")
_HELLO_S = 10.0
_MOST_CALLERS, _OF_ONE = 256, 64
"""who have not proved yet that they know the key"""

AnyLink = TypeVar("AnyLink", bound=Link)


class Unreachable(LinkClosed):
    """Nobody answers there, or not yet: trying again makes sense."""


class HandshakeError(UsageError):
    """Who answers is of another job, or of another Fivefold: trying again makes no sense."""


def parse_key(text: str) -> bytes:
    """The job's key from 64 hexadecimal digits. Raises `UsageError` if they are not."""
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise UsageError(
            f"the key of helpers has {2 * KEY_BYTES} hexadecimal digits, the same for all processes of a "
            "job; `openssl rand -hex 32` makes one"
        )
    return key


def connect(
    address: str,
    key: bytes,
    *,
    name: str = "",
    timeout_s: float = 5.0,
    about: Mapping[str, Any] | None = None,
    silent_s: float = 60.0,
) -> StreamLink:
    """A link to the helper at `address`, for a trainer: its `send` never waits.

    Args:
        address: `unix:/path` or `host:port`.
        key: of the job.
        name: of the helper, for people.
        timeout_s: how long all of this may take.
        about: what to say of oneself; rank and host by default.
        silent_s: how long the helper's host may be silent, or the helper read nothing, until it counts as
            lost. A helper at work reads nothing, but little that is sent does not fit on the way.

    Raises:
        Unreachable: nobody answers in time.
        HandshakeError: who answers knows another key, speaks another protocol, or is no helper.
        UsageError: the address is none.
    """
    place, end = Address.parse(address), time.monotonic() + timeout_s
    name = name or f"the helper at {place}"
    try:
        sock = dial(place, timeout_s)
    except OSError as problem:
        raise Unreachable(f"{name} does not answer: {problem}") from None
    try:
        _prove(sock, key, name, end)
        link = _link(sock, name, queues=True, silent_s=silent_s)
    except OSError as problem:
        sock.close()
        raise Unreachable(f"{name} does not answer: {problem}") from None
    except BaseException:
        sock.close()
        raise
    link = _introduced(link, about or _about_trainer(), end)
    if not _alike(link):
        warn(
            f"{name} lives in another PID namespace (a container?), where it could not be told whether it "
            "still writes: batches are sent through the socket, which costs a copy",
            OffloadWarning,
        )
    return link


def listen(address: str, key: bytes, *, about: Mapping[str, Any] | None = None) -> TrainerListener:
    """Take calls of trainers at `address` (`unix:/path`, or `host:port`, port 0 for a free one).

    Raises:
        UsageError: the address is none, is in use, or none of this host.
    """
    return TrainerListener(Address.parse(address), key, about or _about_helper())


class TrainerListener(Closing):
    """Where trainers call a helper. Made by `listen`.

    They are greeted by threads, so that a helper at work does not let them wait, and one that is silent
    does not hold up the others.
    """

    def __init__(self, address: Address, key: bytes, about: Mapping[str, Any]) -> None:
        self._about = about
        door, self._address = opened(address)
        self.address = str(self._address)
        """where it listens; a port 0 has become a free one"""
        self._inode = os.stat(address.path).st_ino if address.path else 0  # noqa: PTH116
        self._ready = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        self._links: deque[StreamLink] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self._listener = wire.Listener(
            door, _PROTOCOL, key, self._admit, most=_MOST_CALLERS, of_one=_OF_ONE
        )

    def fileno(self) -> int:
        """Readable when a trainer has been greeted."""
        return self._ready

    def accept(self, timeout_s: float) -> StreamLink | None:
        """The next trainer's link; None if there is none in time. Its `send` waits until all is sent."""
        poll = select.poll()
        poll.register(self._ready, select.POLLIN)
        if not poll.poll(max(timeout_s, 0.0) * 1000):
            return None
        with self._lock:
            try:
                os.eventfd_read(self._ready)
            except BlockingIOError:
                return None
            return self._links.popleft()

    def close(self) -> None:
        """Take no more calls. Links that were accepted stay."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._listener.close()
        self._unlink()
        with self._lock:
            for link in self._links:
                link.close()
            self._links.clear()
            os.close(self._ready)

    def _unlink(self) -> None:
        path = Path(self._address.path)
        with contextlib.suppress(FileNotFoundError):
            if self._address.path and path.stat().st_ino == self._inode:
                path.unlink()

    def _admit(self, sock: socket.socket) -> None:
        try:
            link = _link(sock, "a trainer", queues=False)
            link = _introduced(link, self._about, time.monotonic() + _HELLO_S)
        except (OSError, FivefoldError):  # a silent or broken caller; others go on
            sock.close()
            return
        link.peer = _trainer_name(link.hello) or link.peer
        with self._lock:
            if not self._closed:
                self._links.append(link)
                os.eventfd_write(self._ready, 1)
                return
        link.close()


def _introduced(link: AnyLink, about: Mapping[str, Any], end: float) -> AnyLink:
    """The link, after both have said HELLO; `link.hello` is the other's.

    `about` is what to say beside versions and process; `end` a time of `time.monotonic`.

    Raises `Unreachable` if the other says nothing in time, `HandshakeError` if it cannot be worked with; the
    link is closed then.
    """
    try:
        link.send(Kind.HELLO, {"versions": versions(), "pid": os.getpid(), "about": dict(about)})
        answer = link.receive(max(end - time.monotonic(), 0.001))
        if answer is None or answer.kind is not Kind.HELLO:
            raise Unreachable(f"{link.peer} did not say what it is")
        link.hello = answer.fields
        _check_order(link)
    except LinkError as problem:
        link.close()
        raise Unreachable(str(problem)) from None
    except BaseException:
        link.close()
        raise
    return link


def _check_order(link: Link) -> None:
    """Raises `HandshakeError` for a machine whose numbers are written the other way round."""
    fields: object = link.hello.get("versions")
    order = cast(dict[str, Any], fields).get("byteorder") if isinstance(fields, dict) else None
    if order != sys.byteorder:
        raise HandshakeError(
            f"{link.peer} stores numbers in {order}-endian order, this machine in {sys.byteorder}-endian: "
            "use helpers of the same order"
        )


def _about_trainer() -> dict[str, Any]:
    """What a trainer says of itself: rank and host."""
    with contextlib.suppress(UsageError):  # not the place to complain about a launcher
        return {"rank": locate(os.environ).rank, "host": socket.gethostname()}
    return {"host": socket.gethostname()}


def _about_helper() -> dict[str, Any]:
    """What a helper says of itself: its host."""
    return {"host": socket.gethostname()}


def _trainer_name(hello: Mapping[str, Any]) -> str:
    """The name of a trainer, from its hello; empty if it has not said its rank."""
    about: object = hello.get("about")
    if not isinstance(about, dict) or "rank" not in about:
        return ""
    fields = cast(dict[str, Any], about)
    return f"trainer {fields['rank']} ({fields.get('host', 'unknown host')})"


def _prove(sock: socket.socket, key: bytes, name: str, end: float) -> None:
    """The trainer's part of the handshake, in words."""
    try:
        _PROTOCOL.call(sock, key, end)
    except OtherVersion as problem:
        raise HandshakeError(
            f"{name} speaks protocol {problem}, this process {_PROTOCOL.version}: install the same version "
            "of Fivefold on both"
        ) from None
    except OtherProtocol:
        raise HandshakeError(
            f"who answers as {name} is no helper of fivefold: check address and port"
        ) from None
    except OtherKey:
        raise HandshakeError(
            f"{name} knows another key: it belongs to another job, or FIVEFOLD_HELPER_KEY differs"
        ) from None


def _link(sock: socket.socket, peer: str, *, queues: bool, silent_s: float = 60.0) -> StreamLink:
    kind = ArenaLink if sock.family == socket.AF_UNIX else StreamLink
    return kind(sock, peer, queues=queues, timeout_s=silent_s)


def _alike(link: StreamLink) -> bool:
    """Whether both count processes alike, so that one can tell whether the other still writes."""
    if isinstance(link, ArenaLink) and link.hello.get("pid") != link.peer_pid():
        link.passes_memory = False
        return False
    return True


# ---- Where helpers listen: `unix:/path/of/a.sock` on the same node, `host:port` elsewhere

_MOST_PATH_BYTES = 107  # sun_path has 108, one of them for the end
_BACKLOG = 64


@dataclass(frozen=True)
class Address:
    """Of a helper: a path, or host and port."""

    path: str = ""
    host: str = ""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Address:
        """From text. Raises `UsageError` unless it is `unix:/path` or `host:port` (`[::1]:port`)."""
        if text.startswith("unix:"):
            return cls._of_path(text.removeprefix("unix:"))
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise UsageError(
                f"{text!r} is no address of a helper; valid: unix:/path/of/a.sock on the same node, "
                "host:port (such as dpu01:21001, or [fd00::7]:21001) elsewhere"
            )
        return cls(host=host, port=int(port))

    @classmethod
    def _of_path(cls, path: str) -> Address:
        size = len(os.fsencode(path))
        if not path.startswith("/") or size > _MOST_PATH_BYTES:
            raise UsageError(
                f"the path of a helper's socket has {size} bytes; {_MOST_PATH_BYTES} is the most that the "
                "system takes: use a shorter one, in /tmp or $XDG_RUNTIME_DIR"
                if size > _MOST_PATH_BYTES
                else f"the address unix:{path} has no absolute path; write unix:/path/of/a.sock"
            )
        return cls(path=path)

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def dial(address: Address, timeout_s: float) -> socket.socket:
    """A connection to whoever listens there. Raises `OSError` if nobody does."""
    if not address.path:
        return socket.create_connection((address.host, address.port), timeout_s)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(address.path)
    except BaseException:
        sock.close()
        raise
    return sock


def opened(address: Address) -> tuple[socket.socket, Address]:
    """A socket that listens, and its address: port 0 has become a free port.

    Raises:
        UsageError: it is in use, or none of this host; the message says what to do.
    """
    return _opened_path(address) if address.path else _opened_port(address)


def _opened_port(address: Address) -> tuple[socket.socket, Address]:
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        door = socket.create_server(found[4][:2], family=found[0], backlog=_BACKLOG)
    except OSError as problem:
        raise UsageError(
            f"a helper cannot listen at {address}: {_why_not(address, problem)}"
        ) from None
    return door, Address(host=address.host, port=int(door.getsockname()[1]))


def _why_not(address: Address, problem: OSError) -> str:
    if problem.errno == errno.EADDRINUSE:
        return (
            f"port {address.port} is in use; choose another one, or 0 for a free one. Helpers of a node "
            "need a port each"
        )
    if problem.errno == errno.EADDRNOTAVAIL or isinstance(problem, socket.gaierror):
        return (
            f"{address.host} is no address of this host ({socket.gethostname()}); name one of its network "
            "interfaces, or 0.0.0.0 for all"
        )
    if problem.errno == errno.EACCES:
        return "ports below 1024 are the system's; choose one above"
    return str(problem)


def _opened_path(address: Address) -> tuple[socket.socket, Address]:
    path = Path(address.path)
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _clear(path)
        door.bind(address.path)
        path.chmod(0o600)
        door.listen(_BACKLOG)
    except UsageError:
        door.close()
        raise
    except OSError as problem:
        door.close()
        raise UsageError(
            f"a helper cannot listen at {address}: {problem.strerror or problem}; name a path in a "
            "directory that exists and is yours"
        ) from None
    return door, address


def _clear(path: Path) -> None:
    """Remove the socket of a process that was killed. Raises `UsageError` if it is anything else."""
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise UsageError(
            f"a helper cannot listen at unix:{path}: there is a file; name another path"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(1.0)
        try:
            asking.connect(str(path))
        except ConnectionRefusedError:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            return
        except OSError:  # full, but somebody is there
            pass
    raise UsageError(
        f"a helper cannot listen at unix:{path}: another process does; name another path"
    )
