"""Random batches for a net that nobody has data for: what verification is fed by the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from fivefold.errors import UsageError
from fivefold.train.verify.one_process import cast_net
from fivefold.train.verify.reference import default_dtype, seeded

__all__ = ["Targets", "random_batches"]

Targets = Literal["classes", "likewise", "binary"]
"""class indices, (N, ...) int64; or tensors like the outputs, normally distributed or 0 and 1"""


def random_batches(
    net: nn.Module,
    shape: Sequence[int],
    samples: int,
    targets: Targets,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    integers: int = 0,
) -> Callable[[int], tuple[Tensor, Tensor]]:
    """`batch(step) -> (inputs, targets)` on the CPU: inputs (samples, *shape), standard normal, in `dtype`.

    With `integers`, inputs are whole numbers below it instead, int64.

    The same for every caller with the same `seed`. The net is run once, to see what it returns and so what
    targets look like; it is of no other use afterwards. Classes are as many as dim 1 of the outputs says.

    Raises `UsageError` if the net cannot be run on such inputs, with what torch says to that, or if it
    does not return one tensor with the samples on its leading dim.
    """
    whole = torch.Size([samples, *shape])

    def inputs_from(draw: torch.Generator) -> Tensor:
        if integers:
            return torch.randint(integers, whole, generator=draw)
        return torch.randn(whole, generator=draw, dtype=torch.float64).to(dtype)

    probe = inputs_from(torch.Generator().manual_seed(seed))
    outputs = _shape_of_outputs(net, probe, seed, dtype, device)
    if targets == "classes" and len(outputs) < 2:
        raise UsageError(
            f"the model returns a tensor of shape {tuple(outputs)}, but a loss on classes needs (samples, "
            "classes, ...): choose another --loss"
        )

    def batch(step: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(seed * 1_000_003 + step)
        inputs = inputs_from(draw)
        if targets == "classes":
            wanted = torch.randint(outputs[1], (samples, *outputs[2:]), generator=draw)
        elif targets == "binary":
            wanted = torch.randint(2, outputs, generator=draw).to(dtype)
        else:
            wanted = torch.randn(outputs, generator=draw, dtype=torch.float64).to(dtype)
        return inputs, wanted

    return batch


def _shape_of_outputs(
    net: nn.Module, inputs: Tensor, seed: int, dtype: torch.dtype, device: torch.device
) -> torch.Size:
    shape = inputs.shape
    try:
        probe = cast_net(net.to(device), dtype).train()
        with seeded(seed, device), default_dtype(dtype), torch.no_grad():
            outputs = probe(inputs.to(device))
    except Exception as problem:
        said = str(problem).strip().splitlines() or ["no reason given"]
        raise UsageError(
            f"one process alone cannot run the model on an input of shape {tuple(shape)} in "
            f"{str(inputs.dtype).removeprefix('torch.')}: {type(problem).__name__}: {said[0]}"
        ) from problem
    if not isinstance(outputs, Tensor):
        raise UsageError(
            f"the model returns a value of type {type(outputs).__name__}, which no built-in loss takes: call "
            "fivefold.train.verify.verify from Python, with a loss of your own"
        )
    if not outputs.dim() or outputs.shape[0] != shape[0]:
        raise UsageError(
            f"the model returns a tensor of shape {tuple(outputs.shape)} for {shape[0]} samples: its leading "
            "dim must be the samples"
        )
    return outputs.shape
