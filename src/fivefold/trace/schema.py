r"""What a trace file holds, byte by byte: one file per rank, of a fixed size, mapped by who writes it.

    0      "fivefold trace\n\0"
    16     version, u4
    20     length of the following, u4
    24     JSON: where the sections are, {"events": {"offset": ..., "items": ..., "fields": [...]}, ...}
    4096   the sections, each from a multiple of 4096 on

    live      one row: what the rank is doing now, and how much of the other sections is in use
    meta      JSON: rank, host, command line, plan, environment, clock
    notes     JSON, a line each: groups, losses, saves, failures, whatever has a text
    stacks    JSON: how often the main thread was seen where, by phase
    events    a ring: the latest spans and operations, one row each
    sums      operations and spans added up over the whole run, a row per kind, tag, phase, group and size
    windows   steps in order, a row each; when all rows are used, neighbours are merged

All integers are little-endian. Times are nanoseconds of CLOCK_MONOTONIC of the rank's node; `clock_offset_ns`
of meta, added, makes them those of rank 0's node. A reader takes names of fields from the file, and ignores
those it does not know. A newer version number means that known fields have changed their meaning.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import LiteralString

import numpy as np

from fivefold.trace.phases import Phase, Tag

__all__ = [
    "BINS",
    "DTYPES",
    "EVENT",
    "HEADER_BYTES",
    "KINDS",
    "LIVE",
    "MAGIC",
    "NOTHING",
    "PACKED",
    "PHASES",
    "SECTIONS",
    "SPAN",
    "SUM",
    "TAGS",
    "TEXT_BYTES",
    "VERSION",
    "WINDOW",
    "ProcessState",
    "bucket",
    "offset_of",
]

MAGIC = b"fivefold trace\n\0"
VERSION = 1
HEADER_BYTES = 4096

KINDS = (
    "span", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter",
    "all_to_all", "barrier", "send", "receive", "exchange", "other",
)  # fmt: skip
"""what an event is, by number: 0 is a span of a phase, all others are operations of a group"""
PHASES: tuple[str, ...] = tuple(Phase)
"""phases by number; where a field may be without one, that is `NOTHING`"""
TAGS: tuple[str, ...] = tuple(Tag)
DTYPES = (
    "", "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
    "complex64", "complex128", "other",
)  # fmt: skip
"""element types by number; 0 is none, as for a barrier"""
NOTHING = 255
"""no phase, no group, no tag"""
BINS = 40
"""of the histogram of durations: bin b counts those of 2**(b-1) to 2**b - 1 ns, the last all longer ones"""
_PHASES, _TAGS = 8, 12
"""room in a window; more phases or tags need a new version"""
assert len(PHASES) <= _PHASES
assert len(TAGS) <= _TAGS


class ProcessState(IntEnum):
    """Of the process that writes a file."""

    RUNNING = 0
    ENDED = 1
    FAILED = 2


LIVE = np.dtype([
    ("state", "<u4"), ("pid", "<u4"),
    ("stamp", "<u8"),           # odd while sums and windows are being changed
    ("heartbeat_ns", "<i8"),    # the last time that a thread of the process said it lives
    ("step", "<u8"),            # under way
    ("phase", "<u4"),           # of the main thread, or NOTHING
    ("window_steps", "<u4"),    # steps that a row of windows covers now
    ("phase_since_ns", "<i8"),
    ("sums", "<u8"), ("windows", "<u8"),   # rows in use
    ("meta_bytes", "<u8"), ("notes_bytes", "<u8"), ("stacks_bytes", "<u8"),
    ("lost_events", "<u8"),     # overwritten before they were added up, or still under way when overwritten
    ("lost_notes", "<u8"),      # for which there was no room
    ("lost_sums", "<u8"),       # events whose kind found no row left
    ("stopped_ns", "<i8"),      # at least so long the process stood still as a whole: by a signal, say
])  # fmt: skip

EVENT = np.dtype([
    ("seq", "<u8"),             # number of the event from 1; 0: the row was never used
    ("begin_ns", "<i8"),        # when the operation was asked for, or the span began
    ("end_ns", "<i8"),          # 0: under way
    ("blocked_ns", "<i8"),      # how long the caller could do nothing else (operations only)
    ("start_ns", "<i8"),        # when all ranks had come, 0 if unknown (operations only)
    ("cpu_ns", "<i8"),          # processor time of the thread (spans only)
    ("size_bytes", "<i8"),      # that this rank gave, or took where it gave nothing
    ("number", "<u4"),          # of the operation among those of its group: the same on all ranks
    ("step", "<u4"),
    ("kind", "u1"), ("tag", "u1"), ("phase", "u1"), ("group", "u1"), ("dtype", "u1"),
    ("folded", "u1"),           # 1: added up in sums
    ("peer", "<i2"),            # of a message, a rank of the group; root of a broadcast; else -1
])  # fmt: skip
PACKED = struct.Struct("<QqqqqqqIIBBBBBBh")
"""a row of `EVENT`, for those who write or read a few: numpy takes longer for one"""
assert PACKED.size == EVENT.itemsize == 72
SPAN = KINDS.index("span")

SUM = np.dtype([
    ("kind", "u1"), ("tag", "u1"), ("phase", "u1"), ("group", "u1"), ("dtype", "u1"),
    ("bucket", "u1"),           # `bucket` of the size
    ("unused", "<u2"),
    ("count", "<u8"), ("size_bytes", "<i8"), ("total_ns", "<i8"), ("blocked_ns", "<i8"),
    ("min_ns", "<i8"), ("max_ns", "<i8"), ("cpu_ns", "<i8"),
    ("histogram", "<u4", (BINS,)),
])  # fmt: skip

WINDOW = np.dtype([
    ("first_step", "<u4"), ("steps", "<u4"), ("begin_ns", "<i8"), ("end_ns", "<i8"),
    ("phase_ns", "<i8", (_PHASES,)),       # of the main thread, phases within it not counted
    ("phase_cpu_ns", "<i8", (_PHASES,)),   # its processor time there
    ("tag_ns", "<i8", (_TAGS,)),           # operations from asking to end, which may overlap
    ("tag_blocked_ns", "<i8", (_TAGS,)),
    ("tag_bytes", "<i8", (_TAGS,)),
    ("samples", "<u8"),         # of this rank; 0: unknown
    ("loss", "<f8"),            # mean of those that were read; nan: none was
    ("cpu_ns", "<i8"),          # of the process, all threads
    ("run_delay_ns", "<i8"),    # the main thread was ready and had no core
    ("throttled_ns", "<i8"),    # its cgroup had used up its share
    ("switched", "<u4"),        # times that the process was made to give up a core
    ("faults", "<u4"),          # pages that had to be read from a disk
    ("rss_bytes", "<i8"), ("gpu_bytes", "<i8"),  # most within the window; -1: unknown
    ("gpu_busy", "<f4"),        # share of time, nan: unknown
    ("ready", "<f4"),           # batches that the loader had ready when asked, mean; nan: unknown
    ("sent_bytes", "<i8"), ("received_bytes", "<i8"),  # by the node, loopback apart; -1: unknown
    ("energy_j", "<f8"),        # of the node's processors; nan: the machine does not tell
])  # fmt: skip

SECTIONS: dict[str, tuple[np.dtype[np.void], int]] = {
    "live": (LIVE, 1),
    "events": (EVENT, 16384),
    "sums": (SUM, 1024),
    "windows": (WINDOW, 1024),
}
"""tables and how many rows they have; a file may have others"""
TEXT_BYTES = {"meta": 128 << 10, "notes": 256 << 10, "stacks": 64 << 10}
"""sections of text, UTF-8"""


def offset_of(row: np.dtype[np.void], field: LiteralString) -> int:
    """Where a field of a row begins, in bytes."""
    fields = row.fields
    assert fields is not None
    return int(fields[field][1])


def bucket(size_bytes: int) -> int:
    """Which sizes are added up together: b holds 2**(b-1) to 2**b - 1 bytes, 0 holds none.

    >>> [bucket(n) for n in (0, 1, 4, 7, 8, 1 << 20)]
    [0, 1, 3, 3, 4, 21]
    """
    return size_bytes.bit_length()
