"""The benchmark of helpers runs as its README says, only smaller; its bounds are what arithmetic says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commands import python
from faults import quota_refusal
from nodes import refusal

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
HERE = BENCHMARKS / "offload"
MODULES = (
    *(
        "augmentation",
        "bounds",
        "bystanders",
        "contender",
        "epoch_work",
        "epochs",
        "figures",
        "formats",
    ),
    *("peers", "photo", "places", "publishing", "report", "report_augmentation", "report_epochs"),
    *("report_peers", "report_stream", "rounds", "stream", "workload"),
)
PLACES = pytest.mark.skipif(
    bool(refusal() or quota_refusal()), reason=f"no nodes or quotas: {refusal() or quota_refusal()}"
)
RATES = st.floats(1.0, 1e4)


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """The benchmark's own modules: beside their script, as it finds them."""
    for name in MODULES:
        sys.modules.pop(name, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS / "common"))
        patch.syspath_prepend(str(HERE))
        yield {name: __import__(name) for name in MODULES}
    for name in MODULES:
        sys.modules.pop(name, None)


def measured(folder: Path, *words: str) -> str:
    small = ["--rounds=1", "--patience=0", "--seconds=0.2", "--photos=2", f"--results={folder}"]
    done = subprocess.run(
        [python(), str(HERE / "run.py"), *small, *words],
        capture_output=True, text=True, check=False, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(folder.iterdir()) or "stream" in words[0], "too few rounds are not kept"
    return done.stdout


# --- small runs -----------------------------------------------------------------------------------


@PLACES
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_augmentation_is_measured(tmp_path: Path) -> None:
    said = measured(tmp_path, "--parts=jpeg-32", "--quotas", "100", "50")
    assert said.count("**Helper with") == 2
    assert "fivefold, helper on core 1, another node" in said and "extra hardware" in said
    assert "at least 90% of the bound: too few rounds to say" in said


@PLACES
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_trainers_are_measured(tmp_path: Path) -> None:
    said = measured(tmp_path, "--parts=two")
    assert said.count("the slower trainer trains") == 3


@PLACES
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", ["validation", "hybrid", "tiny-imagenet"])
def test_epochs_are_measured_and_their_figures_equal(tmp_path: Path, part: str) -> None:
    said = measured(tmp_path, f"--parts={part}", "--epochs=1", "--half=0.2")
    assert "validations are equal bit by bit" in said
    assert "bounds are from these" in said


@PLACES
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_streams_are_the_same_whatever_becomes_of_helpers(tmp_path: Path) -> None:
    said = measured(tmp_path, "--parts=stream", "--runs=20", "--batches=40")
    assert "the same hash in all runs with faults: 20 of 20: met" in said
    kept = json.loads((tmp_path / "stream.json").read_text())
    assert sum(row["by_helpers"] for row in kept["rows"]) > 100
    assert sum(row["done"]["kill"] + row["done"]["stall"] for row in kept["rows"]) > 10


@PLACES
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_peers_that_need_no_other_environment(tmp_path: Path) -> None:
    said = measured(tmp_path, "--parts=peers", "--peers", "local", "remote", "torch")
    assert "DataLoader(num_workers=1)" in said and "fivefold, helper on another node, TCP" in said


# --- arithmetic -----------------------------------------------------------------------------------


@given(train=RATES, augment=RATES, own_ms=st.floats(0.01, 100.0))
def test_a_bound_balances_what_is_made_and_what_is_trained(
    modules: dict[str, ModuleType], train: float, augment: float, own_ms: float
) -> None:
    own_s = own_ms / 1e3
    none = 1 / (1 / train + own_s)
    rates = modules["bounds"].Rates(none, train, augment, own_s)
    possible = rates.steals
    assert none * (1 - 1e-9) <= possible <= train
    assert possible >= min(rates.waits, train) * (1 - 1e-9), "making the rest is never worse"
    if possible < train:
        busy_s = possible / train + (possible - augment) * own_s
        assert busy_s == pytest.approx(1.0), "the trainer is busy all the time"


@given(
    seconds=st.tuples(*[st.floats(0.1, 50.0)] * 3), evaluated=st.floats(0.1, 50.0),
    made=st.floats(0.1, 50.0),
)  # fmt: skip
def test_a_helper_for_both_is_never_worse_than_for_one(
    modules: dict[str, ModuleType],
    seconds: tuple[float, float, float],
    evaluated: float,
    made: float,
) -> None:
    possible, whole_s = modules["bounds"].with_validation, sum(seconds)
    train_s, evaluate_s, augment_s = seconds
    one = possible(train_s, evaluate_s, augment_s, evaluated_s=evaluated)
    both = possible(train_s, evaluate_s, augment_s, evaluated_s=evaluated, made_s=made)
    assert both >= one * (1 - 1e-9)
    epoch_s = whole_s / both
    assert epoch_s >= max(train_s, evaluated) * (1 - 1e-9)
    exactly = 1 + 1e-9
    if train_s * exactly < epoch_s < train_s + augment_s and epoch_s > evaluated * exactly:
        by_helper = (epoch_s - evaluated) / made
        assert train_s + (1 - by_helper) * augment_s == pytest.approx(epoch_s)


# --- data and tables ------------------------------------------------------------------------------


def test_data_are_read_by_the_readers_of_the_real_files(
    modules: dict[str, ModuleType], tmp_path: Path
) -> None:
    works = modules["epoch_work"].WORKS
    for name in ("cifar10", "svhn", "tiny-imagenet"):
        folder = tmp_path / name
        folder.mkdir()
        modules["epoch_work"].make_data(works[name], folder)
        train, test = modules["epoch_work"].datasets(works[name], folder)
        assert (len(train), len(test)) == (works[name].train, works[name].test)
        image, label = test[0]
        assert image.shape == (3, works[name].pixels, works[name].pixels) and 0 <= label < 10


def test_the_readme_shows_what_the_results_say(modules: dict[str, ModuleType]) -> None:
    text = (HERE / "README.md").read_text()
    assert modules["report"].PAGE.renewed(text, HERE / "results") == text


def test_a_difference_of_one_bit_is_told(modules: dict[str, ModuleType]) -> None:
    def answers(last: float) -> list[dict[str, object]]:
        return [{"results": {"0": [(1.0).hex()], "1": [last.hex()]}}]

    same_bits, nearly = modules["epochs"].same_bits, 0.1 + 0.2
    found = same_bits({"none": answers(0.3), "mv": answers(0.3), "without": [{"results": {}}]})
    assert found == {"contenders": ["none", "mv"], "epochs": 2, "differ": []}
    assert same_bits({"none": answers(0.3), "mv": answers(nearly)})["differ"] == ["1"]
