"""`fivefold bench --tune` on three nodes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fivefold.arena.native import problem
from fivefold.plan import Plan
from login_site import Site
from nodes import refusal

pytestmark = [
    pytest.mark.skipif(bool(problem()), reason="installed without the C core"),
    pytest.mark.skipif(bool(refusal()), reason=refusal() or "nodes can be made"),
    pytest.mark.timeout(300),
]


def bench(site: Site, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fivefold", "bench", *words, "--engine", "ssh"]
    return subprocess.run(
        [*site.entering(folder), *command], env=site.environ, capture_output=True, text=True, timeout=200,
        check=False,
    )  # fmt: skip


@pytest.mark.long
def test_a_plan_gets_what_was_measured_and_keeps_the_rest(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text("[train]\nepochs = 7\n")
    with Site(3, tmp_path) as site:
        words = ("--tune", str(plan), "--rounds", "1", "-n", "3")
        done = bench(site, tmp_path, "allreduce", *words, "-H", "node0:1,node1:1,node2:1")
        assert done.returncode == 0, done.stdout + done.stderr
        few = bench(site, tmp_path, "allreduce", *words[:-1], "2", "-H", "node0:1,node1:1")
        assert few.returncode == 2
        assert few.stderr.startswith("error: 2 nodes: small sums can be made in two ways"), (
            few.stderr
        )
        other = bench(site, tmp_path, "bcast", *words, "-H", "node0:1,node1:1,node2:1")
        assert (other.returncode, other.stderr) == (
            2,
            "error: --tune is for allreduce, not bcast\n",
        )
    found = Plan.load(plan)
    assert found.train.epochs == 7
    assert found.comm.direct_bytes >= 0
    origin = found.origin("comm.direct_bytes")
    assert origin.kind == "tuned" and "3 ranks on 3 nodes" in origin.reason
    assert f"comm.direct_bytes = {found.comm.direct_bytes}" in done.stdout
