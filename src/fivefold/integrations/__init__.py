"""What other packages need to hear of a run. Each module here imports one of them, when it is used."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from fivefold.errors import UsageError

if TYPE_CHECKING:
    from fivefold.integrations.mlflow import MLflow
    from fivefold.integrations.tensorboard import TensorBoard
    from fivefold.integrations.wandb import Wandb

__all__ = ["MLflow", "TensorBoard", "Wandb"]

_HOME = {"MLflow": "mlflow", "TensorBoard": "tensorboard", "Wandb": "wandb"}


def __getattr__(name: str) -> object:
    """Import a public name from the module where it lives (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'fivefold.integrations' has no attribute {name!r}")
    value: object = getattr(import_module(f"fivefold.integrations.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def needs(package: str) -> None:
    """Raise `UsageError` if a package, which has an extra of the same name, is missing. Imports nothing."""
    if find_spec(package) is None:
        raise UsageError(f"{package} is not installed: pip install 'fivefold[{package}]'")
