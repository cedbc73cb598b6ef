"""Reading batches from a consumer's side, without torch."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from wire import answering

WARM = 4
"""batches, before anything is counted"""
UNTIMED = 0.25
"""of a block's length, before it: what was made ahead is used up"""


def options() -> argparse.Namespace:
    """The command line of all consumers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("contender")
    parser.add_argument("--socket", required=True)
    parser.add_argument("--photos", type=Path, required=True)
    return parser.parse_args()


def move(core: int) -> None:
    """All threads of this process, and none of its children, compute on that core from now on."""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(thread.name), {core})


def serve(
    address: str, begin: Callable[[], Iterator[Any]], versions: str, *, anew: bool = False
) -> None:
    """Read batches for so many milliseconds, whenever a number comes, until the socket closes.

    `anew`: what `begin` gives goes on by itself and does not wait to be asked, so every block begins again.
    """
    batches = begun(begin)

    def answer(milliseconds: int) -> dict[str, Any]:
        nonlocal batches
        if anew:
            batches = begun(begin)
        found = block(batches, milliseconds / 1e3)
        if anew:
            batches = iter(())  # and ends here
        return found

    answering(address, {"rank": 0, "versions": versions}, answer)


def begun(begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Batches, of which some have come."""
    batches = begin()
    for _ in range(WARM):
        next(batches)
    return batches


def block(batches: Iterator[Any], seconds: float) -> dict[str, Any]:
    """Samples, of seconds; and how many there were together with those before the clock ran."""
    before = _read(batches, UNTIMED * seconds)
    begun = time.perf_counter()
    samples = _read(batches, seconds)
    wall_s = time.perf_counter() - begun
    return {"samples": samples, "wall_s": wall_s, "all_samples": before + samples}


def _read(batches: Iterator[Any], seconds: float) -> int:
    """For so long; how many samples, by the length of their images."""
    samples, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        samples += len(next(batches))
    return samples
