"""Recording of groups: nothing changes for who uses them, and the trace has every operation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import trace_checks
from fivefold.arena.native import problem
from pool import Pool

BACKENDS = [
    "gloo",
    pytest.param("fivefold", marks=pytest.mark.skipif(bool(problem()), reason="no C core")),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    """Two ranks whose groups are recorded from the second on."""
    with Pool(2) as pool:
        pool.run("gloo", trace_checks.use_traced_groups)
        assert pool.run("gloo", trace_checks.use_traced_groups) == ["TracedGroup"] * 2
        yield pool


def test_both_backends_record_the_same(ranks: Pool, tmp_path: Path) -> None:
    if problem():
        pytest.skip("installed without the C core")
    ours = ranks.run("fivefold", trace_checks.every_operation, str(tmp_path / "fivefold"))
    gloos = ranks.run("gloo", trace_checks.every_operation, str(tmp_path / "gloo"))
    for own, gloo in zip(ours, gloos, strict=True):
        assert own["rows"] == gloo["rows"]
        assert own["results"] == gloo["results"]
        assert (own["notes"][0]["backend"], gloo["notes"][0]["backend"]) == ("fivefold", "gloo")
    assert [event for event in gloos[0]["events"] if event[0] not in ("send", "receive")][:8] == [
        ("all_reduce", 16, -1, 0), ("broadcast", 16, 1, 1), ("reduce", 16, 0, 2),
        ("all_gather", 16, -1, 3), ("all_gather", 16, -1, 4), ("gather", 16, 0, 5),
        ("scatter", 32, 0, 6), ("reduce_scatter", 16, -1, 7),
    ]  # fmt: skip
    assert ("receive", 16, -1, 0) in gloos[1]["events"]
    assert ("send", 16, 0, 0) in gloos[1]["events"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_operation_whose_row_was_written_over_leaves_the_new_one(
    ranks: Pool, tmp_path: Path, backend: str
) -> None:
    waiting, other = ranks.run(backend, trace_checks.written_over, str(tmp_path))
    assert waiting == {"sizes": [7] * 64, "starts": 0, "lost": 1}
    assert (other["sizes"], other["lost"]) == ([4], 0)


def test_numbers_of_collectives_are_the_same_on_all_ranks(ranks: Pool, tmp_path: Path) -> None:
    found = ranks.run("gloo", trace_checks.every_operation, str(tmp_path))
    told = [
        [(kind, number) for kind, _, _, number in one["events"] if kind not in ("send", "receive")]
        for one in found
    ]
    assert told[0] == told[1]
    assert [number for _, number in told[0]] == [*range(len(told[0]))]
    assert found[0]["notes"][0]["key"] == found[1]["notes"][0]["key"]


def test_those_who_call_groups_from_cpp_find_them_unchanged(ranks: Pool) -> None:
    assert ranks.run("gloo", trace_checks.consumers) == [[], []]


@pytest.mark.parametrize("backend", BACKENDS)
def test_exposed_and_hidden_are_the_whole(ranks: Pool, tmp_path: Path, backend: str) -> None:
    early, late = ranks.run(backend, trace_checks.hidden_and_exposed, str(tmp_path))
    for event in (early, late):
        assert 0 <= event["blocked"] <= event["total"]
        assert event["total"] - event["blocked"] >= 0.1e9
    # Rank 0 waits for the other, which comes 0.3 s later.
    assert early["blocked"] > 0.1e9
    assert early["total"] > 0.25e9


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_reduced_from_cpp_are_seen_and_named(
    ranks: Pool, tmp_path: Path, backend: str
) -> None:
    for found in ranks.run(backend, trace_checks.of_ddp, str(tmp_path)):
        assert found["tags"] == ["parameters and gradients"]
        assert found["count"] >= 7  # one bucket in the first step, two or more later
        assert not found["under_way"] and not found["problems"]
        # Waiting is counted once, however many buckets are under way.
        assert 0 < found["blocked"] <= min(found["total"], found["backward"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_recording_changes_no_bit(ranks: Pool, tmp_path: Path, backend: str) -> None:
    plain = ranks.run(backend, trace_checks.weights_of_ddp, None)
    traced = ranks.run(backend, trace_checks.weights_of_ddp, str(tmp_path))
    ranks.run(backend, trace_checks.of_ddp, str(tmp_path))  # ends the trace
    assert plain == traced
