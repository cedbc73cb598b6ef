"""A parameter of another stage is asked for: one sentence that says what to do."""

from __future__ import annotations

import torch
from torch import nn

import fivefold as ff
from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.plan import Layout
from ranks import run_ranks


def test_a_parameter_of_another_stage_is_told_in_a_sentence() -> None:
    def asked(mesh: Mesh) -> list[str]:
        net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        model = ff.parallelize(net, mesh, example=torch.zeros(4, 3), loss=nn.CrossEntropyLoss())
        told: list[str] = []
        for name in ("0.weight", "4.weight"):
            try:
                told.append(str(tuple(model.get_parameter(name).shape)))
            except UsageError as problem:
                told.append(str(problem))
        return told

    first, last = run_ranks(Layout(pipe=2), asked)
    assert first[0] == "(4, 3)" and last[1] == "(2, 4)"
    for name, said in (("4.weight", first[1]), ("0.weight", last[0])):
        assert said.startswith(f"the parameter '{name}' is in a stage of another rank")
        assert "full_state_dict()" in said and "\n" not in said
