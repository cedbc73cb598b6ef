"""The contenders: how each of them is started."""

from __future__ import annotations

from pathlib import Path

from contender import Kind

HERE = Path(__file__).resolve().parent
RANKS = 2

# What `fivefold.start` sets too. All have it, so that the figures compare how work is divided, not the heap.
_HEAP = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))


def _fivefold(ranks: int) -> tuple[str, ...]:
    return ("-m", "fivefold", "run", "-n", str(ranks), "--log-dir", "{logs}")


def _named(*kinds: Kind) -> dict[str, Kind]:
    return {kind.name: kind for kind in kinds}


SPEED = _named(
    Kind("half", "one thread on half the image", (), 1, 1, _HEAP),
    Kind("halves", "two processes, half the image each", _fivefold(RANKS), RANKS, 1),
    Kind("single", "one process, two threads", (), 1, RANKS, _HEAP),
    Kind("one-thread", "one process, one thread", (), 1, 1, _HEAP),
    Kind("layers", "torchrun, half the layers each", _TORCHRUN, RANKS, 1, _HEAP),
    Kind("tiles", "fivefold run, width=2", _fivefold(RANKS), RANKS, 1),
    Kind("tiles-shared", "fivefold run, width=2, backend fivefold", _fivefold(RANKS), RANKS, 1),
    Kind("tiles-never", "fivefold run, width=2, nothing fused", _fivefold(RANKS), RANKS, 1),
    Kind("tiles-2", "fivefold run, width=2, two layers fused", _fivefold(RANKS), RANKS, 1),
    Kind("tiles-4", "fivefold run, width=2, four layers fused", _fivefold(RANKS), RANKS, 1),
)
"""whose steps are timed"""
MEMORY = _named(
    Kind("whole", "one process", (), 1, RANKS, _HEAP),
    Kind("1x2", "2 tiles: width=2", _fivefold(2), 2, 1),
    Kind("2x2", "4 tiles: height=2, width=2", _fivefold(4), 4, 1),
)
"""whose memory is measured"""
