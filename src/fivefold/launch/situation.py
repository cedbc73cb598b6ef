"""Everything that a report of a placement, and advice on it, is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fivefold.cluster.gpus import Gpu
from fivefold.cluster.node import NodeFacts
from fivefold.launch.rank_facts import RankFacts
from fivefold.launch.torch_facts import TorchFacts

__all__ = ["Situation", "cores_of"]


@dataclass(frozen=True)
class Situation:
    """A job before it runs, or as its ranks found it."""

    node: NodeFacts
    """that of rank 0, or where this is asked"""
    ranks: tuple[RankFacts, ...]
    """as expected, or as those told that were asked"""
    world_size: int
    nodes: int
    """of the job or the allocation"""
    engine: str
    observed: bool
    """whether the ranks have been started"""
    torch: TorchFacts = field(default_factory=TorchFacts)
    backend: str = "auto"
    """that the plan asks for"""
    workers: int = 0
    """of the loader, per rank"""
    meeting: str = ""
    """where the ranks meet, in words or as address:port"""
    environ: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def by_host(self) -> dict[str, tuple[RankFacts, ...]]:
        """The ranks of every host."""
        hosts = dict.fromkeys(one.host for one in self.ranks)
        return {host: tuple(one for one in self.ranks if one.host == host) for host in hosts}

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks of which nothing is known."""
        return tuple(sorted(set(range(self.world_size)) - {one.rank for one in self.ranks}))

    @property
    def slurm(self) -> bool:
        """Whether all this is in an allocation of Slurm."""
        return self.engine == "srun" or bool(self.environ.get("SLURM_JOB_ID"))

    def gpu_of(self, one: RankFacts) -> Gpu | None:
        """The GPU that a rank uses; None where PyTorch sees none."""
        return one.gpu if self.torch.devices else None

    def threads_of(self, one: RankFacts) -> int:
        """Threads of a rank. Without OMP_NUM_THREADS PyTorch takes one per physical core of its mask."""
        return one.threads or max(1, len(one.mask) // self.node.processors.threads_per_core)


def cores_of(ranks: tuple[RankFacts, ...]) -> float:
    """How many cores' time ranks of one host have together."""
    cores = float(len({core for one in ranks for core in one.mask}))
    return min([cores, *(one.quota for one in ranks if one.quota is not None)])
