r"""How the learning rate goes: up in a straight line, then down along half a cosine.

    1 |    _--_
      |  /      \
      | /        \
    0 |/          `-_____
       warm-up          steps

Sources: Goyal et al. 2017, "Accurate, large minibatch SGD", section 2.2 (warm-up); Loshchilov and Hutter
2017, "SGDR", equation 5 without restarts (cosine).
"""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

__all__ = ["fraction", "warmup_cosine"]


def fraction(step: int, steps: int, warmup: int) -> float:
    """The share of the full learning rate in `step` (from 0) of `steps`, the first `warmup` rising.

    >>> [round(fraction(step, 6, 2), 2) for step in range(6)]
    [0.5, 1.0, 1.0, 0.85, 0.5, 0.15]
    """
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return (1 + math.cos(math.pi * min(done, 1.0))) / 2


def warmup_cosine(optimizer: Optimizer, steps: int, warmup: int) -> LambdaLR:
    """A schedule whose `step` is called once after every step of the optimiser.

    A warm-up that would outlast the run is cut to half of it, so that short trials also reach the full
    learning rate.
    """
    rising = min(warmup, steps // 2)
    return LambdaLR(optimizer, lambda step: fraction(step, steps, rising))
