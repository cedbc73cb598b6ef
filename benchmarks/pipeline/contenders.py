"""The contenders: how each of them is started."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from contender import Kind
from ways import STAGES, TORCH_SCHEDULES, WAYS, Way, ranks_of

HERE = Path(__file__).resolve().parent

# What `fivefold.start` sets too. All have it, so that the figures compare pipelines, not the heap.
_HEAP = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
_TITLES = {
    "1f1b-recompute-4": "pipe=4, 1f1b, activations computed again",
    "tiles": "width=2",
    "tiles-shared": "width=2, backend fivefold",
    "tiles-never": "width=2, nothing fused",
}


def _fivefold(name: str, way: Way) -> Kind:
    ranks = ranks_of(way)
    launcher = ("-m", "fivefold", "run", "-n", str(ranks), "--log-dir", "{logs}")
    backend = ", backend fivefold" if way.backend == "fivefold" else ""
    title = _TITLES.get(name, f"pipe={ranks}, {way.schedule}{backend}")
    return Kind(name, f"fivefold run, {title}", launcher, ranks, 1)


def _torchrun(name: str, title: str, ranks: int) -> Kind:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    return Kind(name, title, launcher, ranks, 1, _HEAP)


KINDS: Mapping[str, Kind] = {
    **{name: _fivefold(name, way) for name, way in WAYS.items()},
    **{
        name: _torchrun(name, f"torch.distributed.pipelining, {schedule}", 2)
        for name, schedule in TORCH_SCHEDULES.items()
    },
    **{name: _torchrun(name, "stages alone, plain torch", int(name[-1])) for name in STAGES},
}
