"""GPUs that the ranks of a node share: through an MPS daemon, and in slices where MIG divides them.

fivefold run --instances 2 ── FIVEFOLD_MPS=2:auto:0 ──> engine ── daemon, while the ranks run
                                                           └───── variables ──> ranks
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Generator, Mapping
from dataclasses import replace

from fivefold.cluster.gpus import Gpu, gpus, visible
from fivefold.cluster.mps import CONTROL, PERCENTAGE, PIPES, Mps, runs_by_default
from fivefold.errors import UsageError
from fivefold.launch.job import Job

__all__ = ["MPS", "own_slices", "shared_gpus", "sharing"]

MPS = "FIVEFOLD_MPS"


@contextlib.contextmanager
def sharing(job: Job, engine: str) -> Generator[Job]:
    """A job of this node, with what its ranks need to share GPUs. See `shared_gpus`."""
    with shared_gpus(job.rank_environment(engine), job.processes) as told:
        yield replace(job, environment={**job.environment, **told})


@contextlib.contextmanager
def shared_gpus(environ: Mapping[str, str], ranks: int) -> Generator[dict[str, str]]:
    """What this node's ranks, which have this environment, find besides; while it lasts an MPS daemon runs.

    Every start of ranks has a daemon of its own: after a fault of a client, the server takes no others until
    all have gone. Raises `UsageError` if GPUs have to be shared through MPS, and cannot be.
    """
    each, mode, percent = _asked(environ)
    if PIPES in environ or (mode != "off" and runs_by_default()):  # whoever started that daemon
        yield {PERCENTAGE: str(percent)} if percent and PERCENTAGE not in environ else {}
        return
    daemon = _daemon(environ, mode, percent) if mode != "off" and min(each, ranks) > 1 else None
    if daemon is None:
        yield {}
        return
    with daemon:
        yield daemon.variables


def own_slices(environ: Mapping[str, str], ranks: int) -> list[dict[str, str]]:
    """By local rank, which names its slice to CUDA: it shows a process one at most. Empty without slices."""
    found, (each, _, _) = _of_nvidia(environ), _asked(environ)
    if not any(gpu.is_slice for gpu in found):
        return [{}] * ranks
    own = [found[rank // each % len(found)].uuid for rank in range(ranks)]
    return [{"CUDA_VISIBLE_DEVICES": uuid} for uuid in own]


def _asked(environ: Mapping[str, str]) -> tuple[int, str, int]:
    each, mode, percent = environ.get(MPS, "1:off:0").split(":")
    return int(each), mode, int(percent)


def _of_nvidia(environ: Mapping[str, str]) -> list[Gpu]:
    return [gpu for gpu in visible(gpus(), environ) if gpu.vendor == "NVIDIA"]


def _daemon(environ: Mapping[str, str], mode: str, percent: int) -> Mps | None:
    found = _of_nvidia(environ)
    if mode == "auto" and (
        not found or any(gpu.is_slice for gpu in found) or shutil.which(CONTROL) is None
    ):
        return None
    try:
        _refuse(found)
        return Mps([gpu.uuid for gpu in found], percent)
    except UsageError as problem:
        if mode == "on":
            raise
        with contextlib.suppress(OSError):  # of an agent, nobody may listen
            sys.stderr.write(f"warning: ranks share GPUs in turns, without MPS: {problem}\n")
        return None


def _refuse(found: list[Gpu]) -> None:
    """Raise `UsageError` for GPUs that a daemon cannot serve."""
    why = ""
    if not found:
        why = "no GPU of NVIDIA that its ranks may use"
    elif any(gpu.is_slice for gpu in found):
        why = "GPUs that MIG divides, and gives each rank a slice of its own"
    elif not all(gpu.uuid for gpu in found):
        why = "GPUs whose UUIDs the driver does not tell; fivefold[gpu] asks NVML for them"
    if why:
        raise UsageError(
            f'instances.mps = "on" cannot be: {os.uname().nodename} has {why}; leave it out'
        )
