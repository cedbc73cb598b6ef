"""The trace of a rank: where it is written, and what it says of the run before the first step."""

from __future__ import annotations

import itertools
import json
import logging
import os
import platform
import statistics
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
from torch import Tensor

from fivefold import comm
from fivefold.arena import node_name
from fivefold.comm.hang import attend
from fivefold.launch.environment import RankPlace
from fivefold.launch.role import is_helper
from fivefold.launch.variables import read_seconds
from fivefold.torch_private import device_types
from fivefold.trace import Tag
from fivefold.trace.connections import Connections
from fivefold.trace.process import start
from fivefold.trace.trace import Trace

__all__ = ["begin", "links", "met", "trace_folder"]

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
    more fields of meta. Where FIVEFOLD_TRACE_SPOOL is set, that is the folder.
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
    folder = Path(os.environ.get("FIVEFOLD_TRACE_SPOOL") or folder)
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


# ---- What collectives of a group take while nothing else goes on: what later ones are compared with

_SIZES_BYTES = tuple(1 << n for n in (10, 14, 16, 18, 20, 22, 24))
_ENOUGH_S = 0.4
"""no further size once so much time has passed"""
_MOST_TURNS = 10
_EACH_S = 0.03
_MOST_LINKS = 64
_MESSAGE_BYTES = 1 << 20
_CALLS, _DOUBTS = 5, 2
_DOUBTFUL = 0.5
"""of what the faster quarter of links does, as where reports begin to blame a link"""


def calibration(group: dist.ProcessGroup) -> list[dict[str, Any]]:
    """Seconds of an all_reduce by size in bytes, of the slowest rank, median of a few. Collective.

    Takes about half a second at most, unless one of 1 KiB takes longer.
    """
    found: list[dict[str, Any]] = []
    if group.size() == 1:
        return found
    begun_s = 0.0
    for size in _SIZES_BYTES:
        tensor = torch.zeros(size // 4)
        first_s = _slowest([_timed(tensor, group), _timed(tensor, group)][1:], group)[0]
        turns = max(3, min(_MOST_TURNS, int(_EACH_S / max(first_s, 1e-7))))
        took_s = _slowest([_timed(tensor, group) for _ in range(turns)], group)
        seconds = statistics.median(took_s)
        found.append({"op": "all_reduce", "group": 0, "size_bytes": size, "seconds": seconds})
        begun_s += (turns + 2) * seconds
        # Agreed, since all ranks know the slowest: the next size is four times as large.
        if begun_s + 5 * 4 * seconds > _ENOUGH_S:
            break
    return found


def links(group: dist.ProcessGroup, nodes: Sequence[int]) -> list[dict[str, Any]]:
    """Between first ranks of neighbours in the ring of nodes: latency, and bytes per second. Collective.

    Known to all ranks of `group`. Of 64 links at most. One that is far below the others is measured again:
    another process may just have had its core.
    """
    firsts = [nodes.index(node) for node in sorted(set(nodes))]
    # A ring, so that a node at fault has two slow links.
    ring = [*firsts, firsts[0]] if len(firsts) > 2 else firsts
    pairs = list(itertools.pairwise(ring))[:_MOST_LINKS]
    if not pairs:
        return []
    found = _measured(pairs, [_CALLS] * len(pairs), group)
    for _ in range(_DOUBTS):
        rates = _rates(found)
        least = _DOUBTFUL * float(rates.quantile(0.75))
        doubtful = [n for n, rate in enumerate(rates.tolist()) if rate < least]
        if not doubtful:
            break
        turns = [max(1, min(_CALLS, int(_EACH_S / float(found[n, 1])))) for n in doubtful]
        again = _measured([pairs[n] for n in doubtful], turns, group)
        found[doubtful] = found[doubtful].minimum(again)
    return [
        {"ranks": list(pair), "latency_s": latency_s, "bytes_per_s": rate}
        for pair, latency_s, rate in zip(
            pairs, found[:, 0].tolist(), _rates(found).tolist(), strict=True
        )
    ]


def _rates(seconds: Tensor) -> Tensor:
    """Bytes per second of links, from seconds of a short and a long message, (links, 2)."""
    return _MESSAGE_BYTES / (seconds[:, 1] - seconds[:, 0]).clamp_min(1e-9)


def _measured(
    pairs: Sequence[tuple[int, int]], turns: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Seconds of a short and a long message on links, one after the other; float64, (links, 2). Collective.

    `turns` are those of the long one.
    """
    own = torch.zeros(len(pairs), 2, dtype=torch.float64)
    for number, (one, other) in enumerate(pairs):
        if group.rank() in (one, other):
            first, peer = group.rank() == one, other if group.rank() == one else one
            short, long = torch.zeros(2), torch.zeros(_MESSAGE_BYTES // 4)
            # A short one that came late would make the link fast: always the least of several.
            short_s = _turn_s(short, group, peer, first=first, turns=_CALLS)
            long_s = _turn_s(long, group, peer, first=first, turns=turns[number])
            if first:
                own[number] = torch.tensor([short_s, long_s])
    return comm.all_reduce(own, group, Tag.CONTROL)


def _turn_s(
    tensor: Tensor, group: dist.ProcessGroup, peer: int, *, first: bool, turns: int
) -> float:
    """Half of the time that a tensor takes there and back, the least of some turns."""
    found: list[float] = []
    for _ in range(turns):
        begun = time.perf_counter()
        if first:
            dist.send(tensor, group=group, group_dst=peer)
            dist.recv(tensor, group=group, group_src=peer)
        else:
            dist.recv(tensor, group=group, group_src=peer)
            dist.send(tensor, group=group, group_dst=peer)
        found.append((time.perf_counter() - begun) / 2)
    return min(found)


def _timed(tensor: torch.Tensor, group: dist.ProcessGroup) -> float:
    begun = time.perf_counter()
    comm.all_reduce(tensor, group, Tag.CONTROL)
    return time.perf_counter() - begun


def _slowest(seconds: list[float], group: dist.ProcessGroup) -> list[float]:
    """Of each turn, what the slowest rank took."""
    told = torch.tensor(seconds, dtype=torch.float64)
    return comm.all_gather(told, group, Tag.CONTROL).max(dim=0).values.tolist()
