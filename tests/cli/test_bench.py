"""`fivefold bench`: contenders side by side, every result checked; mistakes in one line."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import pytest

from commands import python
from fivefold.arena.native import problem
from fivefold.bench import MESSAGES, OPERATIONS
from fivefold.bench.measure import Measurement


def bench(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python(), "-m", "fivefold", "bench", *words],
        capture_output=True, text=True, check=False, timeout=100, cwd=folder,
    )  # fmt: skip


@pytest.mark.skipif(bool(problem()), reason="installed without the C core")
def test_contenders_are_measured_and_their_results_checked(tmp_path: Path) -> None:
    done = bench(
        "allreduce", "--sizes", "4:16", "--rounds", "1", "--against", "gloo",
        "--json", "all.json", folder=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "gloo / fivefold" in done.stdout and "wrong" not in done.stdout
    record = json.loads((tmp_path / "all.json").read_text())
    assert list(record["results"]) == ["fivefold", "gloo"]
    for found in record["results"].values():
        assert [m["size_bytes"] for m in found] == [4, 16]
        assert all(m["right"] and 0 < m["least_s"] <= m["most_s"] and not m["error"] for m in found)


@pytest.mark.skipif(bool(problem()), reason="installed without the C core")
def test_messages_of_pairs_are_told_in_bytes_per_second(tmp_path: Path) -> None:
    done = bench(
        "multi-bw", "-n", "5", "--sizes", "4K", "--rounds", "1", "--json", "all.json", folder=tmp_path
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads((tmp_path / "all.json").read_text())["results"]["fivefold"]
    assert found["moved_bytes"] == 2 * 64 * 4096  # of two pairs; the fifth rank has no partner
    assert found["right"] and not found["error"]
    rate = found["moved_bytes"] / found["rounds_s"][0] / 1e6
    assert "MB/s" in done.stdout and f"{rate:.1f}" in done.stdout


@pytest.mark.skipif(bool(problem()), reason="installed without the C core")
@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_of_every_contender_is_right(
    operation: str, overlap: bool, tmp_path: Path
) -> None:
    if overlap and operation in MESSAGES:
        pytest.skip("messages have no call that goes on by itself")
    done = bench(
        operation, "--sizes", "64", "--rounds", "1", *["--overlap"] * overlap,
        "--against", "fivefold-arena,gloo,openmpi,mpich", "--json", "all.json", folder=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "all.json").read_text())["results"]
    assert all(m["right"] and not m["error"] for found in results.values() for m in found)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["allredcue"], "unknown operation 'allredcue'; did you mean 'allreduce'?"),
        (["allreduce", "--against", "glooo"], "unknown contender 'glooo'; did you mean 'gloo'?"),
        (["allreduce", "--against", "fivefold"], "a contender is named twice"),
        (["allreduce", "--sizes", "4:1x"], "'1x' is no number of bytes; write 4, 64K or 16M"),
        (["allreduce", "--sizes", "1M:4"], "FROM is larger than TO"),
        (["allreduce", "-n", "1"], "at least 2 ranks"),
        (["p2p", "--overlap"], "--overlap is for collectives"),
        (["allreduce", "--json", "no/where.json"], "there is no folder"),
    ],
)
def test_a_mistake_is_told_in_one_line(words: list[str], told: str, tmp_path: Path) -> None:
    from fivefold.cli.bench import Bench
    from fivefold.errors import UsageError

    with pytest.raises(UsageError) as caught:
        Bench.parse(words).run()
    assert told in str(caught.value)


def test_overlap_is_what_osu_calls_so() -> None:
    hidden = Measurement(4, rounds_s=[1.25], pure_s=1.0, compute_s=1.0)
    assert math.isclose(hidden.overlap_percent, 75.0)
    assert Measurement(4, rounds_s=[3.0], pure_s=1.0, compute_s=1.0).overlap_percent == 0.0
