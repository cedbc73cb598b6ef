"""The shortest Fivefold script that communicates."""

import torch

import fivefold as ff
from fivefold import comm
from fivefold.plan import Comm
from fivefold.trace import Tag

with ff.start(ff.Plan(comm=Comm(backend="gloo")), device="cpu") as mesh:  # as hello_torch.py
    total = comm.all_reduce(torch.ones(1), mesh.group("data"), Tag.CONTROL)
    assert total.item() == mesh.size
