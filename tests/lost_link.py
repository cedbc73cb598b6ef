"""Trains until nobody answers any more: python lost_link.py LAYOUT TIMEOUT_S."""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

import fivefold as ff
from fivefold.plan import Comm

torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
images, targets = torch.ones(4, 3, 12, 12), torch.ones(4, 4, 12, 12)
axis, ranks = sys.argv[1].split("=")
plan = ff.Plan(ff.Layout(**{axis: int(ranks)}), comm=Comm(timeout_s=float(sys.argv[2])))
last = time.monotonic()
try:
    with ff.start(plan) as mesh:
        model = ff.parallelize(net, mesh, loss=nn.MSELoss(), example=images)
        optim = torch.optim.SGD(model.parameters(), lr=0.01)
        while True:
            model.step(*model.shard(images, targets))
            optim.step()
            optim.zero_grad()
            last = time.monotonic()
            print("step", flush=True)
finally:
    print(f"ended {time.monotonic() - last:.1f} s after a step", flush=True)
