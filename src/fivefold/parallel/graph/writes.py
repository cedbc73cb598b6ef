"""What is below the calls of a forward: which tensors they change, and the line of the user's code."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from fivefold.torch_private import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    fake_of,
    memory_of,
    pytree,
    schema_of,
)

__all__ = ["Writes", "storage_of", "user_frame", "user_line"]

_PACKAGES = (
    contextlib.__file__,
    str(Path(__file__).parents[1]) + "/",
    str(Path(torch.__file__).parent) + "/",
)


def storage_of(tensor: Tensor) -> int:
    """Which memory a tensor is a view of."""
    if tensor.layout is not torch.strided:
        return -id(tensor)
    return memory_of(tensor)


class Writes(TorchDispatchMode):
    """Sees which tensors operations change. A real tensor is replaced by a stand-in: its numbers stay."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.fake = fake
        self._stand_ins: dict[int, tuple[Tensor, Tensor]] = {}
        self.changed: set[int] = set()
        """storages that were written to since this was last emptied"""
        self.read: set[int] = set()
        """storages that were read since this was last emptied"""

    def stand_in(self, tensor: Tensor) -> Tensor:
        """What is computed with instead of a real tensor: always the same."""
        if self.own(tensor):
            return tensor
        if id(tensor) not in self._stand_ins:
            self._stand_ins[id(tensor)] = (tensor, fake_of(self.fake, tensor))
        return self._stand_ins[id(tensor)][1]

    def adopt(self, tensor: Tensor, stand_in: Tensor) -> Tensor:
        """Let `stand_in` be what is computed with instead of a real tensor."""
        self._stand_ins[id(tensor)] = (tensor, stand_in)
        return stand_in

    def own(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of the recording's."""
        return isinstance(tensor, FakeTensor) and tensor.fake_mode is self.fake

    def storage(self, tensor: Tensor) -> int:
        """Which memory a tensor stands for."""
        return storage_of(self.stand_in(tensor))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named, schema = kwargs or {}, schema_of(func)
        if "lift" not in schema.name:  # which makes a constant of a real tensor
            args, named = pytree.tree_map_only(Tensor, self.stand_in, (args, named))
        self.read.update(
            storage_of(leaf)
            for leaf in pytree.tree_leaves((args, named))
            if isinstance(leaf, Tensor)
        )
        if schema.is_mutable:
            self._note(schema, args, named)
        return func(*args, **named)

    def _note(self, schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **kwargs}
        for argument in schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                flat = pytree.tree_flatten(given.get(argument.name))[0]
                self.changed.update(storage_of(leaf) for leaf in flat if isinstance(leaf, Tensor))


def user_frame() -> FrameType | None:
    """The innermost frame that is neither torch's nor ours, up to where the net was called."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        code = frame.f_code
        if code.co_name == "called_here" and code.co_filename.startswith(_PACKAGES[1]):
            return None
        if not code.co_filename.startswith(_PACKAGES):
            return frame
        frame = frame.f_back
    return None


def user_line() -> str:
    """Where in the user's code the forward is: `file.py:12`."""
    frame = user_frame()
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
