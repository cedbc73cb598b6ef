"""Ranks that die for good leave a copy of their newest save in the persistent directory."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from agents import AgentNodes
from commands import CLEAN
from fivefold.checkpoint.encoding import Peers
from fivefold.checkpoint.files import FileOps
from fivefold.checkpoint.last_flush import LastFlush
from fivefold.checkpoint.run import RunHistory
from fivefold.checkpoint.store import PersistentStore
from generations import saved_state

SCRIPT = """
import os, signal, sys, time
import torch
import fivefold as ff
restart = int(os.environ.get("FIVEFOLD_RESTART", 0))
with ff.start() as mesh:
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(160, 512), torch.randn(160, 512))
    loader = ff.loader(data, mesh, batch_size=16, seed=0)
    model = ff.parallelize(torch.nn.Linear(512, 512), mesh, loss=torch.nn.MSELoss())
    optim = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    things = {"model": model, "optim": optim, "data": loader}
    where = {"local": "local", "every": 1, "flush_every": 0}
    NODE
    with ff.Checkpointer("run", mesh, **where, **things) as ckpt:
        for step, (x, y) in ckpt.resume(loader, 1):
            model.step(x, y)
            optim.step()
            optim.zero_grad()
            ckpt.maybe_save(step)
            if step == 5 + 2 * restart and restart < int(sys.argv[1]):
                ckpt.wait()
                ENDS
    for value in [*model.full_state_dict().values()][:1]:
        print("final", value.double().sum().item().hex(), flush=True)
"""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
AGENT_KILLED = "os.kill(ckpt._node.agent.pid, signal.SIGKILL) if mesh.rank else time.sleep(2)"
"""of rank 1's node, before rank 0 ends"""


def run(
    folder: Path, *words: str, ends: str = KILLED, node: str = "", times: int = 9, **variables: str
) -> subprocess.CompletedProcess[str]:
    script = SCRIPT.replace("ENDS", ends).replace("NODE", node)
    (folder / "script.py").write_text(script)
    return subprocess.run(
        [sys.executable, "-m", "fivefold", "run", "-n", "2", *words, "script.py", str(times)],
        cwd=folder, env=CLEAN | {"OMP_NUM_THREADS": "1", "FIVEFOLD_GRACE_S": "20", **variables},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def flushed(folder: Path) -> list[str]:
    store = PersistentStore(str(folder / "run"))
    whole = [g for g in store.generations() if g.manifest is not None]
    assert not [problem for g in whole for problem in store.verify(g, deep=True)]
    return [g.name for g in whole]


def agents(folder: Path) -> Sequence[psutil.Process]:
    """Those whose run is in this folder."""
    return [
        p
        for p in psutil.process_iter(["cmdline", "cwd"])
        if p.info["cwd"] == str(folder) and "fivefold.checkpoint.agent" in (p.info["cmdline"] or ())
    ]


def test_saves_of_a_start_that_another_has_followed_are_left_alone(tmp_path: Path) -> None:
    state = saved_state([[4096]], scheme="single")
    nodes, far = AgentNodes(tmp_path), PersistentStore(str(tmp_path / "far"))
    with closing(nodes):
        [agent] = nodes.start(1)
        nodes.save(state)
        peers = Peers({0: agent.address}, nodes.key, agent.address)
        for epoch, copied in ((state.manifest.epoch + 1, False), (state.manifest.epoch, True)):
            far.write_run(RunHistory("r", ()).started(None, epoch))
            last = LastFlush(nodes.store(0), far, 0, state.manifest.epoch, peers, FileOps())
            assert ("was copied" in last.run(time.monotonic() + 10)) == copied
            assert bool(far.generations()) == copied


@pytest.mark.long(every=2)
@pytest.mark.parametrize("ends", [KILLED, "raise ValueError('not so')"], ids=["killed", "error"])
def test_ranks_that_die_for_good_leave_a_copy(ends: str, tmp_path: Path) -> None:
    done = run(tmp_path, ends=ends)
    assert done.returncode == (137 if ends == KILLED else 1), done.stderr
    assert flushed(tmp_path) == ["step-00000005-epoch-1"]
    [told] = re.findall(
        r"^note: step-00000005-epoch-1 was copied to .*run$", done.stderr, re.MULTILINE
    )
    assert told and not agents(tmp_path)


APART = 'where |= {"node": f"n{mesh.rank}", "local": f"local-{mesh.rank}"}'
"""as if each rank had a node of its own"""


@pytest.mark.long
def test_all_nodes_copy_their_parts(tmp_path: Path) -> None:
    done = run(tmp_path, node=APART)
    assert flushed(tmp_path) == ["step-00000005-epoch-1"], done.stderr
    assert len(re.findall("^note: .* was copied to ", done.stderr, re.MULTILINE)) == 1
    assert not agents(tmp_path)


def test_a_lost_node_is_rebuilt_for_the_copy(tmp_path: Path) -> None:
    ends = f"{AGENT_KILLED}; {KILLED}"
    done = run(tmp_path, node=APART, ends=ends)
    assert flushed(tmp_path) == ["step-00000005-epoch-1"], done.stderr


@pytest.mark.long
def test_a_lost_node_without_redundancy_is_told(tmp_path: Path) -> None:
    ends = f"{AGENT_KILLED}; {KILLED}"
    single = APART + '; where["scheme"] = "single"'
    done = run(tmp_path, node=single, ends=ends, FIVEFOLD_GRACE_S="3")
    assert not flushed(tmp_path)
    assert "is on the nodes alone" in done.stderr and "n1 is lost, with its part" in done.stderr


@pytest.mark.long
def test_a_copy_that_fails_is_told_in_time(tmp_path: Path) -> None:
    ends = f"open('run/step-00000005-epoch-1', 'w').close(); {KILLED}"
    begun = time.monotonic()
    done = run(tmp_path, ends=ends, FIVEFOLD_GRACE_S="2")
    assert time.monotonic() - begun < 60
    [told] = re.findall(r"^note: .*", done.stderr, re.MULTILINE)
    assert "is on the nodes alone" in told and "fivefold checkpoint flush" in told
    assert not agents(tmp_path)


@pytest.mark.long
def test_where_ranks_start_again_no_copy_is_made_for_them(tmp_path: Path) -> None:
    (undisturbed := tmp_path / "a").mkdir()
    (disturbed := tmp_path / "b").mkdir()
    whole = run(undisturbed, times=0)
    again = run(disturbed, "--restarts", "1", times=1)
    final = re.findall("final .*", whole.stdout)
    assert final and re.findall("final .*", again.stdout) == final, again.stderr
    assert flushed(disturbed) == ["step-00000010-epoch-2"]
    assert "was copied to" not in again.stderr and not agents(disturbed)


@pytest.mark.long
def test_given_up_after_restarts_the_newest_save_is_copied(tmp_path: Path) -> None:
    done = run(tmp_path, "--restarts", "1", node=APART)
    assert done.returncode == 76, done.stderr
    assert flushed(tmp_path) == ["step-00000007-epoch-2"]


@pytest.mark.long
@pytest.mark.parametrize("words", [(), ("-H", "localhost:2")], ids=["local", "agent"])
def test_a_launcher_that_is_killed_leaves_no_agent(words: tuple[str, ...], tmp_path: Path) -> None:
    ends = (
        "time.sleep(1); mesh.rank or open('there', 'w').close(); "
        "mesh.rank or os.kill(int(open('launcher').read()), signal.SIGKILL); time.sleep(60)"
    )
    run_it = (
        "import os, sys; from fivefold.cli import main; "
        "open('launcher', 'w').write(str(os.getpid())); sys.exit(main())"
    )
    script = SCRIPT.replace("ENDS", ends).replace("NODE", "")
    (tmp_path / "script.py").write_text(script)
    subprocess.run(
        [sys.executable, "-c", run_it, "run", "-n", "2", *words, "script.py", "9"],
        cwd=tmp_path, env=CLEAN | {"OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=100, check=False,
    )  # fmt: skip
    assert (tmp_path / "there").exists()
    end = time.monotonic() + 30
    while agents(tmp_path) and time.monotonic() < end:
        time.sleep(0.1)
    assert not agents(tmp_path)


@pytest.mark.long
def test_agents_of_nodes_pass_it_on(tmp_path: Path) -> None:
    done = run(tmp_path, "-H", "localhost:2")
    assert done.returncode == 137, done.stderr
    assert flushed(tmp_path) == ["step-00000005-epoch-1"]
    assert re.search("^note: .* was copied to ", done.stderr, re.MULTILINE) and not agents(tmp_path)
