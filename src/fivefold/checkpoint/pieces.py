"""Bytes of checkpoints between nodes: a server that knows the run's key, and its client.

    both               the handshake of `wire`
    client -> server   length (4 bytes), request in JSON         as often as wanted
    server -> client   status, length, digest (1 + 8 + 16 bytes), bytes

The digest (xxh3_128) detects damage, not an attacker inside the network. Nothing received is executed or
unpickled.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, cast

import xxhash

from fivefold.closing import Closing
from fivefold.errors import CheckpointError
from fivefold.wire import Listener, OtherKey, OtherProtocol, Protocol

__all__ = [
    "MOST_BYTES",
    "Address",
    "NotHere",
    "PeerError",
    "PieceClient",
    "Server",
    "Stretch",
]

Address = tuple[str, int]
"""host and port"""

MOST_BYTES = 8 << 20
"""what one request may ask for"""

_PROTOCOL = Protocol("fivefold file", "002")
_REQUEST = struct.Struct("!I")
_REPLY = struct.Struct("!BQ16s")
_REQUEST_BYTES = 4096
_MOST_CALLERS, _OF_ONE = 512, 256
"""who have not proved yet that they know the key: as many as a node has ranks may call at once"""
_OK, _NOT_HERE, _REFUSED = range(3)
_RETRY_S = 0.05


class PeerError(CheckpointError):
    """Another node does not answer, knows another key, or answers nonsense."""


class NotHere(CheckpointError):
    """The other node answers, but does not have what is asked for, or not yet."""


@dataclass(frozen=True)
class Stretch:
    """A stretch of bytes of a generation."""

    generation: str
    """name of its directory"""
    save: str
    """which save; empty for whichever there is"""
    of: Literal["data", "redundancy", "file"]
    member: int
    """whose data or redundancy; of no meaning for a file"""
    name: str = ""
    """of a file"""
    start: int = 0
    length: int = 0

    def to_json(self) -> bytes:
        """As it travels."""
        return json.dumps(asdict(self)).encode("ascii")

    @staticmethod
    def parse(text: bytes) -> Stretch:
        """Raises `ValueError` on anything but a request."""
        values: object = json.loads(text.decode("ascii"))
        if not isinstance(values, dict):
            raise ValueError("a request is an object")  # noqa: TRY004 - what a peer sent, not a caller's type
        given = cast(dict[str, Any], values)
        if set(given) != {field.name for field in fields(Stretch)}:
            raise ValueError(f"a request has other fields than {sorted(given)}")
        request = Stretch(**given)
        texts = (request.generation, request.save, request.of, request.name)
        numbers = (request.member, request.start, request.length)
        if not all(type(text) is str for text in texts) or not all(
            type(number) is int and 0 <= number < 1 << 62 for number in numbers
        ):
            raise ValueError("a field of the request has another type")
        if request.of not in ("data", "redundancy", "file") or request.length > MOST_BYTES:
            raise ValueError("the request asks for what there is not, or for too much at once")
        return request


class Server(Closing):
    """Answers requests of those who know the key, each connection in a thread of its own.

    Args:
        host: address of the interface that looks toward the other nodes.
        key: of the run.
        answer: reads the bytes of a request into the beginning of a buffer and returns what it filled, less
            where they end. Raises `NotHere`, or an error that is told to who asked. It runs in several
            threads at once.
        idle_s: how long a connection may be silent.
        most: connections at a time of those who know the key; others wait until there is room.

    Raises:
        OSError: the address is none of this host.
    """

    def __init__(
        self,
        host: str,
        key: bytes,
        answer: Callable[[Stretch, memoryview], memoryview],
        *,
        idle_s: float = 600.0,
        most: int = 1024,
    ) -> None:
        self._answer = answer
        self._idle_s = idle_s
        self._places = threading.BoundedSemaphore(most)
        self._lines: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._stopping = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        door = socket.create_server((host, 0), family=family, backlog=most)
        self.address: Address = (host, door.getsockname()[1])
        self.sent_bytes = 0
        self._listener = Listener(
            door, _PROTOCOL, key, self._talk, most=_MOST_CALLERS, of_one=_OF_ONE
        )

    def close(self) -> None:
        """Hang up on everybody."""
        self._stopping = True
        self._listener.close()
        with self._lock:
            for line in self._lines:
                with contextlib.suppress(OSError):
                    line.shutdown(socket.SHUT_RDWR)

    def _talk(self, line: socket.socket) -> None:
        # A caller that hangs up, is silent or slow, or talks nonsense.
        with line, contextlib.suppress(OSError, ValueError, RecursionError):
            self._converse(line)

    def _converse(self, line: socket.socket) -> None:
        """Answer all requests of one who knows the key, once there is a place."""
        while not self._places.acquire(timeout=_RETRY_S):
            if self._stopping:
                return
        try:
            with self._lock:
                self._lines.add(line)
            line.settimeout(self._idle_s)
            room = memoryview(b"")
            while not self._stopping:
                room = self._reply(line, room)
        finally:
            with self._lock:
                self._lines.discard(line)
            self._places.release()

    def _reply(self, line: socket.socket, room: memoryview) -> memoryview:
        """Answer one request. `room` is used again for the next: fresh memory costs more than reading."""
        (length,) = _REQUEST.unpack(_received(line, _REQUEST.size))
        if length > _REQUEST_BYTES:
            raise ValueError("no request is that long")
        request = Stretch.parse(_received(line, length))
        if len(room) < request.length:
            room = memoryview(bytearray(request.length))
        try:
            status, payload = _OK, self._answer(request, room)
        except NotHere as problem:
            status, payload = _NOT_HERE, _told(problem)
        except (CheckpointError, OSError) as problem:
            status, payload = _REFUSED, _told(problem)
        line.sendall(_REPLY.pack(status, len(payload), xxhash.xxh3_128_digest(payload)))
        line.sendall(payload)
        self.sent_bytes += len(payload)
        return room


class PieceClient(Closing):
    """A connection to one server, made when it is first needed. For one thread at a time.

    Args:
        address: of the server.
        key: of the run.
        timeout_s: how long connecting, or any single wait for bytes, may take.
    """

    def __init__(self, address: Address, key: bytes, *, timeout_s: float = 30.0) -> None:
        self.address = address
        self._key = key
        self._timeout_s = timeout_s
        self._line: socket.socket | None = None
        self._closed = False

    def close(self) -> None:
        """Hang up for good; a thread that waits in `read` gets a `PeerError`."""
        self._closed = True
        self._hang_up()

    def _hang_up(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            line.close()

    def read(
        self, request: Stretch, into: memoryview | None = None, *, patience_s: float = 0.0
    ) -> memoryview:
        """The bytes that are asked for; fewer where they end.

        Args:
            request: what to read.
            into: room for `request.length` bytes; else some is made.
            patience_s: how long to ask again while the server does not have it yet.

        Raises:
            NotHere: the server does not have it.
            PeerError: the server cannot be reached, is silent, or refuses. The connection is closed.
        """
        end = time.monotonic() + patience_s
        while True:
            try:
                return self._read(request, into)
            except NotHere:
                if time.monotonic() >= end:
                    raise
                time.sleep(_RETRY_S)

    def blocks(self, request: Stretch, block_bytes: int = MOST_BYTES) -> Iterator[memoryview]:
        """All bytes from `request.start` to their end; each block is valid until the next."""
        room, start = memoryview(bytearray(block_bytes)), request.start
        while True:
            block = self.read(replace(request, start=start, length=block_bytes), room)
            if block:
                yield block
            if len(block) < block_bytes:
                return
            start += len(block)

    def _read(self, request: Stretch, into: memoryview | None) -> memoryview:
        try:
            line = self._line = self._line or self._connect()
            text = request.to_json()
            line.sendall(_REQUEST.pack(len(text)) + text)
            status, length, digest = _REPLY.unpack(_received(line, _REPLY.size))
            if status > _REFUSED or length > (request.length if status == _OK else _REQUEST_BYTES):
                raise PeerError(f"{self._who()} answers nonsense (status {status}, {length} bytes)")
            room = memoryview(bytearray(length)) if into is None or status else into[:length]
            _receive(line, room)
            if xxhash.xxh3_128_digest(room) != digest:
                raise PeerError(f"{self._who()}: bytes were damaged on the way")
        except PeerError:
            self._hang_up()
            raise
        except (OSError, ValueError) as problem:  # a closed socket is a ValueError
            self._hang_up()
            raise PeerError(f"{self._who()} does not answer: {problem}") from None
        if status == _OK:
            return room
        told = bytes(room).decode("utf-8", "replace")
        if status == _NOT_HERE:
            raise NotHere(f"{self._who()}: {told}")
        raise PeerError(f"{self._who()} refuses: {told}")

    def _connect(self) -> socket.socket:
        if self._closed:
            raise PeerError(f"the connection to {self._who()} was closed")
        end = time.monotonic() + self._timeout_s
        line = socket.create_connection(self.address, self._timeout_s)
        try:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _PROTOCOL.call(line, self._key, end)
        except OtherProtocol:
            line.close()
            raise PeerError(
                f"{self._who()} is no agent of fivefold, or one of another version"
            ) from None
        except OtherKey:
            line.close()
            raise PeerError(f"{self._who()} knows another key: it belongs to another run") from None
        except BaseException:
            line.close()
            raise
        line.settimeout(self._timeout_s)
        return line

    def _who(self) -> str:
        return f"the agent at {self.address[0]}:{self.address[1]}"


def _told(problem: Exception) -> memoryview:
    return memoryview(str(problem).encode("utf-8", "replace")[:_REQUEST_BYTES])


def _received(line: socket.socket, length: int) -> bytes:
    room = bytearray(length)
    _receive(line, memoryview(room))
    return bytes(room)


def _receive(line: socket.socket, room: memoryview) -> None:
    while room:
        count = line.recv_into(room)
        if count == 0:
            raise ConnectionError("the connection ended")
        room = room[count:]
