"""The contenders: how each of them is started."""

from __future__ import annotations

from pathlib import Path

from contender import Kind

HERE = Path(__file__).resolve().parent
RANKS = 2

_FIVEFOLD = ("-m", "fivefold", "run", "-n", str(RANKS), "--log-dir", "{logs}")
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))
# What `fivefold.start` sets too: glibc keeps freed memory for the next step, up to tensors of 32 MB.
_HEAP = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
KINDS = {
    kind.name: kind
    for kind in (
        Kind("alone", "one process alone on half the batch, one thread", (), 1, 1, _HEAP),
        Kind("single", "one process, two threads", (), 1, RANKS),
        Kind("ddp", "torchrun, DDP", _TORCHRUN, RANKS, 1),
        Kind("ddp-heap", "torchrun, DDP, heap kept", _TORCHRUN, RANKS, 1, _HEAP),
        Kind("replica", "fivefold run, statistics of each replica", _FIVEFOLD, RANKS, 1),
        Kind("exact", "fivefold run, exact", _FIVEFOLD, RANKS, 1),
        Kind("exact-shared", "fivefold run, exact, shared memory", _FIVEFOLD, RANKS, 1),
    )
}
