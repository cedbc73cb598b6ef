"""What every rank needs, imported once in the process that they are forked from."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module

import torch
import torch._dynamo
import torch._functorch.aot_autograd
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import FakeTensorMode

import fivefold.parallel.model  # noqa: F401
import fuzz.worker  # noqa: F401
from fuzz.judge import DEVICE

__all__: list[str] = []

torch.set_num_threads(1)
# Both ask how many GPUs there are, after which torch lets no child use one.
if DEVICE == "cpu":
    import_module("torch._inductor.compile_fx")
with FakeTensorMode() if DEVICE == "cpu" else nullcontext():  # what its first use imports
    torch.nn.functional.conv2d(torch.empty(1, 2, 5, 5), torch.empty(2, 2, 3, 3)).sum()
