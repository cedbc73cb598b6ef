"""Candidates within a budget, and those whose replicas hold parts: what fits only so, and what it costs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fivefold.cluster.description import Cluster, Device, LinkCost
from fivefold.plan import Layout, Plan
from fivefold.tune.candidates import Candidate, candidates, smaller
from fivefold.tune.predict import Case
from fivefold.tune.report import Question, nothing_fits, plan_of, reasons, rows
from fivefold.tune.search import SearchResult, search
from fivefold.tune.subject import Subject

IMAGE, VECTOR, BATCH = (3, 64, 64), (512,), 4
LINK = LinkCost(1e-5, 1e10)
WHERE = Cluster("test", 1, 8, Device(1 << 30, 5e10, 5e9), LINK, LINK)


def convolutions() -> Subject:
    """Activations take nearly all memory, and norms are cheap to compute again."""
    layers = (
        layer
        for n in (3, *(16,) * 7)
        for layer in (nn.Conv2d(n, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
    )
    return Subject(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), IMAGE, WHERE)


def matrices() -> Subject:
    """Parameters take nearly all memory."""
    return Subject(nn.Sequential(*(nn.Linear(512, 512) for _ in range(16))), VECTOR, WHERE)


def asked(subject: Subject, memory_bytes: int, devices: int, optimizer: str = "sgd") -> Question:
    sample = subject.sample
    return Question("m:net", sample, BATCH, devices, memory_bytes, WHERE, optimizer)


def need(subject: Subject, candidate: Candidate, optimizer: str = "sgd") -> int:
    return Case(subject, candidate, BATCH, optimizer).memory_bytes()


def within(subject: Subject, layout: Layout, part: float) -> SearchResult:
    """The search for one layout, in a part of the memory that it needs without a budget."""
    plain = Candidate(layout)
    return search(subject, [plain], BATCH, int(part * need(subject, plain)))


@pytest.mark.parametrize("layout", [Layout(), Layout(data=2), Layout(width=2)], ids=str)
def test_what_does_not_fit_does_within_a_budget(layout: Layout) -> None:
    net = convolutions()
    free = Case(net, Candidate(layout), BATCH, "sgd").predict()
    found = within(net, layout, 0.8)
    told = next(one for one in found.best if one.candidate.shard == "none")
    assert told.candidate.budget and found.too_large
    assert told.memory_bytes <= 0.8 * free.memory_bytes
    assert told.parts.again_s > 0
    assert told.step_s == pytest.approx(free.step_s + told.parts.again_s)
    assert told.step_s < free.step_s * 4 / 3  # the net's forward is a third


def test_the_less_memory_there_is_the_longer_it_takes_until_nothing_fits() -> None:
    net = convolutions()
    steps = [
        found.best[0].step_s
        for part in (1.0, 0.9, 0.8, 0.7, 0.6)
        if (found := within(net, Layout(), part)).best
    ]
    assert len(steps) >= 3 and steps == sorted(steps) and steps[0] < steps[-1]
    found = within(net, Layout(), 0.01)
    assert not found.best and found.closest is not None
    candidate, least = found.closest
    assert candidate.budget and least < need(net, Candidate(Layout()))
    said = str(nothing_fits(found, asked(net, 1000, 1)))
    assert "the closest (data=1, within budget) needs" in said
    # What is told to be the least is enough.
    assert search(net, [Candidate(Layout())], BATCH, least).best


@pytest.mark.parametrize("shard", ["optimizer", "parameters"])
def test_parts_are_of_parameters_gradients_and_what_the_optimiser_keeps(shard: str) -> None:
    net = matrices()
    own = 16 * 4 * (512 * 512 + 512) // 4  # of four replicas
    case = Case(net, Candidate(Layout(data=4), shard=shard), BATCH, "adam")
    standing = case.need.standing_bytes(case.candidate.make(), 0)
    layer = 4 * (512 * 512 + 512)
    whole = 4 * own if shard == "optimizer" else 4 * layer  # two layers, and their gradients
    assert standing == 4 * own + whole + 4 * 512


def test_what_does_not_fit_does_in_parts() -> None:
    net = matrices()
    plain = need(net, Candidate(Layout(data=4)), "adam")
    found = search(net, [Candidate(Layout(data=4))], BATCH, int(0.75 * plain), "adam")
    assert {told.candidate.shard for told in found.best} == {"optimizer", "parameters"}
    assert not any(told.candidate.budget for told in found.best)  # activations are little
    for told in found.best:
        assert told.parts.gather_s > 0 and told.memory_bytes <= 0.75 * plain
    plan = Plan.parse(plan_of(found, asked(net, int(0.75 * plain), 4, "adam")).to_toml())
    assert plan.memory.shard == found.best[0].candidate.shard and not plan.memory.budget
    assert plan.origin("memory.shard").kind == "tuned"


def test_parameters_that_cannot_be_divided_are_not() -> None:
    net = nn.Sequential(nn.Embedding(1 << 14, 16, sparse=True), nn.Flatten(), nn.Linear(64, 8))
    subject = Subject(net, (4,), WHERE, dtype=torch.int64)
    found = search(subject, [Candidate(Layout(data=2))], BATCH, 1 << 20)
    assert not found.best and found.impossible == 2  # gathered for a step, and layer by layer


def test_nobody_computes_again_what_there_is_room_for() -> None:
    net = convolutions()
    every = list(candidates(4, net.pixels, BATCH, net.most_stages))
    found = search(net, every, BATCH, 1 << 40)
    assert found.candidates == len(every)
    assert not any(p.candidate.budget or p.candidate.shard != "none" for p in found.best)


def test_what_holds_less_is_never_faster_than_its_bound() -> None:
    net = convolutions()
    for candidate in candidates(4, net.pixels, BATCH, 6):
        bound = Case(net, candidate, BATCH, "sgd").least_s()
        for other in smaller(candidate, 2 << 20):
            assert bound <= Case(net, other, BATCH, "sgd").predict().step_s * (1 + 1e-9), other


def test_stages_choose_for_themselves() -> None:
    candidate = Candidate(Layout(pipe=2), "1f1b", 4, budget="4500000B")
    case = Case(convolutions(), candidate, BATCH, "sgd")
    assert case.memory_bytes() == 4_500_000
    # The first stage has two micro-batches alive, the second one.
    most, again_s = case.need.within(candidate.make(), 4_500_000)
    assert most == 4_500_000 and again_s[0] > 0 == again_s[1]


def test_the_choice_is_explained_and_becomes_a_plan() -> None:
    net = convolutions()
    found = within(net, Layout(width=2), 0.8)
    (told,), question = found.best, asked(net, found.best[0].memory_bytes, 2)
    heading, row = rows(found)
    assert row[heading.index("recompute")] == "by budget"
    why, *_ = reasons(found, question)
    assert why.startswith("width=2, within budget: computing ") and "computing again" in why
    plan = Plan.parse(plan_of(found, question).to_toml())
    assert plan.memory.budget == told.candidate.budget and plan.memory.recompute == 0
    assert str(plan.origin("memory.budget")).startswith("tuned: predicted ")
