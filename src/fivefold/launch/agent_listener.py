"""What starts the agents of a job, at first and again, and where they call."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fivefold.closing import Closing
from fivefold.errors import UsageError
from fivefold.launch.job import ProcessStart, ended, opened_log, tail
from fivefold.launch.node_messages import PROTOCOL
from fivefold.launch.supervisor import Supervised
from fivefold.wire import Listener, new_key

__all__ = ["AgentListener", "AgentStart", "AgentStarters"]

_MOST_CALLERS, _OF_ONE = 1024, 64


@dataclass(frozen=True)
class AgentStart:
    """A process by which an engine starts the agents of some nodes."""

    start: ProcessStart
    nodes: tuple[int, ...]
    """numbers in the list of hosts"""
    brief: bytes = b""
    """for its standard input"""


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


class AgentStarters:
    """The processes that start agents, for as long as these run.

    Args:
        supervise: see `Supervisor.start`.
        forget: a process group that has ended.
    """

    def __init__(
        self,
        supervise: Callable[[Supervised, Callable[[int], None]], None],
        forget: Callable[[int], None],
    ) -> None:
        self._supervise, self._forget = supervise, forget
        self.running: dict[int, Supervised] = {}
        """by the first of its nodes"""
        self._began: dict[int, float] = {}
        self._again: dict[int, Callable[[], None]] = {}
        """by node: what starts its agent alone"""

    def start(
        self,
        starter: AgentStart,
        log: Path,
        failed: Callable[[Sequence[int], str], None],
    ) -> None:
        """Start one, whose output is kept in `log`; `failed` is told of its nodes, and why, when it ends.

        Raises `UsageError`.
        """
        first = starter.nodes[0]
        try:
            with opened_log(log) as file:
                process = subprocess.Popen(
                    list(starter.start.command),
                    env=dict(starter.start.environment),
                    stdin=subprocess.PIPE if starter.brief else subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
        except OSError as problem:
            command = starter.start.command[0]
            raise UsageError(f"cannot start {command}: {problem.strerror}") from None
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(starter.brief)
                process.stdin.close()
        self.running[first], self._began[first] = process, time.monotonic()
        if len(starter.nodes) == 1:
            self._again[first] = lambda: self.start(starter, log, failed)

        def over(code: int) -> None:
            self._forget(self.running.pop(first).pid)
            said = tail(log, 3)
            words = f": {' / '.join(said)}" if said else ""
            failed(starter.nodes, f"what started its agent {ended(code)}{words}")

        self._supervise(process, over)

    def again(self, node: int, patience_s: float) -> None:
        """Start the agent of a lost node anew, if it has one of its own, or end a try of `patience_s`."""
        if node not in self.running and node in self._again:
            with contextlib.suppress(UsageError):
                self._again[node]()
        elif node in self.running and time.monotonic() > self._began[node] + patience_s:
            self.end(node)

    def end(self, node: int) -> None:
        """End what started the agent of one node alone; it waits for nothing."""
        if node in self._again and node in self.running:
            self.running[node].send_signal(signal.SIGTERM)
