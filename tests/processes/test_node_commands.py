"""`fivefold train`, `verify` and `bench` with ranks on other nodes, whose files the launcher does not see."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine_places import SELDOM, Place, place_of
from waiting import awaited

TIMEOUT_S = 120.0
pytestmark = pytest.mark.timeout(3 * TIMEOUT_S)
MODELS = """
import os
import torch
from torch import nn

class Net(nn.Linear):
    def __init__(self):
        super().__init__(12, 4)

    def forward(self, x):
        if os.environ.get("GIVEN") == "dies" and os.environ["RANK"] == "1":
            os._exit(7)
        return super().forward(x.flatten(1))
"""


@pytest.fixture(params=SELDOM, scope="module")
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    with place_of(request.param, tmp_path_factory.mktemp("site")) as made:
        yield made


Call = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def home(place: Place, tmp_path: Path) -> Iterator[Path]:
    """Where commands are called: every node has a folder of this name, empty at first."""
    folder = place.own or tmp_path
    yield folder
    for found in place.seen(folder):
        for path in found.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.fixture
def call(place: Place, home: Path, tmp_path: Path) -> Call:
    (tmp_path / "temporary").mkdir()

    def fivefold(command: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                *place.before(home),
                *[sys.executable, "-m", "fivefold", command, *words, *place.where],
            ],
            cwd=home if place.own is None else None,  # which the words before enter elsewhere
            env=place.environ
            | {"TMPDIR": str(tmp_path / "temporary"), "COLUMNS": "100"}
            | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )

    return fivefold


@pytest.fixture(autouse=True)
def nothing_left(place: Place) -> Iterator[None]:
    yield
    awaited(lambda: not place.processes(), "the nodes to be empty", TIMEOUT_S)


def test_a_model_is_verified_and_the_figures_come_here(
    call: Call, home: Path, tmp_path: Path, place: Place
) -> None:
    for folder in place.seen(home):
        (folder / "models.py").write_text(MODELS)
    words = ("--input", "3x2x2", "--ppn", "1", "--steps", "1", "--json", "a.json")
    done = call("verify", "models:Net", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("exact: models:Net under data=2 equals one")
    report = json.loads((home / "a.json").read_text())
    assert report["passed"] and len({q["name"] for q in report["quantities"]}) > 3
    assert not list((tmp_path / "temporary").glob("fivefold-verify-*"))


@pytest.mark.long
def test_a_model_that_is_not_exact_and_one_that_fails(
    call: Call, home: Path, tmp_path: Path, place: Place
) -> None:
    for folder in place.seen(home):
        (folder / "models.py").write_text(MODELS)
    words = ("--input", "3x8x8", "--steps", "1", "--layout", "data=4")
    done = call("verify", "resnet20", *words, "--batch-norm", "replica", "--json", "a.json")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "NOT exact" in done.stdout.splitlines()[-1]
    assert not json.loads((home / "a.json").read_text())["passed"]
    done = call("verify", "models:Net", "--input", "3x2x2", "--layout", "data=4", GIVEN="dies")
    assert done.returncode == 7
    assert "rank 1 of 4 exited with code 7" in done.stderr
    assert list((tmp_path / "temporary").glob("fivefold-verify-*/rank-*.log"))


@pytest.mark.long
def test_a_recipe_is_trained_and_its_directory_is_where_rank_0_is(
    call: Call, home: Path, place: Place
) -> None:
    done = call("train", "digits", "--epochs", "1", "--batch-size", "256", "--ppn", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    here, first = place.seen(home)[:2]
    run = first / "runs" / "digits-001"
    assert {"metrics.jsonl", "plan.toml", "weights.pt"} <= {path.name for path in run.iterdir()}
    assert "data=2" in done.stdout
    if place.own is None:
        logs = run / "logs"
        assert not (here / "fivefold-logs").exists()
    else:
        assert "the run's directory is on the node of rank 0" in done.stdout
        [logs] = (here / "fivefold-logs").iterdir()
    assert {f"rank-{rank}.log" for rank in range(2)} <= {path.name for path in logs.iterdir()}


@pytest.mark.long
def test_contenders_are_measured_between_nodes(call: Call, home: Path) -> None:
    words = ("--sizes", "4:16", "--rounds", "1", "--against", "gloo", "--json", "all.json")
    done = call("bench", "allreduce", "--ppn", "1", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((home / "all.json").read_text())
    assert list(record["results"]) == ["fivefold", "gloo"]
    for found in record["results"].values():
        assert all(m["right"] and 0 < m["least_s"] <= m["most_s"] and not m["error"] for m in found)


@pytest.mark.slow
def test_mpi_between_nodes_is_measured_too(place: Place, call: Call) -> None:
    if place.engine != "ssh" or place.options:
        pytest.skip("which engine starts the others matters to none of these")
    words = ("--sizes", "64", "--rounds", "1", "--contender", "openmpi", "--against", "mpich,gloo")
    done = call("bench", "allreduce", *words, "-n", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 ranks on 2 nodes" in done.stdout and "wrong" not in done.stdout


def test_what_cannot_be_measured_between_nodes_is_told(place: Place, call: Call) -> None:
    done = call("bench", "allreduce", "-n", "4", "--against", "fivefold-arena")
    assert done.returncode == 2
    assert done.stderr.startswith("error: fivefold-arena is for ranks of one node"), done.stderr
