"""What one rank was given: its host, cores, threads and GPUs. Ranks tell it each other in small files."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fivefold.cluster import cores
from fivefold.cluster.gpus import Gpu, gpus, visible
from fivefold.cluster.network import resolve
from fivefold.cluster.node import NodeFacts
from fivefold.cluster.processors import processors
from fivefold.launch.binding import instances
from fivefold.launch.environment import RankPlace
from fivefold.writing import write_whole

__all__ = ["RankFacts", "expected", "gather", "look", "tell"]


@dataclass(frozen=True)
class RankFacts:
    """What one process has to work with."""

    rank: int
    local_rank: int
    local_size: int
    host: str
    address: str
    """what the host takes its own name for, and gloo tells the other ranks; empty if nothing"""
    mask: tuple[int, ...]
    """logical cores on which it may run"""
    quota: float | None
    """how many cores' time its control groups grant, to all ranks of the host together"""
    numa: tuple[int, ...]
    """NUMA nodes of these cores"""
    threads: int | None
    """that OMP_NUM_THREADS gives it; None: not set, and PyTorch takes a thread per core"""
    gpus: tuple[Gpu, ...]
    """that it may use, in the order in which it counts them"""
    instances: int = 1
    """how many neighbours share a device"""

    @property
    def gpu(self) -> Gpu | None:
        """The one that `fivefold.start()` gives it: they are dealt out by local rank."""
        return self.gpus[self.local_rank // self.instances % len(self.gpus)] if self.gpus else None


def look(
    place: RankPlace, environ: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> RankFacts:
    """What this process was given."""
    mask, host = cores.affinity(root), socket.gethostname()
    return RankFacts(
        rank=place.rank,
        local_rank=place.local_rank,
        local_size=place.local_size,
        host=host,
        address=resolve(host, root),
        mask=mask,
        quota=cores.quota(root),
        numa=processors(root).numa_of(mask),
        threads=threads_of(environ),
        gpus=visible(gpus(root), environ),
        instances=instances(environ),
    )


def expected(
    processes: int,
    node: NodeFacts,
    environ: Mapping[str, str],
    shares: Sequence[tuple[int, ...]] = (),
) -> tuple[RankFacts, ...]:
    """What the engines of `fivefold run` would give to ranks on this node, with `shares` of its cores."""
    share = max(1, node.granted // processes)
    first = RankFacts(
        rank=0,
        local_rank=0,
        local_size=processes,
        host=node.host,
        address=node.address,
        mask=node.mask,
        quota=node.quota,
        numa=node.processors.numa_of(node.mask),
        threads=threads_of(environ) if environ.get("OMP_NUM_THREADS") else share,
        gpus=visible(node.gpus, environ),
        instances=instances(environ),
    )
    masks = [share or node.mask for share in shares or [()] * processes]
    return tuple(
        replace(first, rank=n, local_rank=n, mask=mask, numa=node.processors.numa_of(mask))
        for n, mask in enumerate(masks)
    )


def threads_of(environ: Mapping[str, str]) -> int | None:
    """Threads that OMP_NUM_THREADS gives; of a list, those of the outermost region."""
    first = environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


def tell(folder: Path, facts: RankFacts) -> None:
    """Write this rank's facts for rank 0 to read. Raises `OSError`, `UsageError`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{facts.rank}.json"
    write_whole(path, json.dumps(asdict(facts)), "where this rank runs to")


def gather(folder: Path, ranks: int, limit_s: float) -> tuple[RankFacts, ...]:
    """The facts of all ranks, by rank; after `limit_s` seconds, of those that told them by then."""
    end = time.monotonic() + limit_s
    while len(found := list(folder.glob("rank-*.json"))) < ranks and time.monotonic() < end:
        time.sleep(0.01)
    facts = [one for path in found if (one := _read(path)) and one.rank < ranks]
    for path in found:
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # a rank that comes too late still writes to it
        folder.rmdir()
    return tuple(sorted(facts, key=lambda one: one.rank))


def _read(path: Path) -> RankFacts | None:
    from cattrs import structure

    try:
        return structure(json.loads(path.read_text()), RankFacts)
    except Exception:  # noqa: BLE001 - cattrs raises groups of anything; a damaged file counts as missing
        return None
