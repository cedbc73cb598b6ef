"""A plain model, made to compute over the whole mesh what one process would compute alone.

Names are imported on first use: schedules of pipelines are planned where there is no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fivefold.parallel.clip import clip_grad_norm_
    from fivefold.parallel.graph.marked import pointwise
    from fivefold.parallel.model import ParallelModel, parallelize

__all__ = ["ParallelModel", "clip_grad_norm_", "parallelize", "pointwise"]

_HOME = {"clip_grad_norm_": "clip", "pointwise": "graph.marked"}


def __getattr__(name: str) -> object:
    """Import a public name from its module (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME.get(name, 'model')}"), name)
