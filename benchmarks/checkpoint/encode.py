"""How fast one core makes parity, and data out of it, in memory: GB of data read per second.

    python benchmarks/checkpoint/encode.py

Disks and networks are left out: this is the bound that the arithmetic sets. In each round all ways read as
much data as a member has, or several times that, of which nothing is in a cache.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

import numpy as np
import report
from contenders import HERE
from figures import environment
from rounds import undisturbed

from fivefold.checkpoint.schemes import BLOCK_BYTES, SCHEMES, CodedPiece, Term, carry_out


def main() -> int:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=256, help="data of a member, in 10**6 bytes")
    parser.add_argument("--members", type=int, default=8, help="members of a set")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of figures")
    asked = parser.parse_args()
    return report.PAGE.publish(
        ["encode"], lambda _: measured(asked.rounds, asked.members, asked.mb), asked.results
    )


def measured(rounds: int, members: int, mb: int) -> dict[str, Any]:
    """GB/s of each way, by round."""
    before = environment()
    ways = ways_of(members, mb * 10**6)
    for way in ways.values():
        way()
    answers, others = undisturbed(ways, rounds, gb_per_s, told, time.process_time)
    return {
        "part": "encode", "members": members, "mb": mb, "rounds": rounds, "gb_per_s": answers,
        "numpy": np.__version__,
        "environment": {**before, "torch": version("torch"), **others.told()},
    }  # fmt: skip


def ways_of(members: int, length: int) -> dict[str, Callable[[], int]]:
    """What is measured, by the names in `report.ENCODING`; each returns how many bytes it read."""
    # One member's bytes stand for all: what counts is that they do not fit into a cache.
    data = np.random.default_rng(0).integers(0, 256, length + BLOCK_BYTES, np.uint8)
    target = np.ones(length, np.uint8)
    lengths = [length] * members

    def read(term: Term, count: int) -> memoryview:
        at = (term.start + term.member * 4096) % length
        return data[at : at + count].data

    def copy() -> int:
        for at in range(0, length, BLOCK_BYTES):
            part = target[at : at + BLOCK_BYTES]
            np.copyto(part, data[at : at + len(part)])
        return length

    def coded(pieces: Sequence[CodedPiece]) -> Callable[[], int]:
        return partial(carry_out, pieces, read, lambda _: None)

    xor, rs = SCHEMES["xor"], SCHEMES["rs"]
    return {
        "copy": copy,
        "xor": coded(xor.recipe(lengths, 0)),
        "rs": coded(rs.recipe(lengths, 0)),
        "xor-rebuild": coded(xor.rebuild(lengths, {0}, 0)),
        "rs-rebuild": coded(rs.rebuild(lengths, {0, 1}, 0)),
    }


def gb_per_s(way: Callable[[], int]) -> float:
    """Of one core, while it computes."""
    begun = time.process_time()
    read = way()
    return read / (time.process_time() - begun) / 1e9


def told(done: int, answers: Mapping[str, Sequence[float]]) -> str:
    """A line after each round."""
    latest = "  ".join(f"{way} {own[-1]:.1f} GB/s" for way, own in answers.items())
    return f"round {done}: {latest}"


if __name__ == "__main__":
    sys.exit(main())
