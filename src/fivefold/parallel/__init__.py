"""A plain model, made to compute over the whole mesh what one process would compute alone."""

from __future__ import annotations

from fivefold.parallel.clip import clip_grad_norm_
from fivefold.parallel.model import ParallelModel, parallelize

__all__ = ["ParallelModel", "clip_grad_norm_", "parallelize"]
