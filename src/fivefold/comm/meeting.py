"""How the ranks of a group find out whether they share a node, and come by each other's memory.

every rank   tells through the store: its node, its cores, and whether it can share memory at all
rank 0       decides whether they can, makes the group's memory and opens a gate
the others   call there, and hand in their arena
rank 0       passes the memory and all arenas to each
"""

from __future__ import annotations

import functools
import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from fivefold.arena import (
    ArenaError,
    Connection,
    Gate,
    Segment,
    between,
    check,
    connect,
    node_name,
    watch,
)
from fivefold.arena.native import problem
from fivefold.comm.core import Core
from fivefold.comm.own_arena import mapped, own_arena
from fivefold.comm.store import agree

__all__ = ["Apart", "meet"]

_log = logging.getLogger(__name__)
_MOST_RANKS = 240
"""as many arenas fit into one message"""


@dataclass(frozen=True)
class Apart:
    """Why the ranks of a group cannot share memory."""

    reason: str


@dataclass(frozen=True)
class _Member:
    """What a rank tells the first about itself."""

    node: str
    cores: list[int]
    problem: str


@dataclass(frozen=True)
class _Decision:
    """What the first rank tells the others."""

    apart: str
    """why they cannot share memory; empty if they can"""
    gate: str
    """where it listens"""
    cores: int
    """that all have in all"""


def meet(store: dist.Store, rank: int, size: int, timeout: timedelta, name: str) -> Core | Apart:
    """Form the group. Collective; all ranks get a `Core`, or all learn why not.

    Raises `LaunchError` when a rank does not come, `ArenaError` when one is lost on the way.
    """
    gate = Gate() if rank == 0 else None

    def decide(told: list[str]) -> str:
        assert gate is not None
        members = [_Member(**json.loads(text)) for text in told]
        cores = len({core for member in members for core in member.cores})
        return json.dumps(asdict(_Decision(_apart(members), gate.address, cores)))

    try:
        own = _Member(node_name(), sorted(os.sched_getaffinity(0)), _own_problem(size))
        told = json.dumps(asdict(own))
        what = f"making group {name}"
        text = agree(store, rank, size, told, decide, timeout=timeout, what=what)
        decision = _Decision(**json.loads(text))
        if decision.apart:
            return Apart(decision.apart)
        timeout_s = timeout.total_seconds()
        if gate is not None:
            fds, pids = _serve(gate, size, timeout_s)
        else:
            fds, pids = _call(decision.gate, rank, timeout_s)
    finally:
        if gate is not None:
            gate.close()
    memory, arenas = Segment.attach(fds[0]), [mapped(fd) for fd in fds[1:]]
    watches = [watch(pid) for pid in pids]
    group = Core(rank, size, memory, arenas, watches, _is_crowded(size, decision.cores), name)
    if size > 1:
        try:
            _note_staging(group.probe(timeout_s), rank)
        except BaseException:
            group.close()
            raise
    return group


@functools.cache
def _note_staging(why: str, rank: int) -> None:
    """One line per reason and process, of the first rank."""
    if why and rank == 0:
        _log.warning(
            "%s: large tensors outside the arena are copied twice instead of once; a container needs "
            "--cap-add=SYS_PTRACE for that, a machine sysctl kernel.yama.ptrace_scope=0",
            why,
        )


def _own_problem(size: int) -> str:
    """Why this process cannot take part in a group of so many ranks, or nothing."""
    why = problem()
    if why:
        return why
    try:
        own_arena()
        check(Core.bytes_per_rank(size), f"a rank of a group of {size}")
    except ArenaError as trouble:
        return str(trouble)
    return ""


def _apart(members: Sequence[_Member]) -> str:
    """Why they cannot share memory, or nothing."""
    for rank, member in enumerate(members):
        if member.problem:
            return f"rank {rank} cannot share memory: {member.problem}"
        if why := between(members[0].node, member.node):
            return f"ranks 0 and {rank} {why}"
    if len(members) > _MOST_RANKS:
        return f"{len(members)} ranks on one node; {_MOST_RANKS} is the most"
    return ""


_largest = 0
"""ranks of the largest group so far: what is crowded is the node, not a small group of it"""


def _is_crowded(size: int, cores: int) -> bool:
    global _largest  # noqa: PLW0603 - a fact about the process
    _largest = max(_largest, size)
    return _largest > cores


def _serve(gate: Gate, size: int, timeout_s: float) -> tuple[list[int], list[int]]:
    """As rank 0: collect the arenas, and give everyone everything. Returns file descriptors and pids."""
    memory = Core.memory_for(size)
    arenas, pids = {0: os.dup(own_arena().segment.fd)}, {0: os.getpid()}
    lines, end = list[Connection](), time.monotonic() + timeout_s
    try:
        while len(lines) < size - 1:
            lines.append(gate.accept(max(end - time.monotonic(), 0.001)))
        for line in lines:
            told, received = line.receive()
            pids[int(told)], arenas[int(told)] = line.pid, received[0]
        everyone = range(size)
        fds = [os.dup(memory.fd), *(arenas[rank] for rank in everyone)]
        for line in lines:
            line.send(json.dumps([pids[rank] for rank in everyone]).encode(), fds)
    finally:
        for line in lines:
            line.close()
        memory.close()
    return fds, [pids[rank] for rank in everyone]


def _call(address: str, rank: int, timeout_s: float) -> tuple[list[int], list[int]]:
    with connect(address, timeout_s) as line:
        line.send(str(rank).encode(), [own_arena().segment.fd])
        told, fds = line.receive()
    return fds, json.loads(told)
