"""The benchmark of pipelines: its simulation of ranks that share cores, its page, and a small run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from commands import python
from fivefold.parallel.pipeline.schedules import make
from fivefold.parallel.pipeline.simulate import StageTimes, simulate

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
HERE = BENCHMARKS / "pipeline"
MODULES = ("contender", "contenders", "figures", "publishing", "report", "sharing", "ways")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The benchmark's own modules: beside their script, as it finds them."""
    monkeypatch.syspath_prepend(str(BENCHMARKS / "common"))
    monkeypatch.syspath_prepend(str(HERE))
    yield {name: __import__(name) for name in MODULES}
    for name in MODULES:
        sys.modules.pop(name, None)


def uneven(stages: int, reduce_s: float) -> StageTimes:
    forward = tuple(1 + 0.1 * s for s in range(stages))
    backward = tuple(2 + 0.3 * (s % 3) for s in range(stages))
    half = tuple(b / 2 for b in backward)
    return StageTimes(forward, backward, half, half, (reduce_s,) * stages)


@pytest.mark.parametrize(
    "schedule", ["layer", "gpipe", "1f1b", "interleaved", "zero-bubble", "gems", "gems-overlap", "chimera"]
)  # fmt: skip
def test_a_core_for_every_rank_is_what_the_simulator_says(
    modules: dict[str, ModuleType], schedule: str
) -> None:
    micros, each = (1, 1) if schedule == "layer" else (6, 2 if schedule == "interleaved" else 1)
    made = make(schedule, 4, micros, each)
    times = uneven(made.stages, 0.25 if made.chains > 1 else 0.0)
    found = modules["sharing"].on_cores(made, times, times, 4)
    assert found.makespan_s == pytest.approx(simulate(made, times).makespan_s)


def test_two_cores_are_enough_for_gems_and_too_few_for_gpipe(
    modules: dict[str, ModuleType],
) -> None:
    on_cores, even = modules["sharing"].on_cores, StageTimes.even(4)
    gems, gpipe = make("gems", 4, 8), make("gpipe", 4, 8)
    assert modules["sharing"].most_at_once(on_cores(gems, even, even, 2)) == 2
    assert on_cores(gems, even, even, 2).makespan_s == pytest.approx(
        simulate(gems, even).makespan_s
    )
    # 4 stages x 8 micro-batches x 3 seconds on two cores, at the least.
    assert on_cores(gpipe, even, even, 2).makespan_s >= 48.0
    assert on_cores(gpipe, even, even, 1).makespan_s == pytest.approx(96.0)


def test_a_rank_that_computes_alone_is_faster(modules: dict[str, ModuleType]) -> None:
    on_cores, layer = modules["sharing"].on_cores, make("layer", 4, 1)
    fast, slow = StageTimes.even(4), StageTimes.even(4, 2.0, 4.0)
    assert on_cores(layer, fast, slow, 2).makespan_s == pytest.approx(12.0)
    two = make("gpipe", 2, 2)
    fast, slow = StageTimes.even(2), StageTimes.even(2, 2.0, 4.0)
    # F alone, F and F, F alone, B alone, B and B, B alone
    assert on_cores(two, fast, slow, 2).makespan_s == pytest.approx(1 + 2 + 1 + 2 + 4 + 2)


def test_the_readme_shows_what_the_results_say(modules: dict[str, ModuleType]) -> None:
    text = (HERE / "README.md").read_text()
    if list((HERE / "results").glob("*.json")):
        assert modules["report"].renewed(text, HERE / "results") == text
    else:
        assert "Figures follow" in text


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_stages_beside_torch(tmp_path: Path) -> None:
    small = ["--image=32", "--samples=2", "--micro-batches=2", "--rounds=1", "--steps=1"]
    done = subprocess.run(
        [python(), str(HERE / "run.py"), "--parts=torch", *small, "--results", str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "too few rounds to say" in done.stdout
    assert not list(tmp_path.iterdir())
