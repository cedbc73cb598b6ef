"""Disks that are full or fail cost a save, or its protection, and never the run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fault_checks import Told, apart, ended, run, same
from nodes import Nodes

pytestmark = apart  # a disk of its own is what these tests are about

MANY = "--size=4000"
"""a net of 2.4 MB and twice as much of its optimiser: more than all manifests"""


def leave(disk: Path, count: int) -> None:
    """Fill a disk until so many bytes are left."""
    free = shutil.disk_usage(disk).free
    (disk / "filler").write_bytes(bytes(free - count))


def payload(disk: Path) -> tuple[int, int]:
    """Bytes of data and of redundancy in the newest save of a node."""
    newest = max(disk.glob("*/step-*"))
    sizes = {path.name: path.stat().st_size for path in newest.iterdir()}
    kept = sum(size for name, size in sizes.items() if name.startswith("redundancy"))
    return sum(sizes.values()) - kept, kept


@pytest.mark.long
def test_a_full_disk_costs_saves_and_not_the_run(nodes: Nodes, oracle: list[Told]) -> None:
    leave(nodes.disk(1), 40_000)
    job = run(nodes)
    assert job.wait(90.0) == [1] * len(job.ranks), (
        "all train to the end, and say then that nothing is kept"
    )
    found = [Told(rank.text) for rank in job.ranks]
    same(found, oracle)
    for one in found:
        assert "CheckpointError: the run ends without any save" in one.text
        assert "No space left on device" in one.text
    (nodes.disk(1) / "filler").unlink()
    after = ended(run(nodes, steps=15))
    assert {one.start for one in after} <= {0}, "nothing was saved, and nothing pretends to be"


@pytest.mark.long
def test_a_disk_with_room_for_data_alone_lowers_the_protection(nodes: Nodes) -> None:
    ended(run(nodes, MANY, "--lockstep", steps=3))
    data, kept = payload(nodes.disk(1))
    leave(nodes.disk(1), data + kept // 2)
    found = ended(run(nodes, MANY, "--lockstep", steps=6))
    assert "step 6 is saved, but not protected" in found[0].text
    assert "No space left on device" in found[0].text
    (nodes.disk(1) / "filler").unlink()
    after = ended(run(nodes, MANY, steps=7))
    assert {one.start for one in after} == {6}
    assert {one.loaded for one in after} == {found[0].steps[6].split()[-1]}


@pytest.mark.long
@pytest.mark.skipif(shutil.which("strace") is None, reason="no strace here")
def test_a_disk_that_fails_to_synchronise_costs_what_it_fails_only(
    nodes: Nodes, oracle: list[Told], tmp_path: Path
) -> None:
    # The ninth call of each thread that makes so many: of saves, and of the agent's flushes.
    fail = ["strace", "-f", "-qq", "-o", str(tmp_path / "calls")]
    fail += ["--seccomp-bpf", "-e", "trace=fsync", "-e", "inject=fsync:error=EIO:when=9"]
    found = ended(run(nodes, "--lockstep", before={1: fail}))
    assert "EIO" in (tmp_path / "calls").read_text()
    assert "Input/output error" in found[0].text
    same(found, oracle)
    after = ended(run(nodes, steps=13))
    assert {one.start for one in after} == {12}
