"""Scripts and recipes that are recorded, as they are: without a changed line."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch

from commands import CLEAN, python
from fivefold.trace import Phase, Tag, helping
from fivefold.trace.reader import RankTrace
from fivefold.trace.schema import KINDS, PHASES, TAGS, ProcessState
from fivefold.trace.trace import Trace

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


# torch computes SyncBatchNorm on GPUs only: here is its arithmetic for CPUs, around torch's own collectives.
SYNCHRONISED = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules._functions import SyncBatchNorm


def stats(x, eps):
    var, mean = torch.var_mean(x, 0, correction=0)
    return mean, (var + eps).rsqrt()


def gathered(x, means, inverses, running_mean, running_var, momentum, eps, counts):
    share = (counts / counts.sum())[:, None]
    mean = (means * share).sum(0)
    var = ((inverses**-2 - eps + (means - mean) ** 2) * share).sum(0)
    return mean, (var + eps).rsqrt()


def reduced(dy, x, mean, inverse, *_):
    with_x = (dy * (x - mean)).sum(0)
    return dy.sum(0), with_x, with_x * inverse, dy.sum(0)


def back(dy, x, mean, inverse, weight, sum_dy, with_x, counts):
    return (dy - (sum_dy + (x - mean) * inverse**2 * with_x) / counts.sum()) * inverse * weight


torch.batch_norm_stats, torch.batch_norm_gather_stats_with_counts = stats, gathered
torch.batch_norm_elemt = lambda x, weight, bias, mean, inverse, _: (x - mean) * inverse * weight + bias
torch.batch_norm_backward_reduce, torch.batch_norm_backward_elemt = reduced, back


class Norm(nn.BatchNorm1d):
    def forward(self, x):
        return SyncBatchNorm.apply(
            x, self.weight, self.bias, self.running_mean, self.running_var, self.eps, 0.1,
            dist.group.WORLD, dist.get_world_size(),
        )


dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 8), Norm(8), nn.ReLU(), nn.Linear(8, 8), Norm(8), nn.Linear(8, 1))
model = nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in torch.randn(3, 2, 4, 8):
    model(batch[dist.get_rank()]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


def fivefold(*words: object, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [python(), "-m", "fivefold", *map(str, words)],
        cwd=cwd, env=CLEAN | {"OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done


def weights(done: subprocess.CompletedProcess[str]) -> set[str]:
    return set(re.findall(r"weights (\S+ \S+)", done.stdout))


def traces(folder: Path) -> list[RankTrace]:
    return [RankTrace.load(path) for path in sorted(folder.glob("*.trace"))]


HELPED = """
import os, time
from pathlib import Path
while os.environ.get("FIVEFOLD_ROLE") == "helper" and not list(Path("logs").rglob("*.trace")):
    time.sleep(0.02)

import torch
import fivefold as ff

class Marked(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if os.environ.get("FIVEFOLD_ROLE") == "helper":
            Path("helped").touch()
        time.sleep(0.002)
        return torch.ones(4), index

with ff.start() as mesh:
    Path(f"{mesh.role}-{os.getpid()}").touch()
    data = ff.loader(Marked(), mesh, batch_size=8, seed=0)
    while not Path("helped").exists():
        for x, y in data:
            pass
    for x, y in data:
        pass
    data.close()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(DDP)
    return tmp_path


def test_a_script_is_recorded_as_it_is(folder: Path) -> None:
    plain = fivefold("run", "-n", 2, "train.py", cwd=folder)
    assert not [*folder.rglob("*.trace")], "nothing is recorded unless it is asked for"
    done = fivefold("run", "-n", 2, "--trace", "--log-dir", "logs", "train.py", cwd=folder)
    assert weights(done) == weights(plain) and len(weights(plain)) == 1
    assert "recorded: fivefold report logs" in done.stderr
    found = traces(folder / "logs" / "trace")
    assert [trace.rank for trace in found] == [0, 1]
    for trace in found:
        assert trace.state == ProcessState.ENDED and not trace.problems
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


def test_a_helper_that_begins_late_leaves_the_trace_to_its_trainer(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HELPED)
    words = ("--trace", "--plan", "shared.toml", "--helpers", "local:1", "--log-dir", "logs")
    (tmp_path / "shared.toml").write_text("[offload]\nshare_cores = true\n")
    fivefold("run", *words, "train.py", cwd=tmp_path)
    (found,) = traces(tmp_path / "logs" / "trace")
    assert (tmp_path / f"trainer-{found.meta['pid']}").exists(), found.meta
    (helper,), supply = helping.read(found.meta)
    assert helper.leases and supply and supply.batches > supply.own


def test_collectives_of_synchronised_batch_norm_say_so(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SYNCHRONISED)
    fivefold("run", "-n", 2, "--trace", "--log-dir", "logs", "train.py", cwd=tmp_path)
    for trace in traces(tmp_path / "logs" / "trace"):
        counts: Counter[tuple[str, str, str]] = Counter()
        for row in trace.sums[trace.sums["kind"] > 0]:
            phase = PHASES[row["phase"]] if row["phase"] < len(PHASES) else ""
            counts[KINDS[row["kind"]], TAGS[row["tag"]], phase] += int(row["count"])
        # Two layers in three steps; the optimiser's hooks alone tell where a step begins and ends.
        norms = {
            (kind, phase): n for (kind, tag, phase), n in counts.items() if tag == Tag.BATCH_NORM
        }
        assert sum(n for (kind, _), n in norms.items() if kind == "all_gather") == 6
        assert norms["all_reduce", Phase.BACKWARD] == 6
        assert {kind for kind, _ in norms} == {"all_gather", "all_reduce"}
        # What comes after them is not theirs: gradients in the same backward pass, a sum at the end.
        assert counts["all_reduce", Tag.GRADIENTS, Phase.BACKWARD] >= 3
        assert any(kind == "all_reduce" and tag == Tag.OTHER for kind, tag, _ in counts)


def test_a_script_of_one_process_needs_no_torch_distributed(folder: Path) -> None:
    done = subprocess.run(
        [python(), "train.py"], cwd=folder, env=CLEAN | {"FIVEFOLD_TRACE": "here"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (found,) = traces(folder / "here")
    assert found.windows["steps"].sum() == 8
    assert found.windows["samples"].sum() == 64
    assert found.state == ProcessState.ENDED


def test_a_script_that_finds_its_trace_written_says_so_once(folder: Path) -> None:
    meta = {"rank": 0, "host": os.uname().nodename}
    ours = Trace.create(folder / "here", meta)
    done = subprocess.run(
        [python(), "train.py"], cwd=folder, env=CLEAN | {"FIVEFOLD_TRACE": "here"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(f"process {os.getpid()} writes the trace of this rank") == 1
    ours.close()
    (found,) = traces(folder / "here")
    assert found.live["pid"] == os.getpid() and not found.windows["steps"].sum()


def test_a_script_that_fails_says_why_in_its_trace(folder: Path) -> None:
    fivefold("run", "--trace", "--log-dir", "logs", "train.py", "fail", cwd=folder, code=1)
    (found,) = traces(folder / "logs" / "trace")
    assert found.state == ProcessState.FAILED
    failures = [note["text"] for note in found.notes if note["kind"] == "failure"]
    assert failures == ["ValueError: no such thing"]


@pytest.mark.long
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
        assert tags == {"parameters and gradients", "batch-norm statistics", "loss", "control"}


@pytest.mark.long
def test_saves_are_noted(folder: Path) -> None:
    fivefold("train", "digits", "--epochs", 1, "--checkpoint", "saves",
             "--set", "checkpoint.every_steps=6", "--set", f'checkpoint.local="{folder}/local"',
             cwd=folder)  # fmt: skip
    (found,) = traces(folder / "runs" / "digits-001" / "trace")
    saved = [(note["step"], note["level"]) for note in found.notes if note["kind"] == "checkpoint"]
    assert {(6, "local"), (6, "protected"), (12, "local"), (12, "flushed")} <= set(saved)
