"""Folders that are copied to the storage of a node: what of them, and where the copies lie.

    TMPDIR/fivefold-UID-stage/KEY-BOOT   a whole copy: whoever uses it holds a shared lock (flock) on it
                              tmp-...    one that is being written, or removed

A copy gets its name when it is whole. One that was made before the node started again is not trusted: what
the system had not written by then may be missing.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Self

from fivefold.errors import UsageError

__all__ = ["Entry", "Store", "Tree"]

_BYTECODE = "__pycache__"
_CODE = (".py", ".pyc", ".so")
_KEPT_S = 7 * 86400.0
_PAGE_BYTES = 4096
_SCRIPT_BYTES = 1 << 16
_PTH = "zz_fivefold_stage.pth"
"""the last of its folder, so that it sees what the others have added"""
_PTH_LINE = (
    "import json, os, sys; sys.path[:] = map(lambda path, places=json.loads(os.environ.get("
    "'FIVEFOLD_STAGED', '{}')): places.get(path, path), sys.path)\n"
)


class Entry(NamedTuple):
    """A file, folder or link in a tree."""

    path: str
    mode: int
    size: int
    mtime_ns: int
    link: str
    """where a link leads"""


@dataclass(frozen=True)
class Tree:
    """A folder as it was seen.

    Args:
        source: its absolute path.
        whole: whether all of it is carried, as of an environment. Else it is code: Python files and extension
            modules of it, and of folders in it that hold Python files directly; all else is a link there.
        entries: folders come before what they hold.
    """

    source: str
    whole: bool
    entries: tuple[Entry, ...]

    @classmethod
    def seen(cls, source: str, *, whole: bool) -> Self:
        """Look at a folder. Raises `UsageError` if it cannot be read."""
        try:
            return cls(source, whole, tuple(_entries(source, "", whole=whole)))
        except OSError as problem:
            raise UsageError(
                f"--stage cannot read {problem.filename}: {problem.strerror}"
            ) from None

    @cached_property
    def key(self) -> str:
        """Of its source, and paths, sizes and times in it; not of bytecode, which Python adds at any time."""
        lasting = [
            entry[:1] if stat.S_ISDIR(entry.mode) else entry
            for entry in self.entries
            if _BYTECODE not in entry.path
        ]
        digest = hashlib.sha256(json.dumps([self.whole, lasting]).encode()).hexdigest()
        return f"{hashlib.sha256(os.fsencode(self.source)).hexdigest()[:12]}-{digest[:20]}"

    @cached_property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(entry.size for entry in self.entries)

    def files(self) -> list[Entry]:
        """Those with content, in the order in which it is sent."""
        return [entry for entry in self.entries if stat.S_ISREG(entry.mode)]

    def pack(self) -> bytes:
        """As it travels: a line."""
        return json.dumps([self.source, self.whole, self.entries]).encode() + b"\n"

    @classmethod
    def parse(cls, packed: bytes) -> Self:
        """What `pack` made."""
        source, whole, entries = json.loads(packed)
        return cls(source, whole, tuple(Entry(*one) for one in entries))

    def write(self, root: str, blocks: Iterator[memoryview]) -> None:
        """Write it to the folder `root`. `blocks` are the contents of its files, one after the other."""
        block = memoryview(b"")
        for entry in self.entries:
            path = f"{root}/{entry.path}"
            if stat.S_ISDIR(entry.mode):
                os.mkdir(path, 0o700)  # noqa: PTH102 - of many files, each line here counts
            elif stat.S_ISLNK(entry.mode):
                os.symlink(entry.link, path)  # noqa: PTH211
            else:
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                try:
                    left = entry.size
                    while left:
                        block = block or next(blocks)
                        done = os.write(fd, block[:left])
                        block, left = block[done:], left - done
                    os.fchmod(fd, stat.S_IMODE(entry.mode) & 0o777)
                    os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
                finally:
                    os.close(fd)

    def adapt(self, root: Path, final: Path) -> None:
        """Make what was written to `root` work as `final`."""
        if not self.whole:
            self._close_folders(root)
        for site in root.glob("lib/python*/site-packages"):
            (site / _PTH).write_text(_PTH_LINE)
        for script in root.glob("bin/*"):
            plain = script.is_file() and not script.is_symlink()
            if not plain or script.stat().st_size > _SCRIPT_BYTES:
                continue
            text = script.read_bytes()
            if text.startswith(b"#!"):
                there, here = (os.fsencode(f"{place}/") for place in (self.source, final))
                script.write_bytes(text.replace(there, here))

    def _close_folders(self, root: Path) -> None:
        """What a script writes beside itself would be lost here: let it fail instead."""
        inner = [root / entry.path for entry in self.entries if stat.S_ISDIR(entry.mode)]
        for folder in (root, *inner):
            if folder.name != _BYTECODE:
                (folder / _BYTECODE).mkdir(exist_ok=True)
                folder.chmod(0o500)


def _entries(source: str, below: str, *, whole: bool) -> Iterator[Entry]:
    with os.scandir(f"{source}/{below}") as listed:
        found = sorted(listed, key=lambda one: one.name)
    for one in found:
        path = f"{below}{one.name}"
        link = _link(source, one, whole=whole)
        if link:
            yield Entry(path, stat.S_IFLNK, 0, 0, link)
        elif one.is_dir():
            if whole and path in ("envs", "pkgs") and os.path.isdir(f"{source}/conda-meta"):  # noqa: PTH112
                continue  # other environments, and what they were made of
            yield Entry(path, stat.S_IFDIR, 0, 0, "")
            yield from _entries(source, f"{path}/", whole=whole)
        elif one.is_file():
            told = one.stat()
            yield Entry(path, told.st_mode, told.st_size, told.st_mtime_ns, "")


def _link(source: str, one: os.DirEntry[str], *, whole: bool) -> str:
    """Where an entry of a copy leads; empty if it is carried."""
    if not whole:
        if one.is_symlink() and one.is_dir():
            return one.path
        if one.is_dir():
            return "" if one.name == _BYTECODE or _holds_code(one.path) else one.path
        return "" if one.name.endswith(_CODE) and one.is_file() else one.path
    if not one.is_symlink():
        return ""
    told, folder = os.readlink(one.path), os.path.dirname(one.path)  # noqa: PTH115, PTH120
    target = os.path.normpath(os.path.join(folder, told))  # noqa: PTH118
    inside = target.startswith(f"{source}/")
    if not inside and one.is_file() and folder != f"{source}/bin":
        return ""  # into a store of packages, as some installers make them; those of bin are the base's
    if inside == os.path.isabs(told):  # noqa: PTH117
        return os.path.relpath(target, folder) if inside else target
    return told


def _holds_code(folder: str) -> bool:
    try:
        with os.scandir(folder) as found:
            return any(one.name.endswith(".py") for one in found)
    except OSError:
        return False  # not ours to read: a link will do


# ---- On a node


class Store:
    """The copies on this node. Raises `UsageError` if nobody but others may use its folder.

    Args:
        folder: on storage of the node; empty: TMPDIR, or /tmp.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder or tempfile.gettempdir()) / f"fivefold-{os.geteuid()}-stage"
        try:
            with contextlib.suppress(FileExistsError):
                self.folder.mkdir(0o700)
            found = self.folder.lstat()
        except OSError as problem:
            raise self._refused(f"cannot be made: {problem.strerror}") from None
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise self._refused("is no folder that only you can use: see what it is, and remove it")
        self._boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]

    def _refused(self, why: str) -> UsageError:
        return UsageError(
            f"{os.uname().nodename}: {self.folder}, for copies of environments, {why}; or name another "
            "folder in FIVEFOLD_STAGE"
        )

    def place(self, key: str) -> Path:
        """Where the copy of a tree lies, if it does."""
        return self.folder / f"{key}-{self._boot}"

    def hold(self, key: str) -> int | None:
        """A descriptor that keeps a copy here until it is closed; None if there is no whole copy."""
        with self._locked(), contextlib.suppress(FileNotFoundError):
            fd = _lock(self.place(key), fcntl.LOCK_SH)
            os.utime(fd)  # it was used
            return fd
        return None

    @contextlib.contextmanager
    def new(self, tree: Tree) -> Generator[Path]:
        """A folder to write a copy to, which gets its name then. Raises `UsageError` for lack of space."""
        self._make_room(tree)
        folder = self.folder / f"tmp-{secrets.token_hex(8)}"
        with self._locked():
            folder.mkdir(0o700)
            fd = _lock(folder, fcntl.LOCK_SH)
        try:
            yield folder
            tree.adapt(folder, self.place(tree.key))
            try:
                folder.rename(self.place(tree.key))
            except OSError:
                if not self.place(tree.key).is_dir():  # another job was faster
                    raise
        finally:
            os.close(fd)
            if folder.exists():
                _remove(folder)

    def _make_room(self, tree: Tree) -> None:
        """Remove older copies of the same folder, and those not used for a week; others only for space."""
        same = tree.key.partition("-")[0]
        oldest = time.time() - _KEPT_S
        self._remove_unused(
            lambda path: path.name.startswith(same) or path.stat().st_mtime < oldest
        )
        if self._lacks(tree):
            self._remove_unused(lambda _: True)
        if why := self._lacks(tree):
            raise UsageError(
                f"{os.uname().nodename} has no room for a copy of {tree.source} in {self.folder}: {why}; "
                "name another folder in FIVEFOLD_STAGE"
            )

    def _lacks(self, tree: Tree) -> str:
        disk = os.statvfs(self.folder)
        free = disk.f_bavail * disk.f_frsize
        needed = sum(-(-entry.size // _PAGE_BYTES) * _PAGE_BYTES for entry in tree.files())
        if free < needed:
            return f"it takes {needed / 1e6:.0f} MB, and {free / 1e6:.0f} MB are free"
        if disk.f_files and disk.f_favail < len(tree.entries):
            return f"it takes {len(tree.entries)} files, and {disk.f_favail} more can be made"
        return ""

    def _remove_unused(self, chosen: Callable[[Path], bool]) -> None:
        doomed: list[Path] = []
        with self._locked():
            for path in self.folder.iterdir():
                left = path.name.startswith("tmp-") or not path.name.endswith(self._boot)
                if left or chosen(path):
                    # Somebody uses it, or is removing it.
                    with contextlib.suppress(BlockingIOError, FileNotFoundError):
                        os.close(_lock(path, fcntl.LOCK_EX))
                        doomed.append(path.rename(self.folder / f"tmp-{secrets.token_hex(8)}"))
        for path in doomed:
            _remove(path)

    @contextlib.contextmanager
    def _locked(self) -> Generator[None]:
        """While it lasts no other process looks for copies, names or removes any."""
        fd = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def _lock(folder: Path, how: int) -> int:
    """Raises `BlockingIOError` if others keep it from that."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _remove(folder: Path) -> None:
    for inner, _, _ in os.walk(folder):
        with contextlib.suppress(OSError):
            os.chmod(inner, 0o700)  # noqa: PTH101
    shutil.rmtree(folder, ignore_errors=True)
