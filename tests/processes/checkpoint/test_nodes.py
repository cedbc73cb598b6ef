"""The nodes that fault tests use are what they claim: apart, joined, and gone when they are killed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from nodes import Job, Nodes, refusal
from template import Template

KINDS = [
    pytest.param(
        True,
        id="namespaces",
        marks=pytest.mark.skipif(bool(refusal()), reason=f"no nodes of their own: {refusal()}"),
    ),
    pytest.param(False, id="directories-only"),
]

# Every rank sums over all, again and again, until a peer is missed.
SUMS = """
import datetime, os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=8))  # it may forget who waits
total = torch.ones(1)
dist.all_reduce(total)
print("together", int(total), flush=True)
rounds = int(sys.argv[1])
try:
    while rounds:
        dist.all_reduce(total)
        rounds -= 1
        time.sleep(0.005)
except RuntimeError as problem:
    print("missed", time.time(), flush=True)
    os._exit(3)  # gloo's threads wait for the peer
dist.destroy_process_group()
"""


@pytest.fixture(params=KINDS)
def nodes(request: pytest.FixtureRequest, template: Template) -> Iterator[Nodes]:
    with Nodes(4, apart=request.param, template=template) as found:
        yield found


@pytest.fixture
def sums(tmp_path: Path) -> list[str]:
    """The command without its argument."""
    script = tmp_path / "sums.py"
    script.write_text(SUMS)
    return [sys.executable, str(script)]


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def until(met: Callable[[], bool], limit_s: float = 90.0) -> None:
    end = time.monotonic() + limit_s
    while not met():
        assert time.monotonic() < end, f"not within {limit_s:g} s"
        time.sleep(0.01)


def all_say(job: Job, word: str) -> None:
    try:
        until(lambda: all(word in rank.text for rank in job.ranks))
    except AssertionError:
        raise AssertionError(job.told()) from None


def test_a_node_that_is_killed_is_gone_and_its_peers_notice(nodes: Nodes, sums: list[str]) -> None:
    job = nodes.job([*sums, "-1"])
    all_say(job, "together 4")
    kept = nodes.disk(2)
    (kept / "data").write_text("of node 2")
    running = nodes.processes(2)
    assert running
    begun = time.time()
    nodes.kill(2)
    assert time.time() - begun < 2.0
    assert not nodes.alive(2)
    assert not any(psutil.pid_exists(pid) for pid in running)
    assert not kept.exists()
    codes = job.wait(20.0)
    assert codes[2] == -signal.SIGKILL
    assert [codes[i] for i in (0, 1, 3)] == [3, 3, 3], job.told()
    noticed = [float(job.ranks[i].text.split("missed")[1].split()[0]) for i in (0, 1, 3)]
    assert min(noticed) - begun < 5.0  # the kernel closes what a killed node held


def test_another_host_takes_the_place_empty(nodes: Nodes) -> None:
    (nodes.disk(1) / "data").write_text("old")
    before = nodes.host(1)
    nodes.replace(1)
    assert nodes.host(1) != before
    assert not list(nodes.disk(1).iterdir())


def test_a_job_may_leave_nodes_out_and_share_one(nodes: Nodes, sums: list[str]) -> None:
    nodes.kill(0)
    nodes.replace(1)
    job = nodes.job([*sums, "1"], on=[3, 1], ranks_per_node=2)
    assert all("together 4" in text for text in job.succeed())


def test_nobody_else_gets_the_port_where_a_job_meets() -> None:
    with Nodes(2, apart=False) as nodes, socket.socket() as other:
        ports = nodes.job(python("import os; print(os.environ['MASTER_PORT'])")).succeed()
        with pytest.raises(OSError, match="in use"):
            other.bind(("", int(ports[0])))


def test_a_job_that_shall_succeed_is_ended_when_a_rank_fails() -> None:
    fails = (
        "import os, sys, time; sys.exit('why') if os.environ['RANK'] == '0' else time.sleep(600)"
    )
    with Nodes(2, apart=False) as nodes:
        job = nodes.job(python(fails))
        with pytest.raises(AssertionError, match="why"):
            job.succeed()
        assert [rank.code for rank in job.ranks] == [1, -signal.SIGKILL]


def test_what_a_node_started_ends_with_it(nodes: Nodes) -> None:
    child = "import subprocess, sys; subprocess.run(['sleep', '600'])"
    nodes.start(0, python(child))
    until(lambda: len(nodes.processes(0)) >= 2)
    running = nodes.processes(0)
    nodes.kill(0)
    until(lambda: not any(psutil.pid_exists(pid) for pid in running), 2.0)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_processes_that_are_started_one_by_one_are_the_same(kind: bool, sums: list[str]) -> None:
    """Without a template, which the other tests have."""
    with Nodes(3, apart=kind) as nodes:
        job = nodes.job([*sums, "-1"])
        all_say(job, "together 3")
        running = nodes.processes(1)
        assert job.ranks[1].pid in running
        nodes.kill(1)
        assert job.wait(20.0) == [3, -signal.SIGKILL, 3], job.told()
        assert not any(psutil.pid_exists(pid) for pid in running)


@pytest.fixture
def apart(template: Template) -> Iterator[Nodes]:
    if refusal():
        pytest.skip(f"no nodes of their own: {refusal()}")
    with Nodes(2, 8 << 20, template=template) as found:
        yield found


def test_nodes_differ_in_all_that_tells_hosts_apart(apart: Nodes) -> None:
    told = (
        "import os, socket, psutil; print(socket.gethostname(), socket.gethostbyname(socket.gethostname()),"
        " os.getpid() < 50, len(psutil.pids()) < 50, os.listdir(os.environ['LOCAL']))"
    )
    (apart.disk(0) / "mine").touch()
    texts = apart.job(python(told)).succeed()
    assert [text.split() for text in texts] == [
        ["node0", "10.5.0.1", "True", "True", "['mine']"],
        ["node1", "10.5.0.2", "True", "True", "[]"],
    ]


def test_a_disk_has_its_size(apart: Nodes) -> None:
    fill = "import os; open(os.environ['LOCAL'] + '/big', 'wb').write(bytes(9 << 20))"
    job = apart.job(python(fill), on=[0])
    assert job.wait() == [1]
    assert "No space left on device" in job.told()
    assert (apart.disk(0) / "big").stat().st_size <= 8 << 20


def test_files_of_the_shared_folder_are_the_same(apart: Nodes) -> None:
    write = "import os; open('of-' + os.environ['RANK'], 'w').write(os.environ['SHARED'])"
    apart.job(python(write)).succeed()
    assert [(apart.shared / f"of-{i}").read_text() for i in (0, 1)] == [str(apart.shared)] * 2


def test_the_shared_folder_may_lie_in_memory() -> None:
    if refusal():
        pytest.skip(f"no nodes of their own: {refusal()}")
    with Nodes(2, shared_bytes=1 << 20) as nodes:
        nodes.job(python("open('of-all', 'w').write('here')"), on=[0]).succeed()
        assert nodes.job(python("print(open('of-all').read())"), on=[1]).succeed() == ["here\n"]
        assert not list(nodes.shared.iterdir())
        fill = nodes.job(python("open('big', 'wb').write(bytes(2 << 20))"), on=[1])
        assert fill.wait() == [1] and "No space left" in fill.told()


def test_a_process_can_end_its_own_node(apart: Nodes) -> None:
    disk = apart.disk(1)
    job = apart.job(
        python("import os, signal, time; os.kill(1, signal.SIGTERM); time.sleep(60)"), on=[1]
    )
    assert job.wait(20.0) == [-signal.SIGKILL]
    until(lambda: not apart.alive(1), 2.0)
    assert not disk.exists()
    apart.replace(1)
    assert apart.alive(1)


def test_a_cable_that_is_pulled_stops_messages_until_it_is_back(
    apart: Nodes, sums: list[str]
) -> None:
    job = apart.job([*sums, "-1"])
    all_say(job, "together")
    apart.cut(1)
    time.sleep(0.3)
    assert [rank.code for rank in job.ranks] == [None, None]
    apart.mend(1)
    apart.kill(1)
    assert job.wait(20.0) == [3, -signal.SIGKILL], job.told()


def test_all_of_it_ends_with_the_process_that_made_it(tmp_path: Path) -> None:
    if refusal():
        pytest.skip(f"no nodes of their own: {refusal()}")
    holder = """
import os, signal, sys
from nodes import Nodes
nodes = Nodes(2)
sleeper = nodes.start(0, ["sleep", "600"])
print(sleeper.pid, nodes._folder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    folder = str(Path(__file__).parents[2])
    done = subprocess.run(
        python(holder), env={**os.environ, "PYTHONPATH": folder}, capture_output=True, check=False
    )
    pid, left = done.stdout.decode().split()
    assert done.returncode == -signal.SIGKILL
    until(lambda: not psutil.pid_exists(int(pid)), 5.0)
    shutil.rmtree(left)
