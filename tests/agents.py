"""Agents of nodes that are directories on one machine: start them, save, lose nodes, and restart."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fivefold.checkpoint.agent_client import Agent, Protection
from fivefold.checkpoint.recovery_plan import RecoveryChoice, RecoveryPlan, choose
from fivefold.checkpoint.store import LocalStore
from fivefold.wire import new_key
from generations import SavedState

__all__ = ["MIB", "THREE", "WAIT_S", "AgentNodes", "content", "gone", "plan_of", "wait_until"]

WAIT_S = 60.0
MIB = 1 << 20
THREE = [[3 * MIB, 5], [1 * MIB + 7], [2 * MIB, 0, 9]]
"""lengths of the files of three nodes"""


class AgentNodes:
    """Directories that stand for the disks of nodes, with an agent each."""

    def __init__(self, root: Path) -> None:
        self._stack = ExitStack()
        self.root = root
        self.key = new_key()
        self.agents: list[Agent] = []

    def start(self, count: int, timeout_s: float = 20.0, **options: Any) -> list[Agent]:
        """More nodes. Agents start side by side."""
        first = len(self.agents)

        def begin(node: int) -> Agent:
            return Agent(self.disk(node), "r", self.key, timeout_s=timeout_s, **options)

        with ThreadPoolExecutor(count) as pool:
            new = list(pool.map(begin, range(first, first + count)))
        for agent in new:
            self._stack.enter_context(agent)
        self.agents += new
        self.meet()
        return new

    def meet(self) -> None:
        addresses = {node: agent.address for node, agent in enumerate(self.agents)}
        for agent in self.agents:
            agent.peers(addresses)

    def disk(self, node: int) -> Path:
        return self.root / f"disk{node}"

    def store(self, node: int) -> LocalStore:
        return LocalStore(self.disk(node), "r")

    def folder(self, node: int, state: SavedState) -> Path:
        return self.store(node).root / state.manifest.name

    def save(self, state: SavedState) -> None:
        """Every node writes its part."""
        for member in range(len(state.manifest.members)):
            state.put(self.store(member).root, member)

    def protect(self, state: SavedState) -> list[Protection]:
        """Let all agents encode, and enter it into the manifests."""
        futures = [a.protect(state.manifest.name) for a in self.agents]
        results = [future.result(WAIT_S) for future in futures]
        for node, result in enumerate(results):
            assert not result.problem
            store = self.store(node)
            found = store.find(state.manifest.name)
            assert found is not None
            store.advance(found, "protected", result.redundancy)
        return results

    def lose(self, node: int) -> None:
        """Its processes and its disk are gone."""
        os.kill(self.agents[node].pid, signal.SIGKILL)
        self.agents[node].close()
        shutil.rmtree(self.disk(node))

    def replace(self, node: int) -> None:
        """An empty node instead."""
        others = self.agents
        self.agents = self.agents[:node]
        [new] = self.start(1)
        self.agents = [*others[:node], new, *others[node + 1 :]]
        self.meet()

    def choice(self, *, deep: bool = True) -> RecoveryChoice:
        """What a restart finds."""
        futures = [a.inventory(node, deep=deep) for node, a in enumerate(self.agents)]
        shallow = [future.result(WAIT_S) for future in futures]
        known = [h.manifest for inventory in shallow for h in inventory.holdings]
        futures = [
            a.inventory(node, deep=deep, elsewhere=known) for node, a in enumerate(self.agents)
        ]
        return choose([future.result(WAIT_S) for future in futures])

    def rebuild(self, choice: RecoveryChoice) -> list[list[str]]:
        """Do what the plan says."""
        assert choice.plan is not None, choice.passed
        plan = choice.plan
        addresses = {member: self.agents[node].address for member, node in plan.homes.items()}
        futures = [
            self.agents[task.node].rebuild(plan.manifest, task, addresses) for task in plan.tasks
        ]
        return [future.result(WAIT_S) for future in futures]

    def close(self) -> None:
        self._stack.close()


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def wait_until(what: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
    except OSError:
        return True


def plan_of(choice: RecoveryChoice) -> RecoveryPlan:
    """What was chosen."""
    assert choice.plan is not None, choice.passed
    return choice.plan
