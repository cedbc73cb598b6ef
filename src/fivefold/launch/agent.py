"""The agent of a node: an engine starts one on each, and the launcher tells it which ranks to start.

    python -P -m fivefold.launch.agent               addresses and key of the launcher are in the environment
    python -P -m fivefold.launch.agent --number N    or in a line of JSON on standard input, as through ssh

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import IO, Any, Self

from fivefold.cluster import granted_cores
from fivefold.errors import LaunchError, UsageError
from fivefold.launch.binding import bound
from fivefold.launch.guard import dies_with_parent, why_not_started
from fivefold.launch.node_messages import FRAMES, PROTOCOL, Kind
from fivefold.launch.outbox import Outbox
from fivefold.launch.port import reserved_port
from fivefold.launch.supervisor import Supervised, Supervisor
from fivefold.launch.surroundings import node_environment
from fivefold.launch.template import TemplateProcess, words
from fivefold.wire import Channel, LinkClosed, LinkError, Message, OtherKey, OtherProtocol

__all__ = ["ADDRESSES", "KEY", "RankOrder", "main", "own_versions"]

ADDRESSES = "FIVEFOLD_AGENT_ADDRESSES"
KEY = "FIVEFOLD_AGENT_KEY"
_MOST_BYTES = 1 << 16
_CALL_S = 10.0
_SAME_S = 5.0
"""within this, a signal that comes on two ways is one"""
_CONNECT_S = 3.0
"""an address of the launcher may lead nowhere from here"""
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

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel
        self._outbox = Outbox(channel)
        self._ranks: dict[int, Supervised] = {}
        self._template: tuple[object, TemplateProcess] | None = None
        self._ports = contextlib.ExitStack()
        self._pipes: list[int] = []
        """of the ranks of this start"""
        self._passed_on: dict[tuple[int, bool], float] = {}
        """by signal, and whether the launcher sent it: when"""
        self._deaf = False
        """nobody listens any more to what ranks write"""
        self._grace_s = 5.0
        self._why = ""
        """of the end"""

    def serve(self, number: int) -> int:
        """Until the launcher says that it was all, or is gone; returns an exit code."""
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
        if self._why == _BYE:
            return 0
        sys.stderr.write(f"error: {self._why}; the ranks of this node are ended\n")
        self._end_ranks()
        return LaunchError.exit_code

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
            grace_s = float(fields["grace_s"])
            self._sweep(grace_s)
            if not grace_s:
                self._outbox.shorten()
            self._tell_when_cleared()
        elif kind == Kind.BYE:
            self._why = _BYE

    def _pass_on(self, signum: int, *, by_launcher: bool) -> None:
        """Send a signal to the ranks, once if a scheduler sends it to the launcher and to its agents."""
        now = time.monotonic()
        if now - self._passed_on.pop((signum, not by_launcher), -_SAME_S) < _SAME_S:
            return
        self._passed_on[signum, by_launcher] = now
        for rank in self._ranks.values():
            rank.send_signal(signum)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except UsageError as problem:
            self._outbox.put(Kind.REFUSED, {"why": str(problem)})

    def _listen(self, wanted: int | None) -> None:
        self._ports.close()
        port = self._ports.enter_context(reserved_port(wanted))
        self._outbox.put(Kind.LISTEN, {"port": port})

    def _start_ranks(self, order: RankOrder) -> None:
        self._grace_s = order.grace_s
        shared = node_environment(order.environment, os.environ) | {
            "WORLD_SIZE": str(order.world),
            "LOCAL_WORLD_SIZE": str(order.count),
            "PWD": order.directory,
        }
        # What differs between starts is apart: a process that has imported torch serves all of them.
        meeting = {"MASTER_ADDR": order.address, "MASTER_PORT": str(order.port)}
        if (again := shared.pop("FIVEFOLD_RESTART", None)) is not None:
            meeting["FIVEFOLD_RESTART"] = again
        cores = order.cores or sorted(os.sched_getaffinity(0))
        if order.threads:
            granted = min(granted_cores(), len(cores))
            shared["OMP_NUM_THREADS"] = str(max(1, granted // order.count))
        start = self._fork_rank if order.fork else self._start_rank
        for local, share in enumerate(bound(cores, order.count)):
            rank = order.first + local
            own = meeting | {"RANK": str(rank), "LOCAL_RANK": str(local)}
            start(replace(order, cores=[*share] or order.cores), rank, shared, own)

    def _start_rank(
        self, order: RankOrder, rank: int, shared: dict[str, str], own: dict[str, str]
    ) -> None:
        dies = dies_with_parent()

        def in_child() -> None:
            dies()
            if order.cores:
                os.sched_setaffinity(0, order.cores)

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
                preexec_fn=in_child,  # noqa: PLW1509 - no threads here
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
        del self._ranks[rank]
        if not self._deaf:
            self._outbox.put(Kind.ENDED, {"rank": rank, "code": code})

    def _tell_when_cleared(self) -> None:
        if self._ranks:
            self.later(0.01, self._tell_when_cleared)
            return
        self.leave(
            self._pipes
        )  # what escaped from its group must not write into the next start's logs
        self._pipes.clear()
        self._passed_on.clear()
        self._outbox.put(Kind.CLEARED, {})

    def _signalled(self, signum: int) -> None:
        """Of a scheduler, for the ranks: when they have ended, the launcher says what follows.

        Ctrl-C reaches the launcher too, which tells what to do about it.
        """
        if signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
            self._pass_on(signum, by_launcher=False)


_BYE = "bye"


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
    options = parser.parse_args(argv)
    try:
        addresses, key = _told(from_input=options.number >= 0)
        channel = _call(addresses, key)
    except (UsageError, LaunchError) as problem:
        sys.stderr.write(f"error: {problem}\n")
        return problem.exit_code
    with channel, Agent(channel) as agent:
        return agent.serve(options.number)


def _told(*, from_input: bool) -> tuple[list[str], bytes]:
    """Addresses and key of the launcher. They leave the environment: ranks have no use for them."""
    addresses, key = os.environ.pop(ADDRESSES, ""), os.environ.pop(KEY, "")
    try:
        if from_input:
            brief: dict[str, str] = json.loads(sys.stdin.buffer.readline(_MOST_BYTES))
            addresses, key = brief["addresses"], brief["key"]
        told = [address for address in addresses.split(",") if address]
        assert told
        return told, bytes.fromhex(key)
    except (ValueError, KeyError, TypeError, AssertionError):
        raise UsageError(
            "this is for `fivefold run`, which starts it on every node and tells it where to call; by hand, "
            "start a script on several nodes by: fivefold run -H node1:4,node2:4 script.py"
        ) from None


def _call(addresses: list[str], key: bytes) -> Channel:
    """Raises `LaunchError` if the launcher answers at none of its addresses."""
    reasons: list[str] = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        end = time.monotonic() + _CALL_S
        try:
            line = socket.create_connection((host, int(port)), _CONNECT_S)
        except OSError as problem:
            reasons.append(f"{address}: {problem.strerror or problem}")
            continue
        try:
            PROTOCOL.call(line, key, end)
            return Channel(line, "the launcher", FRAMES, queues=True, timeout_s=SILENT_S)
        except OtherProtocol:
            reasons.append(f"{address}: another program, or another version of Fivefold, answers")
        except OtherKey:
            reasons.append(f"{address}: the launcher of another job answers")
        except OSError as problem:
            reasons.append(f"{address}: {problem.strerror or problem}")
        line.close()
    raise LaunchError(f"{os.uname().nodename} cannot reach the launcher ({'; '.join(reasons)})")


if __name__ == "__main__":
    sys.exit(main())
