"""Predictions beside sums that were made by hand, and beside the bytes that a step really needs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from fivefold.cluster.description import Cluster, Device, LinkCost
from fivefold.parallel.pipeline.memory import predicted_in_stages
from fivefold.parallel.program.memory import predicted
from fivefold.plan import Layout, Memory, Plan, Provenance
from fivefold.recipes.models import build
from fivefold.tune.candidates import Candidate, candidates, smaller
from fivefold.tune.predict import Case
from fivefold.tune.report import Question, nothing_fits, plan_of, reasons
from fivefold.tune.search import search
from fivefold.tune.subject import Subject

PIXELS, CHANNELS = 32, 64
IMAGE_BYTES = 4 * CHANNELS * PIXELS * PIXELS
FREE = LinkCost(1e-15, 1e30)
LAYER_S = 2 * CHANNELS * 9 * CHANNELS * PIXELS * PIXELS / 1e6
"""one convolution of one sample at 1 MFLOP/s"""


def chain(layers: int = 4) -> nn.Module:
    """Convolutions that all take as long; nobody asks for the gradient of the images."""
    return nn.Sequential(*(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(layers)))


def cluster(link: LinkCost = FREE, nodes: int = 1, devices: int = 2) -> Cluster:
    return Cluster("test", nodes, devices, Device(1 << 30, 1e6, 1e30), link, link)


def subject(link: LinkCost = FREE, layers: int = 4, net: nn.Module | None = None) -> Subject:
    return Subject(net or chain(layers), (CHANNELS, PIXELS, PIXELS), cluster(link))


def layers_of(candidate: Candidate, batch: int = 4, link: LinkCost = FREE) -> float:
    """A step in units of a layer's forward."""
    return Case(subject(link), candidate, batch, "sgd").predict().step_s / LAYER_S


def test_replicas_share_the_samples() -> None:
    # Per sample 4 forward, and 1 + 3 x 2 backward: 11; two samples per replica.
    assert layers_of(Candidate(Layout(data=2))) == pytest.approx(22)


def test_tiles_share_the_pixels() -> None:
    assert layers_of(Candidate(Layout(width=2))) == pytest.approx(22)


def test_layers_follow_each_other() -> None:
    assert layers_of(Candidate(Layout(pipe=2), "layer")) == pytest.approx(44)


def test_a_pipeline_waits_for_its_first_and_last_micro_batch() -> None:
    # Stage 1: 2 forward, 4 backward, four times, behind 2 of stage 0; then 3 for its last backward.
    assert layers_of(Candidate(Layout(pipe=2), "1f1b", 4)) == pytest.approx(2 + 4 * 6 + 3)


def test_recomputation_costs_another_forward() -> None:
    assert layers_of(Candidate(Layout(width=2), recompute=2)) == pytest.approx(22 + 8)


def test_exchanges_take_their_latency() -> None:
    # Four halos there and back, each hidden behind what is computed meanwhile, unless that is shorter.
    slow = LinkCost(100 * LAYER_S, 1e30)
    compute = 22 * LAYER_S
    told = Case(subject(slow), Candidate(Layout(width=2)), 4, "sgd").predict().parts
    assert told.compute_s == pytest.approx(compute)
    # 2 x 4 exchanges less the compute behind which they hide, which is all of it.
    assert told.exchange_s == pytest.approx(8 * 100 * LAYER_S - compute)


def test_no_candidate_is_faster_than_its_bounds() -> None:
    for link in (FREE, LinkCost(0.1 * LAYER_S, 1e6)):
        net = subject(link)
        for candidate in candidates(2, net.pixels, 4, 4):
            case = Case(net, candidate, 4, "sgd")
            step_s = case.predict().step_s * (1 + 1e-9)
            assert case.bound_s() <= step_s and case.least_s() <= step_s, candidate


def test_what_is_saved_counts_once() -> None:
    net = nn.Sequential(
        nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
        nn.BatchNorm2d(CHANNELS),
        nn.ReLU(inplace=True),
        nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1),
    )
    held = subject(net=net).staged(Layout(), 1, 1).work.held
    # The images, what the norm takes, and what it makes, which the second convolution takes as well.
    assert held.saved(range(4)).tolist() == [IMAGE_BYTES, IMAGE_BYTES, IMAGE_BYTES, 0]


def test_stages_hold_their_parameters_and_what_is_alive() -> None:
    layer_bytes = 4 * (CHANNELS * CHANNELS * 9 + CHANNELS)
    case = Case(subject(), Candidate(Layout(pipe=2), "gpipe", 4), 4, "adam")
    schedule = case.candidate.make()
    standing = [case.need.standing_bytes(schedule, rank) for rank in (0, 1)]
    # Parameters, gradients and two numbers of the optimiser; the first rank has the images.
    assert standing == [2 * 4 * layer_bytes + 4 * IMAGE_BYTES, 2 * 4 * layer_bytes]
    saved, beside = case.need.activations()
    # What two layers take, and what is given.
    assert saved == [3 * IMAGE_BYTES] * 2
    # The gradients of what a layer takes and makes, two messages that are awaited, and one that has not left.
    assert beside == [4 * IMAGE_BYTES, 5 * IMAGE_BYTES]


def test_recomputation_keeps_borders_only() -> None:
    saved = {
        parts: Case(subject(layers=12), Candidate(Layout(width=2), recompute=parts), 4, "sgd").need
        for parts in (0, 4)
    }
    # Four images a step, halves of them on a rank; a layer's strips come on top.
    plain, again = (need.activations()[0][0] for need in saved.values())
    assert plain == pytest.approx(12 * 4 * IMAGE_BYTES / 2, rel=0.1)
    borders = (4 + 1) * 4 * IMAGE_BYTES / 2  # what segments take, and what the net returns
    assert (
        again == borders + 12 * 4 * IMAGE_BYTES / PIXELS
    )  # and a column of a neighbour for every layer


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "options", "recompute"), [("resnet20", {}, 0), ("unet", {"width": 8}, 4)]
)
def test_memory_is_near_to_what_a_step_needs(
    model: str, options: dict[str, object], recompute: int
) -> None:
    size = 96
    net = build(model, 10, 3, **options)
    layout, shape = Layout(width=2), (3, size, size)
    dense = model == "unet"
    targets = torch.empty((2, size, size) if dense else (2,), dtype=torch.long, device="meta")
    exact = predicted(
        net, Plan(layout=layout, memory=Memory(recompute=recompute)), 1,
        inputs=torch.empty((2, *shape), device="meta"), targets=targets, loss=nn.CrossEntropyLoss(),
    )  # fmt: skip
    case = Case(Subject(net, shape, cluster()), Candidate(layout, recompute=recompute), 2, "sgd")
    momentum = sum(p.numel() * 4 for p in net.parameters())
    # In the one, gradients of earlier steps are there as well.
    least = exact.total_bytes - exact.gradients_bytes
    assert 0.9 * least <= case.memory_bytes() - momentum <= 1.1 * exact.total_bytes


def question(memory_bytes: int) -> Question:
    return Question("test:chain", (CHANNELS, PIXELS, PIXELS), 4, 2, memory_bytes, cluster())


def test_the_fastest_that_fits_is_found() -> None:
    net = subject(LinkCost(1e-3 * LAYER_S, 1e9))
    every = list(candidates(2, net.pixels, 4, 4))
    needs = sorted(Case(net, c, 4, "sgd").memory_bytes() for c in every)
    for memory in (needs[-1], needs[len(needs) // 3]):
        cases, fit = [Case(net, c, 4, "sgd") for c in every], list[float]()
        for case in cases:
            if case.memory_bytes() <= memory:
                fit.append(case.predict().step_s)
            else:
                cases += [Case(net, c, 4, "sgd") for c in smaller(case.candidate, memory)]
        found = search(net, every, 4, memory)
        assert [told.step_s for told in found.best] == sorted(fit)[:5]
        assert all(told.memory_bytes <= memory for told in found.best)
        assert len(every) <= found.candidates <= len(cases) and not found.impossible
        assert memory < needs[-1] or found.candidates == len(every)


def test_nothing_fits() -> None:
    net = subject()
    found = search(net, candidates(2, net.pixels, 4, 4), 4, 1000)
    assert not found.best and found.closest is not None
    assert found.too_large == found.candidates
    said = str(nothing_fits(found, question(1000)))
    assert f"the closest ({found.closest[0]}) needs" in said and "What helps: --memory" in said


def test_nothing_can_be_divided() -> None:
    net = subject()
    found = search(net, candidates(64, net.pixels, 1, 4), 1, 1 << 40)
    assert "cannot be divided over" in str(nothing_fits(found, question(1 << 40)))


def test_the_choice_is_explained_and_becomes_a_plan() -> None:
    net, asked = subject(), question(1 << 30)
    found = search(net, candidates(2, net.pixels, 4, 4), 4, 1 << 30)
    first, *_, last = reasons(found, asked)
    assert first.startswith("data=2: computing 100%") or "computing" in first
    assert last.startswith(f"{found.candidates} candidates: 0 impossible, 0 larger")
    plan = Plan.parse(plan_of(found, asked).to_toml())
    assert plan.layout == found.best[0].candidate.layout and plan.train.batch_size == 4
    assert plan.origin("layout.data").kind == "tuned"
    assert "on test, simulated" in plan.origin("layout.data").reason


def test_thousands_of_devices_take_few_plans() -> None:
    many = Cluster(
        "many",
        256,
        8,
        Device(80 << 30, 2e13, 2e12, 1e-5),
        LinkCost(1e-5, 2e11),
        LinkCost(2e-5, 2.5e10),
    )
    net = Subject(chain(8), (CHANNELS, 4096, 4096), many)
    found = search(net, candidates(2048, net.pixels, 16, net.most_stages), 16, 80 << 30)
    assert all(told.candidate.layout.size == 2048 for told in found.best)
    assert len(found.best) == 5 and found.candidates > 500
    assert net.programs < 40  # each takes a while: most candidates are ruled out without
    # A device does about its share, and no more than all of its time is told.
    one = Case(net, Candidate(Layout()), 16, "sgd").predict()
    fastest = found.best[0]
    assert one.parts.compute_s / 2048 <= fastest.parts.compute_s < one.parts.compute_s / 100
    assert fastest.step_s == pytest.approx(sum(vars(fastest.parts).values()))


def test_ranks_that_outnumber_cores_share_them() -> None:
    shared = dataclasses.replace(cluster(), cores_per_node=1)

    def step(where: Cluster, candidate: Candidate) -> float:
        net = Subject(chain(), (CHANNELS, PIXELS, PIXELS), where)
        return Case(net, candidate, 4, "sgd").predict().step_s / LAYER_S

    # Of two ranks each has half a core; one at a time has all of it.
    for candidate in (Candidate(Layout(data=2)), Candidate(Layout(width=2))):
        assert step(shared, candidate) == pytest.approx(44)
    assert step(shared, Candidate(Layout(pipe=2), "layer")) == pytest.approx(44)
    # All that there is to do, on one core, and nothing to wait for.
    assert step(shared, Candidate(Layout(pipe=2), "1f1b", 4)) == pytest.approx(44)
    # As many cores as ranks, which are faster alone: the first and the last of a pipeline.
    alone = dataclasses.replace(cluster().device, alone=2.0)
    quick = dataclasses.replace(cluster(), cores_per_node=2, device=alone)
    assert step(quick, Candidate(Layout(pipe=2), "layer")) == pytest.approx(22)
    assert step(quick, Candidate(Layout(data=2))) == pytest.approx(22)


def test_no_candidate_is_faster_than_its_bounds_on_shared_cores() -> None:
    device = dataclasses.replace(cluster().device, alone=1.5, overlaps=False)
    where = dataclasses.replace(cluster(devices=4), cores_per_node=2, device=device)
    net = Subject(chain(), (CHANNELS, PIXELS, PIXELS), where)
    for candidate in candidates(4, net.pixels, 4, 4):
        case = Case(net, candidate, 4, "sgd")
        step_s = case.predict().step_s * (1 + 1e-9)
        assert case.bound_s() <= step_s and case.least_s() <= step_s, candidate


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble", "gems", "chimera"])
def test_memory_of_stages_is_near_to_what_a_step_needs(schedule: Any) -> None:
    net, shape, batch = build("resnet20", 10, 3), (3, 48, 48), 8
    candidate = Candidate(Layout(pipe=2), schedule, 4)
    case = Case(Subject(net, shape, cluster()), candidate, batch, "sgd")
    stages = case.candidate.make()
    plan = Plan().replace(candidate.values(), Provenance("tuned", "test"))
    momentum = [
        sum(case.need.staged.trained_bytes[stage] for stage in stages.stages_of(rank))
        for rank in range(2)
    ]
    exact = max(
        momentum[rank]
        + predicted_in_stages(
            net, plan, rank, inputs=torch.empty((batch, *shape), device="meta"),
            targets=torch.empty(batch, dtype=torch.long, device="meta"), loss=nn.CrossEntropyLoss(),
        ).total_bytes
        for rank in range(2)
    )  # fmt: skip
    assert case.memory_bytes() == pytest.approx(exact, rel=0.15)
