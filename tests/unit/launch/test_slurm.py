"""Slurm's shorthand: 4(x2),3 tasks per node, gpu[003-005,010] nodes."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import UsageError
from fivefold.launch import slurm


def shorthand(counts: list[int]) -> str:
    runs = [(count, len(list(run))) for count, run in groupby(counts)]
    return ",".join(f"{count}(x{times})" if times > 1 else f"{count}" for count, times in runs)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=30), st.data())
def test_tasks_of_each_node(counts: list[int], data: st.DataObject) -> None:
    node = data.draw(st.integers(0, len(counts) - 1))
    environ = {"SLURM_STEP_TASKS_PER_NODE": shorthand(counts), "SLURM_NODEID": str(node)}
    assert slurm.tasks_here(environ) == counts[node]


@pytest.mark.parametrize(("tasks", "node"), [("4(x2)", "2"), ("4(y2)", "0"), ("", "0"), ("4", "x")])
def test_what_cannot_be_read_is_named(tasks: str, node: str) -> None:
    with pytest.raises(UsageError, match="SLURM_STEP_TASKS_PER_NODE"):
        slurm.tasks_here({"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node0", "node0"),
        ("node[0-1]", "node0"),
        ("gpu[003-005,010]", "gpu003"),
        ("gpu[010,003-005],cpu1", "gpu010"),
        ("login1,gpu[003-005]", "login1"),
        ("rack[1-2]node[07-09].site.org", "rack1node07.site.org"),
        ("", ""),
    ],
)
def test_first_node(nodes: str, first: str) -> None:
    assert slurm.first_node({"SLURM_STEP_NODELIST": nodes}) == first


def test_steps_of_a_job_meet_on_different_ports() -> None:
    ports = {slurm.meeting_port({"SLURM_JOB_ID": "12", "SLURM_STEP_ID": f"{n}"}) for n in range(20)}
    assert len(ports) > 15
    assert all(20000 <= port < 30000 for port in ports)
