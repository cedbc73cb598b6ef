"""Agents as real processes, one per node; a node is a directory here, but for the last tests."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from agents import MIB, WAIT_S, AgentNodes, content, gone, plan_of, wait_until
from fivefold.checkpoint import agent_client
from fivefold.checkpoint.agent_client import Agent, AgentGone
from fivefold.checkpoint.inventory import PERSISTENT, Inventory, stocktaking
from fivefold.checkpoint.manifest import MANIFEST, METADATA
from fivefold.checkpoint.recovery_plan import choose
from fivefold.checkpoint.store import PersistentStore
from fivefold.errors import CheckpointError
from generations import saved_state
from nodes import Nodes, refusal


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[AgentNodes]:
    nodes = AgentNodes(tmp_path)
    yield nodes
    nodes.close()


# --- failures while encoding ----------------------------------------------------------------------


def test_a_peer_that_dies_while_encoding_leaves_the_generation_local(nodes: AgentNodes) -> None:
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


def test_a_peer_that_never_gets_there_is_not_waited_for_endlessly(nodes: AgentNodes) -> None:
    state = saved_state([[10], [10]])
    nodes.start(2, patience_s=0.3)
    state.put(nodes.store(0).root, 0)
    problem = nodes.agents[0].protect(state.manifest.name).result(WAIT_S).problem
    assert "there is no step-00000120-epoch-1 here" in problem


def test_a_full_disk_costs_the_redundancy_only(nodes: AgentNodes) -> None:
    # A limit on the length of files stands in for a disk that is full; tests of real nodes fill one.
    state = saved_state([[MIB], [8 * MIB]], scheme="partner")
    nodes.start(2)
    nodes.save(state)
    subprocess.run(["prlimit", "--pid", str(nodes.agents[0].pid), f"--fsize={2 * MIB}"], check=True)
    result = nodes.agents[0].protect(state.manifest.name).result(WAIT_S)
    assert result.redundancy == ()
    assert re.search(
        r"is not protected: writing /.*redundancy-\d\.bin: File too large; free space there",
        result.problem,
    )
    assert not any("redundancy" in name for name in content(nodes.folder(0, state)))
    assert nodes.agents[0].figures().result(WAIT_S).cpu_s > 0  # it lives


def test_an_agent_that_crashes_while_encoding_can_be_replaced(
    nodes: AgentNodes, monkeypatch: pytest.MonkeyPatch
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


# --- the persistent level -------------------------------------------------------------------------


def test_all_nodes_flush_and_one_finishes(nodes: AgentNodes, tmp_path: Path) -> None:
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
    assert set(plan_of(choose(empty)).sources.values()) == {PERSISTENT}
    figures = nodes.agents[0].figures().result(WAIT_S)
    assert figures.done["flush"]["bytes"] == 300 + 123


def test_an_agent_that_crashes_while_flushing_is_continued_by_the_next(
    nodes: AgentNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = saved_state([[3 * MIB, 2 * MIB, MIB]], scheme="single")
    name, where = state.manifest.name, tmp_path / "shared"
    monkeypatch.setenv("FIVEFOLD_CRASH_AT", "flushing:6")  # in the middle of the second file
    nodes.start(1)
    monkeypatch.delenv("FIVEFOLD_CRASH_AT")
    nodes.save(state)
    with pytest.raises(AgentGone):
        nodes.agents[0].flush(name, where, [0], metadata=True).result(WAIT_S)
    [generation] = PersistentStore(where).generations()
    assert generation.manifest is None
    nodes.replace(0)
    again = nodes.agents[0].flush(name, where, [0], metadata=True).result(WAIT_S)
    assert again.names == ("__1_0.distcp", "__2_0.distcp", METADATA)
    nodes.agents[0].finish_flush(name, where).result(WAIT_S)
    store = PersistentStore(where)
    assert store.verify(store.generations()[0]) == []
    assert not list((where / name).glob("*.tmp"))


# --- the process itself ---------------------------------------------------------------------------


def test_it_has_no_torch() -> None:
    code = (
        "import sys, fivefold.checkpoint.agent, fivefold.checkpoint.agent_client;"
        "assert not {'torch', 'fsspec'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_modules_of_the_present_directory_are_not_taken_for_its_own(
    nodes: AgentNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "xxhash.py").write_text("raise SystemExit('the wrong xxhash')")
    monkeypatch.chdir(tmp_path)
    [agent] = nodes.start(1)
    assert agent.figures().result(WAIT_S).sent_bytes == 0


def test_signals_that_end_a_run_leave_it_alone(nodes: AgentNodes) -> None:
    [agent] = nodes.start(1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        os.kill(agent.pid, number)
    assert agent.figures().result(WAIT_S).wall_s > 0


def test_it_is_less_urgent_than_training(nodes: AgentNodes) -> None:
    [agent] = nodes.start(1)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, agent.pid) == min(own + 10, 19)


def test_nonsense_is_answered(nodes: AgentNodes) -> None:
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


def test_drop_removes_a_generation(nodes: AgentNodes) -> None:
    state = saved_state([[10]], scheme="single")
    [agent] = nodes.start(1)
    nodes.save(state)
    agent.drop(state.manifest.name).result(WAIT_S)
    assert not nodes.folder(0, state).exists()


def test_closing_ends_it_in_the_middle_of_work(nodes: AgentNodes, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("length", [10, 10**6])
def test_an_agent_that_stands_still_is_ended(
    nodes: AgentNodes, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.setattr(agent_client, "_END_S", 0.3)
    [agent] = nodes.start(1)
    os.kill(agent.pid, signal.SIGSTOP)
    # The longer request does not fit into the pipe: who asks has to wait.
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(agent._ask, "look", {"manifest": "x" * length}, lambda did: did)
        time.sleep(0.1)
        agent.close()
        with pytest.raises(AgentGone):
            asked.result(WAIT_S).result(WAIT_S)
    assert gone(agent.pid)


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
def agents_on_nodes(nodes: Nodes, **plan: object) -> Iterator[None]:
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


def told(nodes: Nodes, name: str) -> str:
    wait_until((nodes.shared / name).exists, 60)
    return (nodes.shared / name).read_text()


@pytest.mark.skipif(refusal() != "", reason=f"no nodes here: {refusal()}")
def test_a_full_disk_of_a_node_costs_its_redundancy_only() -> None:
    with Nodes(2, disk_bytes=9 * MIB) as nodes:
        plan = {"lengths": [[2 * MIB], [8 * MIB]], "scheme": "partner", "options": {}}
        with agents_on_nodes(nodes, **plan):
            assert "redundancy-0.bin: No space left on device; free space there" in told(
                nodes, "result-0"
            )
            assert told(nodes, "wrong-0") == "[]"
            assert [p.name for p in nodes.disk(0).glob("r/*/*.bin*")] == []


@pytest.mark.skipif(refusal() != "", reason=f"no nodes here: {refusal()}")
def test_a_node_that_falls_silent_while_encoding_is_given_up() -> None:
    with Nodes(2) as nodes:
        options = {"bytes_per_s": 4 * MIB, "timeout_s": 1.0, "patience_s": 1.0}
        plan = {"lengths": [[8 * MIB], [8 * MIB]], "scheme": "partner", "options": options}
        with agents_on_nodes(nodes, **plan):
            wait_until(lambda: any(nodes.disk(0).glob("r/*/redundancy-0.bin.*")), 60)
            nodes.kill(1, silently=True)
            problem = told(nodes, "result-0")
            assert "does not answer: timed out" in problem
            assert told(nodes, "wrong-0") == "[]"
            assert [p.name for p in nodes.disk(0).glob("r/*/*.bin*")] == []
