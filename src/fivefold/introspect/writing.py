"""Files that a report writes into a folder that others may write to as well."""

from __future__ import annotations

import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["opened_anew"]


@contextmanager
def opened_anew(path: Path, *, newline: str | None = None, binary: bool = False) -> Generator[Any]:
    """A file, for UTF-8 text or bytes, that takes the place of `path` at the end of the block.

    Raises `OSError`.
    Whatever lies there, a link too, is replaced and never followed: it may be somebody else's.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        how: Any = (
            {"mode": "wb"} if binary else {"mode": "w", "encoding": "utf-8", "newline": newline}
        )
        with os.fdopen(descriptor, **how) as file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
