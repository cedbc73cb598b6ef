"""Two processes of a job prove to each other that they know its key, which is not sent.

    listener -> caller   name, version, nonce                    16, 32 bytes
    caller -> listener   nonce, HMAC(key, name, version, "caller", both nonces)
    listener -> caller   HMAC(key, name, version, "listener", both nonces), or zeros and the end

What follows is not encrypted, and its checksums detect damage, not an attacker inside the network.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time
from dataclasses import dataclass

__all__ = [
    "KEY_BYTES",
    "OtherKey",
    "OtherProtocol",
    "OtherVersion",
    "Protocol",
    "new_key",
    "received",
]

KEY_BYTES = 32
_CODE_BYTES, _NAME_BYTES, _VERSION_BYTES = 32, 13, 3
_REFUSAL = bytes(_CODE_BYTES)


class OtherProtocol(Exception):
    """Who answers speaks another protocol."""


class OtherVersion(OtherProtocol):
    """Who answers speaks another version of it, which is the argument."""


class OtherKey(Exception):
    """The other side knows another key."""


def new_key() -> bytes:
    """A secret for the processes of a job."""
    return secrets.token_bytes(KEY_BYTES)


@dataclass(frozen=True)
class Protocol:
    """What a listener speaks: told before anything else.

    Args:
        name: at most 13 ASCII characters.
        version: at most 3.
    """

    name: str
    version: str

    def call(self, line: socket.socket, key: bytes, end: float) -> None:
        """The caller's part of the handshake; `end` is a time of `time.monotonic`.

        Raises `OtherProtocol`, `OtherVersion` or `OtherKey`, and `OSError` if nothing comes in time.
        """
        head = received(line, len(self._head()) + _CODE_BYTES, end)
        if not head.startswith(self._head()):
            if not head.startswith(self._head()[:_NAME_BYTES]):
                raise OtherProtocol
            version = head[_NAME_BYTES : _NAME_BYTES + _VERSION_BYTES]
            raise OtherVersion(version.decode("ascii", "replace").strip())
        theirs, ours = head[-_CODE_BYTES:], secrets.token_bytes(_CODE_BYTES)
        line.sendall(ours + self._code(key, b"caller", theirs, ours))
        proof = received(line, _CODE_BYTES, end)
        if not hmac.compare_digest(proof, self._code(key, b"listener", theirs, ours)):
            raise OtherKey

    def answer(self, line: socket.socket, key: bytes, end: float) -> None:
        """The listener's part. Raises `OtherKey`, and `OSError` if nothing comes in time."""
        ours = secrets.token_bytes(_CODE_BYTES)
        line.settimeout(max(end - time.monotonic(), 0.001))
        line.sendall(self._head() + ours)
        told = received(line, 2 * _CODE_BYTES, end)
        theirs, proof = told[:_CODE_BYTES], told[_CODE_BYTES:]
        if not hmac.compare_digest(proof, self._code(key, b"caller", ours, theirs)):
            line.sendall(_REFUSAL)
            raise OtherKey
        line.sendall(self._code(key, b"listener", ours, theirs))

    def _head(self) -> bytes:
        name, version = self.name.ljust(_NAME_BYTES), self.version.ljust(_VERSION_BYTES)
        return f"{name}{version}".encode("ascii")

    def _code(self, key: bytes, whose: bytes, listener: bytes, caller: bytes) -> bytes:
        return hmac.new(key, self._head() + whose + listener + caller, hashlib.sha256).digest()


# ---- Bytes that have to come by a certain time, however slowly they come


def received(line: socket.socket, length: int, end: float) -> bytes:
    """The next `length` bytes of a line; `end` is a time of `time.monotonic`.

    The line is left with a timeout. Raises `OSError` if it ends, or they have not come by then.
    """
    room = bytearray(length)
    left = memoryview(room)
    while left:
        line.settimeout(max(end - time.monotonic(), 0.001))
        count = line.recv_into(left)
        if count == 0:
            raise ConnectionError("the connection ended")
        left = left[count:]
    return bytes(room)
