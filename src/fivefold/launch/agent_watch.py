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
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from fivefold.errors import LaunchError, UsageError
from fivefold.launch.agent import SILENT_S, own_versions
from fivefold.launch.agent_listener import AgentListener, AgentStart, AgentStarters
from fivefold.launch.ending import ENDS_AT
from fivefold.launch.job import (
    Job,
    RankFailure,
    Resumable,
    Stalled,
    ended,
    log_path,
    opened_log,
)
from fivefold.launch.job_nodes import JobNode, JobNodes, NodeLost
from fivefold.launch.node_folders import REPORT
from fivefold.launch.node_messages import FRAMES, Kind, weight
from fivefold.launch.output import LogLines, Stream
from fivefold.launch.progress import RankProgress
from fivefold.launch.restarts import FinalFailure
from fivefold.launch.slurm import ended_with_node
from fivefold.launch.staging import Reach, Staging
from fivefold.launch.supervisor import STOPPING, SWEEP_GRACE_S, Supervisor
from fivefold.launch.surroundings import portable
from fivefold.launch.trace_copies import TraceCopies
from fivefold.launch.variables import read_seconds
from fivefold.launch.watch import Watch
from fivefold.wire import Channel, LinkClosed, LinkError, Message
from fivefold.writing import write_whole

__all__ = ["AgentWatch"]

_QUICK_SILENT_S = 5.0
"""how long the network to a node may be dead in a job that may start again; else `SILENT_S`: it may mend"""
_CALL_AGAIN_S = 15.0
"""between calls to a node that was lost"""
_CLEARED_S = 10.0
_GOODBYE_S = 3.0
_PORT_S = 10.0
"""that an agent may take to find a port: it has nothing else to do then"""
_TRACES_S = 10.0
"""that the end of a job waits for traces which have not come"""
_TICK_S = 0.5
_AT_ONCE = 32
_TAKEN_BYTES = 1 << 14
_SHOWN_RANKS = 64
"""of more ranks the output of the first is shown, and what others write to standard error"""


class AgentWatch(Watch):
    """Watches the ranks of a job through agents. A context manager that leaves nothing running.

    Args:
        job: with nodes.
        engine: its name.
        listener: where its agents call.
    """

    def __init__(self, job: Job, engine: str, listener: AgentListener) -> None:
        super().__init__(job)
        self._engine, self._engine_log = engine, job.log_dir / "engine.log"
        self._agents = listener
        self._nodes = JobNodes(job)
        self._unnamed: list[tuple[Channel, str, str]] = []
        """agents that have called, and not yet said from where; with both addresses"""
        self._port = 0
        self._refused = ""
        self._node_lost: NodeLost | None = None
        self._reports_progress = job.reports_progress  # also when no restart is left
        self._progress: list[RankProgress] = []
        self._begun = self._leaving = self._agents_asked = False
        saving_s = self._grace_s + _CLEARED_S
        start = partial(self.start, after_s=saving_s, awaited=False)
        self._starters = AgentStarters(start, self.drop_group)
        self._impatient = False
        """whether a signal has asked to end since all was over"""
        self._traces = TraceCopies(
            lambda number, fields: self._send(self._nodes[number], Kind.TRACES, fields),
            self._tell,
        )
        self._staging: Staging | None = None
        if job.processes > _SHOWN_RANKS:
            self.display.only_errors_of_others()

    def progress(self) -> list[RankProgress]:
        """How far the ranks are, as their agents tell."""
        return [*self._progress]

    # ---- gathering

    def gather(self, starters: Sequence[AgentStart]) -> None:
        """Start the agents, and wait until all have called.

        Raises `LaunchError` that names all nodes whose agents did not, and why; `UsageError` if one has other
        versions than this node.
        """
        listener = self._agents
        self.attach(listener.woken.fileno(), self._answer)
        for starter in starters:
            hosts = [self._nodes[number].host for number in starter.nodes]
            one = self.job.log_dir / f"agent-{hosts[0]}.log"
            log = self._engine_log if len(hosts) > 1 else one
            self._starters.start(starter, log, self._not_started)
        listener.open()
        patience_s = _agents_s()
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
        if sum(bool(node.ranks) for node in lost) > len(self._nodes.spares()):
            raise LaunchError(self._unreached())
        for node in lost:
            self.display.note(f"warning: node {node.host} cannot be used: {node.lost}")

    def _not_started(self, numbers: Sequence[int], why: str) -> None:
        for number in numbers:
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
        silent_s = _QUICK_SILENT_S if self.job.restarts else SILENT_S
        with contextlib.suppress(BlockingIOError):
            listener.woken.recv(4096)
        while listener.lines:
            line = listener.lines.popleft()
            try:
                peer, own = line.getpeername()[0], line.getsockname()[0]
            except OSError:  # it has hung up
                line.close()
                continue
            channel = Channel(line, f"the agent at {peer}", FRAMES, queues=True, timeout_s=silent_s)
            self._undo.callback(channel.close)
            self._unnamed.append((channel, peer, own))
            self.attach(channel.fileno(), self._hearing(channel, None))

    def _hearing(self, channel: Channel, node: JobNode | None) -> Callable[[], None]:
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
        node = self._nodes.called(message.fields, peer)
        if node is None or self._leaving:
            if not self._leaving:
                names = ", ".join(message.fields["names"])
                self.display.note(f"warning: an agent on {names} calls, which is none of the hosts")
            with contextlib.suppress(LinkClosed):
                channel.send(Kind.BYE, {})
            channel.close()
            return
        channel.peer = f"the agent of {node.host}"
        was_lost, node.lost = node.lost, ""
        node.channel, node.peer, node.own = channel, peer, own
        node.untaken_bytes = 0
        self.attach(channel.fileno(), self._hearing(channel, node))
        theirs, ours = message.fields["versions"], own_versions()
        if differing := [name for name in ours if theirs.get(name) != ours[name]]:
            told = ", ".join(f"{name} {theirs.get(name)} (here {ours[name]})" for name in differing)
            self._lost(node, f"it has {told}; all nodes need the same")
        elif was_lost:
            self.display.note(f"note: node {node.host} is back")
            if self._begun and not node.ranks:
                self._start_ranks(node)

    def _heard(self, node: JobNode, message: Message) -> None:
        kind, fields = message.kind, message.fields
        if kind == Kind.OUTPUT:
            self._output(node, fields["rank"], fields["stream"], bytes(message.payload))
        elif kind == Kind.ENDED:
            for lines in node.logs.get(fields["rank"], ()):
                lines.flush()
            self.ended(fields["rank"], fields["code"])
        elif kind == Kind.ASKED:
            self._told.update(fields["ranks"])
        elif kind == Kind.LISTEN:
            self._port = fields["port"]
        elif kind == Kind.REFUSED:
            self._refused = self._refused or fields["why"]
        elif kind == Kind.CLEARED:
            node.cleared = True
        elif kind == Kind.PROGRESS:
            first, told = fields["first"], [RankProgress(*one) for one in fields["ranks"]]
            self._progress[first : first + len(told)] = told
            self._send(node, Kind.PROGRESS, {})
        else:
            self._heard_of_files(node, kind, fields, bytes(message.payload))

    def _heard_of_files(
        self, node: JobNode, kind: int, fields: Mapping[str, Any], payload: bytes
    ) -> None:
        if kind == Kind.STAGE and self._staging is not None:
            self._staging.heard(node, fields)
        elif kind == Kind.FLUSH:
            node.flushed = True
            for line in fields["told"]:
                self._tell(f"note: {line}")
        elif kind == Kind.TRACES:
            self._traces.heard(node.number, node.host, fields, payload)
        elif kind == Kind.FACTS:
            self._facts(node, int(fields["rank"]), payload)

    def _facts(self, node: JobNode, rank: int, told: bytes) -> None:
        """What --explain has found: rank 0 gets it, and the folder of the logs what that makes of it."""
        first = self._nodes.working()[0]
        if node is not first:
            self._send(first, Kind.FACTS, {"rank": rank}, told)
            return
        try:
            write_whole(self.job.log_dir / REPORT, told.decode(), "the report")
        except UsageError as problem:
            self.display.note(f"warning: {problem}")

    def _output(self, node: JobNode, rank: int, stream: Stream, chunk: bytes) -> None:
        if rank in node.logs:
            node.logs[rank][stream == "err"].feed(chunk)
        self.display.feed(rank, stream, chunk)
        node.untaken_bytes += weight(chunk)
        if node.untaken_bytes >= _TAKEN_BYTES:
            self._send(node, Kind.TAKEN, {"bytes": node.untaken_bytes})
            node.untaken_bytes = 0

    def _send(
        self, node: JobNode, kind: Kind, fields: Mapping[str, Any], payload: bytes = b""
    ) -> None:
        if node.channel is None or node.lost:
            return
        try:
            node.channel.send(kind, fields, [payload] if payload else [])
        except LinkClosed as problem:
            self._lost(node, str(problem))

    def _lost(self, node: JobNode, why: str) -> None:
        if node.lost:
            return
        node.lost = why
        self._traces.lost(node.number)
        if node.channel is not None:
            self.detach(node.channel.fileno())
            node.channel.close()
            node.channel = None
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
        self._begin()
        self._node_lost, self._refused = None, ""
        self._stage(job)
        self._nodes.replace_lost(self.display.note, job.shrinking)
        self._nodes.replace_blamed(self.display.note)
        self.job = self._fitted(job)
        self._progress = [RankProgress()] * self.job.processes
        self._begun = True
        self._call_lost()
        self.display.begin()
        try:
            with contextlib.ExitStack() as logs:
                self._ask_for_port()
                self._ask_for_traces()
                for node in self._nodes:
                    node.logs = {rank: self._log(rank, logs) for rank in node.ranks}
                for node in self._nodes:
                    self._start_ranks(node)
                self.wait()
        except (RankFailure, NodeLost) as problem:
            if self._ended_with_node(problem):
                raise FinalFailure(
                    f"{problem}\n  a node failed, and Slurm ended those of all others: it spares them in "
                    "jobs that were submitted with --no-kill (sbatch, salloc)"
                ) from None
            if isinstance(problem, RankFailure) and problem.code < 0:
                # what a script does wrong ends in an exit code
                self._nodes.blame(problem.rank, ended(problem.code))
            raise
        except Stalled as problem:
            self._nodes.blame(problem.culprit, "held the others up")
            raise
        finally:
            self._begun = self.display.silent = False
            for node in self._nodes:
                node.logs = {}

    def _ended_with_node(self, problem: RankFailure | NodeLost) -> bool:
        """Whether Slurm ends all agents. It asks their ranks first, and tells so a moment later."""
        ended = partial(ended_with_node, self._engine_log)
        asked = isinstance(problem, RankFailure) and problem.code == -signal.SIGTERM
        if asked and self._engine == "srun":
            self._turn_until(ended, _TICK_S)
        return ended()

    def _call_lost(self) -> None:
        """Start the agents of lost nodes again, now and later: one that is back stands by."""
        if not self.job.restarts:
            return
        for node in self._nodes:
            if node.lost:
                self._starters.again(node.number, _agents_s())
        self.later(_CALL_AGAIN_S, self._call_lost)

    def _stage(self, job: Job) -> None:
        """Copy what ranks import to where it is not yet."""
        if job.stage:
            if self._staging is None:
                self._staging = Staging(job, self._agents.key, self.display.note)
            start = partial(self.start, awaited=False)
            reach = Reach(self._send, self._await, start, self.later, self._lost)
            self._staging.bring(self._nodes, reach)
            if self._signalled_at > -math.inf or (job.ending is not None and job.ending.why):
                raise Resumable(job)  # before any rank could hear of it

    def _fitted(self, job: Job) -> Job:
        """The job with as many ranks as there are nodes for."""
        world = sum(len(node.ranks) for node in self._nodes)
        if world == job.processes or job.shrinking is None:
            return job
        told = job.shrinking.environment(world, job.log_dir)
        return replace(job, processes=world, environment={**job.environment, **told})

    def _log(self, rank: int, logs: contextlib.ExitStack) -> tuple[LogLines, LogLines]:
        log = logs.enter_context(opened_log(log_path(self.job.log_dir, rank)))
        return LogLines(log), LogLines(log)

    def _ask_for_traces(self) -> None:
        """Now and then, while ranks run."""
        self._traces.ask_due()
        self.later(_TICK_S, self._ask_for_traces)

    def _ask_for_port(self) -> None:
        """Of the node of rank 0, where the ranks will meet."""
        self._port = 0
        first = self._nodes.working()[0]
        self._send(first, Kind.LISTEN, {"port": self.job.port or 0})
        late = f"its agent named no port for rank 0 in {_PORT_S:g} s"
        self.later(_PORT_S, lambda: self._port or self._lost(first, late))
        self._await(lambda: self._port or self._refused)
        if self._refused:
            raise UsageError(self._refused)

    def pause(self, seconds: float) -> bool:
        """Wait; True if a signal asks to save and end meanwhile. Raises `Stopped` for one that stops."""
        end = time.monotonic() + seconds
        self._begin()
        self.later(seconds, lambda: None)
        self._await(lambda: time.monotonic() >= end or self._signalled_at > -math.inf)
        return self._signalled_at > -math.inf

    def _start_ranks(self, node: JobNode) -> None:
        """Or what they would be forked from, where it stands by: it takes no time when it is needed."""
        standby = not node.ranks
        if standby and self._staging is not None and not self._staging.complete(node):
            return
        if not standby or (self.job.fork and self.job.restarts):
            ranks = node.ranks or self._nodes.working()[-1].ranks
            order = {**self._order(node, ranks), "standby": standby}
            self._send(node, Kind.START, {}, json.dumps(order).encode())

    def _order(self, node: JobNode, ranks: range) -> dict[str, Any]:
        job = self.job
        environ = job.rank_environment(self._engine)
        environ.pop(ENDS_AT, None)  # of this node's processes and clock
        plan = Path(environ.get("FIVEFOLD_PLAN", ""))
        readable = plan.is_file() and os.access(plan, os.R_OK)
        staging = self._staging
        added = {} if staging is None else staging.variables(environ)
        chosen = "OMP_NUM_THREADS" in os.environ or "OMP_NUM_THREADS" in job.environment
        return {
            "command": self._command(node),
            "directory": os.getcwd(),  # noqa: PTH109 - as the shell calls it
            "environment": portable(environ) | dict(job.environment) | added,
            "first": ranks[0],
            "count": len(ranks),
            "world": job.processes,
            "address": self._nodes.meeting_address(),
            "port": self._port,
            "threads": not chosen,
            "cores": list(node.cores),
            "grace_s": self._grace_s,
            "fork": job.fork,
            "progress": self._reports_progress,
            "traces": self._traces.order(self._trace_folder(environ)),
            "explains": job.explains and "FIVEFOLD_RESTART" not in environ,
            "plan": plan.read_text(errors="replace") if readable else "",
            "limit_s": None if job.ending is None else job.ending.limit_left_s,
            "copies": {} if staging is None else staging.places,
        }

    def _trace_folder(self, environ: Mapping[str, str]) -> str:
        """Where traces are kept; of ranks that make a directory for theirs, beside the logs."""
        beside = self.job.log_dir.resolve() / "trace" if environ.get("FIVEFOLD_LOG_DIR") else ""
        return environ.get("FIVEFOLD_TRACE") or str(beside)

    def _command(self, node: JobNode) -> list[str]:
        """The node may have another Python."""
        command = list((self._staging or self.job).command)
        if node.python and command[0] == sys.executable:
            command[0] = node.python
        return command

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

    def _ask_ranks(self) -> bool:
        if self._begun and not self._agents_asked:
            self._agents_asked = True
            for node in self._nodes:
                self._send(node, Kind.ASK, {})
        return self._begun

    def _end_ranks(self) -> None:
        self._kill_ranks(0.0)

    def _kill_ranks(self, grace_s: float) -> None:
        for node in self._nodes:
            self._send(node, Kind.KILL, {"grace_s": grace_s})

    def _settle(self) -> None:
        killed = self._called()
        for node, _ in killed:
            node.cleared = False
        self._kill_ranks(0.0 if self._refused else SWEEP_GRACE_S)

        def left() -> list[JobNode]:
            return [node for node, agent in killed if node.channel is agent and not node.cleared]

        self._turn_until(lambda: not left(), _CLEARED_S)
        for node in left():
            self._lost(node, f"its ranks did not end within {_CLEARED_S:g} s of SIGKILL")

    def _called(self) -> list[tuple[JobNode, Channel]]:
        """Nodes whose agents can be asked for something: one that is back has another."""
        return [(node, node.channel) for node in self._nodes if node.channel is not None]

    def _turn_until(self, done: Callable[[], bool], limit_s: float) -> None:
        end = time.monotonic() + limit_s
        Supervisor.later(self, limit_s, lambda: None)  # wakes the loop
        while not done() and time.monotonic() < end:
            self._turn()

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
        self._impatient = False
        self._flush_last()
        self._await_traces()
        self._let_go()
        super().__exit__(kind, value, trace)

    def _flush_last(self) -> None:
        """Let checkpoint agents copy what is on the nodes alone."""
        self._due.clear()
        ending, asked = self.job.ending, self._called()
        limit_s = self._grace_s if ending is None else min(self._grace_s, ending.left_s)
        for node, _ in asked:
            node.flushed = False
            self._send(node, Kind.FLUSH, {"limit_s": limit_s})

        def over() -> bool:
            left = [node for node, agent in asked if node.channel is agent and not node.flushed]
            return self._impatient or not left

        self._turn_until(over, limit_s + _CLEARED_S)

    def _await_traces(self) -> None:
        left_s = _TRACES_S if self.job.ending is None else self.job.ending.left_s
        limit_s = 0.0 if self._impatient else max(_TICK_S, min(left_s, _TRACES_S))
        self._due.clear()
        Supervisor.later(self, limit_s, lambda: None)
        self._traces.finish(limit_s, self._turn)

    def _signalled(self, signum: int) -> None:
        super()._signalled(signum)
        if signum in STOPPING:
            self._impatient = True
            self._traces.hurry()

    def _tell(self, text: str) -> None:
        """Even while nothing else is shown."""
        before, self.display.silent = self.display.silent, False
        self.display.note(text)
        self.display.silent = before

    def _let_go(self) -> None:
        """Let the agents go, and wait for what started them."""
        for node in self._nodes:
            self._send(node, Kind.BYE, {})
            if node.lost:
                self._starters.end(node.number)
        self._leaving = True
        self._due.clear()
        self._turn_until(lambda: not self._starters.running, _GOODBYE_S)


def _agents_s() -> float:
    """How long an agent may take to call."""
    return read_seconds("FIVEFOLD_AGENTS_S", 60.0)
