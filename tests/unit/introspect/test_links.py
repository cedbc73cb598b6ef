"""A link that becomes slow while the run goes on is named, from what the kernel counted of connections."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fivefold.introspect.analysis import Analysis
from fivefold.introspect.facts import calibrated
from fivefold.introspect.findings import Finding
from fivefold.introspect.link_use import ways
from fivefold.introspect.run import TracedRun
from fivefold.introspect.verdict import findings, verdict
from traces import MS, Story

_SLOW = {"calibration": [
    {"op": "all_reduce", "group": 0, "size_bytes": 4 << 20, "seconds": 5e-3}
]}  # fmt: skip
"""what operations of 3 and 20 ms took when the run started"""
_SECONDS = 40 * 0.07
"""of 20 steps and more"""


@dataclass
class Ring(Story):
    """Ranks on nodes of their own, each of which sends to the next one, and little to all others."""

    in_use: dict[int, float] = field(default_factory=dict[int, float])
    """by rank that sends: share of the time, of the latter half"""
    kept: float = 0.0
    """share of that in which the other side has no room"""

    def _notes(self, rank: int) -> list[dict[str, Any]]:
        notes = super()._notes(rank)
        after, share = (rank + 1) % self.ranks, self.in_use.get(rank, 0.04)
        for step in (1, 2, 4, 8, 16, 32):
            busy_s = _SECONDS * (step / 40 * 0.04 + max(0, step - 16) / 40 * (share - 0.04))
            notes.append({
                "kind": "links", "at_ns": int(1e9 * _SECONDS * step / 40), "step": step,
                "own": [f"10.0.0.{rank}", f"fd00::{rank}"],
                "peers": [
                    {"to": f"10.0.0.{after}", "bytes": (1 << 20) * step, "busy_s": busy_s,
                     "kept_s": busy_s * self.kept},
                    {"to": f"10.0.0.{(rank + 2) % self.ranks}", "bytes": 1000 * step, "busy_s": busy_s,
                     "kept_s": 0.0},
                    {"to": "192.168.7.7", "bytes": (1 << 20) * step, "busy_s": 0.9 * step, "kept_s": 0.0},
                ],
            })  # fmt: skip
        return notes


def judged(story: Story, folder: Path) -> tuple[str, dict[str, Finding]]:
    analysis = Analysis(TracedRun.load(story.write(folder)))
    found = findings(analysis)
    return verdict(analysis, found)["text"], {finding.id: finding for finding in found}


def ring(ranks: int = 4, per_node: int = 1, **told: Any) -> Ring:
    meta = told.pop("meta", _SLOW)
    return Ring(ranks=ranks, per_node=per_node, transfer_ns=20 * MS, meta=meta, **told)


def test_the_link_that_became_slow_is_named(tmp_path: Path) -> None:
    text, found = judged(ring(in_use={2: 0.6}), tmp_path)
    assert "the link from node2 (rank 2) to node3 (rank 3) has become slow" in text
    assert "all_reduce of 4.0 MiB takes 12 ms instead of 5.0 ms" in text
    link = found["slow-link"]
    assert link.ranks == (2, 3)
    assert link.figures["in_use"] == pytest.approx(0.6, rel=0.01)
    assert link.figures["bytes_per_s"] == pytest.approx((1 << 20) * 40 / _SECONDS / 0.6, rel=0.01)
    assert link.figures["usual_bytes_per_s"] == pytest.approx(
        (1 << 20) * 40 / _SECONDS / 0.04, rel=0.01
    )
    assert link.gain_s and "slow-network" not in found


def test_links_are_told_as_they_were_used(tmp_path: Path) -> None:
    run = TracedRun.load(ring(in_use={2: 0.6}).write(tmp_path))
    used = calibrated(run)["used"]
    assert (used[0]["hosts"], used[0]["ranks"]) == (["node2", "node3"], [[2], [3]])
    assert used[0]["in_use"] == pytest.approx(0.6, rel=0.01)
    assert [way["bytes_per_step"] for way in used] == pytest.approx([1 << 20] * 4, rel=1e-3)


def test_of_two_nodes_the_direction_is_told(tmp_path: Path) -> None:
    _, found = judged(ring(2, in_use={1: 0.5}), tmp_path)
    assert "from node1 (rank 1) to node0 (rank 0)" in found["slow-link"].title
    assert "others" not in found["slow-link"].title


def test_a_node_of_several_ranks_is_named_without_them(tmp_path: Path) -> None:
    _, found = judged(ring(6, per_node=2, in_use={3: 0.6}), tmp_path)
    assert "the link from node1 to node2 has become slow" in found["slow-link"].title
    assert found["slow-link"].ranks == (2, 3, 4, 5)


def all_links(run: Ring) -> None:
    run.in_use = dict.fromkeys(range(4), 0.6)


def links_that_are_idle(run: Ring) -> None:
    run.in_use = {2: 0.15}


def a_rank_that_does_not_read(run: Ring) -> None:
    run.in_use, run.kept = {2: 0.6}, 0.95


@pytest.mark.parametrize("why", [all_links, links_that_are_idle, a_rank_that_does_not_read])
def test_a_slow_network_without_a_slow_link(why: Any, tmp_path: Path) -> None:
    story = ring()
    why(story)
    _, found = judged(story, tmp_path)
    assert "slow-network" in found and "slow-link" not in found


def as_at_the_start(**told: Any) -> Ring:
    calibrated = [{**_SLOW["calibration"][0], "seconds": 18e-3}]
    return ring(meta={"calibration": calibrated}, hidden_ns=19 * MS, **told)


def test_links_in_use_are_no_fault_while_operations_are_as_fast_as_at_the_start(
    tmp_path: Path,
) -> None:
    story = as_at_the_start(in_use=dict.fromkeys(range(4), 0.6))
    assert not judged(story, tmp_path)[1].keys() & {"slow-link", "slow-network"}


def test_a_link_slower_than_the_others_is_named_though_the_start_was_as_slow(
    tmp_path: Path,
) -> None:
    _, found = judged(as_at_the_start(in_use={2: 0.6}), tmp_path)
    link = found["slow-link"]
    assert link.title.startswith("the link from node2 (rank 2) to node3 (rank 3) is slow: ")
    assert link.gain_s and link.ranks == (2, 3) and "slow-network" not in found


def test_only_links_between_ranks_of_different_nodes_count(tmp_path: Path) -> None:
    run = TracedRun.load(ring(4, per_node=2, in_use={1: 0.6}).write(tmp_path))
    assert {way.hosts for way in ways(run)} == {("node0", "node1"), ("node1", "node0")}


def test_connections_that_were_made_anew_say_nothing(tmp_path: Path) -> None:
    class Anew(Ring):
        def _notes(self, rank: int) -> list[dict[str, Any]]:
            notes = super()._notes(rank)
            notes[-1]["peers"] = [{**peer, "bytes": 70_000} for peer in notes[-1]["peers"]]
            return notes

    run = TracedRun.load(Anew(ranks=4, per_node=1).write(tmp_path))
    assert ways(run) == []
