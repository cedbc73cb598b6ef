"""What the hang watch says of ranks that wait: real runs in which one rank misbehaves."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from faults import notes, run
from fivefold.arena.native import problem
from nodes import Job, Nodes, refusal
from template import Template

BACKENDS = [
    pytest.param("fivefold", marks=pytest.mark.skipif(bool(problem()), reason="no C core")),
    "gloo",
]
LIMIT_S = 90.0


@pytest.fixture
def node(template: Template) -> Iterator[Nodes]:
    with Nodes(1, apart=False, template=template) as made:
        yield made


def until(done: Callable[[], Any], job: Job) -> Any:
    end = time.monotonic() + LIMIT_S
    while not (found := done()):
        assert time.monotonic() < end, job.told()
        assert None in [rank.code for rank in job.ranks], job.told()
        time.sleep(0.05)
    return found


def told(trace: Path, *kinds: str) -> list[dict[str, Any]]:
    return notes(trace, *(kinds or ("hang", "mismatch")))


def release(pipe: Path) -> None:
    """Let go of who reads it."""
    os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_is_stuck_in_a_read_is_found_and_the_end_of_it_noted(
    backend: str, node: Nodes, tmp_path: Path
) -> None:
    pipe, trace = tmp_path / "pipe", tmp_path / "trace"
    os.mkfifo(pipe)
    options = ["--fault=read", "--on=1", "--steps=4", f"--pipe={pipe}", f"--backend={backend}"]
    job = run(node, trace, *options, ranks=3)
    (note,) = until(lambda: told(trace), job)
    assert (note["kind"], note["by"]) == ("hang", 0)
    assert (note["waiting"], note["missing"]) == ([0, 2], [1])
    assert note["text"].splitlines()[0].endswith("for rank 1")
    stuck = note["states"][0]
    assert (stuck["rank"], stuck["phase"], stuck["condition"]) == (1, "load", "")
    assert "faulty_training.py" in stuck["at"]
    assert "_read_late (Path().read_bytes" in stuck["at"]
    assert any("_read_late" in line for line in stuck["stack"])
    assert any("faulty_training.py" in line for line in note["states"][1]["stack"])
    release(pipe)
    until(lambda: len(told(trace)) > 1, job)
    release_all(pipe, job)
    job.succeed(LIMIT_S)
    assert [n.get("resolved", False) for n in told(trace)][:2] == [False, True]
    said = [rank.text for rank in job.ranks]
    assert "fivefold: hang: ranks 0, 2 have waited" in said[0]
    assert "fivefold: rank 0 goes on after" in said[0]
    assert not any("fivefold: hang" in text for text in said[1:])
    assert sorted(path.name for path in trace.iterdir()) == [
        f"rank-{rank:05d}.trace" for rank in range(3)
    ]


def release_all(pipe: Path, job: Job) -> None:
    """The rank reads again in every step."""
    end = time.monotonic() + LIMIT_S
    while any(rank.code is None for rank in job.ranks) and time.monotonic() < end:
        try:
            release(pipe)
        except OSError:  # nobody reads
            time.sleep(0.02)


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_without_faults_says_nothing(backend: str, node: Nodes, tmp_path: Path) -> None:
    job = run(node, tmp_path, "--steps=6", f"--backend={backend}", hang_s=20)
    said = job.succeed(LIMIT_S)
    assert not told(tmp_path)
    assert not any("fivefold:" in text for text in said)


@pytest.mark.long
def test_calls_that_do_not_belong_together_are_both_named(node: Nodes, tmp_path: Path) -> None:
    options = ["--fault=other", "--on=1", "--steps=4", "--backend=gloo", "--timeout=8"]
    job = run(node, tmp_path, *options)
    (note, *_) = until(lambda: told(tmp_path), job)
    assert (note["kind"], note["by"], note["missing"]) == ("mismatch", 0, [1])
    first = note["text"].splitlines()[0]
    assert "rank 0 asks for all_reduce number" in first
    assert "rank 1 for barrier number" in first
    assert "faulty_training.py" in first
    job.fail(LIMIT_S)
    assert "CommError" in job.ranks[0].text
    error = job.ranks[0].text.partition("CommError")[2]
    assert "ranks do not agree on an operation" in error


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_another_size_is_named_by_the_error(backend: str, node: Nodes, tmp_path: Path) -> None:
    options = ["--fault=all_reduce", "--on=1", "--steps=4", f"--backend={backend}", "--timeout=8"]
    job = run(node, tmp_path, *options)
    job.fail(LIMIT_S)
    error = job.ranks[0].text.partition("CommError")[2]
    assert "rank 1 for all_reduce number" in error
    assert "(12 bytes of float32)" in error
    assert "mismatch" in {note["kind"] for note in told(tmp_path)}


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_is_killed_is_told_as_dead(backend: str, node: Nodes, tmp_path: Path) -> None:
    options = ["--fault=die", "--on=2", "--steps=4", f"--backend={backend}", "--timeout=8"]
    job = run(node, tmp_path, *options, ranks=3)
    job.fail(LIMIT_S)
    errors = [rank.text.partition("CommError")[2] for rank in job.ranks[:2]]
    assert any("rank 2" in error and "is dead; it was in step 3" in error for error in errors)


@pytest.mark.long
def test_a_rank_that_a_signal_stopped(node: Nodes, tmp_path: Path) -> None:
    job = run(node, tmp_path, "--fault=layer", "--on=1", "--seconds=0.1", "--steps=30")
    until(lambda: all("at train" in rank.text for rank in job.ranks), job)
    until((tmp_path / "rank-00001.trace").exists, job)
    job.ranks[1].send_signal(signal.SIGSTOP)
    (note,) = until(lambda: told(tmp_path), job)
    assert note["missing"] == [1]
    assert "stopped by a signal" in note["text"]
    job.ranks[1].send_signal(signal.SIGCONT)
    job.succeed(LIMIT_S)
    assert [n.get("resolved", False) for n in told(tmp_path)] == [False, True]


@pytest.mark.long
@pytest.mark.skipif(bool(refusal()), reason=f"no nodes of their own: {refusal()}")
def test_nodes_that_see_only_their_own_traces_ask_through_the_store(
    template: Template, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with Nodes(2, template=template) as nodes:
        options = ["--fault=read", "--on=1", "--steps=4", f"--pipe={pipe}", "--timeout=30"]
        job = run(nodes, nodes.local(0) / "trace", *options, ranks=1)
        until(lambda: "fivefold: hang" in job.ranks[0].text, job)
        release_all(pipe, job)
        said = job.succeed(LIMIT_S)
    assert "for rank 1" in said[0]
    assert "rank 1 on node1: step 3, load for" in said[0]
    assert "_read_late (Path().read_bytes" in said[0]
    assert "rank 0 goes on after" in said[0]
