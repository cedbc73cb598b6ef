"""The agent of a node: an engine starts one on each, and the launcher tells it which ranks to start.

    python -P -m fivefold.launch.agent               addresses and key of the launcher are in the environment
    python -P -m fivefold.launch.agent --number N    or in a line of JSON on standard input, as through ssh
                                       --apart       whoever has started it may end before it

    fivefold run --- srun, ssh, mpirun ... --- agent --- ranks
          ^                                     |
          +------------ channel ----------------+    orders there; output and ends here

Needs the standard library alone. When the launcher is gone, however it ended, the ranks end: they get SIGTERM
and time to save.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, Self

from fivefold.cluster import granted_cores
from fivefold.cluster.processes import handles, process_stat
from fivefold.errors import LaunchError, UsageError
from fivefold.launch.agent_call import call, told
from fivefold.launch.binding import bound, instances
from fivefold.launch.checkpoint_agents import SUPERVISOR, CheckpointAgents
from fivefold.launch.ending import limit_within
from fivefold.launch.guard import dies_with_parent, why_not_started
from fivefold.launch.node_folders import NodeFolders
from fivefold.launch.node_messages import FRAMES, PROTOCOL, Kind
from fivefold.launch.outbox import Outbox
from fivefold.launch.port import reserved_port
from fivefold.launch.progress import VARIABLE, ProgressFile, RankProgress
from fivefold.launch.sharing import own_slices, shared_gpus
from fivefold.launch.stage import NodeStage
from fivefold.launch.supervisor import Supervised, Supervisor
from fivefold.launch.surroundings import node_environment
from fivefold.launch.template import TemplateProcess, words
from fivefold.wire import (
    Channel,
    LinkClosed,
    LinkError,
    Message,
)

__all__ = ["RankOrder", "main", "own_versions"]

_ASK_S = 0.5
_SAME_S = 5.0
"""within this, a signal that comes on two ways is one"""
_PROGRESS_S = 0.5
"""between looks at how far the ranks are"""
SILENT_S = 20.0
"""after which a launcher, or a node, counts as lost whose kernel acknowledges nothing"""


@dataclass(frozen=True)
class RankOrder:
    """What to start: the ranks `first` to `first + count - 1` of `world`."""

    command: list[str]
    directory: str
    environment: dict[str, str]
    """the launcher's, and what all ranks find"""
    first: int
    count: int
    world: int
    address: str
    port: int
    threads: bool
    """whether to set OMP_NUM_THREADS"""
    cores: list[int]
    """that the ranks may use; empty: all that are granted"""
    grace_s: float
    fork: bool
    """whether the ranks are forked from one process that has imported torch"""
    progress: bool
    """whether the launcher wants to know how far they are"""
    traces: dict[str, str] | None
    """`folder` that they trace to, and a `token` seen there if the launcher shares it; None: no matter"""
    explains: bool
    """whether they tell what they were given"""
    standby: bool
    """whether to start none of them yet, but what they are forked from"""
    plan: str
    """what is in the file FIVEFOLD_PLAN on the launcher's node"""
    limit_s: float | None
    """seconds until they have to have ended; None: not known"""
    copies: dict[str, str]
    """by folder, the key of the tree that takes its place here"""

    @classmethod
    def parse(cls, fields: dict[str, Any]) -> Self:
        """Raises `UsageError` if a launcher of another version wrote it."""
        try:
            return cls(**fields)
        except TypeError as problem:
            raise UsageError(f"the launcher's order is not understood: {problem}") from None

    def refused(self, problem: Exception) -> str:
        """Why `Popen` could not start it."""
        return why_not_started(problem, self.command, self.directory, self.cores, "ranks")


class Agent(Supervisor):
    """Starts ranks as the launcher orders, tells what they write and how they end."""

    def __init__(self, channel: Channel, key: bytes) -> None:
        super().__init__()
        self._channel = channel
        self._stage = NodeStage(key)
        self.callback(self._stage.close)
        self._outbox = Outbox(channel)
        self._folders = NodeFolders(self, channel, lambda: self._outbox.empty)
        self._ranks: dict[int, Supervised] = {}
        self._checkpoints = CheckpointAgents()
        self.callback(self._checkpoints.close)
        self._template: tuple[object, TemplateProcess] | None = None
        self._ports = contextlib.ExitStack()
        self._sharing = contextlib.ExitStack()
        self.callback(self._sharing.close)
        self._pipes: list[int] = []
        """of the ranks of this start"""
        self._passed_on: dict[tuple[int, bool], float] = {}
        """by signal, and whether the launcher sent it: when"""
        self._to_save = False
        """whether the ranks are to save and end"""
        self._told: set[int] = set()
        """ranks that have got SIGUSR1"""
        self._deaf = False
        """nobody listens any more to what ranks write"""
        self._grace_s = 5.0
        self._plans: dict[str, str] = {}
        """files by what is in them"""
        self._progress: ProgressFile | None = None
        self._first = self._count = 0
        """of the ranks of this node"""
        self._told_progress: list[RankProgress] = []
        self._progress_read = True
        """a launcher that stands still gets no more of it"""
        self._why = ""
        """of the end"""

    def serve(self, number: int) -> int:
        """Until the launcher says that it was all, or is gone; returns the exit code."""
        self.attach(self._channel.fileno(), self._receive)
        try:
            self._channel.send(Kind.HELLO, _about(number))
            while not self._why:
                self._turn()
        except LinkClosed as problem:
            self._why = str(problem)
        finally:
            self._deaf = True
            self.detach(self._channel.fileno())
            self._ports.close()
            self._outbox.close()
            self._folders.close()
        if self._why == _BYE:
            return 0
        kept = "".join(f"; traces are in {place}" for place in self._folders.traces)
        _say(f"error: {self._why}; the ranks of this node are ended{kept}")
        self._end_ranks()
        for line in self._checkpoints.flush(self._grace_s):
            _say(f"note: {line}")
        return 0  # for another code, srun and mpirun would end agents whose ranks still save

    def _end_ranks(self) -> None:
        """Ask them to end, and go on reading what they write while they save."""
        end = time.monotonic() + self._grace_s
        self._kill(signal.SIGTERM)
        self.later(self._grace_s, lambda: None)
        while self._ranks and time.monotonic() < end:
            self._turn()
        self._sweep(0.0)

    def _receive(self) -> None:
        while not self._why:
            try:
                message = self._channel.receive(0.0)
            except LinkError as problem:
                raise LinkClosed(f"an order of the launcher is lost: {problem}") from None
            if message is None:
                return
            self._obey(message)

    def _obey(self, message: Message) -> None:
        kind, fields = message.kind, message.fields
        if kind == Kind.TAKEN:
            self._outbox.taken(int(fields["bytes"]))
        elif kind == Kind.LISTEN:
            self._try(lambda: self._listen(fields["port"] or None))
        elif kind == Kind.START:
            order = json.loads(bytes(message.payload))
            self._try(lambda: self._start_ranks(RankOrder.parse(order)))
        elif kind == Kind.SIGNAL:
            self._pass_on(int(fields["signum"]), by_launcher=True)
        elif kind == Kind.KILL:
            self._clear(float(fields["grace_s"]))
        elif kind == Kind.ASK:
            self._to_save = True
            self._ask_ranks()
        elif kind == Kind.PROGRESS:
            self._progress_read = True
        elif kind == Kind.BYE:
            self._why = _BYE
        else:
            self._obey_about_files(message)

    def _obey_about_files(self, message: Message) -> None:
        kind, fields = message.kind, message.fields
        if kind == Kind.FLUSH:
            told = self._checkpoints.flush(float(fields["limit_s"]))
            self._outbox.put(Kind.FLUSH, {"told": told})
        elif kind in (Kind.STAGE, Kind.COPY):
            self._bring_copies(fields)
        else:
            self._folders.heard(message)

    def _pass_on(self, signum: int, *, by_launcher: bool) -> None:
        """Send a signal to the ranks, once if a scheduler sends it to the launcher and to its agents."""
        if signum == signal.SIGUSR1:
            if self._to_save:
                return  # who saves takes a second one for impatience
            self._told.update(self._ranks)
        now = time.monotonic()
        if now - self._passed_on.pop((signum, not by_launcher), -_SAME_S) < _SAME_S:
            return
        self._passed_on[signum, by_launcher] = now
        for rank in self._ranks.values():
            rank.send_signal(signum)

    def _ask_ranks(self) -> None:
        """Now and again: a rank that has no handler yet would die of the signal."""
        if self._deaf:
            return
        ready = [
            rank
            for rank, process in self._ranks.items()
            if rank not in self._told and handles(process.pid, signal.SIGUSR1)
        ]
        for rank in ready:
            self._ranks[rank].send_signal(signal.SIGUSR1)
        self._told.update(ready)
        if ready:
            self._outbox.put(Kind.ASKED, {"ranks": ready})
        self.later(_ASK_S, self._ask_ranks)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except UsageError as problem:
            self._outbox.put(Kind.REFUSED, {"why": str(problem)})

    def _bring_copies(self, fields: Mapping[str, Any]) -> None:
        """Tell which copies are not here, or take them."""
        try:
            if "host" in fields:
                copying = self._stage.copying(**fields)
                self.start(copying.process, lambda code: self._tell_copies(copying.why(code)))
            else:
                lacks, port = self._stage.asked(**fields)
                self._tell_copies("", lacks, port)
        except UsageError as problem:
            self._tell_copies(str(problem))
        except OSError as problem:
            self._tell_copies(f"{os.uname().nodename} cannot keep copies: {problem}")

    def _tell_copies(self, why: str, lacks: Sequence[str] = (), port: int = 0) -> None:
        if not self._deaf:
            self._outbox.put(Kind.STAGE, {"why": why, "lacks": lacks, "port": port})

    def _listen(self, wanted: int | None) -> None:
        self._ports.close()
        port = self._ports.enter_context(reserved_port(wanted))
        self._outbox.put(Kind.LISTEN, {"port": port})

    def _start_ranks(self, order: RankOrder) -> None:
        self._grace_s = order.grace_s
        self._checkpoints.end()
        self._sharing.close()
        shared = node_environment(order.environment, os.environ) | {
            "WORLD_SIZE": str(order.world),
            "LOCAL_WORLD_SIZE": str(order.count),
            "PWD": order.directory,
            SUPERVISOR: self._checkpoints.address,
        }
        if order.progress:
            shared[VARIABLE] = self._progress_file(order).path
        if order.plan:
            shared["FIVEFOLD_PLAN"] = self._plan_file(shared["FIVEFOLD_PLAN"], order.plan)
        if order.copies:
            command, shared = self._stage.relocated(order.command, shared, order.copies)
            order = replace(order, command=command)
        # What differs between starts is apart: a process that has imported torch serves all of them.
        meeting = {"MASTER_ADDR": order.address, "MASTER_PORT": str(order.port)}
        for name in ("FIVEFOLD_RESTART", "FIVEFOLD_RESUME_BEFORE", "FIVEFOLD_TRACE"):
            if name in shared:
                meeting[name] = shared.pop(name)
        meeting |= limit_within(order.limit_s)
        cores = order.cores or sorted(os.sched_getaffinity(0))
        if order.threads:
            granted = min(granted_cores(), len(cores))
            shared["OMP_NUM_THREADS"] = str(max(1, granted // order.count))
        if order.standby:
            with contextlib.suppress(UsageError):  # said when it is needed
                self._template_of(order, shared)
            return
        ranks = range(order.first, order.first + order.count)
        meeting |= self._folders.variables(
            ranks, order.directory, order.traces, explains=order.explains
        )
        slices = own_slices(shared, order.count)
        meeting |= self._sharing.enter_context(shared_gpus(shared, order.count))
        start = self._fork_rank if order.fork else self._start_rank
        for local, share in enumerate(
            bound(cores, order.count, per_device=instances(order.environment))
        ):
            rank = order.first + local
            own = meeting | slices[local] | {"RANK": str(rank), "LOCAL_RANK": str(local)}
            start(replace(order, cores=[*share] or order.cores), rank, shared, own)

    def _plan_file(self, path: str, text: str) -> str:
        """The file, where this node has it as well; else a nameless one of this process, of the same text."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if Path(path).read_text() == text:
                return path
        if text not in self._plans:
            fd = os.memfd_create("fivefold-plan", os.MFD_CLOEXEC)
            self.callback(lambda: os.close(fd))
            os.write(fd, text.encode())
            self._plans[text] = f"/proc/{os.getpid()}/fd/{fd}"
        return self._plans[text]

    def _progress_file(self, order: RankOrder) -> ProgressFile:
        """One for all starts, so that processes may be forked that know of it."""
        if self._progress is None:
            self._tell_progress_again()
        if self._progress is None or order.count > len(self._progress.read()):
            self._progress = ProgressFile(order.count)
            self.callback(self._progress.close)
        self._progress.clear()
        self._first, self._count, self._told_progress = order.first, order.count, []
        return self._progress

    def _tell_progress_again(self) -> None:
        if self._progress_read:
            self._tell_progress()
        self.later(_PROGRESS_S, self._tell_progress_again)

    def _tell_progress(self) -> None:
        if self._progress is None or self._deaf or not self._ranks:
            return
        found = self._progress.read()[: self._count]
        for rank, process in self._ranks.items():
            # Its end may be told late, by a template that imports: that is no stall.
            if (stat := process_stat(process.pid)) is None or stat.ended:
                found[rank - self._first] = found[rank - self._first]._replace(signs=-1)
        if found != self._told_progress:
            self._told_progress, self._progress_read = found, False
            # Past what waits in the outbox: a node that writes much must not look as if it stood still.
            self._channel.send(Kind.PROGRESS, {"first": self._first, "ranks": found})

    def _start_rank(
        self, order: RankOrder, rank: int, shared: dict[str, str], own: dict[str, str]
    ) -> None:
        try:
            process = subprocess.Popen(
                order.command,
                cwd=order.directory,
                env=shared | own,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                preexec_fn=dies_with_parent(cores=order.cores),  # noqa: PLW1509 - no threads here
            )
        except (OSError, subprocess.SubprocessError) as problem:
            raise UsageError(order.refused(problem)) from None
        assert process.stdout is not None and process.stderr is not None
        self._watch_rank(rank, process, process.stdout, process.stderr)

    def _fork_rank(
        self, order: RankOrder, rank: int, shared: dict[str, str], own: dict[str, str]
    ) -> None:
        template = self._template_of(order, shared)
        ends = [os.pipe() for _ in range(2)]
        try:
            process = template.fork(own, order.cores, ends[0][1], ends[1][1])
        except OSError as problem:
            for reader, _ in ends:
                os.close(reader)
            raise UsageError(
                f"{os.uname().nodename} cannot fork ranks: {problem}; its log says why, or leave --fork out"
            ) from None
        finally:
            for _, writer in ends:
                os.close(writer)
        out, err = (os.fdopen(reader, "rb", buffering=0) for reader, _ in ends)
        self._watch_rank(rank, process, out, err)

    def _template_of(self, order: RankOrder, shared: dict[str, str]) -> TemplateProcess:
        """One that has imported torch in this environment, or will have."""
        wanted = (order.command, order.directory, shared)
        if self._template is None or self._template[0] != wanted or self._template[1].gone:
            if self._template is not None:  # it ends with its line
                self.detach(self._template[1].line.fileno())
                self._template[1].line.close()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                try:
                    subprocess.Popen(  # the kernel ends it with this process
                        words(order.command[0], theirs.fileno(), order.command),
                        cwd=order.directory,
                        env=shared,
                        stdin=subprocess.DEVNULL,
                        pass_fds=[theirs.fileno()],
                        start_new_session=True,
                        preexec_fn=dies_with_parent(),  # noqa: PLW1509 - no threads here
                    )
                except OSError as problem:
                    raise UsageError(order.refused(problem)) from None
            template = TemplateProcess(ours)
            self._template = (wanted, template)
            self.callback(ours.close)  # the template ends then, and what it has forked with it
            self.attach(ours.fileno(), lambda: self._template_said(template))
        return self._template[1]

    def _template_said(self, template: TemplateProcess) -> None:
        template.take()
        if template.gone:
            self.detach(template.line.fileno())

    def _watch_rank(self, rank: int, process: Supervised, out: IO[bytes], err: IO[bytes]) -> None:
        self._ranks[rank] = process
        self.start(process, lambda code: self._ended(rank, code))
        self._pipes += [
            self.read(out, self._telling(rank, "out")),
            self.read(err, self._telling(rank, "err")),
        ]

    def _telling(self, rank: int, stream: str) -> Callable[[bytes], None]:
        fields = {"rank": rank, "stream": stream}
        return lambda chunk: None if self._deaf else self._outbox.put(Kind.OUTPUT, fields, chunk)

    def _ended(self, rank: int, code: int) -> None:
        self._tell_progress()
        self._folders.tell_facts()
        del self._ranks[rank]
        if not self._deaf:
            self._outbox.put(Kind.ENDED, {"rank": rank, "code": code})

    def _clear(self, grace_s: float) -> None:
        self._sweep(grace_s)
        if not grace_s:
            self._outbox.shorten()
        self._tell_when_cleared()

    def _tell_when_cleared(self) -> None:
        if self._ranks:
            self.later(0.01, self._tell_when_cleared)
            return
        self.leave(
            self._pipes
        )  # what escaped from its group must not write into the next start's logs
        self._pipes.clear()
        self._passed_on.clear()
        self._told.clear()
        self._outbox.put(Kind.CLEARED, {})

    def _signalled(self, signum: int) -> None:
        """Of a scheduler, for the ranks: when they have ended, the launcher says what follows.

        Ctrl-C reaches the launcher too, which tells what to do about it.
        """
        if signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
            self._pass_on(signum, by_launcher=False)


_BYE = "bye"


def _say(line: str) -> None:
    """To whoever started this process, if it still listens."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{line}\n")


def own_versions() -> dict[str, str]:
    """What has to be the same on all nodes."""
    try:
        ours = version("fivefold")
    except PackageNotFoundError:
        ours = ""
    return {"fivefold": ours, "Python": ".".join(platform.python_version_tuple()[:2])}


def _about(number: int) -> dict[str, Any]:
    own = os.uname().nodename
    names = {own, own.partition(".")[0], os.environ.get("SLURMD_NODENAME", "")} - {""}
    return {
        "number": number,
        "names": sorted(names),
        "versions": own_versions(),
        "cores": granted_cores(),
    }


# ---- The call to the launcher


def main(argv: Sequence[str] | None = None) -> int:
    """Call the launcher and serve it; returns an exit code."""
    parser = argparse.ArgumentParser(prog="fivefold.launch.agent")
    parser.add_argument("--number", type=int, default=-1)
    parser.add_argument("--apart", action="store_true")
    options = parser.parse_args(argv)
    if options.apart:
        _part()
    try:
        addresses, key = told(from_input=options.number >= 0)
        line = call(addresses, key, PROTOCOL)
    except (UsageError, LaunchError) as problem:
        sys.stderr.write(f"error: {problem}\n")
        return problem.exit_code
    channel = Channel(line, "the launcher", FRAMES, queues=True, timeout_s=SILENT_S)
    with channel, Agent(channel, key) as agent:
        return agent.serve(options.number)


def _part() -> None:
    """Go on in a process that whoever started this one does not know.

    mpirun ends all that it has started when one of its nodes is lost. The agents of the others are needed.
    """
    if agent := os.fork():
        os._exit(abs(os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1])))
    os.setsid()


if __name__ == "__main__":
    sys.exit(main())
