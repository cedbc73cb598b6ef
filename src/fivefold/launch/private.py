"""Folders that only this user can use, where anybody could have put something of that name before."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from fivefold.errors import UsageError

__all__ = ["private_folder"]


def private_folder(path: Path, use: str, remedy: str) -> Path:
    """Make the folder `path` unless it is there, and see to it that only this user can use it.

    One of this user that was open to others is closed to them, unless somebody else has put something into
    it. Nothing is ever removed. Returns `path`.

    Args:
        path: its parent exists.
        use: what happens there, for people, such as "where ranks meet".
        remedy: how to choose another place, for people.

    Raises:
        UsageError: it is a link, no folder, another user's, or holds something of another user, or it cannot
            be made.
    """
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        why = _why_not(path)
    except OSError as problem:
        why = f"cannot be made a folder that only you can use ({problem.strerror or problem})"
    if why:
        raise UsageError(f"{path}, {use}, {why}; {remedy}")
    return path


def _why_not(path: Path) -> str:
    """Why a folder is not to be trusted, after it was closed to others if it is ours; else nothing."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        return "is a link, and whoever made it says what lies there"
    if not stat.S_ISDIR(found.st_mode):
        return "is no folder"
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}, not to you (user {os.geteuid()})"
    if found.st_mode & 0o077:
        path.chmod(0o700)
        if path.lstat().st_mode & 0o077:
            return "can be used by others, and its file system does not change that"
    # Every time: it may have been closed just now, after others had left something.
    stranger = next(_strangers(path), None)
    if stranger is None:
        return ""
    return f"was open to others, and {stranger} is not yours: see what it is, and move it away"


def _strangers(path: Path) -> Iterator[Path]:
    """What other users have put into a folder."""
    for folder, folders, names in os.walk(path):
        for inside in (Path(folder, name) for name in (*folders, *names)):
            with contextlib.suppress(FileNotFoundError):  # of another rank, which has removed it
                if inside.lstat().st_uid != os.geteuid():
                    yield inside
