"""Messages between trainers and helpers."""

from __future__ import annotations

import enum

import numpy as np
import xxhash

from fivefold.wire.frames import MOST_PAYLOAD_BYTES, Frames, LinkClosed

__all__ = ["FRAMES", "Kind", "fresh"]

_ALIGNED = 64


class Kind(enum.IntEnum):
    """What a message is for. T: a trainer sends it, H: a helper."""

    HELLO = 1
    """both, after they proved that they know the key: versions, machine, process"""
    POOL = 2
    """T: memory that payloads may be written into; links that share memory deal with it themselves"""
    OPEN = 3
    """T: `service`, `number`, `identity`, `axes`: what leases will be about"""
    READY = 4
    """H: `service`, `number`: it can be served"""
    REFUSED = 5
    """H: `service`, `number`, `why`: it cannot"""
    LEASE = 6
    """T: `service`, `number`, `lease`, and what to make"""
    DONE = 7
    """H: `service`, `number`, `lease`, `busy_s`, `waited_s`, and what was made"""
    FAILED = 8
    """H: `service`, `number`, `lease`, `kind` (of error), `message`, `traceback`"""
    CANCEL = 9
    """T: `service`, `number`, `lease`: not needed any more, unless begun"""
    WEIGHTS = 10
    """T: `service`, `number`, `version`; payload: a snapshot of the model"""
    SAMPLES = 11
    """T: samples of a lease that the helper could not read"""
    BYE = 12
    """both: `why`"""


def fresh(size_bytes: int) -> memoryview:
    """New memory, 64-byte aligned, pages of which cost nothing until they are written.

    Raises `LinkClosed` where there is none.
    """
    if size_bytes > MOST_PAYLOAD_BYTES:
        raise LinkClosed(
            f"a message announces a payload of {size_bytes} bytes; {MOST_PAYLOAD_BYTES} is the most"
        )
    try:
        room = np.empty(size_bytes + _ALIGNED, np.uint8)
    except MemoryError:
        raise LinkClosed(f"no memory for a payload of {size_bytes} bytes") from None
    start = -room.ctypes.data % _ALIGNED
    return room.data[start : start + size_bytes]


FRAMES = Frames(Kind, xxhash.xxh3_64, fresh)
