"""Cables between nodes that are out for a while, or for ever."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from fivefold.arena.native import problem
from nodes import Nodes, refusal
from template import Template
from waiting import awaited

pytestmark = [
    pytest.mark.skipif(bool(problem()), reason="installed without the C core"),
    pytest.mark.skipif(bool(refusal()), reason=refusal() or "nodes can be made"),
]
SCRIPT = Path(__file__).parents[1] / "cable_sums.py"
SILENCE_S = 4.0


@pytest.mark.long
@pytest.mark.parametrize("cuts", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_cable_that_is_out_for_a_while_costs_time_only(cuts: int, template: Template) -> None:
    with Nodes(3, template=template) as nodes:
        job = nodes.job([sys.executable, str(SCRIPT), "10"])

        def rounds() -> int:
            return min(rank.text.count("round") for rank in job.ranks)

        for number in range(cuts):
            before = rounds()
            awaited(lambda before=before: rounds() > before + 3, "rounds", 60)
            nodes.cut(number % 3)
            time.sleep(1 + number % 5)
            nodes.mend(number % 3)
        (nodes.shared / "stop").touch()
        assert job.wait(60) == [0, 0, 0], job.told()
        assert all("all of" in rank.text for rank in job.ranks)


@pytest.mark.long
def test_a_node_that_is_silent_is_lost() -> None:
    with Nodes(2) as nodes:
        job = nodes.job([sys.executable, str(SCRIPT), str(SILENCE_S)])
        awaited(lambda: all(rank.text.count("round") > 3 for rank in job.ranks), "rounds", 60)
        nodes.cut(1)
        assert job.wait(60) == [3, 3], job.told()
        for number, rank in enumerate(job.ranks):
            (waited,) = re.findall(r"ended after ([\d.]+) s", rank.text)
            assert SILENCE_S - 2 < float(waited) < 3 * SILENCE_S
            assert f"the node of rank {1 - number} acknowledges nothing any more" in rank.text


def test_large_tensors_take_all_interfaces_that_are_named(template: Template) -> None:
    with Nodes(2, template=template, interfaces=2) as nodes:
        job = nodes.job([sys.executable, str(SCRIPT), "10", "eth0,eth1"])
        awaited(lambda: all(rank.text.count("round") > 30 for rank in job.ranks), "rounds", 60)
        (nodes.shared / "stop").touch()
        assert job.wait(60) == [0, 0], job.told()
        for rank in job.ranks:
            sent = {
                name: int(number) for name, number in re.findall(r"(eth\d) sent (\d+)", rank.text)
            }
            assert sent["eth1"] > 1_000_000, sent
            assert sent["eth0"] > sent["eth1"] / 2, sent  # with messages, and small tensors


def test_an_interface_that_leads_nowhere_is_named() -> None:
    with Nodes(2) as nodes:
        job = nodes.job([sys.executable, str(SCRIPT), "10", "eth0,lo"])
        assert job.wait(60) == [3, 3], job.told()
        assert any("from 127.0.0.1, one of comm.interfaces" in rank.text for rank in job.ranks), (
            job.told()
        )
