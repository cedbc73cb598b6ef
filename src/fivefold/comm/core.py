"""A group of the C core: its memory, its operations, and what their failures mean in words."""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fivefold.arena import Segment
from fivefold.arena.native import (
    CONNECT,
    DTYPES,
    KINDS,
    MISSING,
    REDUCTIONS,
    Call,
    CallReport,
    core,
)
from fivefold.comm import streams
from fivefold.comm.tensors import MARKS

__all__ = ["AskedMessage", "Core", "Spread", "explain", "held_up"]

STAGING_BYTES = 256 << 10
"""per rank, twice: small enough to stay in a core's own cache"""
RING_BYTES = 256 << 10
"""per ordered pair of ranks; takes memory once the pair exchanges messages"""

(
    _TIMEOUT, _DIED, _LEFT, _BROKEN, _MISMATCH, _TOO_LONG, _TOO_SHORT, _UNSUPPORTED, _NO_MEMORY, _CLOSED,
    _UNREADABLE, _CUT_OFF, _UNREACHABLE, _DAMAGED,
) = range(1, 15)  # fmt: skip
_OPEN_S = 30.0
"""how long a stream to another node may take to be opened"""


@dataclass(frozen=True)
class Spread:
    """How the ranks of a group lie on several nodes."""

    local: int
    """which rank of its node this one is"""
    node_of: Sequence[int]
    """by rank; numbered from 0 in the order of their first ranks"""
    doors: Sequence[streams.Door]
    """by rank"""
    token: str
    """names the group to those that open streams to it"""
    wakers: Sequence[int]
    """an eventfd per rank of this node; the group's own from now on"""
    rounds: bool = False
    """whether each node rounds its part of a sum of 16-bit floats"""
    direct_bytes: int = 0
    """small sums of fewer go straight from each node to each, others by doubling"""

    @property
    def rails(self) -> int:
        """How many streams large tensors take to each rank: as many as all ranks have."""
        return min(len(door.hosts) for door in self.doors)


@dataclass
class Core:
    """This rank's part of a group. Everything it maps stays mapped until `close`."""

    rank: int
    size: int
    memory: Segment
    """of the ranks of this node: posts, stagings, rings"""
    arenas: Sequence[Segment]
    """where their tensors may lie, one segment per rank; kept, not owned"""
    watches: list[int]
    """per rank of this node, what tells of its end, or -1"""
    crowded: bool
    """whether this node has more ranks than cores"""
    name: str = ""
    """of the group, for messages"""
    tag: str = ""
    """what the group is for, as torch's `group_desc` says; for messages and events"""
    left_in: int = 0
    """in a forked child: the process whose group this is"""
    spread: Spread | None = None
    """None: all ranks are on this node"""
    in_order: bool = False
    """whether sums are made one rank after the other, see `add_in_order`"""
    unreachable: str = ""
    """why the last stream that could not be opened could not"""
    _pointer: int = field(init=False, repr=False)
    _closing: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        self.library = library = core()
        local = self.rank if self.spread is None else self.spread.local
        opened = library.ff_group_open(self.memory.address, local, int(self.crowded))
        assert opened, "the memory was set up by rank 0"
        self._pointer = opened
        _opened[id(self)] = self
        for rank, (arena, watch) in enumerate(zip(self.arenas, self.watches, strict=True)):
            library.ff_group_peer(opened, rank, watch, arena.address, arena.size_bytes)
        if self.spread is not None:
            self._open_to_nodes(self.spread)

    def _open_to_nodes(self, spread: Spread) -> None:
        known = weakref.ref(self)

        def connect(_self: object, rank: int, lane: int, tag: int) -> int:
            group = known()
            return -1 if group is None else group.connect(rank, lane, tag)

        self._connect = CONNECT(connect)  # the core calls it as long as the group is open
        numbers = (ctypes.c_int32 * self.size)(*spread.node_of)
        wakers = (ctypes.c_int * len(spread.wakers))(*spread.wakers)
        failed = self.library.ff_group_spread(
            self._pointer, self.rank, self.size, numbers, self._connect, None, wakers, spread.rails,
            int(spread.rounds), spread.direct_bytes,
        )  # fmt: skip
        if spread.doors[0].world:
            _close_at_exit()
            mpi_ranks = (ctypes.c_int32 * self.size)(*(door.mpi_rank for door in spread.doors))
            failed = failed or self.library.ff_group_by_mpi(self._pointer, mpi_ranks)
        assert not failed, "there is memory for a group"
        streams.expect(spread.token, self)

    def connect(self, rank: int, lane: int, tag: int) -> int:
        """Open a stream to a rank of another node: its descriptor, or -1."""
        assert self.spread is not None
        try:
            return streams.open_stream(
                self.spread.doors[rank], self.spread.token, self.rank, lane, tag, timeout_s=_OPEN_S
            )
        except streams.StreamError as problem:
            self.unreachable = str(problem)
            return -1

    def accept(self, rank: int, lane: int, descriptor: int, tag: int) -> bool:
        """Take a stream that a rank of another node has opened."""
        with self._closing:
            if not self._pointer:
                return False
            return self.library.ff_group_accept(self._pointer, rank, lane, descriptor, tag) == 0

    @property
    def pointer(self) -> int:
        """What the core calls this group. Raises `RuntimeError` once it is closed, and in forked children."""
        if self.left_in:
            raise RuntimeError(
                f"group {self.name or '?'} is that of process {self.left_in}, rank {self.rank}, of which "
                "this one is a forked copy: it would take part in the name of its rank; let the parent "
                "communicate"
            )
        if not self._pointer:
            raise RuntimeError(
                f"group {self.name or '?'} was destroyed; make a new one (dist.new_group)"
            )
        return self._pointer

    @property
    def closed(self) -> bool:
        """Whether this rank has left."""
        return not self._pointer

    @staticmethod
    def bytes_per_rank(size: int) -> int:
        """What a rank of a group may come to use of its memory."""
        return 2 * STAGING_BYTES + size * RING_BYTES

    @staticmethod
    def memory_for(size: int) -> Segment:
        """The memory of a new group, which one rank makes for all."""
        library = core()
        bytes_ = int(library.ff_group_bytes(size, STAGING_BYTES, RING_BYTES))
        segment = Segment.create("group", bytes_, sparse=True)
        done = library.ff_group_set_up(segment.address, size, STAGING_BYTES, RING_BYTES)
        assert done == 0, "sizes are multiples of pages"
        return segment

    def probe(self, timeout_s: float) -> str:
        """Let the ranks find out whether each may read the memory of each; why not, or nothing. Collective.

        Raises `RuntimeError` when a rank does not come.
        """
        report = CallReport()
        call = Call(kind=KINDS.index("barrier"))
        if core().ff_group_probe(self.pointer, timeout_s, ctypes.byref(report)):
            raise explain(self, report, call)
        if not report.other_count:
            return ""
        why = os.strerror(int(report.other_count))
        return f"rank {report.other} may not read the memory of rank {report.other_root} ({why})"

    def add_in_order(self) -> None:
        """Make sums one rank after the other from now on, where all are on this node. Collective."""
        self.library.ff_group_in_order(self.pointer)
        self.in_order = True

    def run(self, call: Call) -> None:
        """Run a collective and return when it is done. Raises `RuntimeError`."""
        report = CallReport()
        if self.library.ff_run(self.pointer, ctypes.byref(call), ctypes.byref(report)):
            raise explain(self, report, call)

    def held_up(self, report: CallReport) -> bool:
        """Whether a collective waits for another node; `report` then says for what."""
        with self._closing:
            return bool(
                self._pointer and self.library.ff_held_up(self._pointer, ctypes.byref(report))
            )

    def close(self) -> None:
        """Leave the group. Operations under way fail, here and on the others."""
        if self.spread is not None and self._pointer:
            streams.dismiss(self.spread.token)
        with self._closing:
            if self._pointer:
                core().ff_group_close(self._pointer)
                self._pointer = 0
                self.memory.close()
                for watch in self.watches:
                    if watch >= 0:
                        os.close(watch)


@dataclass(frozen=True)
class AskedMessage:
    """A message, for its error."""

    peer: int
    """the other side; -1: anyone"""
    tag: int
    dtype: torch.dtype


def held_up(name: str) -> tuple[int, bool, int, int] | None:
    """What a collective of the group of that name waits for on another node.

    A rank of the group, whether this one sends to it, and how many of how many bytes have moved.
    """
    report = CallReport()
    for group in [*_opened.values()]:
        if group.name == name and group.held_up(report):
            moved, size = int(report.other_count), int(report.other_bytes)
            return int(report.other), bool(report.other_root), moved, size
    return None


_opened: weakref.WeakValueDictionary[int, Core] = weakref.WeakValueDictionary()
"""by number of the object"""


@functools.cache
def _close_at_exit() -> None:
    """Once per process, which then waits for the others in MPI."""
    atexit.register(_close_all, os.getpid())


def _close_all(process: int) -> None:
    if process == os.getpid():
        for group in [*_opened.values()]:
            group.close()
        streams.hang_up()


def _leave_to_parent() -> None:
    """In a forked child: the memory is shared, and whoever writes to it is the rank."""
    for group in [*_opened.values()]:
        if group.spread is not None and not group.closed:
            group.library.ff_group_forget(
                group.pointer
            )  # no lock: its holder may not be in the child
        group.left_in, group._pointer = os.getppid(), 0  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    _opened.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def explain(group: Core, report: CallReport, asked: Call | AskedMessage) -> RuntimeError:
    """The error of a failed operation: who, what, which, why, and what to do, in one line."""
    from torch.distributed import DistBackendError

    what = KINDS[report.kind]
    if isinstance(asked, AskedMessage):
        other = "anyone" if asked.peer < 0 else f"rank {asked.peer}"
        what = f"message with {other}, tag {asked.tag}"
    where = f"number {report.sequence} of group {group.name or '?'}"
    where += f", {group.tag}" if group.tag else ""
    return DistBackendError(
        f"rank {group.rank} of {group.size}: {what} ({where}): {_reason(group, report, asked)}"
    )


def _reason(group: Core, report: CallReport, asked: Call | AskedMessage) -> str:
    status = int(report.status)
    if status == _MISMATCH:
        return _mismatch(report, asked) if isinstance(asked, Call) else _otherwise(report, asked)
    if status in (_TOO_LONG, _TOO_SHORT):
        return (
            f"rank {report.other} sent {report.other_count} bytes, "
            f"{'more' if status == _TOO_LONG else 'fewer'} than the tensor holds that receives them"
        )
    if status == _BROKEN:
        return (
            f"rank {report.other} has given up: {_who_is_missing(group, report, int(report.other_status))}; "
            "the group cannot be used any more"
        )
    if status == _UNSUPPORTED:
        assert isinstance(asked, Call), "messages are not reduced"
        return f"{REDUCTIONS[asked.reduction]} of {DTYPES[asked.dtype]} does not exist"
    return _who_is_missing(group, report, status)


def _who_is_missing(group: Core, report: CallReport, status: int) -> str:
    count = int(report.missing_count)
    who = _ranks(sorted(report.missing[:count])) + (
        f" and {count - MISSING} more" if count > MISSING else ""
    )
    return {
        _MISMATCH: "it asked for something else than another rank, whose message says what",
        _TIMEOUT: f"Timed out waiting for {who}{_how_far(report)}; "
        "`fivefold run --trace` tells who waits for whom",
        _DIED: f"the process of {who} has ended",
        _LEFT: f"{who} has left the group (its script ended or failed)",
        _CLOSED: "it closed the group while this was under way",
        _CUT_OFF: f"the node of {who} acknowledges nothing any more: it is down, or cut off from this one",
        _UNREACHABLE: f"no stream to {who} could be opened"
        + (f" ({group.unreachable})" if group.unreachable else "")
        + ": it has ended, or its node takes no connections from this one",
        _DAMAGED: f"what came from {who} is damaged: do all ranks have one version of Fivefold?",
        _UNREADABLE: f"the memory of {who} cannot be read any more: was it made to run as another user?",
        _NO_MEMORY: f"a quarter of the node's memory is taken by messages of {who} that nobody receives: are "
        "they received in another order than they are sent?"
        if count
        else "no memory",
    }.get(status, f"status {status}")


def _how_far(report: CallReport) -> str:
    """What moved over the link to a rank of another node."""
    if not report.other_bytes:
        return ""
    moved, bytes_ = int(report.other_count), int(report.other_bytes)
    way = f"gone to rank {report.other}" if report.other_root else f"come from rank {report.other}"
    return f" ({moved:,} of {bytes_:,} bytes have {way})"


def _otherwise(report: CallReport, asked: AskedMessage) -> str:
    sent = next((d for d, mark in MARKS.items() if mark == report.other_dtype), "another dtype")
    return (
        f"rank {report.other} sent {report.other_count} bytes of {sent}, and the tensor that receives them "
        f"is of {asked.dtype}: give both the same dtype"
    )


def _mismatch(report: CallReport, call: Call) -> str:
    if KINDS[call.kind] == "all_to_all_v" and report.other_kind == call.kind:
        return (
            f"rank {report.other} sends {report.other_count} bytes to rank {report.other_root}, which "
            "expects another number: make output_split_sizes match the input_split_sizes of the others"
        )
    other = Call(
        kind=report.other_kind, dtype=report.other_dtype, reduction=report.other_reduction,
        root=report.other_root, count=report.other_count,
    )  # fmt: skip
    return f"this rank asks for {_told(call)}, rank {report.other} for {_told(other)}"


def _told(call: Call) -> str:
    kind = KINDS[call.kind]
    words = [kind]
    if "reduce" in kind:
        words.append(REDUCTIONS[call.reduction])
    if kind in ("reduce", "broadcast", "gather", "scatter"):
        words.append(f"root {call.root}")
    if kind not in ("barrier", "all_to_all_v"):
        words.append(f"of {call.count} {DTYPES[call.dtype]}")
    return " ".join(words)


def _ranks(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks))
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}" if ranks else "others"
