"""The ranks of a job on several nodes, each under an agent that the engine has started.

    gather ── all agents have called ──> run ── LISTEN, START ──> ranks run ── all have ended ──> CLEARED
                                          ^                                        |
                                          +------------- start again --------------+

The engine is needed once: ranks that start again are started by the agents that are there. What ranks write
comes through their agents and is kept in the folder of the logs, which is this node's alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from fivefold.closing import Closing
from fivefold.cluster.network import resolve
from fivefold.errors import LaunchError, UsageError
from fivefold.launch.agent import SILENT_S, own_versions
from fivefold.launch.guard import dies_with_parent
from fivefold.launch.job import Job, ProcessStart, ended, log_path, opened_log, tail
from fivefold.launch.node_messages import FRAMES, PROTOCOL, Kind, weight
from fivefold.launch.output import LogLines, Stream
from fivefold.launch.restarts import FinalFailure
from fivefold.launch.supervisor import SWEEP_GRACE_S, Supervised, Supervisor
from fivefold.launch.surroundings import portable
from fivefold.launch.variables import read_seconds
from fivefold.launch.watch import Watch
from fivefold.wire import Channel, LinkClosed, LinkError, Listener, Message, new_key

__all__ = ["AgentListener", "AgentStart", "AgentWatch", "NodeLost"]

_MOST_CALLERS, _OF_ONE = 1024, 64
_CLEARED_S = 10.0
_GOODBYE_S = 3.0
_AT_ONCE = 32
_TAKEN_BYTES = 1 << 14
_SHOWN_RANKS = 64
"""of more ranks the output of the first is shown, and what others write to standard error"""


class NodeLost(LaunchError):
    """A node, or its agent, is gone; the ranks of the others were stopped."""

    def __init__(self, host: str, ranks: range, why: str, job: Job) -> None:
        self.host = host
        which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        others = "; the other ranks were stopped" if len(ranks) < job.processes else ""
        super().__init__(
            f"node {host} with {which} of {job.processes} was lost: {why}{others}\n"
            f"  logs of all ranks: {job.log_dir}/rank-*.log"
        )


@dataclass(frozen=True)
class AgentStart:
    """A process by which an engine starts the agents of some nodes."""

    start: ProcessStart
    nodes: tuple[int, ...]
    """numbers in the list of hosts"""
    brief: bytes = b""
    """for its standard input"""


@dataclass
class _Node:
    """A node of the job."""

    number: int
    host: str
    ranks: range
    cores: tuple[int, ...]
    python: str
    channel: Channel | None = None
    peer: str = ""
    """its address, as it called from there"""
    own: str = ""
    """ours, as it called there"""
    lost: str = ""
    untaken_bytes: int = 0
    cleared: bool = False
    logs: dict[int, tuple[LogLines, LogLines]] = field(
        default_factory=dict[int, tuple[LogLines, LogLines]]
    )


class AgentListener(Closing):
    """Where agents call: the listener, and the lines of those who have proved that they know the key."""

    def __init__(self) -> None:
        self.key = new_key()
        door = socket.create_server(("", 0), backlog=4096)
        door.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        self.port: int = door.getsockname()[1]
        self.lines: deque[socket.socket] = deque()
        self.woken, self._wake = socket.socketpair()
        self.woken.setblocking(False)
        self._door = door
        self._listener: Listener | None = None

    def open(self) -> None:
        """Answer. Those who have called before wait in the kernel, so that processes can be started first.

        From here on there are threads, and whoever forks should have none.
        """
        self._listener = Listener(
            self._door, PROTOCOL, self.key, self._take, most=_MOST_CALLERS, of_one=_OF_ONE
        )

    def _take(self, line: socket.socket) -> None:
        self.lines.append(line)
        with contextlib.suppress(OSError):
            self._wake.send(b"!")

    def close(self) -> None:
        """Take no more calls."""
        if self._listener is not None:
            self._listener.close()
        self._door.close()
        for line in self.lines:
            line.close()
        self.woken.close()
        self._wake.close()


class AgentWatch(Watch):
    """Watches the ranks of a job through agents. A context manager that leaves nothing running.

    Args:
        job: with nodes.
        engine: its name.
        listener: where its agents call.
    """

    def __init__(self, job: Job, engine: str, listener: AgentListener) -> None:
        super().__init__(job)
        self._engine = engine
        self._agents = listener
        self._nodes = _nodes(job)
        self._unnamed: list[tuple[Channel, str, str]] = []
        """agents that have called, and not yet said from where; with both addresses"""
        self._port = 0
        self._refused = ""
        self._node_lost: NodeLost | None = None
        self._begun = self._leaving = False
        self._starters: list[Supervised] = []
        if job.processes > _SHOWN_RANKS:
            self.display.only_errors_of_others()

    # ---- gathering

    def gather(self, starters: Sequence[AgentStart]) -> None:
        """Start the agents, and wait until all have called.

        Raises `LaunchError` that names all nodes whose agents did not, and why; `UsageError` if one has other
        versions than this node.
        """
        listener = self._agents
        self.attach(listener.woken.fileno(), self._answer)
        for starter in starters:
            self._start_agents(starter)
        listener.open()
        patience_s = read_seconds("FIVEFOLD_AGENTS_S", 60.0)
        give_up = partial(self._give_up, f"its agent did not call in {patience_s:g} s")
        self.later(patience_s, give_up)
        while any(node.channel is None and not node.lost for node in self._nodes):
            self._turn()
            if self._stopping:
                break
        self._due = [due for due in self._due if due[1] is not give_up]
        if self._stopping:
            self._conclude()
        lost = [node for node in self._nodes if node.lost]
        if sum(bool(node.ranks) for node in lost) > sum(
            not node.ranks and not node.lost for node in self._nodes
        ):
            raise LaunchError(self._unreached())
        for node in lost:
            self.display.note(f"warning: node {node.host} cannot be used: {node.lost}")

    def _start_agents(self, starter: AgentStart) -> None:
        several = len(starter.nodes) > 1
        name = "engine" if several else f"agent-{self._nodes[starter.nodes[0]].host}"
        path = self.job.log_dir / f"{name}.log"
        log = self.keep(opened_log(path))
        try:
            process = subprocess.Popen(
                list(starter.start.command),
                env=dict(starter.start.environment),
                stdin=subprocess.PIPE if starter.brief else subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=dies_with_parent(signal.SIGTERM),  # noqa: PLW1509 - no threads yet
            )
        except OSError as problem:
            command = starter.start.command[0]
            raise UsageError(f"cannot start {command}: {problem.strerror}") from None
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(starter.brief)
                process.stdin.close()
        self._starters.append(process)
        self.start(process, lambda code: self._starter_ended(starter, path, code), awaited=False)

    def _starter_ended(self, starter: AgentStart, log: Path, code: int) -> None:
        said = tail(log, 3)
        why = f"what started its agent {ended(code)}" + (f": {' / '.join(said)}" if said else "")
        for number in starter.nodes:
            if self._nodes[number].channel is None:
                self._lost(self._nodes[number], why)

    def _give_up(self, why: str) -> None:
        for node in self._nodes:
            if node.channel is None:
                self._lost(node, why)

    def _unreached(self) -> str:
        lost = [node for node in self._nodes if node.lost]
        lines = "\n".join(f"    {node.host}: {node.lost}" for node in lost)
        count = f"{len(lost)} of {len(self._nodes)} nodes"
        return f"{count} cannot be used; no rank was started\n{lines}\n  logs: {self.job.log_dir}"

    # ---- channels

    def _answer(self) -> None:
        listener = self._agents
        with contextlib.suppress(BlockingIOError):
            listener.woken.recv(4096)
        while listener.lines:
            line = listener.lines.popleft()
            try:
                peer, own = line.getpeername()[0], line.getsockname()[0]
            except OSError:  # it has hung up
                line.close()
                continue
            channel = Channel(line, f"the agent at {peer}", FRAMES, queues=True, timeout_s=SILENT_S)
            self._undo.callback(channel.close)
            self._unnamed.append((channel, peer, own))
            self.attach(channel.fileno(), self._hearing(channel, None))

    def _hearing(self, channel: Channel, node: _Node | None) -> Callable[[], None]:
        def hear() -> None:
            try:
                # A few: whoever writes all the time must not keep us from signals and other nodes.
                for _ in range(_AT_ONCE):
                    if (message := channel.receive(0.0)) is None:
                        return
                    if node is None:
                        self._introduced(channel, message)
                        return
                    self._heard(node, message)
            except LinkClosed as problem:
                self.detach(channel.fileno())
                if node is not None:
                    self._lost(node, str(problem))
            except LinkError as problem:
                if node is not None:
                    self._lost(node, f"a message of its agent is lost: {problem}")

        return hear

    def _introduced(self, channel: Channel, message: Message) -> None:
        """An agent says on which node it is."""
        ((_, peer, own),) = [one for one in self._unnamed if one[0] is channel]
        self._unnamed = [one for one in self._unnamed if one[0] is not channel]
        self.detach(channel.fileno())
        node = self._node_of(message.fields, peer)
        if node is None or self._leaving:
            if not self._leaving:
                names = ", ".join(message.fields["names"])
                self.display.note(f"warning: an agent on {names} calls, which is none of the hosts")
            with contextlib.suppress(LinkClosed):
                channel.send(Kind.BYE, {})
            channel.close()
            return
        channel.peer = f"the agent of {node.host}"
        node.channel, node.peer, node.own = channel, peer, own
        self.attach(channel.fileno(), self._hearing(channel, node))
        theirs, ours = message.fields["versions"], own_versions()
        if differing := [name for name in ours if theirs.get(name) != ours[name]]:
            told = ", ".join(f"{name} {theirs.get(name)} (here {ours[name]})" for name in differing)
            self._lost(node, f"it has {told}; all nodes need the same")

    def _node_of(self, fields: Mapping[str, Any], peer: str) -> _Node | None:
        """The node of an agent, by the number that it was told, its names or its address; None if none is."""
        awaited = [node for node in self._nodes if node.channel is None]
        if fields["number"] >= 0:
            return next((node for node in awaited if node.number == fields["number"]), None)
        names = {str(name) for name in fields["names"]}
        short = {name.partition(".")[0] for name in names}
        hosts = {node.number: node.host.rpartition("@")[2] for node in awaited}
        for node in awaited:
            if hosts[node.number] in names:
                return node
        for node in awaited:
            if hosts[node.number].partition(".")[0] in short:
                return node
        return next(
            (n for n in awaited if peer in (hosts[n.number], resolve(hosts[n.number]))), None
        )

    def _heard(self, node: _Node, message: Message) -> None:
        kind, fields = message.kind, message.fields
        if kind == Kind.OUTPUT:
            self._output(node, fields["rank"], fields["stream"], bytes(message.payload))
        elif kind == Kind.ENDED:
            for lines in node.logs.get(fields["rank"], ()):
                lines.flush()
            self.ended(fields["rank"], fields["code"])
        elif kind == Kind.LISTEN:
            self._port = fields["port"]
        elif kind == Kind.REFUSED:
            self._refused = self._refused or fields["why"]
        elif kind == Kind.CLEARED:
            node.cleared = True

    def _output(self, node: _Node, rank: int, stream: Stream, chunk: bytes) -> None:
        if rank in node.logs:
            node.logs[rank][stream == "err"].feed(chunk)
        self.display.feed(rank, stream, chunk)
        node.untaken_bytes += weight(chunk)
        if node.untaken_bytes >= _TAKEN_BYTES:
            self._send(node, Kind.TAKEN, {"bytes": node.untaken_bytes})
            node.untaken_bytes = 0

    def _send(
        self, node: _Node, kind: Kind, fields: Mapping[str, Any], payload: bytes = b""
    ) -> None:
        if node.channel is None or node.lost:
            return
        try:
            node.channel.send(kind, fields, [payload] if payload else [])
        except LinkClosed as problem:
            self._lost(node, str(problem))

    def _lost(self, node: _Node, why: str) -> None:
        if node.lost:
            return
        node.lost = why
        if node.channel is not None:
            self.detach(node.channel.fileno())
            node.channel.close()
        ended = {*self._codes, *(rank for rank, _ in self._ended)}
        if self._begun and not ended.issuperset(node.ranks):
            self._node_lost = self._node_lost or NodeLost(node.host, node.ranks, why, self.job)
            for rank in node.ranks:
                self._codes.setdefault(rank, -signal.SIGKILL)
                self.display.close(rank)
            if not self._stopping:
                self._stop(signal.SIGTERM, self._failure_grace_s(1))

    # ---- one start of the ranks

    def run_ranks(self, job: Job) -> None:
        """Start all ranks, wait until they have ended, and leave nothing of them. Raises as `Watch.wait`.

        `NodeLost` if a node is lost. `job` is that of the beginning but for the folder of its logs.
        """
        self.job = job
        self._begin()
        self._node_lost, self._refused = None, ""
        self._replace_lost()
        self._begun = True
        self.display.begin()
        try:
            with contextlib.ExitStack() as logs:
                self._ask_for_port()
                for node in self._nodes:
                    node.logs = {rank: self._log(rank, logs) for rank in node.ranks}
                for node in self._nodes:
                    if node.ranks:
                        order = json.dumps(self._order(node)).encode()
                        self._send(node, Kind.START, {}, order)
                self.wait()
        finally:
            self._begun = self.display.silent = False
            for node in self._nodes:
                node.logs = {}

    def _log(self, rank: int, logs: contextlib.ExitStack) -> tuple[LogLines, LogLines]:
        log = logs.enter_context(opened_log(log_path(self.job.log_dir, rank)))
        return LogLines(log), LogLines(log)

    def _replace_lost(self) -> None:
        """Spares take the place of nodes that were lost. Raises `FinalFailure` if there are too few."""
        spares = [node for node in self._nodes if not node.ranks and not node.lost]
        for node in self._nodes:
            if node.lost and node.ranks:
                if not spares:
                    raise FinalFailure(f"no spare is left for node {node.host}: {node.lost}")
                spare = spares.pop(0)
                self.display.note(f"note: node {spare.host} takes the place of {node.host}")
                spare.ranks, node.ranks = node.ranks, range(0)

    def _ask_for_port(self) -> None:
        """Of the node of rank 0, where the ranks will meet."""
        self._port = 0
        first = min((node for node in self._nodes if node.ranks), key=lambda node: node.ranks[0])
        self._send(first, Kind.LISTEN, {"port": self.job.port or 0})
        self._await(lambda: self._port or self._refused)
        if self._refused:
            raise UsageError(self._refused)

    def pause(self, seconds: float) -> None:
        """Wait, and notice signals meanwhile. Raises `Stopped` for one."""
        end = time.monotonic() + seconds
        self._begin()
        self.later(seconds, lambda: None)
        self._await(lambda: time.monotonic() >= end)

    def _order(self, node: _Node) -> dict[str, Any]:
        job = self.job
        environ = job.rank_environment(self._engine)
        chosen = "OMP_NUM_THREADS" in os.environ or "OMP_NUM_THREADS" in job.environment
        return {
            "command": self._command(node),
            "directory": os.getcwd(),  # noqa: PTH109 - as the shell calls it
            "environment": portable(environ) | dict(job.environment),
            "first": node.ranks[0],
            "count": len(node.ranks),
            "world": job.processes,
            "address": self._meeting_address(),
            "port": self._port,
            "threads": not chosen,
            "cores": list(node.cores),
            "grace_s": self._grace_s,
            "fork": job.fork,
        }

    def _command(self, node: _Node) -> list[str]:
        """The node may have another Python."""
        command = list(self.job.command)
        if node.python and command[0] == sys.executable:
            command[0] = node.python
        return command

    def _meeting_address(self) -> str:
        """Where the other nodes reach that of rank 0: as they reach the launcher, where it is the same."""
        used = sorted((node for node in self._nodes if node.ranks), key=lambda one: one.ranks[0])
        if not used[0].peer.startswith("127."):
            return used[0].peer
        return next((node.own for node in used if not node.own.startswith("127.")), "127.0.0.1")

    def _await(self, done: Callable[[], object]) -> None:
        while not done() and not self._stopping:
            self._turn()
        if self._stopping:
            self._conclude()

    def _running(self) -> bool:
        return not self._refused and len(self._codes) < self.job.processes

    def _signal(self, signum: int) -> None:
        for node in self._nodes:
            self._send(node, Kind.SIGNAL, {"signum": signum})

    def _end_ranks(self) -> None:
        self._kill_ranks(0.0)

    def _kill_ranks(self, grace_s: float) -> None:
        for node in self._nodes:
            self._send(node, Kind.KILL, {"grace_s": grace_s})

    def _settle(self) -> None:
        end = time.monotonic() + _CLEARED_S
        for node in self._nodes:
            node.cleared = False
        self._kill_ranks(0.0 if self._refused else SWEEP_GRACE_S)
        Supervisor.later(self, _CLEARED_S, lambda: None)  # wakes the loop
        while any(not n.cleared and not n.lost for n in self._nodes) and time.monotonic() < end:
            self._turn()
        for node in self._nodes:
            if not node.cleared and not node.lost:
                self._lost(node, f"its ranks did not end within {_CLEARED_S:g} s of SIGKILL")

    def _conclude(self) -> None:
        if self._refused:
            raise UsageError(self._refused)
        if self._node_lost is not None and self._first is None and not self._asked:
            raise self._node_lost
        super()._conclude()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._let_go()
        super().__exit__(kind, value, trace)

    def _let_go(self) -> None:
        """Let the agents go, and wait for what started them."""
        for node in self._nodes:
            self._send(node, Kind.BYE, {})
        self._leaving = True
        end = time.monotonic() + _GOODBYE_S
        self._due.clear()
        Supervisor.later(self, _GOODBYE_S, lambda: None)
        while any(p in self._on_exit for p in self._starters) and time.monotonic() < end:
            self._turn()


def _nodes(job: Job) -> list[_Node]:
    nodes: list[_Node] = []
    first = 0
    for number, place in enumerate(job.nodes):
        nodes.append(
            _Node(number, place.host, range(first, first + place.ranks), place.cores, place.python)
        )
        first += place.ranks
    return nodes
