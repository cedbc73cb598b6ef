"""On a node: copies of what ranks import, taken from the node before and passed on to the one after.

    launcher ── its process ──blocks──> node 3 ──blocks──> node 1 ──blocks──> ...
                reads each file once     writes, and passes on as it comes

    python -P -m fivefold.launch.stage    < a line of JSON; for the launcher's, a line for each folder follows

Agents do not copy: they start this, and hold the copies while the job lasts.
"""

from __future__ import annotations

import enum
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from fivefold.closing import Closing
from fivefold.errors import UsageError
from fivefold.launch.staged_tree import Store, Tree
from fivefold.wire import (
    Channel,
    Frames,
    LinkClosed,
    LinkError,
    Listener,
    OtherKey,
    OtherProtocol,
    Protocol,
)

__all__ = ["Brief", "Copying", "NodeStage", "main"]

_PROTOCOL = Protocol("fivefold copy", "001")
_BLOCK_BYTES = 4 << 20
_CALL_S, _ANSWER_S, _BLOCK_S = 10.0, 30.0, 60.0
_CUT = 3
"""the exit code of who lost the node before"""
_SEARCHED = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX")


class _Kind(enum.IntEnum):
    TREE = 1
    """payload: `Tree.pack`"""
    BLOCK = 2
    """payload: the next bytes of its files"""


_FRAMES = Frames(_Kind)


@dataclass(frozen=True)
class Brief:
    """What a process that copies is told."""

    job_key: str
    trees: list[str]
    """their keys"""
    door: int
    """descriptor at which the node after calls; -1 if there is none"""
    host: str = ""
    """where the node before answers; empty for the first, which is told what is in the trees"""
    port: int = 0
    folder: str = ""
    """where copies are to lie; empty: TMPDIR, or /tmp"""


class Copying:
    """A process that copies trees, started."""

    def __init__(self, brief: Brief, door: socket.socket | None, told: bytes = b"") -> None:
        # In memory: what is to be told may be that the disk is full.
        self._said, file = (os.fdopen(os.memfd_create(name), "w+b") for name in ("said", "brief"))
        with file:
            file.write(json.dumps(asdict(brief)).encode() + b"\n" + told)
            file.seek(0)
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "fivefold.launch.stage"],
                stdin=file,
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                pass_fds=[door.fileno()] if door is not None else [],
                start_new_session=True,
            )
        if door is not None:
            door.close()

    def why(self, code: int) -> str:
        """Why it failed, once it has; empty if it did not, or only since the node before is gone."""
        with self._said:
            if code in (0, _CUT):
                return ""
            self._said.seek(0)
            said = self._said.read().decode(errors="replace").strip().removeprefix("error: ")
        return said or f"{os.uname().nodename}: the process that copies ended with code {code}"


class NodeStage(Closing):
    """The copies of this node that its agent has been asked for; they stay while this is open."""

    def __init__(self, job_key: bytes) -> None:
        self._key = job_key
        self._folder = ""
        self._store: Store | None = None
        self._held: dict[str, int] = {}
        self._door: socket.socket | None = None

    def asked(self, trees: Sequence[str], folder: str) -> tuple[list[str], int]:
        """Those that are not here, and the port at which the node after shall call. Raises as `Store`."""
        self._folder, store = folder, self._store or Store(folder)
        self._store = store
        lacks: list[str] = []
        for tree in trees:
            if tree not in self._held:
                held = store.hold(tree)
                if held is None:
                    lacks.append(tree)
                else:
                    self._held[tree] = held
        self._door = socket.create_server(("", 0)) if lacks else None
        return lacks, 0 if self._door is None else int(self._door.getsockname()[1])

    def copying(self, trees: Sequence[str], host: str, port: int, *, passes: bool) -> Copying:
        """Start to take copies from whoever answers at an address."""
        door, self._door = self._door, None
        assert door is not None
        if not passes:
            door.close()
            door = None
        number = -1 if door is None else door.fileno()
        return Copying(Brief(self._key.hex(), [*trees], number, host, port, self._folder), door)

    def relocated(
        self, command: Sequence[str], environ: Mapping[str, str], places: Mapping[str, str]
    ) -> tuple[list[str], dict[str, str]]:
        """Command and environment of ranks that use the copies.

        Args:
            command: the first word, and a script after Python, are looked for in the copies.
            environ: of the ranks.
            places: by folder, the key of the tree that takes its place.
        """
        assert self._store is not None
        here = {source: str(self._store.place(key)) for source, key in places.items()}

        def moved(path: str) -> str:
            within = [one for one in here if path == one or path.startswith(f"{one}/")]
            best = max(within, key=len, default="")
            return here[best] + path[len(best) :] if best else path

        first = 2 if Path(command[0]).name.startswith("python") else 1
        changed = {
            name: os.pathsep.join(map(moved, environ[name].split(os.pathsep)))
            for name in _SEARCHED
            if name in environ
        }
        words = [*map(moved, command[:first]), *command[first:]]
        return words, {**environ, **changed, "FIVEFOLD_STAGED": json.dumps(here)}

    def close(self) -> None:
        """See `Closing`."""
        if self._door is not None:
            self._door.close()
        for held in self._held.values():
            os.close(held)
        self._held.clear()


# ---- The process that copies


def main() -> int:
    """Copy trees; returns an exit code."""

    def end(signum: int, _frame: FrameType | None) -> None:
        sys.exit(128 + signum)  # and remove what there is

    signal.signal(signal.SIGTERM, end)
    brief = Brief(**json.loads(sys.stdin.buffer.readline()))
    told = [*sys.stdin.buffer]
    try:
        with ExitStack() as stack:
            if told:
                _send([Tree.parse(line) for line in told], _after(brief, stack))
            else:
                _take(brief, _before(brief, stack), _after(brief, stack))
    except (LinkClosed, LinkError) as problem:
        sys.stderr.write(f"error: {problem}\n")
        return _CUT
    except UsageError as problem:
        sys.stderr.write(f"error: {problem}\n")
        return problem.exit_code
    except OSError as problem:
        where = brief.folder or tempfile.gettempdir()
        sys.stderr.write(
            f"error: {os.uname().nodename} cannot write copies to {where}: {problem.strerror}; free space "
            "there, or name another folder in FIVEFOLD_STAGE\n"
        )
        return UsageError.exit_code
    return 0


def _before(brief: Brief, stack: ExitStack) -> Channel:
    """The node before."""
    try:
        line = socket.create_connection((brief.host, brief.port), _CALL_S)
        _PROTOCOL.call(line, bytes.fromhex(brief.job_key), time.monotonic() + _ANSWER_S)
    except (OSError, OtherKey, OtherProtocol) as problem:
        raise LinkClosed(f"{brief.host}:{brief.port} does not answer: {problem}") from None
    return stack.enter_context(_channel(line))


def _after(brief: Brief, stack: ExitStack) -> Channel | None:
    """The node after; None if there is none, or it does not call."""
    if brief.door < 0:
        return None
    lines: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
    door = socket.socket(fileno=brief.door)
    stack.enter_context(
        Listener(door, _PROTOCOL, bytes.fromhex(brief.job_key), lines.put, most=16, of_one=8)
    )
    try:
        return stack.enter_context(_channel(lines.get(timeout=_ANSWER_S)))
    except queue.Empty:
        return None


def _channel(line: socket.socket) -> Channel:
    return Channel(line, "the node beside", _FRAMES, queues=False)


def _send(trees: Sequence[Tree], after: Channel | None) -> None:
    if after is None:
        raise LinkClosed("no node takes the copies")
    for tree in trees:
        try:
            _send_tree(tree, after)
        except OSError as problem:
            what = problem.filename or tree.source
            raise UsageError(f"--stage cannot read {what}: {problem.strerror}") from None


def _send_tree(tree: Tree, after: Channel) -> None:
    """Read each of its files once. Raises `UsageError` if one changes meanwhile."""
    after.send(_Kind.TREE, {}, [tree.pack()])
    room, used = memoryview(bytearray(_BLOCK_BYTES)), 0
    for entry in tree.files():
        path = f"{tree.source}/{entry.path}"
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - of many files
            left = entry.size
            while left:
                count = file.readinto(room[used : used + left])
                if not count:
                    break
                used, left = used + count, left - count
                if used == len(room):
                    after.send(_Kind.BLOCK, {}, [room])
                    used = 0
            found = os.fstat(file.fileno())
        if left or (found.st_size, found.st_mtime_ns) != (entry.size, entry.mtime_ns):
            raise UsageError(f"{path} changed while it was copied; start again when it is finished")
    if used:
        after.send(_Kind.BLOCK, {}, [room[:used]])


def _take(brief: Brief, before: Channel, after: Channel | None) -> None:
    """Write what comes, and pass it on."""

    def payloads() -> Iterator[memoryview]:
        onward = after
        while True:
            message = before.receive(_BLOCK_S)
            if message is None:
                raise LinkClosed(f"{brief.host} has sent nothing for {_BLOCK_S:.0f} s")
            if onward is not None:
                try:
                    onward.send(message.kind, message.fields, [message.payload])
                except LinkClosed:  # it says itself what is wrong, if it can
                    onward = None
            yield message.payload

    told, store = payloads(), Store(brief.folder)
    for key in brief.trees:
        tree = Tree.parse(bytes(next(told)))
        if tree.key != key:
            raise LinkClosed(f"{brief.host} sends another tree than was asked for")
        with store.new(tree) as folder:
            tree.write(str(folder), told)


if __name__ == "__main__":
    sys.exit(main())
