"""Agents as real processes, one per node; a node is a directory here, but for the last tests."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from fivefold.checkpoint.agent_client import Agent, AgentGone, Protection
from fivefold.checkpoint.inventory import PERSISTENT, Inventory, stocktaking
from fivefold.checkpoint.manifest import MANIFEST, METADATA
from fivefold.checkpoint.pieces import new_key
from fivefold.checkpoint.recovery import Choice, choose
from fivefold.checkpoint.store import LocalStore, PersistentStore
from fivefold.errors import CheckpointError, Unrecoverable
from generations import SavedState, saved_state
from nodes import Nodes as Apart
from nodes import refusal

WAIT_S = 60.0
MIB = 1 << 20
THREE = [[3 * MIB, 5], [1 * MIB + 7], [2 * MIB, 0, 9]]


class Nodes:
    """Directories that stand for the disks of nodes, with an agent each."""

    def __init__(self, root: Path) -> None:
        self._stack = ExitStack()
        self.root = root
        self.key = new_key()
        self.agents: list[Agent] = []

    def start(self, count: int, **options: object) -> list[Agent]:
        """More nodes. Agents start side by side."""
        first = len(self.agents)

        def begin(node: int) -> Agent:
            return Agent(self.disk(node), "r", self.key, **{"timeout_s": 5.0, **options})  # type: ignore[arg-type]

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

    def choice(self, *, deep: bool = True) -> Choice:
        """What a restart finds."""
        futures = [a.inventory(node, deep=deep) for node, a in enumerate(self.agents)]
        shallow = [future.result(WAIT_S) for future in futures]
        known = [h.manifest for inventory in shallow for h in inventory.holdings]
        futures = [
            a.inventory(node, deep=deep, elsewhere=known) for node, a in enumerate(self.agents)
        ]
        return choose([future.result(WAIT_S) for future in futures])

    def rebuild(self, choice: Choice) -> list[list[str]]:
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


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    yield nodes
    nodes.close()


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


# --- redundancy, loss and rebuilding --------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["partner", "xor"])
def test_every_node_comes_back_after_its_loss(nodes: Nodes, scheme: str) -> None:
    state = saved_state(THREE, scheme=scheme)
    nodes.start(3)
    nodes.save(state)
    nodes.protect(state)
    before = [content(nodes.folder(node, state)) for node in range(3)]
    for lost in range(3):
        nodes.lose(lost)
        nodes.replace(lost)
        choice = nodes.choice()
        [made] = nodes.rebuild(choice)
        assert METADATA in made and MANIFEST in made
        nodes.protect(state)
        after = content(nodes.folder(lost, state))
        assert after == before[lost]
        # Once more: nothing to do, and the same bytes.
        assert nodes.rebuild(choice) == [[]]
        assert content(nodes.folder(lost, state)) == after


def test_single_keeps_nothing_and_says_nothing(nodes: Nodes) -> None:
    state = saved_state([[10]], scheme="single")
    nodes.start(1)
    nodes.save(state)
    assert nodes.protect(state) == [Protection((), "")]


def test_damaged_files_are_rebuilt_in_place(nodes: Nodes) -> None:
    state = saved_state(THREE)
    nodes.start(3)
    nodes.save(state)
    nodes.protect(state)
    for name in ("__0_0.distcp", "__1_0.distcp"):
        path = nodes.folder(0, state) / name
        damaged = bytearray(path.read_bytes())
        damaged[-1] ^= 1
        path.write_bytes(damaged)
    [problem, _] = nodes.agents[0].verify(state.manifest.name).result(WAIT_S)
    assert "__0_0.distcp" in problem
    assert nodes.rebuild(nodes.choice()) == [["__0_0.distcp", "__1_0.distcp"]]
    assert nodes.agents[0].verify(state.manifest.name).result(WAIT_S) == []


def test_a_damaged_manifest_comes_from_the_others(nodes: Nodes) -> None:
    state = saved_state(THREE)
    nodes.start(3)
    nodes.save(state)
    nodes.protect(state)
    path = nodes.folder(1, state) / MANIFEST
    path.write_bytes(path.read_bytes()[:-9])
    assert nodes.rebuild(nodes.choice()) == [[MANIFEST]]
    assert nodes.choice().plan == replace(_plan(nodes.choice()), tasks=())


def _plan(choice: Choice):  # type: ignore[no-untyped-def]
    assert choice.plan is not None
    return choice.plan


def test_a_surviving_node_takes_a_lost_member_in_and_serves_it(nodes: Nodes) -> None:
    state = saved_state(THREE)
    nodes.start(3)
    nodes.save(state)
    nodes.protect(state)
    nodes.lose(2)
    del nodes.agents[2]
    made = nodes.rebuild(nodes.choice())
    assert made == [[item.name for item in state.manifest.members[2].items]]
    assert content(nodes.folder(0, state))["__3_0.distcp"] == state.payload["__3_0.distcp"]
    again = nodes.choice()
    assert _plan(again).complete and _plan(again).sources["__3_0.distcp"] == 0


def test_redundancy_that_is_damaged_makes_nothing_wrong(nodes: Nodes) -> None:
    """Not listed in a manifest, so nobody knows its digest: what comes out is compared."""
    state = saved_state(THREE)
    nodes.start(3)
    nodes.save(state)
    for agent in nodes.agents:
        assert not agent.protect(state.manifest.name).result(WAIT_S).problem
    for keeper in (0, 1):
        path = nodes.folder(keeper, state) / f"redundancy-{keeper}.bin"
        path.write_bytes(bytes(path.stat().st_size))
    nodes.lose(2)
    nodes.replace(2)
    choice = nodes.choice()
    with pytest.raises(CheckpointError, match=r"what was rebuilt of a file.*is damaged"):
        nodes.rebuild(choice)
    assert not any(name.endswith(".distcp") for name in content(nodes.folder(2, state)))


def test_too_much_lost_is_told(nodes: Nodes) -> None:
    state = saved_state(THREE)
    nodes.start(3)
    nodes.save(state)
    nodes.protect(state)
    choice = nodes.choice()
    nodes.lose(0)
    nodes.replace(0)
    task = nodes.choice().plan
    assert task is not None
    worse = replace(task.tasks[0], lost=(0, 1), bare=(0, 1))
    future = nodes.agents[0].rebuild(state.manifest, worse, {})
    with pytest.raises(Unrecoverable):
        future.result(WAIT_S)
    assert _plan(choice).complete


# --- failures while encoding ----------------------------------------------------------------------


def test_a_peer_that_dies_while_encoding_leaves_the_generation_local(nodes: Nodes) -> None:
    state = saved_state([[4 * MIB], [4 * MIB]], scheme="partner")
    nodes.start(2, bytes_per_s=2 * MIB)
    nodes.save(state)
    future = nodes.agents[0].protect(state.manifest.name)
    wait_until(lambda: any(nodes.folder(0, state).glob("*.tmp")))
    nodes.lose(1)
    problem = future.result(WAIT_S).problem
    assert problem.startswith("step-00000120-epoch-1 is not protected: the agent at 127.0.0.1:")
    assert "does not answer" in problem
    assert set(content(nodes.folder(0, state))) == {"__0_0.distcp", METADATA, MANIFEST}
    assert nodes.agents[0].verify(state.manifest.name).result(WAIT_S) == []


def test_a_peer_that_never_gets_there_is_not_waited_for_endlessly(nodes: Nodes) -> None:
    state = saved_state([[10], [10]])
    nodes.start(2, patience_s=0.3)
    state.put(nodes.store(0).root, 0)
    problem = nodes.agents[0].protect(state.manifest.name).result(WAIT_S).problem
    assert "there is no step-00000120-epoch-1 here" in problem


def test_a_full_disk_costs_the_redundancy_only(nodes: Nodes) -> None:
    # A limit on the length of files stands in for a disk that is full; tests of real nodes fill one.
    state = saved_state([[MIB], [8 * MIB]], scheme="partner")
    nodes.start(2)
    nodes.save(state)
    subprocess.run(["prlimit", "--pid", str(nodes.agents[0].pid), f"--fsize={2 * MIB}"], check=True)
    result = nodes.agents[0].protect(state.manifest.name).result(WAIT_S)
    assert result.redundancy == ()
    assert "is not protected: File too large; free some space, or choose a scheme" in result.problem
    assert not any("redundancy" in name for name in content(nodes.folder(0, state)))
    assert nodes.agents[0].figures().result(WAIT_S).cpu_s > 0  # it lives


def test_an_agent_that_crashes_while_encoding_can_be_replaced(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = saved_state([[3 * MIB], [3 * MIB]])
    monkeypatch.setenv("FIVEFOLD_CRASH_AT", "encoding:2")
    nodes.start(1)
    monkeypatch.delenv("FIVEFOLD_CRASH_AT")
    nodes.start(1)
    nodes.save(state)
    with pytest.raises(AgentGone, match="has ended, with code -9"):
        nodes.agents[0].protect(state.manifest.name).result(WAIT_S)
    with pytest.raises(AgentGone):
        nodes.agents[0].figures().result(WAIT_S)
    names = set(content(nodes.folder(0, state)))
    assert "redundancy-0.bin" not in names and any(name.endswith(".tmp") for name in names)
    nodes.replace(0)
    nodes.protect(state)
    assert not any(name.endswith(".tmp") for name in content(nodes.folder(0, state)))


def test_a_crash_while_rebuilding_is_made_good_by_the_next_attempt(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = saved_state(THREE)
    nodes.start(3)
    nodes.save(state)
    nodes.protect(state)
    nodes.lose(0)
    monkeypatch.setenv("FIVEFOLD_CRASH_AT", "rebuilding:3")
    nodes.replace(0)
    monkeypatch.delenv("FIVEFOLD_CRASH_AT")
    with pytest.raises(AgentGone):
        nodes.rebuild(nodes.choice())
    nodes.replace(0)
    nodes.rebuild(nodes.choice())
    assert _plan(nodes.choice()).complete
    for item in state.manifest.members[0].items:
        assert (nodes.folder(0, state) / item.name).read_bytes() == state.payload[item.name]


# --- the persistent level -------------------------------------------------------------------------


def test_all_nodes_flush_and_one_finishes(nodes: Nodes, tmp_path: Path) -> None:
    state = saved_state([[300], [200]])
    nodes.start(2)
    nodes.save(state)
    where = tmp_path / "shared" / "runs"
    name = state.manifest.name
    first = nodes.agents[0].flush(name, where, [0], metadata=True).result(WAIT_S)
    assert first.names == ("__0_0.distcp", METADATA)
    with pytest.raises(
        CheckpointError, match=r"cannot be committed: __1_0\.distcp: it is not there"
    ):
        nodes.agents[0].finish_flush(name, where).result(WAIT_S)
    nodes.agents[1].flush(name, where, [1], metadata=False).result(WAIT_S)
    nodes.agents[0].finish_flush(name, where).result(WAIT_S)
    store = PersistentStore(where)
    [generation] = store.generations()
    assert generation.manifest is not None and generation.manifest.state == "flushed"
    assert store.verify(generation) == []
    empty = [Inventory(0), stocktaking(store, PERSISTENT, deep=True)]
    assert set(_plan(choose(empty)).sources.values()) == {PERSISTENT}
    figures = nodes.agents[0].figures().result(WAIT_S)
    assert figures.done["flush"]["bytes"] == 300 + 123


# --- the process itself ---------------------------------------------------------------------------


def test_it_has_no_torch() -> None:
    code = (
        "import sys, fivefold.checkpoint.agent, fivefold.checkpoint.agent_client;"
        "assert not {'torch', 'fsspec'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_signals_that_end_a_run_leave_it_alone(nodes: Nodes) -> None:
    [agent] = nodes.start(1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        os.kill(agent.pid, number)
    assert agent.figures().result(WAIT_S).wall_s > 0


def test_it_is_less_urgent_than_training(nodes: Nodes) -> None:
    cores = sorted(os.sched_getaffinity(0))[:1]
    [agent] = nodes.start(1, nice=7, cores=cores)
    assert os.getpriority(os.PRIO_PROCESS, agent.pid) == os.getpriority(os.PRIO_PROCESS, 0) + 7
    assert os.sched_getaffinity(agent.pid) == set(cores)


def test_nonsense_is_answered(nodes: Nodes) -> None:
    [agent] = nodes.start(1)
    with pytest.raises(CheckpointError, match="no such command: 'dance'; valid: hello, peers"):
        agent._ask("dance", {}, lambda did: did).result(WAIT_S)
    with pytest.raises(CheckpointError, match="no name of a generation"):
        agent.drop("../..").result(WAIT_S)
    with pytest.raises(CheckpointError, match="there is no step-00000001-epoch-1 here"):
        agent.flush("step-00000001-epoch-1", "/nowhere", [0], metadata=False).result(WAIT_S)


def test_an_address_of_another_host_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot serve other nodes at 192\.0\.2\.1: Cannot"):
        Agent(tmp_path, "r", bytes(32), host="192.0.2.1")


def test_drop_removes_a_generation(nodes: Nodes) -> None:
    state = saved_state([[10]], scheme="single")
    [agent] = nodes.start(1)
    nodes.save(state)
    agent.drop(state.manifest.name).result(WAIT_S)
    assert not nodes.folder(0, state).exists()


def test_closing_ends_it_in_the_middle_of_work(nodes: Nodes, tmp_path: Path) -> None:
    state = saved_state([[4 * MIB]], scheme="single")
    [agent] = nodes.start(1)
    nodes.save(state)
    slow = agent.flush(state.manifest.name, tmp_path / "p", [0], metadata=False, bytes_per_s=MIB)
    wait_until(lambda: any((tmp_path / "p").glob("*/*.tmp")))
    begun = time.monotonic()
    agent.close()
    assert time.monotonic() - begun < 5 and gone(agent.pid)
    with pytest.raises(CheckpointError):
        slow.result(WAIT_S)
    assert list((tmp_path / "p" / state.manifest.name).iterdir()) == []


PARENT = """
import multiprocessing, sys, time
from pathlib import Path
from fivefold.checkpoint.agent_client import Agent
agent = Agent(Path(sys.argv[1]), "r", bytes(32))
if sys.argv[2] == "forks":  # as a loader's worker does: it has our end of the agent's input open
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
print(agent.pid, child.pid if sys.argv[2] == "forks" else "", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["plain", "forks"])
def test_it_ends_with_its_parent(tmp_path: Path, how: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", PARENT, str(tmp_path), how],
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
        wait_until(lambda: gone(pids[0]))
        for pid in pids[1:]:
            os.kill(pid, signal.SIGKILL)


# --- on nodes of their own ------------------------------------------------------------------------


@contextmanager
def agents_on_nodes(nodes: Apart, **plan: object) -> Iterator[None]:
    """Every node saves and protects; what comes of it lies in the shared folder."""
    script = str(Path(__file__).parents[2] / "agent_on_node.py")
    running = [
        nodes.start(
            node,
            [sys.executable, script, str(node), nodes.address(node), str(nodes.local(node)),
             str(nodes.shared), json.dumps(plan)],
        )
        for node in range(len(nodes))
    ]  # fmt: skip
    try:
        yield
    finally:
        (nodes.shared / "end").touch()
        for process in running:
            process.wait(20)


def told(nodes: Apart, name: str) -> str:
    wait_until((nodes.shared / name).exists, 60)
    return (nodes.shared / name).read_text()


@pytest.mark.skipif(refusal() != "", reason=f"no nodes here: {refusal()}")
def test_a_full_disk_of_a_node_costs_its_redundancy_only() -> None:
    with Apart(2, disk_bytes=9 * MIB) as nodes:
        plan = {"lengths": [[2 * MIB], [8 * MIB]], "scheme": "partner", "options": {}}
        with agents_on_nodes(nodes, **plan):
            assert "is not protected: No space left on device; free some space" in told(
                nodes, "result-0"
            )
            assert told(nodes, "wrong-0") == "[]"
            assert [p.name for p in nodes.disk(0).glob("r/*/*.bin*")] == []


@pytest.mark.skipif(refusal() != "", reason=f"no nodes here: {refusal()}")
def test_a_node_that_falls_silent_while_encoding_is_given_up() -> None:
    with Apart(2) as nodes:
        options = {"bytes_per_s": 4 * MIB, "timeout_s": 1.0, "patience_s": 1.0}
        plan = {"lengths": [[8 * MIB], [8 * MIB]], "scheme": "partner", "options": options}
        with agents_on_nodes(nodes, **plan):
            wait_until(lambda: any(nodes.disk(0).glob("r/*/redundancy-0.bin.*")), 60)
            nodes.kill(1, silently=True)
            problem = told(nodes, "result-0")
            assert "does not answer: timed out" in problem
            assert told(nodes, "wrong-0") == "[]"
            assert [p.name for p in nodes.disk(0).glob("r/*/*.bin*")] == []
