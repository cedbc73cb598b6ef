"""Where a thread is, in a few words: the line of the user's code, and the call in it that takes the time.

    dataset.py:42 __getitem__ (file.read)

The line is that of the innermost frame outside of torch, Python's own library and Fivefold; if there is none,
the innermost of Fivefold. The call is read from the source, for calls into C have no frame of their own.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import os
import re
import sysconfig
from collections.abc import Iterator
from types import CodeType, FrameType

__all__ = ["position", "stack", "where"]

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # noqa: PTH100, PTH120 - as in code objects
_LIBRARY = tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib"))
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_TORCH = tuple(f"{packages}torch{os.sep}" for packages in _PACKAGES)
_CALLED = re.compile(r"[\w.\[\]'\"]+(?=\()")
_LONGEST = 60


def where(frame: FrameType) -> str:
    """The line of the user's code that `frame` was called from, and what it calls."""
    chosen = _chosen(frame)
    called = _called(chosen.f_code, chosen.f_lasti)
    if not called and chosen is not frame:
        called = f"{_short(frame.f_code.co_filename)} {frame.f_code.co_name}"
    return _line(chosen) + (f" ({called})" if called else "")


def stack(frame: FrameType, most: int = 16) -> list[str]:
    """Lines from the innermost frame outwards; what a program begins with is left out."""
    frames = itertools.takewhile(lambda f: "runpy" not in f.f_code.co_filename, _outwards(frame))
    return [_line(one) for one in itertools.islice(frames, most)]


def position(frame: FrameType) -> tuple[int, int]:
    """Equal for a thread that has not moved."""
    return id(frame), frame.f_lasti


def _chosen(frame: FrameType) -> FrameType:
    kinds = [(one, _kind(one.f_code.co_filename)) for one in _outwards(frame)]
    for kind in ("user", "fivefold"):
        for one, its in kinds:
            if its == kind:
                return one
    return frame


def _outwards(frame: FrameType) -> Iterator[FrameType]:
    one: FrameType | None = frame
    while one is not None:
        yield one
        one = one.f_back


@functools.cache
def _kind(filename: str) -> str:
    if filename.startswith(_OWN):
        return "fivefold"
    if filename.startswith("<") or any(part in filename for part in _TORCH):
        return "library"
    packaged = any(part in filename for part in _PACKAGES)
    return "library" if filename.startswith(_LIBRARY) and not packaged else "user"


def _line(frame: FrameType) -> str:
    return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}"


@functools.cache
def _short(filename: str) -> str:
    """The name of a file; with its folder where the name alone says nothing."""
    folder, name = os.path.split(filename)
    return f"{os.path.basename(folder)}/{name}" if name == "__init__.py" else name  # noqa: PTH119


@functools.lru_cache(4096)
def _called(code: CodeType, instruction: int) -> str:
    """The function that is called there, as the source spells it; empty if it is no call."""
    if instruction < 0:
        return ""
    span = next(itertools.islice(code.co_positions(), instruction // 2, None), None)
    if span is None:
        return ""
    first, last, begin, end = span
    if first is None or begin is None or end is None:
        return ""
    line = linecache.getline(code.co_filename, first).encode()
    text = line[begin : end if last == first else None].decode(errors="replace")
    match = _CALLED.match(text.removeprefix("await "))
    return match[0][:_LONGEST] if match else ""
