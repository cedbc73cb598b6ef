"""Exact training of PyTorch models on every processor of a cluster.

    import fivefold as ff

    mesh = ff.start(ff.Plan.load("plan.toml"))
    model = ff.parallelize(net, mesh, example=x, loss=criterion)
    data = ff.loader(dataset, mesh, batch_size=64, seed=0)

Names are imported on first use: `import fivefold` loads neither torch nor the command line, so the
launcher and `fivefold --help` answer at once, on login nodes too.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fivefold.data import loader
    from fivefold.mesh import Mesh, start
    from fivefold.parallel import clip_grad_norm_, parallelize
    from fivefold.plan import Layout, Plan
    from fivefold.trace import Phase, span

    __version__: str

__all__ = [
    "Layout",
    "Mesh",
    "Phase",
    "Plan",
    "__version__",
    "clip_grad_norm_",
    "loader",
    "parallelize",
    "span",
    "start",
]

_HOME = {
    "Layout": "fivefold.plan",
    "Mesh": "fivefold.mesh",
    "Phase": "fivefold.trace",
    "Plan": "fivefold.plan",
    "clip_grad_norm_": "fivefold.parallel",
    "loader": "fivefold.data",
    "parallelize": "fivefold.parallel",
    "span": "fivefold.trace",
    "start": "fivefold.mesh",
}


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
