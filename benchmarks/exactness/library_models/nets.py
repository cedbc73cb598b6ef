"""What a process of a case calls, by the name of the model: its net, its loss and its batches."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from library_models.model import Model

__all__ = ["LIBRARIES", "batch", "build", "loss", "model", "names"]

LIBRARIES = ("torchvision", "timm", "monai", "transformers", "smp")


def _of(library: str) -> dict[str, Model]:
    return importlib.import_module(f"library_models.of_{library}").MODELS


def names(library: str) -> list[str]:
    """All models of a library, as library/family."""
    return [f"{library}/{family}" for family in _of(library)]


def model(name: str) -> Model:
    """The model called library/family."""
    library, _, family = name.partition("/")
    return _of(library)[family]


def build(name: str) -> nn.Module:
    """Its net."""
    return model(name).make().to(torch.get_default_dtype())  # some ask for float32


def loss(name: str, _net: nn.Module) -> Callable[[Any, Tensor], Tensor]:
    """Its loss."""
    return model(name).loss


def batch(name: str, rows: int, number: int) -> tuple[Any, Tensor]:
    """Inputs and targets of batch `number`."""
    return model(name).batch(rows, torch.Generator().manual_seed(1009 + number))
