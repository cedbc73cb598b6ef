"""Faults on purpose: a fuzzer that does not find them would find nothing.

Each is a context manager, entered on every rank for as long as a case takes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fivefold.errors import UsageError
from fivefold.parallel import ParallelModel

__all__ = ["NUMBERS", "OTHERS"]

Step = Callable[..., Tensor]


@contextlib.contextmanager
def _around(change: Callable[[ParallelModel, Step], Tensor]) -> Generator[None]:
    """Every step goes through `change(model, step)`, where `step()` is what it would be."""
    plain = ParallelModel.step

    def step(self: ParallelModel, *args: Any, **kwargs: Any) -> Tensor:
        return change(self, lambda: plain(self, *args, **kwargs))

    ParallelModel.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        ParallelModel.step = plain  # type: ignore[method-assign]


def _with_gradients(model: ParallelModel) -> list[Tensor]:
    return [p for p in model.parameters() if p.grad is not None]


def scaled_gradient() -> Any:
    """One gradient is off by a millionth."""

    def change(model: ParallelModel, step: Step) -> Tensor:
        loss = step()
        for parameter in _with_gradients(model)[:1]:
            parameter.grad.mul_(1.0 + 1e-6)
        return loss

    return _around(change)


def zeros_for_none() -> Any:
    """What has no gradient has one of zeros."""

    def change(model: ParallelModel, step: Step) -> Tensor:
        loss = step()
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return loss

    return _around(change)


def lost_gradient() -> Any:
    """One gradient is gone."""

    def change(model: ParallelModel, step: Step) -> Tensor:
        loss = step()
        for parameter in _with_gradients(model)[-1:]:
            parameter.grad = None
        return loss

    return _around(change)


def stale_buffers() -> Any:
    """Buffers stay as they were."""

    def change(model: ParallelModel, step: Step) -> Tensor:
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        loss = step()
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name in before:
                    buffer.copy_(before[name])
        return loss

    return _around(change)


def drifting_replica() -> Any:
    """The last bit of a weight differs between ranks."""

    def change(model: ParallelModel, step: Step) -> Tensor:
        loss = step()
        if model.mesh.rank:
            for parameter in _with_gradients(model)[:1]:
                up = torch.full_like(parameter, torch.inf)
                parameter.data.copy_(torch.nextafter(parameter.data, up))
        return loss

    return _around(change)


def other_masks() -> Any:
    """Random masks of another seed."""

    def change(model: ParallelModel, step: Step) -> Tensor:
        model.seed += 1
        return step()

    return _around(change)


def wrong_loss() -> Any:
    """The loss is a rank's share."""

    def change(model: ParallelModel, step: Step) -> Tensor:
        return step() / model.mesh.size

    return _around(change)


def swapped_outputs() -> Any:
    """Outputs come in another order."""

    def change(model: ParallelModel, step: Step) -> Tensor:
        told = model.on_outputs
        assert told is not None
        model.on_outputs = lambda made: told(made.flip(0) if isinstance(made, Tensor) else made)
        return step()

    return _around(change)


def forgotten_state() -> Any:
    """What forward counts is forgotten."""

    def change(model: ParallelModel, step: Step) -> Tensor:
        before = {m: dict(vars(m)) for m in model.module.modules()}
        loss = step()
        for module, values in before.items():
            for name, value in values.items():
                if type(value) is int:
                    setattr(module, name, value)
        return loss

    return _around(change)


def fake_left() -> Any:
    """A tensor without numbers is left in the net."""

    def change(model: ParallelModel, step: Step) -> Tensor:
        loss = step()
        with FakeTensorMode():
            model.module.__dict__["left"] = {"here": torch.empty(2)}
        return loss

    return _around(change)


def _on_one(problem: Exception) -> Any:
    def change(model: ParallelModel, step: Step) -> Tensor:
        if model.mesh.rank == 1:
            raise problem
        return step()

    return _around(change)


def one_refuses() -> Any:
    """A rank refuses, the others do not."""
    return _on_one(UsageError("not me"))


def one_raises() -> Any:
    """Something on a rank that is no refusal."""
    return _on_one(RuntimeError("a mistake of ours"))


def all_refuse() -> Any:
    """A clear refusal."""

    def change(_model: ParallelModel, _step: Step) -> Tensor:
        raise UsageError("not us, in one line")

    return _around(change)


def hang() -> Any:
    """A rank sleeps."""

    def change(model: ParallelModel, step: Step) -> Tensor:
        if model.mesh.rank == 1:
            time.sleep(3600)
        return step()

    return _around(change)


def crash() -> Any:
    """A rank dies of a signal."""

    def change(model: ParallelModel, step: Step) -> Tensor:
        if model.mesh.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return step()

    return _around(change)


NUMBERS = (
    "scaled_gradient", "zeros_for_none", "lost_gradient", "stale_buffers", "other_masks",
    "wrong_loss", "swapped_outputs", "forgotten_state", "fake_left",
)  # fmt: skip
"""those that make a case wrong"""
OTHERS = {
    "drifting_replica": "refused",
    "one_refuses": "refused",
    "one_raises": "traceback",
    "all_refuse": "refused",
    "hang": "hang",
    "crash": "crash",
}
"""those that end it otherwise"""
