"""A model on a mesh is saved under one layout and goes on under another, exactly."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fivefold as ff
from fivefold.checkpoint import staging
from fivefold.mesh import Mesh
from fivefold.plan import Layout, Memory, Pipeline, Plan
from ranks import run_ranks

torch.manual_seed(0)
NET = nn.Sequential(
    nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1),
    nn.GroupNorm(2, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5),
).double()  # fmt: skip
X = [torch.randn(8, 3, 9, 7, dtype=torch.float64) for _ in range(6)]
Y = [torch.randint(0, 5, (8,)) for _ in range(6)]


def train(mesh: Mesh, folder: Path, steps: int) -> tuple[int, dict[str, Any]]:
    """From wherever the run stands to `steps`; where it stood, and the weights."""
    model = ff.parallelize(copy.deepcopy(NET), mesh, example=X[0], loss=nn.CrossEntropyLoss())
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    where = {"local": folder / f"node-{mesh.rank}", "node": f"node-{mesh.rank}", "every": 2}
    with ff.Checkpointer(folder / "far", mesh, **where, model=model, optim=optim) as ckpt:
        begun = ckpt.load() or 0
        assert model.steps == begun
        for step in range(begun + 1, steps + 1):
            model.step(*model.shard(X[step - 1], Y[step - 1]))
            optim.step()
            optim.zero_grad()
            ckpt.maybe_save(step)
        ckpt.wait()
        assert ckpt.last is None or not ckpt.last.problem, ckpt.last
    return begun, model.full_state_dict()


LAYOUTS = {
    "data": Plan(layout=Layout(data=2)),
    "alone": Plan(),
    "pipe": Plan(layout=Layout(pipe=3)),
    "chimera": Plan(layout=Layout(pipe=2), pipeline=Pipeline(schedule="chimera")),
    "tiles": Plan(layout=Layout(height=2)),
    "pipe and data": Plan(layout=Layout(data=2, pipe=2)),
    "optimizer divided": Plan(layout=Layout(data=2), memory=Memory(shard="optimizer")),
    "parameters divided": Plan(layout=Layout(data=3), memory=Memory(shard="parameters")),
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Weights after six steps of one process."""
    return run_ranks(1, train, tmp_path_factory.mktemp("through"), 6)[0][1]


@pytest.mark.long(every=8)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("data", "pipe"), ("tiles", "pipe and data"), ("chimera", "tiles"), ("optimizer divided", "pipe"),
        ("alone", "parameters divided"), ("parameters divided", "optimizer divided"),
        *(pytest.param(*pair, marks=pytest.mark.slow)
          for pair in (("pipe", "data"), ("pipe and data", "alone"))),
    ],
)  # fmt: skip
def test_a_run_goes_on_under_another_layout(
    tmp_path: Path,
    before: str,
    after: str,
    expected: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging, "SMALL_BYTES", 0)  # all are copied beside the next step
    first, second = LAYOUTS[before], LAYOUTS[after]
    run_ranks(first.layout, train, tmp_path, 4, plan=first)
    begun, weights = run_ranks(second.layout, train, tmp_path, 6, plan=second)[0]
    assert begun == 4
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-12)
