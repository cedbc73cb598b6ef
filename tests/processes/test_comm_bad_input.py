"""Everything that cannot work says in one line what, why and what to do; nothing of it is simulated."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import comm_places
from comm_script import run
from fivefold.arena import node_name
from fivefold.arena.native import problem
from nodes import Nodes, refusal
from pool import Pool

pytestmark = pytest.mark.skipif(bool(problem()), reason="installed without the C core")
_OLD = Path("/sys/fs/cgroup/memory")
"""control groups of version 1, of memory alone"""


@pytest.mark.long
@pytest.mark.skipif(platform.machine() not in comm_places.CALLS, reason="other system calls")
def test_a_container_without_memory_files_gets_gloo_and_one_line() -> None:
    done = run("import fivefold.comm, comm_places; comm_places.forbid('memfd_create')")
    assert done.stdout.startswith("ProcessGroup fivefold")
    (line,) = done.stderr.splitlines()
    assert (
        "memfd_create failed (Operation not permitted); a container may forbid it: allow it" in line
    )


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_ranks_of_different_users_share_no_memory_and_talk() -> None:
    with Pool(2) as pool:
        told = pool.run("fivefold", comm_places.as_another_user)
    assert told == [([0, 1], 3.0)] * 2


def test_processes_of_different_containers_are_told_apart() -> None:
    code = "from fivefold.arena import node_name; print(node_name())"
    inside = subprocess.run(
        ["unshare", "--user", sys.executable, "-c", code],
        capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip
    if inside.returncode:
        pytest.skip(f"no user namespaces here: {inside.stderr}")
    here, (boot, _, *rest) = node_name(), inside.stdout.strip().split(":")
    there = ":".join([boot, str(os.geteuid()), *rest])  # nobody's number inside is 65534
    assert here != there


@pytest.mark.skipif(bool(refusal()), reason=refusal())
def test_containers_with_networks_of_their_own_are_nodes() -> None:
    ask = [sys.executable, "-c", "from fivefold.arena import node_name; print(node_name())"]
    with Nodes(2) as nodes:
        one, other, again = (text.strip() for text in nodes.job(ask, on=[0, 1, 1]).succeed(60))
    assert one != other == again


def test_tensors_that_are_elsewhere_are_told_and_the_group_works_on() -> None:
    with Pool(2) as pool:
        for texts in pool.run("fivefold", comm_places.on_odd_devices):
            first, second, mixed, total = texts
            assert "this one is on 'meta': move it with .cpu() first" in first == second
            assert "its tensors are on cpu and meta; move all to one device first" in mixed
            assert total == "[2.0, 2.0]"


def test_a_torch_that_nobody_tested_is_told_once() -> None:
    before = "import fivefold.torch_private as own; own.TRIED = ('2.1', '2.2')"
    (line,) = run(before).stderr.splitlines()
    assert "was tried with torch 2.1 to 2.2, this is" in line and "`fivefold verify` shows" in line


@pytest.fixture
def small() -> Iterator[Path]:
    """A control group of 32 MiB."""
    base, limit = (_OLD, "memory.limit_in_bytes") if _OLD.exists() else (_OLD.parent, "memory.max")
    folder = base / f"fivefold-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(32 << 20))
    except OSError as trouble:
        pytest.skip(f"no control groups to make here: {trouble}")
    try:
        yield folder
    finally:
        folder.rmdir()


def test_more_than_the_control_group_grants_is_refused_before_the_kernel_kills(small: Path) -> None:
    with Pool(1) as pool:
        (told,) = pool.run("fivefold", comm_places.with_little_memory, str(small))
    assert told.startswith("1000: a tensor in the arena needs 256 MiB of shared memory, but ")
    assert "limit of the control group: 32 MiB" in told and "ask for more memory" in told
