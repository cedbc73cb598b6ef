"""Where helpers listen: `unix:/path/of/a.sock` on the same node, `host:port` elsewhere."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from fivefold.errors import UsageError

__all__ = ["Address", "dial", "opened"]

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
