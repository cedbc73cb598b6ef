"""The backend "fivefold" of torch.distributed: who gets which group.

the C core is there     SharedGroup: memory that ranks of a node share, streams between nodes
no C core, no memory    torch's gloo, said in one line
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fivefold.comm import streams
from fivefold.comm.cuda_memory import CudaMemory, uuid_of
from fivefold.comm.direct import direct
from fivefold.comm.meeting import Apart, meet
from fivefold.comm.operations import Operations
from fivefold.comm.shared_group import SharedGroup
from fivefold.comm.store import all_differ
from fivefold.errors import UsageError
from fivefold.torch_private import nccl_options, note_version, registered_backends

__all__ = ["BACKEND", "create", "register"]

BACKEND = "fivefold"
_log = logging.getLogger(__name__)


def register() -> None:
    """Make the name "fivefold" known to torch.distributed. Calling it again does nothing."""
    if BACKEND.upper() not in registered_backends():
        dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda"])


def create(options: Any, _given: Any) -> Any:
    """Make a group: what torch calls when one with this backend is asked for. Collective."""
    timeout = _as_timedelta(options.timeout)
    rank, size = int(options.group_rank), int(options.group_size)
    store, name = options.store, str(options.group_id)
    met = meet(dist.PrefixStore("fivefold", store), rank, size, timeout, name)
    if rank == 0:
        note_version()
    if isinstance(met, Apart):
        if rank == 0:
            _note_gloo(met.reason, name, size)
        return dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)

    operations = Operations(met, timeout.total_seconds())

    def elsewhere(device: torch.device) -> Any:
        own = _torchs_own(device, store, rank, size, timeout)
        return own or _of_one_gpu(device, operations, name)

    return SharedGroup(operations, elsewhere, name)


_noted: set[str] = set()


def _note_gloo(reason: str, name: str, size: int) -> None:
    """One line per reason: a mesh of several nodes has many groups between them."""
    if reason not in _noted:
        _noted.add(reason)
        _log.warning("group %s of %d ranks uses gloo: %s", name, size, reason)


def _torchs_own(
    device: torch.device, store: dist.Store, rank: int, size: int, timeout: timedelta
) -> Any | None:
    """NCCL where every rank has a GPU of its own; None where they share some. gloo for CPUs. Collective."""
    if device.type not in ("cpu", "cuda"):
        raise UsageError(
            f"the backend fivefold sends tensors of CPUs and GPUs (cuda), this one is on {device.type!r}: "
            "move it with .cpu() first"
        )
    inner = dist.PrefixStore(device.type, store)
    if device.type == "cuda":
        own = uuid_of(device)
        alone = all_differ(inner, rank, size, own, timeout=timeout, what="naming their GPUs")
        if not alone or not dist.is_nccl_available():
            return None
        return dist.ProcessGroupNCCL(
            dist.PrefixStore("nccl", inner), rank, size, nccl_options(timeout)
        )
    return dist.ProcessGroupGloo(dist.PrefixStore("gloo", inner), rank, size, timeout)


def _of_one_gpu(device: torch.device, operations: Operations, name: str) -> SharedGroup | None:
    """Ranks that share a GPU and read each other's memory there; None where they are not to. Collective."""
    if operations.group.spread is not None or not streams.reads_on_gpu():
        return None
    found = direct(operations, CudaMemory(device))
    if found is None:
        return None
    group = SharedGroup(found, lambda _: None, name)
    found.log = operations.log  # one count of what was asked for
    return group


def _as_timedelta(value: Any) -> timedelta:
    return value if isinstance(value, timedelta) else timedelta(seconds=float(value))
