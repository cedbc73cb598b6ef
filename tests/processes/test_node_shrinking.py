"""Jobs that go on with fewer nodes, since no spare is left for those that they lost."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from login_site import Site
from nodes import refusal
from site_runs import (
    TIMEOUT_S,
    TRAINS,
    WAITS,
    Run,
    emptied,
    finish,
    ready,
    running,
)
from waiting import awaited

pytestmark = pytest.mark.skipif(bool(refusal()), reason=refusal())


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Site(3, tmp_path) as made:
        yield made


@pytest.fixture
def run(site: Site, tmp_path: Path) -> Iterator[Run]:
    """Start `fivefold run` of a script; its first argument is `tmp_path`."""
    with running(site, tmp_path) as run:
        yield run


_KEEPS = """
    torch.save([*net.parameters()], here / f"weights-{mesh.rank}.pt")
"""
"""the end of a script"""


def weights(folder: Path, rank: int) -> list[torch.Tensor]:
    """What a run that has ended left on a rank."""
    return torch.load(folder / f"weights-{rank}.pt")


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("layout", [(), ("--layout", "data=3")])
def test_without_spares_a_run_goes_on_with_fewer_replicas(
    layout: tuple[str, ...], site: Site, run: Run, tmp_path: Path
) -> None:
    """On nodes with local storage of their own; what the lost one had is rebuilt."""
    options = ("-H", "node0:1,node1:1,node2:1", "--min-nodes", "2", "--restarts", "2", *layout)
    script = TRAINS.replace("print(", "print(mesh.size, ") + _KEEPS
    code, _, err = finish(run(script, *options, arguments=["0"]))
    assert code == 0, err
    undisturbed = weights(tmp_path, 0)
    for path in tmp_path.glob("step-*"):
        path.unlink()
    shutil.rmtree(tmp_path / "run")
    options += ("--log-dir", str(tmp_path / "again"))
    process = run(script, *options, arguments=["0.3"])
    awaited((tmp_path / "step-7").exists, "step 7", TIMEOUT_S)
    site.nodes.kill(1)
    code, out, err = finish(process)
    assert (code, out.count("] 2 weights")) == (0, 2), out + err
    assert "the run goes on with 2 ranks on 2 nodes\n" in err
    for rank in (0, 1):  # of other sums: as many samples, by fewer replicas
        torch.testing.assert_close(weights(tmp_path, rank), undisturbed, rtol=1e-10, atol=0.0)
    emptied(site)


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_layout_that_cannot_shrink_gives_way_to_a_smaller_plan(
    site: Site, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "two.toml").write_text("[layout]\nheight = 2\n")
    options = ("-H", "node0:1,node1:1,node2:1", "--min-nodes", "2", "--restarts", "2")
    options += ("--layout", "height=3", "--smaller-plan", str(tmp_path / "two.toml"))
    script = TRAINS.replace("print(", "print(mesh.layout, ").replace(
        "randn(64, 8)", "randn(64, 1, 24, 8)"
    )
    script = script.replace("randn(64, 1)", "randn(64, 1, 24, 8)")
    script = script.replace("Linear(8, 32)", "Conv2d(1, 4, 3, padding=1)")
    script = script.replace("Linear(32, 1)", "Conv2d(4, 1, 3, padding=1)")
    process = run(script, *options, arguments=["0.3"])
    awaited((tmp_path / "step-7").exists, "step 7", TIMEOUT_S)
    site.nodes.kill(1)
    code, out, err = finish(process)
    assert (code, out.count("] height=2 weights")) == (0, 2), out + err
    assert "goes on after step" in err
    emptied(site)


@pytest.mark.long
def test_a_scheme_that_needs_more_nodes_than_are_left_is_told(
    site: Site, run: Run, tmp_path: Path
) -> None:
    options = ("-H", "node0:1,node1:1", "--min-nodes", "1", "--restarts", "5")
    process = run(
        TRAINS.replace("every=2", "every=2, scheme='partner'"), *options, arguments=["0.3"]
    )
    awaited((tmp_path / "step-5").exists, "step 5", TIMEOUT_S)
    site.nodes.kill(1)
    code, _, err = finish(process)
    assert code == 2 and err.count("\nrestart ") == 1, err
    assert re.search("error: .*scheme partner needs 2 nodes that protect each other, and", err), err
    emptied(site)


def test_fewer_nodes_than_allowed_are_the_end(site: Site, run: Run, tmp_path: Path) -> None:
    options = ("-H", "node0:1,node1:1", "--min-nodes", "2", "--restarts", "2")
    process = run(WAITS, *options)
    ready(tmp_path, 2)
    site.nodes.kill(1)
    code, _, err = finish(process)
    assert (
        code != 0 and "left: 1 rank on 1 node; 1 node would work, fewer than --min-nodes\n" in err
    ), err


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--min-nodes", "0"), "--min-nodes 0: at least one node has to work"),
        (("--min-nodes", "3"), "--min-nodes 3: the job has 2 to begin with"),
        (("--min-nodes", "1"), "--min-nodes is for jobs that start again: add --restarts N"),
    ],
)
def test_mistakes_about_fewer_nodes(options: tuple[str, ...], why: str, run: Run) -> None:
    restarts = () if "add --restarts" in why else ("--restarts", "1")
    code, _, err = finish(run(WAITS, "-H", "node0:1,node1:1", *options, *restarts))
    assert (code, err) == (2, f"error: {why}\n")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            "--min-nodes 1 --set checkpoint.scheme=partner",
            "--min-nodes 1: checkpoint.scheme = 'partner' of the plan needs 2 nodes; allow no fewer",
        ),
        (
            "--smaller-plan x.toml",
            "--smaller-plan is for jobs that may lose nodes: add --min-nodes M",
        ),
        (
            "--min-nodes 1 --smaller-plan x.toml",
            "--smaller-plan is for jobs with a layout: add --plan",
        ),
        (
            "--min-nodes 1 --smaller-plan x.toml --layout height=2",
            "cannot read the plan x.toml: No such",
        ),
        (
            "--min-nodes 1 --layout height=2 --smaller-plan /dev/null --smaller-plan /dev/null",
            "--smaller-plan /dev/null is for 1 processes, and an earlier one does; name a plan for each",
        ),
    ],
)
def test_mistakes_about_plans_of_fewer_nodes(options: str, why: str, run: Run) -> None:
    words = ("-H", "node0:1,node1:1", "--restarts", "1", *options.split())
    code, _, err = finish(run(WAITS, *words))
    assert (code, err.count("\n")) == (2, 1) and err.startswith(f"error: {why}")
