"""Ranks that share a device hold weights and the state of optimisers once, and compute what they did."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import one_copy
from fivefold.arena.native import problem
from fivefold.plan import Layout
from pool import Failed, Pool

if problem():
    pytest.skip("installed without the C core", allow_module_level=True)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(4) as pool:
        yield pool


def results(pool: Pool, function: Any, *arguments: Any, size: int = 4) -> list[Any]:
    told = pool.run("fivefold", function, *arguments, size=size)
    assert not [one for one in told if isinstance(one, Failed)], told[0].trace
    return told


def equal(
    pool: Pool,
    optimizer: str,
    case: str = "",
    layout: Layout | None = None,
    per_device: int = 4,
    *,
    divided: bool = False,
    once: bool = True,
) -> None:
    """Whether shared weights and state, on every rank, are those of ranks with weights of their own."""
    arguments = optimizer, case, layout, per_device, divided
    expected = results(pool, one_copy.trained, "own", *arguments)
    found = results(pool, one_copy.trained, "shared", *arguments)
    for (weights, state, shared), (own_weights, own_state, _) in zip(found, expected, strict=True):
        assert shared == once
        differ = [name for name, value in own_weights.items() if weights.get(name) != value]
        assert not differ
        assert state == own_state
        assert [*state] == [*own_state]
    assert not any(shared for _, _, shared in expected)


DIVIDED = pytest.mark.parametrize("divided", [False, True], ids=["whole", "divided"])


@pytest.mark.long(every=3)
@DIVIDED
@pytest.mark.parametrize("optimizer", one_copy.OPTIMIZERS)
def test_every_optimizer_computes_what_it_does_with_weights_of_its_own(
    pool: Pool, optimizer: str, divided: bool
) -> None:
    equal(pool, optimizer, divided=divided)


@pytest.mark.long(every=3)
@DIVIDED
@pytest.mark.parametrize("case", one_copy.CASES)
def test_scripts_may_write_to_weights_and_state_as_ever(
    pool: Pool, case: str, divided: bool
) -> None:
    optimizer = {"sparse": "SGD", "scaled": "AdamW"}.get(case, "Adam")
    once = case != "by vector"  # which gives all of them other memory
    equal(pool, optimizer, case, divided=divided, once=once)


@pytest.mark.parametrize(
    ("layout", "per_device", "once"),
    [
        (Layout(data=4), 2, True),
        (Layout(data=2, height=2), 4, True),
        (Layout(data=2, width=2), 2, True),  # tiles of an image hold the same weights
        (Layout(data=2, pipe=2), 4, True),  # ranks of one stage share
        (Layout(data=2, pipe=2), 2, False),  # stages hold different ones
    ],
)
def test_ranks_that_hold_the_same_share_it_under_every_layout(
    pool: Pool, layout: Layout, per_device: int, once: bool
) -> None:
    equal(pool, "Adam", "written", layout, per_device, divided=True, once=once)


def close(found: Any, expected: Any) -> None:
    """Within rounding of sums in another order."""
    pair = (torch.tensor(value, dtype=torch.float64) for value in (found, expected))
    torch.testing.assert_close(*pair, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("ranks", [2, 4])
def test_replicas_are_bitwise_one_process_that_accumulates(pool: Pool, ranks: int) -> None:
    for ours, theirs in results(pool, one_copy.accumulated, ranks, size=ranks):
        assert ours == theirs


def test_weights_and_state_lie_in_memory_once(pool: Pool) -> None:
    for size, files, outside in results(pool, one_copy.mapped):
        assert not outside
        assert files <= 1.02 * size


def test_small_nets_have_copies_unless_the_plan_says_otherwise(pool: Pool) -> None:
    assert results(pool, one_copy.held_once, 15.5, size=2) == [False, False]
    assert results(pool, one_copy.held_once, 16, size=2) == [True, True]


def test_checkpoints_go_from_any_number_of_instances_to_any(pool: Pool, tmp_path: Path) -> None:
    expected = results(pool, one_copy.resumed, str(tmp_path / "whole"), 4, "own", 6)[0]
    for steps, ranks, weights in (
        (2, 4, "shared"),
        (4, 2, "shared"),
        (5, 1, "own"),
        (6, 4, "shared"),
    ):
        told = results(
            pool, one_copy.resumed, str(tmp_path / "parts"), ranks, weights, steps, size=ranks
        )
    for weights, state in told:
        for name, value in expected[0].items():
            close(weights[name], value)
        assert state.keys() == expected[1].keys()
        for number, kept in expected[1].items():
            for key, value in kept.items():
                close(state[number][key], value)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("one", "one wrote to weights, or to what an optimiser keeps, what others did not"),
        ("moved", "one gave parameters other memory than others did"),
        (
            "shard",
            'instances.weights = "shared" (user: set in Python): memory.shard = "optimizer" divides',
        ),
        ("forked", "this process is a forked copy of a rank that shares its weights with others"),
    ],
)
def test_what_cannot_be_shared_is_told_on_all_ranks(pool: Pool, what: str, said: str) -> None:
    for told in results(pool, one_copy.refused, what, size=2):
        assert said in told
        if what != "shard":
            assert told.count('instances.weights = "own"') == (2 if what == "forked" else 1)


def test_more_instances_than_memory_are_told_how_many_fit(pool: Pool) -> None:
    for told in results(pool, one_copy.refused, "room", size=2):
        assert told.startswith("instances.per_device = 2: weights and gradients of this net take ")
        assert told.endswith("MiB, so no more than 1 fit")


def test_another_backend_shares_no_memory(pool: Pool) -> None:
    for told in pool.run("gloo", one_copy.refused, "gloo", size=2):
        assert "the ranks of a device do not share memory; set instances.weights" in told
