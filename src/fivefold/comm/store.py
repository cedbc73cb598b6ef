"""What ranks agree on through a store while they have no group yet, with a few requests per rank.

every rank    tells about itself       set rank/R
the first     reads all, and decides   wait, multi_get, set decision
the others    read the decision        wait, get
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from fivefold.errors import LaunchError
from fivefold.trace.standstill import listed

__all__ = ["agree", "all_differ"]

_DECISION = "decision"


def agree(
    store: dist.Store,
    rank: int,
    size: int,
    told: str,
    decide: Callable[[list[str]], str],
    *,
    timeout: timedelta,
    what: str,
) -> str:
    """What the first rank decides when it knows what each has `told`. Collective, once per store.

    `what` the ranks are doing is for the message of the `LaunchError` that is raised when a rank does not
    come. Where the first gives up, so do all who come later.
    """
    keys = [f"rank/{other}" for other in range(size)]
    where = f"rank {rank} of {size}: {what}"
    try:
        store.set(keys[rank], told)
        if rank == 0:
            missing, decision = _decided(store, keys, decide, timeout)
            store.set(_DECISION, json.dumps([missing, decision]))
        else:
            missing, decision = _read(store, keys, timeout)
    except RuntimeError as problem:
        raise LaunchError(
            f"{where}: the store of the ranks is gone, with the process of rank 0: {problem}"
        ) from problem
    if missing:
        raise LaunchError(
            f"{where}: {listed(missing)} did not come within {timeout.total_seconds():g} s (comm.timeout_s "
            "of the plan, or FIVEFOLD_TIMEOUT_S). Such a rank has ended, or it stands elsewhere: all ranks "
            "of the job have to make their groups in one order"
        )
    return decision


def _decided(
    store: dist.Store,
    keys: Sequence[str],
    decide: Callable[[list[str]], str],
    timeout: timedelta,
) -> tuple[list[int], str]:
    """Ranks that are missing, and what is decided if none is."""
    try:
        store.wait([*keys], timeout)
    except RuntimeError:
        if missing := _missing(store, keys):
            return missing, ""
    return [], decide([text.decode() for text in store.multi_get([*keys])])


def _read(store: dist.Store, keys: Sequence[str], timeout: timedelta) -> tuple[list[int], str]:
    try:
        store.wait([_DECISION], timeout)
    except RuntimeError:
        if not store.check([_DECISION]):
            return _missing(store, keys) or [0], ""
    missing, decision = json.loads(store.get(_DECISION))
    return missing, decision


def _missing(store: dist.Store, keys: Sequence[str]) -> list[int]:
    return [rank for rank, key in enumerate(keys) if not store.check([key])]


def all_differ(
    store: dist.Store, rank: int, size: int, told: str, *, timeout: timedelta, what: str
) -> bool:
    """Whether no two ranks have `told` the same. Collective; see `agree`."""

    def decide(texts: list[str]) -> str:
        return "yes" if len(set(texts)) == size else ""

    return bool(agree(store, rank, size, told, decide, timeout=timeout, what=what))
