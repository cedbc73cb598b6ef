"""Where a thread is, in a few words: the line of the user's code, and the call in it that takes the time.

    dataset.py:42 __getitem__ (file.read)
    train.py:30 main (loss.backward: graph.py _engine_run_backward)

The line is that of the innermost frame outside of torch, Python's own library and Fivefold; if there is none,
the innermost of Fivefold. The call is read from the source, for calls into C have no frame of their own;
after it comes the innermost function that is written in Python, where that is another one.
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

__all__ = ["may_wait", "position", "stack", "where"]

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # noqa: PTH100, PTH120 - as in code objects
_LIBRARY = tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib"))
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_TORCH = tuple(f"{packages}torch{os.sep}" for packages in _PACKAGES)
_COMMUNICATION = (
    f"{_OWN}comm{os.sep}", f"torch{os.sep}distributed{os.sep}", f"torch{os.sep}autograd{os.sep}",
    f"torch{os.sep}nn{os.sep}parallel{os.sep}", f"torch{os.sep}_ops.py",
)  # fmt: skip
_LONGEST = 60


def where(frame: FrameType) -> str:
    """The line of the user's code that `frame` was called from, and what it calls."""
    chosen = _chosen(frame)
    # Numbers of code objects are quick keys; their objects are kept, so that no other gets the number.
    key = id(chosen.f_code), chosen.f_lasti, id(frame.f_code)
    known = _told.get(key)
    if known is None:
        if len(_told) >= _MOST:
            _told.clear()
        known = _told[key] = _text(chosen, frame), chosen.f_code, frame.f_code
    return known[0]


_MOST = 4096
_told: dict[tuple[int, int, int], tuple[str, CodeType, CodeType]] = {}


def _text(chosen: FrameType, frame: FrameType) -> str:
    called = _called(chosen.f_code, chosen.f_lasti)
    inner = frame.f_code.co_name
    if chosen is not frame and called.rpartition(".")[2] != inner:
        within = f"{_short(frame.f_code.co_filename)} {inner}"
        called = f"{called}: {within}" if called else within
    return _line(chosen) + (f" ({called})" if called else "")


def stack(frame: FrameType, most: int = 32) -> list[str]:
    """Lines from the innermost frame outwards; what a program begins with is left out."""
    frames = itertools.takewhile(lambda f: "runpy" not in f.f_code.co_filename, _outwards(frame))
    return [_line(one) for one in itertools.islice(frames, most)]


def may_wait(frame: FrameType) -> bool:
    """Whether this may be a wait for an operation: in communication, or in C++ beneath autograd."""
    return any(part in frame.f_code.co_filename for part in _COMMUNICATION)


def position(frame: FrameType) -> tuple[int, int]:
    """Equal for a thread that has not moved."""
    return id(frame), frame.f_lasti


def _chosen(frame: FrameType) -> FrameType:
    one: FrameType | None = frame
    own: FrameType | None = None
    while one is not None:
        kind = _kind(one.f_code.co_filename)
        if kind == "user":
            return one
        if own is None and kind == "fivefold":
            own = one
        one = one.f_back
    return own or frame


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


def _called(code: CodeType, instruction: int) -> str:
    """The function that is called there, as the source spells it; empty if it is no call."""
    span = next(itertools.islice(code.co_positions(), max(instruction, 0) // 2, None), None)
    first, last, begin, end = span or (None, None, None, None)
    if first is None or begin is None or end is None:
        return ""
    text = linecache.getline(code.co_filename, first).encode()
    text = text[begin : end if last == first else None]
    return _function(text.decode(errors="replace").strip().removeprefix("await "))


def _function(call: str) -> str:
    """What a call calls; of one that goes on in the next line, what can be seen.

    >>> _function("Path(name).read_bytes()"), _function("net(x)"), _function("x + 1"), _function("send(")
    ('Path().read_bytes', 'net', '', 'send')
    """
    inner = re.compile(r"\([^()]*\)")
    text = call
    while (shorter := inner.sub("\0", text)) != text:
        text = shorter
    if not text.endswith(("\0", "(")):
        match = _CALLED.match(text)
        return match[0][:_LONGEST] if match else ""
    text = text[:-1].replace("\0", "()")
    return text[:_LONGEST] if _NAME.fullmatch(text) else ""


_CALLED = re.compile(r"[\w.]+(?=\()")
_NAME = re.compile(r"[\w.()\[\]'\"]+")
