"""Which layouts, schedules and micro-batches are looked at."""

from __future__ import annotations

import pytest

from fivefold.parallel.pipeline.check import check
from fivefold.plan import Layout, Plan, Provenance
from fivefold.tune.candidates import Candidate, candidates, grids, smaller


def test_grids_are_strips_or_nearly_square() -> None:
    assert grids(1, (64, 64)) == [(1, 1)]
    assert grids(8, (512, 256)) == [(1, 8), (4, 2), (8, 1)]
    assert grids(8, (128, 64, 64)) == [(2, 2, 2), (8, 1, 1)]


def test_tiles_have_at_least_sixteen_pixels() -> None:
    assert grids(8, (64, 64)) == [(2, 4)]  # strips of 8 pixels are too thin
    assert grids(64, (64, 64)) == []


def test_two_devices() -> None:
    found = list(candidates(2, (64, 64), 4, 9))
    assert {c.layout for c in found} == {
        Layout(data=2), Layout(pipe=2), Layout(height=2), Layout(width=2)
    }  # fmt: skip
    told = {(c.schedule, c.micro_batches) for c in found if c.layout.pipe == 2}
    assert told == {
        ("layer", 1), ("gpipe", 2), ("gpipe", 4), ("1f1b", 2), ("1f1b", 4), ("gems", 2), ("gems", 4),
        ("gems-overlap", 2), ("gems-overlap", 4), ("chimera", 4), ("interleaved", 2), ("interleaved", 4),
        ("zero-bubble", 2), ("zero-bubble", 4),
    }  # fmt: skip
    assert len(set(found)) == len(found)


def test_replicas_need_samples_and_stages_need_layers() -> None:
    layouts = {c.layout for c in candidates(4, (), 2, 3)}
    assert layouts == {Layout(data=2, pipe=2)}
    assert not [c for c in candidates(4, (), 2, 3) if c.schedule == "interleaved"]  # 4 stages


@pytest.mark.parametrize("devices", [6, 48, 2048])
def test_every_candidate_uses_all_devices(devices: int) -> None:
    found = list(candidates(devices, (4096, 4096), 64, 64))
    assert {c.layout.size for c in found} == {devices}
    assert len(found) < 10_000


def test_schedules_of_candidates_can_be_run() -> None:
    for candidate in candidates(4, (64, 64), 8, 20):
        check(candidate.make())


def test_values_are_keys_of_a_plan() -> None:
    candidate = Candidate(Layout(pipe=2, width=2), "interleaved", 4, 2, 8)
    plan = Plan().replace(candidate.values(), Provenance("tuned", "test"))
    assert plan.layout == candidate.layout
    assert (plan.pipeline.schedule, plan.pipeline.micro_batches) == ("interleaved", 4)
    assert (plan.pipeline.stages_per_rank, plan.memory.recompute) == (2, 8)
    assert str(candidate) == "pipe=2,width=2, interleaved x 4, recompute 8"


def test_what_does_not_fit_is_tried_within_a_budget_and_with_parts() -> None:
    def tried(candidate: Candidate) -> list[tuple[str, str]]:
        return [(one.shard, one.budget) for one in smaller(candidate, 5 << 20)]

    budget = ("none", "5MiB")
    assert tried(Candidate(Layout())) == tried(Candidate(Layout(width=2))) == [budget]
    assert tried(Candidate(Layout(data=2))) == [budget, ("optimizer", ""), ("parameters", "")]
    assert tried(Candidate(Layout(data=2, width=2))) == [budget, ("optimizer", "")]
    assert tried(Candidate(Layout(data=2, pipe=2), "1f1b", 2)) == [budget, ("optimizer", "")]
    assert tried(Candidate(Layout(data=2, pipe=2), "gems", 2)) == [
        budget
    ]  # held twice, not in parts
    assert tried(Candidate(Layout(data=2), shard="optimizer")) == [("optimizer", "5MiB")]
    for last in ({"recompute": 8}, {"budget": "5MiB"}, {"shard": "parameters"}):
        assert not tried(Candidate(Layout(data=2), **last))  # type: ignore[arg-type]


def test_parts_and_budgets_are_keys_of_a_plan() -> None:
    (candidate,) = smaller(Candidate(Layout(data=2), shard="optimizer"), 16 << 30)
    plan = Plan().replace(candidate.values(), Provenance("tuned", "test"))
    assert (plan.memory.shard, plan.memory.budget) == ("optimizer", "16GiB")
    assert str(candidate) == "data=2, shard optimizer, within budget"
    # Layers that share an exchange hold more than was predicted.
    values = Candidate(Layout(width=2), budget="16GiB").values()
    assert values["tiles.fuse"] == "never" and "memory.shard" not in values
    assert not {"tiles.fuse", "memory.budget"} & Candidate(Layout(width=2)).values().keys()
