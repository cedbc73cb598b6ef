"""What the operating system refused, told so that somebody can act on it: operation, file, reason, remedy."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Generator
from pathlib import Path

__all__ = ["described", "doing"]

_DOING = "_fivefold_doing"
_STORAGE = (
    "that storage fails: look into the kernel's log of that host (dmesg), or name another directory"
)
_CLOSED = "make it writable for you, or name another directory"
_FULL = "free space there, or name another directory"
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _FULL),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _CLOSED),
    **dict.fromkeys((errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.EUCLEAN), _STORAGE),
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "that host has too many files open",
}


@contextlib.contextmanager
def doing(what: str, where: Path | str) -> Generator[None]:
    """Let an `OSError` of the block know what failed: many calls of the system tell no file."""
    try:
        yield
    except OSError as problem:
        if not hasattr(problem, _DOING):  # the innermost knows best
            setattr(problem, _DOING, (what, str(where)))
        raise


def described(problem: BaseException) -> str:
    """A problem for people; of an `OSError` operation, file, reason and what to do about it.

    >>> described(OSError(errno.EROFS, "Read-only file system", "/scratch/a"))
    '/scratch/a: Read-only file system; make it writable for you, or name another directory'
    >>> described(ValueError("too large"))
    'too large'
    """
    if not isinstance(problem, OSError):
        return str(problem) or repr(problem)
    what, where = getattr(problem, _DOING, ("", problem.filename or ""))
    reason = problem.strerror or str(problem) or type(problem).__name__
    place = " ".join(str(part) for part in (what, where) if part)
    remedy = _REMEDIES.get(problem.errno or 0, "")
    return f"{f'{place}: ' if place else ''}{reason}{f'; {remedy}' if remedy else ''}"
