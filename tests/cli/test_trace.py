"""Scripts and recipes that are recorded, as they are: without a changed line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fivefold.launch.environment import without_places
from fivefold.trace import Phase
from fivefold.trace.reader import RankTrace
from fivefold.trace.schema import KINDS, PHASES, TAGS, State

CLEAN = {
    name: value
    for name, value in without_places(os.environ).items()
    if not name.startswith(("FIVEFOLD_", "SLURM_", "PBS_"))
}

DDP = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

several = "RANK" in os.environ
if several:
    dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))
if several:
    net = nn.parallel.DistributedDataParallel(net)
images = TensorDataset(torch.randn(64, 32), torch.randint(4, (64,)))
sampler = DistributedSampler(images, shuffle=False) if several else None
loader = DataLoader(images, batch_size=8, sampler=sampler, num_workers=1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for x, y in loader:
    loss = nn.functional.cross_entropy(net(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
net.eval()
with torch.no_grad():
    for x, y in loader:
        net(x)
if "fail" in sys.argv:
    raise ValueError("no such thing")
weights = torch.cat([p.detach().flatten() for p in net.parameters()]).double()
print("weights", weights.sum().item().hex(), weights.square().sum().item().hex())
if several:
    dist.destroy_process_group()
"""


def fivefold(*words: object, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "fivefold", *map(str, words)],
        cwd=cwd, env=CLEAN | {"OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done


def weights(done: subprocess.CompletedProcess[str]) -> set[str]:
    return set(re.findall(r"weights (\S+ \S+)", done.stdout))


def traces(folder: Path) -> list[RankTrace]:
    return [RankTrace.load(path) for path in sorted(folder.glob("*.trace"))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(DDP)
    return tmp_path


def test_a_script_is_recorded_as_it_is(folder: Path) -> None:
    plain = fivefold("run", "-n", 2, "train.py", cwd=folder)
    done = fivefold("run", "-n", 2, "--trace", "--log-dir", "logs", "train.py", cwd=folder)
    assert weights(done) == weights(plain) and len(weights(plain)) == 1
    assert "recorded: fivefold report logs" in done.stderr
    found = traces(folder / "logs" / "trace")
    assert [trace.rank for trace in found] == [0, 1]
    for trace in found:
        assert trace.state == State.ENDED and not trace.problems
        assert trace.windows["steps"].sum() == 4
        assert trace.windows["samples"].sum() == 32
        assert (trace.windows["ready"] >= 0).all()
        spent = {PHASES[n]: ns for n, ns in enumerate(trace.windows["phase_ns"].sum(axis=0)[:8])}
        for phase in (Phase.LOAD, Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE):
            assert spent[phase] > 0, phase
        kinds = {(KINDS[row["kind"]], TAGS[row["tag"]]) for row in trace.sums}
        assert ("all_reduce", "parameters and gradients") in kinds
        assert ("broadcast", "batch-norm statistics") in kinds
        validated = trace.events[trace.events["phase"] == PHASES.index(Phase.VALIDATE)]
        assert (validated["kind"] == 0).sum() == 4
        assert trace.meta["backend"] == "gloo" and trace.meta["calibration"]
        assert trace.meta["environment"]["OMP_NUM_THREADS"] == "1"


def test_a_script_of_one_process_needs_no_torch_distributed(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=folder, env=CLEAN | {"FIVEFOLD_TRACE": "here"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (found,) = traces(folder / "here")
    assert found.windows["steps"].sum() == 8
    assert found.windows["samples"].sum() == 64
    assert found.state == State.ENDED


def test_a_script_that_fails_says_why_in_its_trace(folder: Path) -> None:
    fivefold("run", "--trace", "--log-dir", "logs", "train.py", "fail", cwd=folder, code=1)
    (found,) = traces(folder / "logs" / "trace")
    assert found.state == State.FAILED
    failures = [note["text"] for note in found.notes if note["kind"] == "failure"]
    assert failures == ["ValueError: no such thing"]


def test_without_the_variable_nothing_is_recorded(folder: Path) -> None:
    fivefold("run", "train.py", cwd=folder)
    assert not [*folder.rglob("*.trace")]


def test_a_recipe_is_recorded_unless_its_plan_says_no(folder: Path) -> None:
    words = ("train", "digits", "-n", 2, "--epochs", 1)
    fivefold(*words, cwd=folder)
    fivefold(*words, "--set", "trace.enabled=false", cwd=folder)
    recorded, plain = (
        torch.load(folder / "runs" / run / "weights.pt", weights_only=True)
        for run in ("digits-001", "digits-002")
    )
    assert all(torch.equal(recorded[key], plain[key]) for key in plain)
    assert not [*(folder / "runs" / "digits-002").rglob("*.trace")]
    for trace in traces(folder / "runs" / "digits-001" / "trace"):
        assert trace.windows["steps"].sum() == 12
        assert trace.meta["layout"]["data"] == 2
        assert trace.meta["plan"]["layout.data"] == {"value": 2, "origin": "user: -n"}
        assert [note["step"] for note in trace.notes if note["kind"] == "loss"][-1] == 12
        tags = {TAGS[row["tag"]] for row in trace.sums if row["kind"]}
        assert tags == {"parameters and gradients", "batch-norm statistics", "loss"}


def test_saves_are_noted(folder: Path) -> None:
    fivefold("train", "digits", "--epochs", 1, "--checkpoint", "saves",
             "--set", "checkpoint.every_steps=6", "--set", f'checkpoint.local="{folder}/local"',
             cwd=folder)  # fmt: skip
    (found,) = traces(folder / "runs" / "digits-001" / "trace")
    saved = [(note["step"], note["level"]) for note in found.notes if note["kind"] == "checkpoint"]
    assert {(6, "local"), (6, "protected"), (12, "local"), (12, "flushed")} <= set(saved)
