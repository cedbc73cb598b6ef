"""The training loop with pictures for targets: one PSNR, whatever the number of processes."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fivefold as ff
from fivefold.mesh import Mesh
from fivefold.plan import Layout
from fivefold.recipes import models
from fivefold.train import Summary, fit, warmup_cosine
from fivefold.train.task import PICTURES
from ranks import run_ranks


def data(n: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(n)
    pictures = torch.rand(n, 1, 10, 14, generator=generator) - 0.5
    return TensorDataset(nn.functional.avg_pool2d(pictures, 2), pictures)


LAYOUTS = [Layout(), Layout(data=3), Layout(width=3), Layout(data=2, height=2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_psnr_is_that_of_all_pixels_in_one_process(layout: Layout) -> None:
    torch.manual_seed(0)
    net = models.build("edsr", channels=1, blocks=1, features=4)

    def train(mesh: Mesh) -> tuple[Summary, nn.Module]:
        model = ff.parallelize(copy.deepcopy(net), mesh, loss=PICTURES.loss())
        batches = ff.loader(data(8), mesh, batch_size=4)
        tests = ff.loader(data(5), mesh, batch_size=2, shuffle=False)  # some shares are empty
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        schedule = warmup_cosine(optimizer, steps=4, warmup=1)
        summary = fit(
            model, optimizer, schedule, batches, tests, mesh=mesh, epochs=2, task=PICTURES
        )  # fmt: skip
        return summary, model.module

    for summary, trained in run_ranks(layout, train):
        small, pictures = data(5).tensors
        with torch.no_grad():
            square = nn.functional.mse_loss(trained.eval()(small), pictures).item()
        assert summary.psnr_db == pytest.approx(-10 * math.log10(square), abs=1e-4)
        assert summary.accuracy is None
