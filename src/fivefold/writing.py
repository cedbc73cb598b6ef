"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from fivefold.errors import UsageError

__all__ = [
    "TorchStream",
    "for_torch",
    "opened_anew",
    "reason_of",
    "told_if_unwritten",
    "write_whole",
]


@contextmanager
def opened_anew(
    path: Path, *, newline: str | None = None, binary: bool = False, mode: int = 0o666
) -> Generator[Any]:
    """A file, for UTF-8 text or bytes, that takes the place of `path` at the end of the block.

    Raises `OSError`.
    Whatever lies there, a link too, is replaced and never followed: it may be somebody else's.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        how: Any = (
            {"mode": "wb"} if binary else {"mode": "w", "encoding": "utf-8", "newline": newline}
        )
        with os.fdopen(descriptor, **how) as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(path: str | Path, text: str, what: str) -> None:
    """Write a file that somebody named: its own or that of a link; or to a device, as /dev/stdout.

    Raises `UsageError` if it cannot be written, which calls it `what`.
    """
    whole = Path(path).resolve()
    with told_if_unwritten(path, what):
        if whole.exists() and not whole.is_file():
            whole.write_text(text, encoding="utf-8")
            return
        with opened_anew(whole) as file:
            file.write(text)


@contextmanager
def told_if_unwritten(path: str | Path, what: str) -> Generator[None]:
    """Raises `UsageError` with the file's name for an `OSError` of the block."""
    try:
        yield
    except OSError as problem:
        raise UsageError(
            f"cannot write {what} {path}: {reason_of(problem)}; free space there, make the folder writable, "
            "or name another place"
        ) from None


class _Stream(Protocol):
    def write(self, data: Any, /) -> int: ...

    def tell(self) -> int: ...


class TorchStream:
    """What torch's writer writes to and may close, after every tensor and at the end; see `for_torch`."""

    def __init__(self, stream: _Stream) -> None:
        self._stream, self.tell = stream, stream.tell
        self.problem: OSError | None = None
        """why nothing more can be written"""

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Pass on."""
        try:
            return self._stream.write(data)
        except OSError as problem:
            self.problem = self.problem or problem
            raise

    def flush(self) -> None:
        """Nothing: whoever opened the stream ends it."""

    def close(self) -> None:
        """Nothing."""


@contextmanager
def for_torch(stream: _Stream) -> Generator[TorchStream]:
    """A stream for torch, whose writer, in C++, tells that something failed, and not what.

    Raises the `OSError` of the stream in the place of what torch makes of it.
    """
    told = TorchStream(stream)
    try:
        yield told
    except Exception as problem:
        if told.problem is None or problem is told.problem:
            raise
        raise told.problem from problem


def reason_of(problem: OSError) -> str:
    """What went wrong, without number and file."""
    return problem.strerror or str(problem)
