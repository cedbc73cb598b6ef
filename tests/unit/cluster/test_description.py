"""Cluster files: what they say, where ranks lie, and what is wrong with a bad one."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.cluster.description import Cluster, Device, LinkCost, bytes_of
from fivefold.errors import UsageError

GOOD = """
name = "two racks"
nodes = 4
devices_per_node = 8

[device]
memory = "80GiB"
flops_per_s = 2e13
bytes_per_s = 2e12

[within]
latency_s = 1e-5
bytes_per_s = 200_000_000_000

[between]
latency_s = 2e-5
bytes_per_s = 2.5e10
reduction_s = 5e-5
"""


def test_a_file_is_read() -> None:
    cluster = Cluster.parse(GOOD)
    assert (cluster.name, cluster.devices, cluster.here) == ("two racks", 32, False)
    assert cluster.device == Device(80 << 30, 2e13, 2e12)
    assert cluster.within == LinkCost(1e-5, 2e11)
    assert cluster.between.reduction_s == 5e-5


def test_a_file_is_named_after_itself(tmp_path: Path) -> None:
    path = tmp_path / "rack.toml"
    path.write_text(GOOD.replace('name = "two racks"', ""))
    assert Cluster.load(path).name == "rack"


@pytest.mark.parametrize(
    ("ranks", "stride", "within"),
    [(1, 1, True), (8, 1, True), (4, 2, True), (16, 1, False), (2, 8, False), (3, 1, False), (1, 64, True)],
)  # fmt: skip
def test_groups_that_fit_a_node_use_its_links(ranks: int, stride: int, within: bool) -> None:
    # 3 ranks do not divide a node of 8: the third group would lie on two nodes.
    cluster = Cluster.parse(GOOD)
    assert cluster.link(ranks, stride) is (cluster.within if within else cluster.between)


def test_collectives_cost_rounds_and_bytes() -> None:
    link = LinkCost(latency_s=1.0, bytes_per_s=10.0)
    assert link.message_s(20) == 3.0
    assert link.all_reduce_s(0, 1) == 0.0
    assert link.all_reduce_s(40, 4) == 2 * 2.0 + 2 * 3 / 4 * 40 / 10
    assert link.all_gather_s(10, 5) == 3 * 2.0 + 4 * 10 / 10
    assert LinkCost(1.0, 10.0, reduction_s=7.0).all_reduce_s(0, 8) == 21.0


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("nodes = 4", "node = 4", "unknown key 'node' at the top level of text; did you mean 'nodes'"),
        ("nodes = 4", "", "text lacks nodes at the top level"),
        ("nodes = 4", "nodes = 1.5", "nodes = 1.5 in text: expected a whole number of at least 1"),
        ("nodes = 4", "nodes = true", "nodes = True in text: expected a whole number"),
        ("nodes = 4", "nodes = 4\nhere = true", "unknown key 'here'"),
        ('"80GiB"', '"much"', "memory in [device] of text: 'much' is no size of memory"),
        ('"80GiB"', "80", "memory in [device] of text: 80 has no unit; write 80GiB, 80MiB, or 80B for bytes"),
        ('memory = "80GiB"', "", "text lacks memory at [device]"),
        ("2e13", "-1", "flops_per_s = -1 in text: expected a number above 0"),
        ("2e13", "nan", "expected a number above 0"),
        ("2e12", "2e12\noverlaps = 1", "overlaps = 1 in text: expected true or false"),
        ("[between]", "[beyond]", "text lacks [between]"),
        ("[within]", "within", "text is not valid TOML"),
        ('"two racks"', "2", "name = 2 in text: expected a string"),
    ],
)  # fmt: skip
def test_mistakes_are_named(old: str, new: str, said: str) -> None:
    with pytest.raises(UsageError) as problem:
        Cluster.parse(GOOD.replace(old, new))
    assert said in str(problem.value) and "\n" not in str(problem.value).strip()


def test_a_section_may_not_be_a_value() -> None:
    with pytest.raises(UsageError, match=r"within in text has to be a section, \[within\]"):
        Cluster.parse('within = 3\n[device]\nmemory="1G"\nflops_per_s=1\nbytes_per_s=1')


def test_a_missing_file_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the cluster .*: No such file"):
        Cluster.load(tmp_path / "none.toml")


@pytest.mark.parametrize("text", ["", "0B", "-1G", "16 Gigabytes", "GiB", "1e3"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="no size of memory"):
        bytes_of(text)
