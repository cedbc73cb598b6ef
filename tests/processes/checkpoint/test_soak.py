"""All moments on all of eight nodes, and nodes that die at random: `make soak` runs it."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from fault_checks import (
    BEFORE,
    CRASH_POINTS,
    Told,
    apart,
    broken,
    cluster,
    crash_of,
    ended,
    run,
    same,
    says,
    two_die,
)
from nodes import Job, Nodes
from template import Template

pytestmark = [pytest.mark.slow, apart]

MANY_STEPS, MEAN_S, FEWEST = 1500, 4.0, 8


@pytest.fixture(scope="module")
def oracle_of_eight(template: Template) -> list[Told]:
    with cluster(8, template) as nodes:
        return ended(run(nodes))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", range(8))
@pytest.mark.parametrize("point", CRASH_POINTS)
def test_every_node_may_die_at_every_moment(
    point: str, victim: int, template: Template, oracle_of_eight: list[Told]
) -> None:
    with cluster(8, template) as nodes:
        if point not in BEFORE:
            broken(run(nodes, crash="staged:3@pid1", victim=victim), victim, nodes)
        broken(run(nodes, "--flush-every=1", crash=crash_of(point), victim=victim), victim, nodes)
        same(ended(run(nodes, "--flush-every=1")), oracle_of_eight)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("pair", [*itertools.combinations(range(8), 2)], ids="{0[0]}-{0[1]}".format)
@pytest.mark.parametrize("point", CRASH_POINTS)
def test_any_two_nodes_may_die_at_every_moment(
    point: str, pair: tuple[int, int], template: Template, oracle_of_eight: list[Told]
) -> None:
    with cluster(8, template) as nodes:
        two_die(point, pair, nodes, oracle_of_eight)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scheme", ["xor", "partner", "rs"])
def test_nodes_die_at_random(scheme: str, template: Template) -> None:
    draw = random.Random(scheme)
    options = [f"--scheme={scheme}"]
    with cluster(4, template) as nodes:
        oracle = ended(run(nodes, *options, steps=MANY_STEPS), 900.0)
    lost = deaths = 0
    with cluster(4, template) as nodes:
        while True:
            job = run(nodes, *options, steps=MANY_STEPS)
            if not killed_at_random(job, nodes, draw):
                break
            deaths += 1
            reached = max(Told(rank.text).steps, default=0) if (rank := job.ranks[0]) else 0
            lost += reached
            print(f"death {deaths} at step {reached}")
        found = [Told(rank.text) for rank in job.ranks]
    same(found, oracle)
    assert deaths >= FEWEST, f"{deaths} deaths in {lost} steps: let the run be longer"


def killed_at_random(job: Job, nodes: Nodes, draw: random.Random) -> bool:
    """Let a node die after a while; False if the run ends before.

    Not before the run has gone on: two nodes that are lost before one is rebuilt are more than a set bears.
    """
    says(job, "from ", 120.0)
    end = time.monotonic() + draw.expovariate(1 / MEAN_S)
    while time.monotonic() < end:
        codes = [rank.code for rank in job.ranks]
        assert not any(codes), job.told()
        if None not in codes:
            return False
        time.sleep(0.02)
    victim = draw.randrange(4)
    nodes.kill(victim)
    job.fail(60.0)
    nodes.replace(victim)
    return True
