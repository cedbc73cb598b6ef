"""Mistakes in scripts that `fivefold run` starts: one line, told once for all ranks, and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import fivefold

SCRIPT = """
import random
import torch
from torch import nn
import fivefold as ff

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.one(x)
        return {forward}

mesh = ff.start()
torch.manual_seed(0)
dataset = [(torch.randn(4), torch.randn(4)) for _ in range(100)]
model = ff.parallelize(Net(), mesh, loss=nn.MSELoss())
optim = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    for x, y in ff.loader(dataset, mesh, {loader}):
        model.step(x, y)
        optim.step()
        optim.zero_grad()
print("trained")
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("loader", "forward", "says"),
    [
        (
            "batch_size=20, seed=mesh.rank",
            "x",
            (
                "ranks differ in the arguments of ff.loader: seed is 0 on rank 0, 1 on rank 1; "
                "give every rank the same (train.py:23)\n"
            ),
        ),
        (
            "batch_size=10 + mesh.rank",
            "x",
            (
                "ranks differ in the arguments of ff.loader: batch_size is 10 on rank 0, 11 on rank 1; "
                "give every rank the same (train.py:23)\n"
            ),
        ),
        ("batch_size=20", "x * random.random()", "ranks differ in what they do: mul in the net"),
        (
            "batch_size=20",
            "self.other(x) if random.random() < 0.5 else x",
            "let the net draw the same random numbers on all",
        ),
    ],
    ids=["seed", "batch_size", "random-number", "random-branch"],
)
def test_ranks_that_differ(loader: str, forward: str, says: str, tmp_path: Path) -> None:
    seeded = "import random, os; random.seed(int(os.environ['RANK']))"  # 0.84 and 0.13 come first
    script = SCRIPT.format(loader=loader, forward=forward).replace("import random", seeded)
    (tmp_path / "train.py").write_text(script)
    done = fivefold("run", "-n", 2, "train.py", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert says in done.stderr


@pytest.mark.parametrize("backend", ["fivefold", "gloo"])
def test_a_rank_that_computes_with_its_batch_first(backend: str, tmp_path: Path) -> None:
    """It does not know its samples any more, and would ask the others, which do not answer."""
    script = SCRIPT.format(loader="batch_size=20", forward="x")
    script = script.replace("model.step(x, y)", "model.step(x * 1 if mesh.rank else x, y)")
    (tmp_path / "train.py").write_text(script)
    done = fivefold("run", "-n", 2, "--set", f"comm.backend={backend}", "train.py", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: the batch of rank 1 does not say which samples of the whole"
    )
    assert done.stderr.count("\n") == 1


def test_ranks_that_draw_alike_train(tmp_path: Path) -> None:
    script = SCRIPT.format(loader="batch_size=20", forward="x * random.random()")
    (tmp_path / "train.py").write_text(f"import random; random.seed(3)\n{script}")
    done = fivefold("run", "-n", 2, "train.py", cwd=tmp_path)
    assert sorted(done.stdout.splitlines()) == ["[0] trained", "[1] trained"], done.stderr


def test_a_mistake_of_one_rank_that_the_other_waits_for(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import fivefold as ff, torch\n"
        "mesh = ff.start()\n"
        "net = torch.nn.Linear(2, 2) if mesh.rank == 0 else 'net'\n"
        "ff.parallelize(net, mesh)\n"
    )
    done = fivefold("run", "-n", 2, "train.py", cwd=tmp_path)
    assert done.returncode == 2
    *others, last = done.stderr.splitlines()
    assert last == "error: parallelize needs an nn.Module, got str (train.py:4)"
    # On busy cores the other rank has told by then that it was left.
    assert all(line.startswith("[0] ") for line in others), done.stderr


def test_a_plan_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import fivefold as ff\nff.Plan.load('nowhere.toml')\n")
    done = fivefold("run", "-n", 2, "train.py", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.endswith("(train.py:2)\n")
    assert done.stderr.count("\n") == 1
    done = fivefold("run", "-n", 2, "train.py", cwd=tmp_path, FIVEFOLD_DEBUG="1")
    assert "Traceback" in done.stderr
