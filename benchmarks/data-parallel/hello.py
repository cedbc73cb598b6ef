"""The shortest Fivefold script that communicates."""

import torch

import fivefold as ff
from fivefold import comm
from fivefold.trace import Tag

with ff.start(device="cpu") as mesh:
    total = comm.all_reduce(torch.ones(1), mesh.group("data"), Tag.CONTROL)
    assert total.item() == mesh.size
