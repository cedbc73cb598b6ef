"""Exact training of PyTorch models on every processor of a cluster.

    import fivefold as ff

    mesh = ff.start(ff.Plan.load("plan.toml"))
    model = ff.parallelize(net, mesh, example=x, loss=criterion)
    data = ff.loader(dataset, mesh, batch_size=64, seed=0)

Names are imported on first use: `import fivefold` loads neither torch nor the command line, so the
launcher and `fivefold --help` answer at once, on login nodes too.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fivefold.checkpoint import Checkpointer
    from fivefold.data import loader
    from fivefold.mesh import Mesh, start
    from fivefold.offload import Validator
    from fivefold.parallel import clip_grad_norm_, parallelize, pointwise
    from fivefold.plan import Layout, Plan
    from fivefold.trace import Phase, span
    from fivefold.train import Logger
    from fivefold.train.infer import infer
    from fivefold.train.shown import progress

    __version__: str

__all__ = [
    "Checkpointer",
    "Layout",
    "Logger",
    "Mesh",
    "Phase",
    "Plan",
    "Validator",
    "__version__",
    "clip_grad_norm_",
    "infer",
    "loader",
    "parallelize",
    "pointwise",
    "progress",
    "span",
    "start",
]

_HOME = {
    "Checkpointer": "fivefold.checkpoint",
    "Layout": "fivefold.plan",
    "Logger": "fivefold.train",
    "Mesh": "fivefold.mesh",
    "Phase": "fivefold.trace",
    "Plan": "fivefold.plan",
    "Validator": "fivefold.offload",
    "clip_grad_norm_": "fivefold.parallel",
    "infer": "fivefold.train.infer",
    "loader": "fivefold.data",
    "parallelize": "fivefold.parallel",
    "pointwise": "fivefold.parallel",
    "progress": "fivefold.train.shown",
    "span": "fivefold.trace",
    "start": "fivefold.mesh",
}


if os.environ.get("FIVEFOLD_ENGINE"):
    import_module("fivefold.launch.mistakes").tell_in_one_line()


def __getattr__(name: str) -> object:
    """Import a public name from the module where it lives, once (PEP 562)."""
    if name == "__version__":
        from importlib.metadata import version

        value: object = version("fivefold")
    elif name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module 'fivefold' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _known_to_torch() -> None:  # pyright: ignore[reportUnusedFunction]
    """Tell torch that there is a backend "fivefold", and where FIVEFOLD_TRACE is set, see what scripts do.

    Torch calls this whenever it is imported. It must not fail, or no program of this environment could
    import torch, and has to be quick: what the backend needs is imported when a group is made.
    """
    import logging

    log = logging.getLogger(__name__)
    try:
        from torch.distributed import Backend

        Backend.register_backend("fivefold", _group, extended_api=True, devices=["cpu", "cuda"])
    except Exception as problem:  # noqa: BLE001
        log.warning("torch does not know the backend fivefold: %r", problem)
    _see_scripts()


def _see_scripts() -> None:
    """See what scripts do where FIVEFOLD_TRACE is set: torch has been imported, by forked ranks before."""
    import logging

    if os.environ.get("FIVEFOLD_TRACE"):
        try:
            import_module("fivefold.comm.script_hooks").install()
        except Exception as problem:  # noqa: BLE001
            logging.getLogger(__name__).warning(
                "FIVEFOLD_TRACE is set, but nothing can be recorded: %r", problem
            )


def _group(options: object, given: object) -> object:
    from fivefold.comm.registration import create

    return create(options, given)
