"""A rank's side of the agent of its node: start it, ask it, and hear of its end.

with Agent(Path("/tmp/ckpt"), run, key, host="10.0.0.7") as agent:
    agent.peers({0: agent.address, 1: address_of_the_other_node})
    protection = agent.protect("step-00000120-epoch-1").result(timeout=60)
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from fivefold.checkpoint.agent import AgentCommands, serve_many
from fivefold.checkpoint.flush import Copied
from fivefold.checkpoint.inventory import Holding, Inventory
from fivefold.checkpoint.manifest import Item, Manifest
from fivefold.checkpoint.pieces import Address
from fivefold.checkpoint.problems import described
from fivefold.checkpoint.recovery_plan import RebuildTask
from fivefold.closing import Closing
from fivefold.errors import CheckpointError, FivefoldError, Unrecoverable
from fivefold.launch.checkpoint_agents import supervisor_address

__all__ = ["Agent", "AgentGone", "Figures", "OwnAgent", "Protection"]

_START_S = 60.0
_END_S = 5.0
_T = TypeVar("_T")


class AgentGone(CheckpointError):
    """The agent of this node has ended. Training goes on, and saves stay on the node."""


@dataclass(frozen=True)
class Protection:
    """What came of protecting a generation."""

    redundancy: tuple[Item, ...]
    problem: str
    """why there is none; empty if all went well"""


@dataclass(frozen=True)
class Figures:
    """What an agent has done and used since it was started."""

    cpu_s: float
    flush_cpu_s: float
    """of it, for copies to the persistent level"""
    flush_bytes: int
    """read so far for those copies"""
    wall_s: float
    sent_bytes: int
    """served to peers"""
    done: Mapping[str, Mapping[str, float]]
    """by command: bytes written and seconds taken"""


class Agent(Closing):
    """The helper process of this node.

    Commands return futures; `result(timeout=...)` raises `CheckpointError` if the command failed
    (`Unrecoverable`, `AgentGone`), and `TimeoutError`.

    Args:
        root: local storage of the node.
        run: the run's id.
        key: secret of the run (`wire.new_key`), the same on all nodes.
        host: address of the interface that looks toward the other nodes.
        bytes_per_s: limit for encoding and rebuilding; None: no limit.
        timeout_s: how long a peer may be silent.
        patience_s: how long a peer may be behind with its part of a generation.

    Raises:
        CheckpointError: it did not start.
    """

    def __init__(
        self,
        root: Path,
        run: str,
        key: bytes,
        *,
        host: str = "127.0.0.1",
        bytes_per_s: float | None = None,
        timeout_s: float = 30.0,
        patience_s: float = 30.0,
    ) -> None:
        self._begin()
        hello = {
            "root": str(root.absolute()), "run": run, "key": key.hex(), "host": host,
            "bytes_per_s": bytes_per_s, "timeout_s": timeout_s, "patience_s": patience_s,
        }  # fmt: skip
        try:
            self.address: Address = self._ask(
                "hello", hello, lambda did: (str(did["host"]), int(did["port"]))
            ).result(_START_S)
            """where peers read from it"""
        except BaseException as problem:
            self.close()
            if isinstance(problem, TimeoutError):
                raise CheckpointError(
                    f"the checkpoint agent did not answer within {_START_S:g} s of its start: is the file "
                    "system with Python very slow?"
                ) from None
            raise

    def _begin(self) -> None:
        self._numbers = itertools.count()
        self._asked: dict[int, tuple[Future[Any], Callable[[dict[str, Any]], Any]]] = {}
        self._lock = threading.Lock()
        self._gone = ""
        self._process = subprocess.Popen(
            # -P: modules of the directory where the user happens to be are not the agent's.
            [sys.executable, "-P", "-m", "fivefold.checkpoint.agent", "--parent", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C in a terminal is for the ranks
        )
        self._reader = threading.Thread(target=self._listen, name="fivefold-agent", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def gone(self) -> bool:
        """Whether it has ended."""
        return bool(self._gone) or self._process.poll() is not None

    def peers(self, addresses: Mapping[int, Address]) -> Future[None]:
        """Tell where the members of the present nodes are, itself included."""
        return self._ask("peers", {"addresses": addresses}, lambda _: None)

    def protect(
        self, generation: str, addresses: Mapping[int, Address] | None = None
    ) -> Future[Protection]:
        """Write this node's redundancy. A peer that is gone, or a full disk, is told in `problem`.

        `addresses` are needed for a generation of another start, whose members have other numbers.
        """

        def made(did: dict[str, Any]) -> Protection:
            return Protection(tuple(Item(**item) for item in did["redundancy"]), did["problem"])

        return self._ask("protect", {"generation": generation, "addresses": addresses}, made)

    def flush(
        self,
        generation: str,
        url: str | Path,
        members: Collection[int],
        *,
        metadata: bool,
        bytes_per_s: float | None = None,
    ) -> Future[Copied]:
        """Copy these members' payload from here to the persistent level, DCP's metadata too if told."""
        given = {
            "generation": generation, "url": str(url), "members": sorted(members),
            "metadata": metadata, "bytes_per_s": bytes_per_s,
        }  # fmt: skip
        return self._ask(
            "flush",
            given,
            lambda did: Copied(
                tuple(did["names"]), did["copied_bytes"], did["cpu_s"], did["waited_s"]
            ),
        )

    def hurry(self) -> Future[None]:
        """Copy without limit from now on, what is under way included."""
        return self._ask("hurry", {}, lambda _: None)

    def finish_flush(self, generation: str, url: str | Path) -> Future[None]:
        """On one node, when all have copied: the manifest makes the copy a checkpoint."""
        return self._ask("finish", {"generation": generation, "url": str(url)}, lambda _: None)

    def rebuild(
        self, manifest: Manifest, task: RebuildTask, addresses: Mapping[int, Address]
    ) -> Future[list[str]]:
        """Make a member's files whole here. Gives the names of those that were made.

        Args:
            manifest: of the generation, from any node.
            task: of this node, from the plan of recovery.
            addresses: by member at the time of the save (`RecoveryPlan.homes`).
        """
        given = {
            "manifest": manifest.to_json(), "member": task.member, "lost": task.lost,
            "bare": task.bare, "addresses": addresses,
        }  # fmt: skip
        return self._ask("rebuild", given, lambda did: list(did["made"]))

    def inventory(
        self, node: int, *, deep: bool, elsewhere: Iterable[Manifest] = ()
    ) -> Future[Inventory]:
        """What lies here; `node` is its number in the present run. See `inventory.stocktaking`."""
        told = [manifest.to_json() for manifest in elsewhere]
        given = {"node": node, "deep": deep, "elsewhere": told}
        return self._ask("inventory", given, lambda did: Inventory.parse(did["inventory"]))

    def look(self, manifest: Manifest, *, deep: bool) -> Future[Holding]:
        """Which files of one save are whole here."""
        given = {"manifest": manifest.to_json(), "deep": deep}
        return self._ask("look", given, lambda did: Holding.of_dict(did["holding"]))

    def verify(self, generation: str, *, deep: bool = True) -> Future[list[str]]:
        """What is wrong with the files of a generation here, for people."""
        given = {"generation": generation, "deep": deep}
        return self._ask("verify", given, lambda did: list(did["problems"]))

    def drop(self, generation: str) -> Future[None]:
        """Remove a generation from this node."""
        return self._ask("drop", {"generation": generation}, lambda _: None)

    def figures(self) -> Future[Figures]:
        """What it has done and used so far."""
        return self._ask("figures", {}, lambda did: Figures(**did))

    def at_end(self, url: str | Path, me: int, epoch: int) -> Future[None]:
        """Let it copy the newest save of a start to `url` when all ranks have died for good."""
        return self._ask("at_end", {"url": str(url), "me": me, "epoch": epoch}, lambda _: None)

    def leave(self) -> None:
        """After an error: under `fivefold run` it lives on until that says what follows, else as `close`."""
        if not supervisor_address():
            self.close()
        elif self._lock.acquire(timeout=_END_S):
            with contextlib.suppress(OSError):
                self._input.close()
            self._lock.release()

    @property
    def _input(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    def close(self) -> None:
        """End the process; commands under way fail with `AgentGone`."""
        if not self._lock.acquire(timeout=_END_S):
            self._process.kill()  # it reads nothing any more, and a thread of ours waits for it
            self._lock.acquire()
        try:
            with contextlib.suppress(OSError, ValueError):  # it has ended, or was closed before
                if select.select([], [self._input], [], 0)[1]:  # else it reads nothing any more
                    self._input.write(b'{"do": "end"}\n')
                self._input.close()
        finally:
            self._lock.release()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END_S)
        self._reader.join(_END_S)

    def _ask(
        self, command: str, given: Mapping[str, Any], made: Callable[[dict[str, Any]], _T]
    ) -> Future[_T]:
        future: Future[_T] = Future()
        number = next(self._numbers)
        text = json.dumps({"id": number, "do": command, "with": given}) + "\n"
        with self._lock:
            if self._gone:
                future.set_exception(AgentGone(self._gone))
                return future
            self._asked[number] = future, made
            # A pipe that is broken or closed: the listener fails this future with the rest.
            with contextlib.suppress(OSError, ValueError):
                self._input.write(text.encode("ascii"))
                self._input.flush()
        return future

    def _listen(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        with stdout:
            for text in stdout:
                self._heard(json.loads(text))
        code = self._process.wait()
        with self._lock:
            self._gone = f"the checkpoint agent of this node (pid {self.pid}) has ended" + (
                f", with code {code}" if code else ""
            )
            left = list(self._asked.values())
            self._asked.clear()
        for future, _ in left:
            future.set_exception(AgentGone(self._gone))

    def _heard(self, answer: dict[str, Any]) -> None:
        with self._lock:
            future, made = self._asked.pop(answer["id"])
        if "did" in answer:
            try:
                future.set_result(made(answer["did"]))
            except Exception as problem:  # noqa: BLE001 - raised where the answer is waited for
                future.set_exception(problem)
        else:
            kind = Unrecoverable if answer["kind"] == "Unrecoverable" else CheckpointError
            future.set_exception(kind(answer["failed"]))


class OwnAgent(Agent):
    """What an agent does, in the process that asks: there is none to be started and waited for."""

    def _begin(self) -> None:
        self._commands = AgentCommands()
        serve_many()

    def _ask(
        self, command: str, given: Mapping[str, Any], made: Callable[[dict[str, Any]], _T]
    ) -> Future[_T]:
        future: Future[_T] = Future()
        try:
            future.set_result(made(self._commands.timed(command, given)))
        except Unrecoverable as problem:
            future.set_exception(problem)
        except (FivefoldError, OSError) as problem:
            future.set_exception(CheckpointError(described(problem)))
        return future

    def close(self) -> None:
        """Serve nobody any more."""
        self._commands.close()
