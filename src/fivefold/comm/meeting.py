"""How the ranks of a group find out which of them share a node, and come by each other's memory.

every rank       tells through the store: its node, its cores, and what keeps it from taking part
rank 0           decides who shares a node
every rank       tells, if there are several, where it takes calls
first of a node  makes the memory of its ranks, and opens a gate
the others       call there, and hand in their arena
first of a node  passes the memory and all arenas to each
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from datetime import timedelta

import torch.distributed as dist

from fivefold.arena import (
    ArenaError,
    Connection,
    Gate,
    Segment,
    check,
    connect,
    node_name,
    watch,
)
from fivefold.arena.native import MAX_RANKS, problem
from fivefold.comm import streams
from fivefold.comm.core import Core, Spread
from fivefold.comm.own_arena import mapped, own_arena
from fivefold.comm.store import agree
from fivefold.errors import LaunchError

__all__ = ["Apart", "meet"]

_log = logging.getLogger(__name__)
_MOST_LOCAL = 240
"""ranks of a node: as many arenas fit into one message"""


@dataclass(frozen=True)
class Apart:
    """Why the ranks of a group cannot form it."""

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
    """why they cannot form the group; empty if they can"""
    gate: str
    """where it listens"""
    node_of: list[int]
    cores: list[int]
    """that the ranks of each node have in all"""
    token: str
    """names the group to those that open streams to it"""
    rounds: bool
    """whether each node rounds its part of a sum of 16-bit floats"""
    direct_bytes: int
    """sums of fewer go straight from each node to each"""


def meet(store: dist.Store, rank: int, size: int, timeout: timedelta, name: str) -> Core | Apart:
    """Form the group. Collective; all ranks get a `Core`, or all learn why not.

    Raises `LaunchError` when a rank does not come, `ArenaError` when one is lost on the way.
    """
    with contextlib.ExitStack() as gates:
        gate = gates.enter_context(Gate()) if rank == 0 else None

        def decide(told: list[str]) -> str:
            assert gate is not None
            return json.dumps(
                asdict(_decided([_Member(**json.loads(text)) for text in told], gate))
            )

        own = _Member(node_name(), sorted(os.sched_getaffinity(0)), _own_problem(size))
        what = f"making group {name}"
        told = json.dumps(asdict(own))
        text = agree(store, rank, size, told, decide, timeout=timeout, what=what)
        decision = _Decision(**json.loads(text))
        if decision.apart:
            return Apart(decision.apart)
        node = decision.node_of[rank]
        here = [q for q, other in enumerate(decision.node_of) if other == node]
        address, several = decision.gate, len(decision.cores) > 1
        if node and rank == here[0]:
            gate = gates.enter_context(Gate())
            store.set(f"gate/{node}", gate.address)
        elif node:
            store.wait([f"gate/{node}"], timeout)
            address = store.get(f"gate/{node}").decode()
        local, timeout_s = here.index(rank), timeout.total_seconds()
        if gate is not None:
            given = _serve(gate, len(here), timeout_s, wakers=several)
        else:
            given = _call(address, local, timeout_s, wakers=several)
    spread = None
    if several:
        doors = _doors(dist.PrefixStore("doors", store), rank, size, timeout, what)
        spread = Spread(
            local,
            decision.node_of,
            doors,
            decision.token,
            given.wakers,
            decision.rounds,
            decision.direct_bytes,
        )
    memory, arenas = Segment.attach(given.fds[0]), [mapped(fd) for fd in given.fds[1:]]
    watches = [watch(pid) for pid in given.pids]
    crowded = _is_crowded(len(here), decision.cores[node])
    group = Core(rank, size, memory, arenas, watches, crowded, name, spread=spread)
    _try_reading(group, timeout_s)
    return group


def _doors(
    store: dist.Store, rank: int, size: int, timeout: timedelta, what: str
) -> list[streams.Door]:
    """Where the ranks take calls. Collective. Raises `LaunchError` if MPI is to carry only some streams."""
    own = json.dumps(astuple(streams.door()))
    text = agree(store, rank, size, own, json.dumps, timeout=timeout, what=what)
    doors = [streams.Door(*json.loads(told)) for told in json.loads(text)]
    for other, door in enumerate(doors):
        if door.world != doors[0].world:
            raise LaunchError(
                f"{what}: ranks 0 and {other} do not know each other by MPI: comm.transport has to be the "
                "same in all ranks, and one mpirun has to start them"
            )
    return doors


def _try_reading(group: Core, timeout_s: float) -> None:
    """Let ranks of a node find out whether they may read each other's memory. Collective."""
    if len(group.arenas) > 1:
        try:
            _note_staging(group.probe(timeout_s), group.rank)
        except BaseException:
            group.close()
            raise


def _decided(members: Sequence[_Member], gate: Gate) -> _Decision:
    """As rank 0."""
    names = [*dict.fromkeys(member.node for member in members)]
    node_of = [names.index(member.node) for member in members]
    cores = [
        len({core for member in members if member.node == name for core in member.cores})
        for name in names
    ]
    return _Decision(
        _apart(members, node_of),
        gate.address,
        node_of,
        cores,
        streams.new_token(),
        streams.rounds(),
        streams.direct_bytes(len(names)),
    )


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
        check(Core.bytes_per_rank(min(size, _MOST_LOCAL)), f"a rank of a group of {size}")
    except ArenaError as trouble:
        return str(trouble)
    return ""


def _apart(members: Sequence[_Member], node_of: Sequence[int]) -> str:
    """Why they cannot form a group, or nothing."""
    for rank, member in enumerate(members):
        if member.problem:
            return f"rank {rank} cannot share memory: {member.problem}"
    for node in {*node_of}:
        if (count := node_of.count(node)) > _MOST_LOCAL:
            return f"{count} ranks on one node; {_MOST_LOCAL} is the most"
    if len(members) > MAX_RANKS:
        return f"{len(members)} ranks; {MAX_RANKS} is the most"
    return ""


_largest = 0
"""ranks of the largest group so far: what is crowded is the node, not a small group of it"""


def _is_crowded(size: int, cores: int) -> bool:
    global _largest  # noqa: PLW0603 - a fact about the process
    _largest = max(_largest, size)
    return _largest > cores


@dataclass(frozen=True)
class _Given:
    """What the ranks of a node share."""

    fds: list[int]
    """of the group's memory, and of their arenas"""
    pids: list[int]
    wakers: list[int]


def _serve(gate: Gate, size: int, timeout_s: float, *, wakers: bool) -> _Given:
    """As the first rank of a node: collect the arenas, and give everyone everything."""
    memory = Core.memory_for(size)
    arenas, pids = {0: os.dup(own_arena().segment.fd)}, {0: os.getpid()}
    lines, end = list[Connection](), time.monotonic() + timeout_s
    events = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(size if wakers else 0)]
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
            if wakers:
                line.send(b"wakers", events)
    finally:
        for line in lines:
            line.close()
        memory.close()
    return _Given(fds, [pids[rank] for rank in everyone], events)


def _call(address: str, local: int, timeout_s: float, *, wakers: bool) -> _Given:
    with connect(address, timeout_s) as line:
        line.send(str(local).encode(), [own_arena().segment.fd])
        told, fds = line.receive()
        events = line.receive()[1] if wakers else []
    return _Given(fds, json.loads(told), events)
