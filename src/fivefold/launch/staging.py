"""In the launcher: what its ranks import is copied to all nodes before they start (`fivefold run --stage`).

what do you lack?  ──> a chain of nodes that lack the same, a process of the launcher at its head ──> they end
     ^                                                                                                  |
     +---------------------- some lost the node before them: again, without it -------------------------+
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fivefold.errors import LaunchError, UsageError
from fivefold.launch.job import Job
from fivefold.launch.job_nodes import JobNode
from fivefold.launch.node_messages import Kind
from fivefold.launch.stage import Brief, Copying
from fivefold.launch.staged_tree import Tree
from fivefold.launch.supervisor import Supervised
from fivefold.wire import Channel

__all__ = ["Reach", "Staging", "by_hooks"]

_Chain = list[tuple[JobNode, int]]
_ROUNDS = 3
_LATE_S = 180.0
"""for all nodes to end copying after all is sent: more than what each waits for others"""
_OF_THE_SYSTEM = ("/", "/usr", "/usr/local")


class Reach(NamedTuple):
    """What this needs of an `AgentWatch`."""

    send: Callable[[JobNode, Kind, Mapping[str, Any]], None]
    wait_until: Callable[[Callable[[], object]], None]
    start: Callable[[Supervised, Callable[[int], None]], None]
    later: Callable[[float, Callable[[], object]], None]
    lose: Callable[[JobNode, str], None]


class Staging:
    """Sees to it that the nodes of a job have copies of what its ranks import.

    Raises `UsageError` if that cannot be read, or is the system's.

    Args:
        job: of whose ranks.
        job_key: that the launcher and its agents know.
        note: for people.
    """

    def __init__(self, job: Job, job_key: bytes, note: Callable[[str], object]) -> None:
        self.command, folder = _steady(job.command)
        self._place = {**os.environ, **job.environment}.get("FIVEFOLD_STAGE", "")
        self._key, self._note = job_key.hex(), note
        self._modules = folder if self.command[1:2] == ["-P"] else ""
        self._trees = [Tree.seen(path, whole=whole) for path, whole in _sources(folder)]
        self.places = {tree.source: tree.key for tree in self._trees}
        """by folder, the key of the tree that takes its place"""
        self._complete: set[Channel | None] = set()
        """of agents whose nodes lack nothing: one that was lost comes back with another"""
        self._channels: dict[int, Channel | None] = {}
        """of the agents that have answered"""
        self._lose: Callable[[JobNode, str], object] | None = None
        """for a node that cannot take copies, once others have worked; at first that ends the job"""
        self._answers: dict[int, Mapping[str, Any]] = {}
        self._deadline = float("inf")
        if hooks := by_hooks(Path(sys.prefix)):
            note(f"note: read where they are, as their installation asks for: {', '.join(hooks)}")

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """For ranks by `-P -m`: the modules of the working directory come first, as by `-m`."""
        paths = [self._modules, environ.get("PYTHONPATH", "")]
        return {"PYTHONPATH": os.pathsep.join(filter(None, paths))} if self._modules else {}

    def complete(self, node: JobNode) -> bool:
        """Whether a node has all copies."""
        return node.channel is not None and node.channel in self._complete

    def heard(self, node: JobNode, fields: Mapping[str, Any]) -> None:
        """An agent has answered."""
        self._answers[node.number] = fields
        self._channels[node.number] = node.channel

    def bring(self, nodes: Iterable[JobNode], launcher: Reach) -> None:
        """Copy what nodes lack. Raises `UsageError` where one cannot take it."""
        nodes = [node for node in nodes if node.channel not in self._complete]
        self._lose = launcher.lose if self._complete else None
        began = time.monotonic()
        copied: set[int] = set()
        for _ in range(_ROUNDS):
            lacking = self._lacking(nodes, launcher)
            if not lacking:
                break
            for trees, chain in lacking.items():
                self._copy([tree for tree in self._trees if tree.key in trees], chain, launcher)
                copied.update(node.number for node, _ in chain)
        else:
            raise LaunchError(
                f"--stage: nodes were lost {_ROUNDS} times while they got their copies"
            )
        self._complete |= {self._channels.get(node.number) for node in nodes} - {None}
        if copied:
            what = ", ".join(
                f"{tree.source} ({tree.size_bytes / 1e6:.0f} MB)" for tree in self._trees
            )
            where = f"{len(copied)} nodes" if len(copied) > 1 else "a node"
            self._note(f"note: {where} got copies in {time.monotonic() - began:.1f} s: {what}")

    def _lacking(self, nodes: Sequence[JobNode], launcher: Reach) -> dict[frozenset[str], _Chain]:
        """By what they lack, nodes, and at which port each will pass it on."""
        fields = {
            "trees": [tree.key for tree in self._trees],
            "folder": self._place,
        }
        answers = self._asked([(node, fields) for node in nodes], Kind.STAGE, launcher)
        found: dict[frozenset[str], _Chain] = {}
        for node in nodes:
            answer = {} if node.lost else answers.get(node.number, {})
            if lacks := answer.get("lacks"):
                found.setdefault(frozenset(lacks), []).append((node, answer["port"]))
        return found

    def _copy(self, trees: Sequence[Tree], chain: _Chain, launcher: Reach) -> None:
        """Have them passed along a chain of nodes."""
        keys = [tree.key for tree in trees]
        door = socket.create_server(("", 0))
        before: JobNode | None = None
        port: int = door.getsockname()[1]
        orders: list[tuple[JobNode, dict[str, Any]]] = []
        for place, (node, own_port) in enumerate(chain, 1):
            # A node that calls from here is reached as the launcher is.
            near = before is None or before.peer.startswith("127.")
            host = node.own if near or before is None else before.peer
            order = {"trees": keys, "host": host, "port": port, "passes": place < len(chain)}
            orders.append((node, order))
            before, port = node, own_port
        told = b"".join(tree.pack() for tree in trees)
        head = Copying(Brief(self._key, keys, door.fileno()), door, told)
        ended: list[int] = []

        def over(code: int) -> None:
            ended.append(code)
            self._deadline = time.monotonic() + _LATE_S
            launcher.later(_LATE_S, lambda: None)  # wakes it

        launcher.start(head.process, over)
        self._asked(orders, Kind.COPY, launcher)
        launcher.wait_until(lambda: ended)
        if why := head.why(ended[0]):
            self._failed([node for node, _ in chain], why)

    def _asked(
        self, orders: Sequence[tuple[JobNode, Mapping[str, Any]]], kind: Kind, launcher: Reach
    ) -> dict[int, Mapping[str, Any]]:
        """The answers of those that are not lost. Raises `UsageError` for what one cannot do."""
        self._answers, self._deadline = {}, float("inf")
        asked = [(node, node.channel) for node, _ in orders if node.channel is not None]
        for node, fields in orders:
            launcher.send(node, kind, fields)
        if kind == Kind.STAGE:
            self._deadline = time.monotonic() + _LATE_S
            launcher.later(_LATE_S, lambda: None)  # wakes it

        def silent() -> list[str]:  # one that is lost, or back, does not answer
            waiting = [n for n, agent in asked if n.channel is agent]
            return [node.host for node in waiting if node.number not in self._answers]

        launcher.wait_until(lambda: not silent() or time.monotonic() >= self._deadline)
        if silent():
            what = "end copying" if kind == Kind.COPY else "tell what it lacks"
            raise LaunchError(f"{', '.join(silent())} did not {what} within {_LATE_S:g} s")
        for node, _ in asked:
            if why := self._answers.get(node.number, {}).get("why"):
                self._failed([node], why)
        return self._answers

    def _failed(self, nodes: Sequence[JobNode], why: str) -> None:
        if self._lose is None:
            raise UsageError(why)
        for node in nodes:
            self._lose(node, why)


def _steady(command: Sequence[str]) -> tuple[list[str], str]:
    """The command with the whole name of its script, and the folder that it imports from first, if any."""
    if command[0] != sys.executable or len(command) < 2:
        return [*command], ""
    python, first, *rest = command
    python = _own_name(python)
    if first == "-m":
        return [python, "-P", first, *rest], os.getcwd()  # noqa: PTH109 - as the shell calls it
    if first.startswith("-"):
        return [*command], ""
    script = os.path.realpath(first)  # Python imports from beside that, not from beside a link
    return [python, script, *rest], os.path.dirname(script)  # noqa: PTH120


def _own_name(python: str) -> str:
    """Within its environment: it may have been called by another name."""
    called, version = os.path.basename(python), "python{}.{}".format(*sys.version_info)  # noqa: PTH119
    return next(
        path
        for name in (called, version)
        if os.path.exists(path := f"{sys.prefix}/bin/{name}")  # noqa: PTH110
    )


def _sources(folder: str) -> Iterator[tuple[str, bool]]:
    """Folders to copy, and whether all of each: the environment, what else is searched, the script's."""
    if sys.prefix in _OF_THE_SYSTEM:
        raise UsageError(
            "--stage sends the virtual or conda environment that fivefold runs in, and its Python is that of "
            f"the system ({sys.prefix}): make an environment, or leave --stage out"
        )
    yield sys.prefix, True
    known = [sys.prefix, sys.base_prefix]
    searched = sys.path if sys.flags.safe_path else sys.path[1:]  # the first is the launcher's own
    for path in [*map(os.path.abspath, searched), folder]:
        inside = any(path == one or path.startswith(f"{one}/") for one in known[:2])
        if not inside and path not in known and os.path.isdir(path):  # noqa: PTH112
            known.append(path)
            yield path, os.path.basename(path) in ("site-packages", "dist-packages")  # noqa: PTH119


def by_hooks(prefix: Path) -> list[str]:
    """Editable installs that name files and not folders: only their own code knows where these are."""
    found = prefix.glob("lib/python*/site-packages/*editable*.pth")
    return sorted(path.stem for path in found if path.read_text().startswith("import "))
