"""The fuzzer itself: its judge is right, it finds what is wrong, and makes it small."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fivefold.parallel.randomness import key_of
from fivefold.parallel.randomness import uniform as in_layouts
from fivefold.train.verify import one_process
from fivefold.train.verify.one_process import flat, uniform
from fuzz import compare, nets
from fuzz.cases import complete, micro_batches, random_case, tags
from fuzz.faults import NUMBERS, OTHERS
from fuzz.judge import Judge, Rejected, request
from fuzz.pool import Ranks
from fuzz.runner import Runner, checked
from fuzz.shrink import shrunk

PLAIN: dict[str, Any] = {
    "seed": 3,
    "net": {
        "input": {"kind": "image", "channels": 2},
        "blocks": [
            ["conv", {"out": 3, "k": 3, "padding": 1}],
            ["batch_norm", {}],
            ["activation", {"which": "relu"}],
            ["dropout", {"which": "Dropout", "p": 0.3, "inplace": False}],
            ["counter", {"read": False}],
            ["unused", {"how": "never"}],
            ["conv", {"out": 2, "k": 1, "padding": 0}],
        ],
    },
    "loss": {"name": "mse"},
    "layout": {"data": 2},
    "plan": {},
    "backend": "gloo",
    "example": False,
    "batches": [{"rows": 5, "size": [6, 5]}, {"rows": 4, "size": [6, 5]}],
    "steps": [{"batch": 0}, {"batch": 1}],
}


def plain(**changes: Any) -> dict[str, Any]:
    return complete({**copy.deepcopy(PLAIN), **changes})


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """Processes stay from test to test here, and others take their place after a crash."""


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner() as made:
        yield made


@pytest.fixture
def judge(runner: Runner) -> Judge:
    return runner.judge


# ---- the judge


def by_hand(case: dict[str, Any], micro: list[list[int]] | None) -> dict[str, torch.Tensor]:
    """Weights after the steps of a case, written down as anyone would."""
    from fuzz import data, losses

    torch.manual_seed(case["seed"])
    net = nets.build(case["net"])
    loss = losses.build(case["loss"], net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    for number in range(len(case["steps"])):
        x, y = data.batch(case, case["steps"][number]["batch"])
        optimizer.zero_grad()
        if micro is None:
            out = net(x)
        else:
            out = torch.empty(0)
            parts = [net(x[rows]) for rows in micro]
            order = [row for rows in micro for row in rows]
            out = torch.stack([torch.cat(parts)[order.index(row)] for row in range(len(x))])
        loss(out, y).backward()
        optimizer.step()
    return dict(net.state_dict())


@pytest.fixture
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.long
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("micro", [None, [[0, 3], [1, 4], [2]]])
def test_the_judge_trains_as_anyone_would(judge: Judge, micro: Any) -> None:
    blocks = [b for b in PLAIN["net"]["blocks"] if b[0] != "dropout"]
    case = plain(net={**PLAIN["net"], "blocks": blocks}, steps=[{"batch": 0}, {"batch": 0}])
    asked = request(case)
    for step in asked["steps"]:
        step["micro_batches"] = micro
    found = judge.ask(asked)["steps"][-1]
    for name, value in by_hand(case, micro).items():
        got = {**found["weights"], **found["buffers"]}[name]
        torch.testing.assert_close(got, value, rtol=1e-12, atol=1e-14)
    assert found["gradients"]["blocks.4.left"] is None
    assert found["state"]["blocks.3.calls"] == 2 * len(micro or [0])


def test_hooks_that_see_a_micro_batch_at_a_time_are_no_case(judge: Judge) -> None:
    """A reentrant checkpoint goes backward by itself, for each micro-batch."""
    inner = [["accumulate_hook", {"how": "step"}]]
    blocks = [["group_norm", {"groups": 1}], ["checkpointed", {"reentrant": True, "inner": inner}]]
    asked = request(plain(net={**PLAIN["net"], "blocks": blocks}))
    judge.ask(asked)
    asked["steps"][0]["micro_batches"] = [[0, 1, 2], [3, 4]]
    with pytest.raises(Rejected, match="see a micro-batch at a time"):
        judge.ask(asked)


def test_masks_are_those_that_are_documented() -> None:
    for shape, origin in (((5, 3), 0), ((4, 2, 3), 7)):
        key = key_of(11, 2, "a.b", 3)
        each = int(np.prod(shape[1:]))
        index = np.arange(origin * each, (origin + shape[0]) * each)
        theirs = in_layouts(torch.Size(shape), origin * each, key, torch.device("cpu"))
        assert torch.equal(uniform(index, 11, 2, "a.b", 3).view(shape), theirs)


class Twice(nn.Module):
    """Drops in a part that is checkpointed, so it runs again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.seen = nn.Dropout(0.5), list[torch.Tensor]()

    def part(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.drop(x))
        return self.seen[-1] * x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.utils.checkpoint.checkpoint(self.part, x, use_reentrant=False)
        return y + self.drop(x)


def test_what_runs_again_draws_the_same_masks() -> None:
    net, x = Twice(), torch.ones(6, 8, requires_grad=True)
    masks = one_process.Masks(net, seed=5, step=0)
    with masks.entered():
        masks.begin(range(6))
        net(x).sum().backward()
    first, again = net.seen
    assert torch.equal(first, again)
    kept = uniform(np.arange(48), 5, 0, "drop", 0).view(6, 8) >= 0.5
    assert torch.equal(first != 0, kept)
    assert torch.nn.functional.dropout.__module__ == "torch.nn.functional"


def test_micro_batches_draw_by_the_numbers_of_their_samples() -> None:
    net = nn.Sequential(nn.Dropout(0.5))
    masks = one_process.Masks(net, seed=5, step=1)
    with masks.entered():
        masks.begin(range(6))
        whole = net(torch.ones(6, 3))
        masks.begin([1, 4])
        some = net(torch.ones(2, 3))
    assert torch.equal(some, whole[[1, 4]])


def test_a_micro_batch_that_runs_again_draws_its_own_masks() -> None:
    net, x = Twice(), torch.ones(6, 8, requires_grad=True)
    masks = one_process.Masks(net, seed=5, step=0)
    with masks.entered():
        made = []
        for samples in ([0, 1], [2, 3, 4, 5]):
            masks.begin(samples)
            made.append(net(x[samples]))
        torch.cat(made).sum().backward()
    first, second, *again = net.seen
    assert {tuple(t.shape) for t in again} == {(2, 8), (4, 8)}
    for one in again:
        assert torch.equal(one, first if len(one) == 2 else second)


def test_leaves_have_the_same_names_on_both_sides() -> None:
    from fuzz.leaves import flat as on_ranks

    tree = {"a": (1, None), "b": nets.Returned(torch.ones(()), None, (torch.ones(()),)),
            "c": [nets.Triple(torch.ones(()), torch.ones(()))], "": 3}  # fmt: skip
    assert [*flat(tree)] == [*on_ranks(tree)]


def test_micro_batches_are_divided_as_documented() -> None:
    case = {"layout": {"data": 2, "pipe": 2}, "plan": {"pipeline.micro_batches": 2}}
    assert micro_batches(case, 7) == [[0, 3, 4], [1, 2, 5, 6]]
    assert micro_batches({"layout": {"data": 2}, "plan": {}}, 7) is None


def test_it_imports_nothing_of_ours() -> None:
    import ast

    tree = ast.parse(Path(one_process.__file__).read_text())
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
    assert not {name for name in names if name.startswith("fivefold")}


def test_what_one_process_cannot_run_is_rejected(judge: Judge) -> None:
    case = plain()
    case["batches"][0]["target"]["shape"] = [5, 1, 7]
    with pytest.raises(Rejected, match="step 0"):
        judge.of(case)
    assert judge.of(plain())["steps"]  # and it goes on


# ---- the comparison


@pytest.mark.long
@pytest.mark.parametrize("layout", [{}, {"data": 2}, {"data": 3}])
def test_a_net_compared_with_itself_is_exact(runner: Runner, layout: dict[str, int]) -> None:
    assert runner.run(plain(layout=layout)).kind == "exact"


@pytest.mark.long(every=8)
@pytest.mark.parametrize("fault", NUMBERS)
def test_what_is_wrong_is_found(runner: Runner, fault: str) -> None:
    outcome = runner.run(plain(), fault=fault)
    assert outcome.kind == "wrong", outcome


@pytest.mark.long(every=8)
@pytest.mark.parametrize("fault", OTHERS)
def test_how_a_case_ends_is_told(judge: Judge, fault: str) -> None:
    ranks = Ranks(limit_s=6.0 if OTHERS[fault] == "hang" else 40.0)
    try:
        assert (
            compare.judged(plain(), judge.of(plain()), ranks.run(plain(), fault)).kind
            == OTHERS[fault]
        )
    finally:
        ranks.close()


def test_nan_and_infinity_equal_nothing() -> None:
    for value in (torch.nan, torch.inf):
        assert compare._error(torch.tensor([value]), torch.tensor([value]), 1.0) == torch.inf
    assert compare._error(None, torch.zeros(1), 1.0) == torch.inf


# ---- cases


def test_cases_are_plain_data_and_come_from_their_seeds() -> None:
    for seed in (1, 2, 3):
        case = random_case(seed)
        assert json.loads(json.dumps(case)) == case == random_case(seed)
        assert tags(case)


def test_shrinking_keeps_what_matters(runner: Runner) -> None:
    def run(case: dict[str, Any]) -> compare.Outcome:
        names = [name for name, _ in case["net"]["blocks"]]
        bad = (
            {"conv", "counter"} <= {*names} and len(case["steps"]) > 1 and "data" in case["layout"]
        )
        return compare.Outcome("wrong" if bad else "exact", "numbers")

    case = plain(plan={"numerics.seed": 4}, backend="fivefold")
    small, outcome = shrunk(case, compare.Outcome("wrong", "numbers"), run)
    assert outcome.kind == "wrong"
    assert {name for name, _ in small["net"]["blocks"]} == {"conv", "counter"}
    assert len(small["steps"]) == 2
    assert (small["plan"], small["backend"], small["layout"]) == ({}, "gloo", {"data": 2})
    assert runner.run(small).kind == "exact"


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "why"), [("low-precision", "rounding by samples"), ("diverging", "training diverges")]
)
def test_what_rounding_decides_is_not_judged(name: str, why: str) -> None:
    """Campaigns called these wrong: one process is as far from the truth there as ranks are."""
    case = json.loads((Path(compare.__file__).parent / "shaky" / f"{name}.json").read_text())
    judge = Judge()
    try:
        with pytest.raises(Rejected, match=why):
            checked(judge, case)
    finally:
        judge.close()
