"""A link between two nodes that is lost: both sides are told after comm.timeout_s, whatever waits on it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from nodes import Nodes, refusal
from template import Template
from waiting import awaited

SCRIPT = Path(__file__).parents[1] / "lost_link.py"
TIMEOUT_S = 6.0
LIMIT_S = 30.0
"""within which both have ended, on busy cores too; torch lets a group wait for 30 minutes"""


@pytest.mark.long
@pytest.mark.skipif(bool(refusal()), reason=refusal() or "nodes can be made")
@pytest.mark.parametrize("layout", ["data=2", "width=2", "pipe=2"])
def test_a_lost_link_is_told_after_the_timeout(layout: str, template: Template) -> None:
    with Nodes(2, template=template) as nodes:
        job = nodes.job([sys.executable, str(SCRIPT), layout, str(TIMEOUT_S)])
        awaited(
            lambda: all(rank.text.count("step") > 2 or rank.code for rank in job.ranks), "steps", 60
        )
        nodes.cut(1)
        assert job.wait(LIMIT_S) == [1, 1], job.told()
        for rank in job.ranks:
            assert re.search(r"CommError: rank \d of 2: \w+ for .+ failed", rank.text), rank.text
            (waited,) = re.findall(r"ended ([\d.]+) s after a step", rank.text)
            assert float(waited) > TIMEOUT_S - 1 and "comm.timeout_s" in rank.text
