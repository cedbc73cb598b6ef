"""A rank that trains for long holds no more memory than one that has just begun."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from commands import fivefold

SCRIPT = """
import torch
from torch import nn
import fivefold as ff

def held_kib():
    with open("/proc/self/status") as status:
        return sum(int(line.split()[1]) for line in status if line.startswith("RssAnon:"))

with ff.start(ff.Plan(layout=ff.Layout(data=2))) as mesh:
    net = nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    data = torch.utils.data.TensorDataset(torch.randn(1000, 20), torch.randint(0, 4, (1000,)))
    model = ff.parallelize(net, mesh, example=torch.empty(10, 20, device="meta"), loss=nn.CrossEntropyLoss())
    optim = torch.optim.SGD(model.parameters(), lr=0.01)
    step, held = 0, []
    while len(held) < 6:
        for x, y in ff.loader(data, mesh, batch_size=10, seed=step):
            model.step(x, y)
            optim.step()
            optim.zero_grad()
            step += 1
        if step % 500 == 0:
            held.append(held_kib())
    print("held", *held, flush=True)
"""
STEPS_KIB = 48
"""per 1,000 steps: 48 bytes a step, less than an object of Python's"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fivefold", "gloo"])
def test_steps_leave_nothing_behind(backend: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = fivefold(
        "run", "-n", 2, "--trace", "--set", f"comm.backend={backend}", "--log-dir", "logs", "script.py",
        cwd=tmp_path, OMP_NUM_THREADS="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = [line.split("held")[1].split() for line in done.stdout.splitlines() if "held" in line]
    assert len(told) == 2
    for held in told:
        held_kib = [*map(int, held[1:])]  # the first thousand steps fill caches
        # Most of the time: once in a while an allocator takes a few pages for good.
        grown = sorted(later - earlier for earlier, later in itertools.pairwise(held_kib))
        assert grown[len(grown) // 2] <= STEPS_KIB, told
