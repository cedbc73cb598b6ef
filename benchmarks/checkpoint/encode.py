"""How fast one core makes the redundancy of each scheme, in memory: GB of data read per second.

    python benchmarks/checkpoint/encode.py [--mb 256] [--members 8] [--rounds 7]

Disks and networks are left out: this is the bound that the arithmetic sets. The ideal beside it is
`numpy.bitwise_xor` on two blocks that stay in the cache. A partner's copy is no arithmetic: the blocks are
handed on as they were read.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from fivefold.checkpoint.schemes import BLOCK_BYTES, SCHEMES, Term, carry_out


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=256, help="data of a member, in 10**6 bytes")
    parser.add_argument("--members", type=int, default=8, help="members of a set")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    length = options.mb * 10**6
    # One member's bytes stand for all: what counts is that they do not fit into a cache.
    data = np.random.default_rng(0).integers(0, 256, length + BLOCK_BYTES, np.uint8).data

    def read(term: Term, count: int) -> memoryview:
        at = (term.start + term.member * 4096) % length
        return data[at : at + count]

    print(f"{options.members} members with {options.mb} MB each; blocks of {BLOCK_BYTES >> 10} KiB")
    print(f"{'scheme':<10}{'kept by a member':>18}{'GB/s per core':>16}")
    for name, scheme in SCHEMES.items():
        recipe = scheme.recipe([length] * options.members, 0)
        kept = sum(piece.length for piece in recipe)
        line = f"{name:<10}{kept / 1e6:>15.1f} MB"
        if any(len(piece.terms) > 1 for piece in recipe):
            speed = _gb_per_s(options.rounds, lambda r=recipe: carry_out(r, read, _discard))
            print(f"{line}{speed:>16.1f}")
        else:
            print(f"{line}{'nothing to do':>16}")
    print(f"{'(ideal: cached xor)':<28}{_gb_per_s(options.rounds, _cached_xor):>16.1f}")


def _discard(block: object) -> None:
    del block


def _cached_xor() -> int:
    a, b = (np.ones(BLOCK_BYTES, np.uint8) for _ in range(2))
    for _ in range(1000):
        np.bitwise_xor(a, b, out=a)
    return 1000 * BLOCK_BYTES


def _gb_per_s(rounds: int, work: Callable[[], int]) -> float:
    speeds: list[float] = []
    for _ in range(rounds + 1):
        begun = time.process_time()
        read = work()
        speeds.append(read / max(time.process_time() - begun, 1e-9) / 1e9)
    return statistics.median(speeds[1:])


if __name__ == "__main__":
    main()
