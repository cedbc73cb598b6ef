"""The trace of a rank: where it is written, and what it says of the run before the first step."""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fivefold import comm
from fivefold.arena import node_name
from fivefold.comm.calibrate import calibration, links
from fivefold.comm.hang import attend
from fivefold.launch.environment import RankPlace
from fivefold.launch.role import is_helper
from fivefold.launch.variables import read_seconds
from fivefold.torch_private import device_types
from fivefold.trace import Tag
from fivefold.trace.connections import Connections
from fivefold.trace.process import start
from fivefold.trace.trace import Trace

__all__ = ["begin", "met", "trace_folder"]

_PREFIXES = ("FIVEFOLD_", "OMP_", "MKL_", "NCCL_", "GLOO_", "SLURM_JOB_")
_NAMES = ("CUDA_VISIBLE_DEVICES", "PBS_JOBID")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_log = logging.getLogger(__name__)


def trace_folder() -> Path | None:
    """Where FIVEFOLD_TRACE asks for a trace, if it does; never in a helper, which is no rank."""
    told = os.environ.get("FIVEFOLD_TRACE", "")
    return Path(told) if told and not is_helper() else None


def begin(
    folder: Path, place: RankPlace, group: dist.ProcessGroup | None, device: torch.device, *,
    rows: Mapping[str, int] | None = None, hang_s: float = 30.0, **facts: Any,
) -> Trace | None:  # fmt: skip
    """Begin the trace of this rank. Collective over `group`, all ranks; None where the rank is alone.

    `rows`: as in `Trace.create`; `hang_s`: as in `attend`, unless FIVEFOLD_HANG_S says otherwise; `facts`:
    more fields of meta.
    A rank that cannot write, or whose trace another process writes, says so and goes on without; None is
    returned then, and where a trace is active already.
    """
    found = met(group)
    meta = {
        "rank": place.rank, "size": place.world_size, "local_rank": place.local_rank,
        "local_size": place.local_size, "host": os.uname().nodename, "pid": os.getpid(),
        "launcher": place.launcher, "engine": os.environ.get("FIVEFOLD_ENGINE", ""),
        "command": [*sys.orig_argv], "device": str(device),"threads": torch.get_num_threads(),
        "cores": sorted(os.sched_getaffinity(0)), "environment": told_environment(os.environ),
        "versions": _versions(), **found, **_placement(), **facts,
    }  # fmt: skip
    try:
        trace = start(folder, meta, rows)
    except OSError as problem:
        _log.warning(
            "rank %d is not traced: cannot write to %s: %s", place.rank, folder, problem.strerror
        )
        return None
    if trace is not None:
        gpu = device.index or 0 if device.type == "cuda" else None
        attend(trace, read_seconds("FIVEFOLD_HANG_S", hang_s), gpu=gpu)
        if place.world_size > 1:
            Connections(trace)
    return trace


def told_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that may be shown: those that decide how a run goes, and no secrets."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if (name.startswith(_PREFIXES) or name in _NAMES)
        and not any(word in name for word in _SECRET)
    }


def met(group: dist.ProcessGroup | None) -> dict[str, Any]:
    """What the ranks find out together: nodes, clocks, and what their links can do. Collective.

    A group that sends tensors of GPUs alone is not asked: of its nodes and clocks nothing is known.
    """
    if group is None or group.size() == 1:
        return {"node": 0, "clock_offset_ns": 0, "clock_error_ns": 0}
    places = device_types(group)
    if all(device.type != "cpu" for device in places):
        return {}
    own = torch.tensor([zlib.crc32(node_name().encode())])
    names = [int(name) for name in comm.all_gather(own, group, Tag.CONTROL)[:, 0]]
    order = {name: number for number, name in enumerate(dict.fromkeys(names))}
    nodes = [order[name] for name in names]
    offset, error = clock_offset(group, nodes)
    return {
        "node": nodes[group.rank()],
        "clock_offset_ns": offset,
        "clock_error_ns": error,
        "calibration": calibration(group),
        "links": links(group, nodes),
    }


def _versions() -> dict[str, str]:
    found = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    with suppress(Exception):  # not installed, only on the path
        found["fivefold"] = version("fivefold")
    return found


def _placement() -> dict[str, Any]:
    """What `fivefold run --explain` wrote beside the logs, if it did."""
    logs = os.environ.get("FIVEFOLD_LOG_DIR")
    with suppress(OSError, ValueError):
        if logs:
            return {"placement": json.loads((Path(logs) / "placement.json").read_text())}
    return {}


# ---- How far the clocks of nodes are apart
#
#     first rank of a node   t0 ──ask──►            ──► t1        CLOCK_MONOTONIC of its node
#     rank 0                        └── reads t ──┘               the answer is as old as half the way, about
#     offset = t - (t0 + t1) / 2, of the exchange that took least; error at most (t1 - t0) / 2
#
# Source: D. L. Mills, RFC 5905, section 8 (the same sum of two one-way delays).

_TURNS = 16


def clock_offset(group: dist.ProcessGroup, nodes: Sequence[int]) -> tuple[int, int]:
    """What to add to this node's monotonic clock to get that of rank 0's node, and the error, in ns.

    `nodes`: number of each rank's node, by rank. Collective over `group`, whose tensors are on CPUs.
    """
    rank, here = group.rank(), nodes[group.rank()]
    firsts = {node: nodes.index(node) for node in nodes}
    own = torch.zeros(2, dtype=torch.int64)
    for node in sorted(firsts):
        if node == nodes[0]:
            continue
        if rank == 0:
            _answer(group, firsts[node])
        elif rank == firsts[node]:
            own = torch.tensor(_ask(group))
    if len(firsts) == 1:
        return 0, 0
    every = comm.all_gather(own, group, Tag.CONTROL)
    offset, error = every[firsts[here]].tolist()
    return int(offset), int(error)


def _answer(group: dist.ProcessGroup, peer: int) -> None:
    told = torch.zeros(1, dtype=torch.int64)
    for _ in range(_TURNS):
        dist.recv(told, group=group, group_src=peer)
        told[0] = time.monotonic_ns()
        dist.send(told, group=group, group_dst=peer)


def _ask(group: dist.ProcessGroup) -> tuple[int, int]:
    told = torch.zeros(1, dtype=torch.int64)
    found: list[tuple[int, int]] = []
    for _ in range(_TURNS):
        begun = time.monotonic_ns()
        dist.send(told, group=group, group_dst=0)
        dist.recv(told, group=group, group_src=0)
        ended = time.monotonic_ns()
        found.append((ended - begun, int(told.item()) - (begun + ended) // 2))
    took, offset = min(found)
    return offset, (took + 1) // 2
