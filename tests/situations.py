"""Situations of jobs on recorded machines, for the rules of advice and the report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import machines
from fivefold.cluster.gpus import visible
from fivefold.cluster.node import NodeFacts, this_node
from fivefold.launch.rank_facts import RankFacts
from fivefold.launch.situation import Situation
from fivefold.launch.torch_facts import TorchFacts

__all__ = ["CUDA", "SEES_NONE", "job", "on"]

GIB = 1 << 30
CUDA = TorchFacts("2.13.0+cu130", "CUDA 13.0", 4)
SEES_NONE = TorchFacts("2.13.0+cpu")


def on(root: Path, machine: Any = machines.two_sockets) -> NodeFacts:
    """A recorded node whose /dev/shm, which cannot be recorded, has 64 GiB."""
    node = this_node(machine(root), {})
    return replace(node, memory=replace(node.memory, shm_bytes=64 * GIB, shm_free_bytes=64 * GIB))


def job(
    node: NodeFacts, masks: list[tuple[int, ...]], threads: int | None = 1, **changes: Any
) -> Situation:
    """Ranks with these masks on one node, started by srun; PyTorch sees the GPUs of NVIDIA that there are."""
    gpus = visible(node.gpus, changes.get("environ", {}))
    ranks = tuple(
        RankFacts(
            rank=rank,
            local_rank=rank,
            local_size=len(masks),
            host=node.host,
            address=node.address,
            mask=mask,
            quota=node.quota,
            numa=node.processors.numa_of(mask),
            threads=threads,
            gpus=gpus,
        )
        for rank, mask in enumerate(masks)
    )
    torch = CUDA if gpus else SEES_NONE
    given: dict[str, Any] = {
        "world_size": len(masks),
        "nodes": 1,
        "engine": "srun",
        "observed": True,
        "torch": torch,
    }
    return Situation(node=node, ranks=ranks, **(given | changes))
