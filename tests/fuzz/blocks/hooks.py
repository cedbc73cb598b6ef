"""Hooks on tensors, parameters and modules."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from fuzz.grammar import Block, Event, Shape, layer, register


@register
class TensorHook(Block):
    """On an activation, registered in forward."""

    often = 2.0

    def __init__(self, shape: Shape, how: str) -> None:
        super().__init__(shape)
        self.layer, self.how = layer(shape), how
        self.seen: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if y.requires_grad:
            y.register_hook(self._hook)
        return y.tanh()

    def _hook(self, grad: Tensor) -> Tensor | None:
        if self.how == "scale":
            return grad * 0.5
        if self.how == "clamp":
            return grad.clamp(-1e-3, 1e-3)
        self.seen.append(True)
        return None

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"how": rng.choice(["scale", "clamp", "record"])}


@register
class ParameterHook(Block):
    """On a weight: what it does may not be linear, and it is called once, with the whole gradient."""

    often = 2.0

    def __init__(self, shape: Shape, how: str) -> None:
        super().__init__(shape)
        self.layer, self.how, self.calls = layer(shape), how, 0
        self.norms: list[float] = []
        self.layer.weight.register_hook(self._hook)

    def _hook(self, grad: Tensor) -> Tensor | None:
        self.calls += 1
        if self.how == "scale":
            return grad * 2.0
        if self.how == "clamp":
            return grad.clamp(-1e-2, 1e-2)
        if self.how == "norm":
            return grad / (grad.norm() + 1e-3)
        self.norms.append(float(grad.norm()))
        return None

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"how": rng.choice(["scale", "clamp", "norm", "record"])}


@register
class AccumulateHook(Block):
    """Called when a gradient has been added: counts, clamps in place, or steps the weight itself."""

    def __init__(self, shape: Shape, how: str) -> None:
        super().__init__(shape)
        self.layer, self.how, self.calls = layer(shape), how, 0
        self.layer.weight.register_post_accumulate_grad_hook(self._hook)

    def _hook(self, parameter: Tensor) -> None:
        self.calls += 1
        assert parameter.grad is not None
        if self.how == "clamp":
            parameter.grad.clamp_(-1e-2, 1e-2)
        elif self.how == "step":
            parameter.data.add_(parameter.grad, alpha=-0.01)
            parameter.grad = None

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"how": rng.choice(["count", "clamp", "step"])}


@register
class ModuleHook(Block):
    """Before or behind a module; reads, or changes what passes."""

    often = 3.0

    def __init__(self, shape: Shape, when: str, change: bool) -> None:
        super().__init__(shape)
        self.layer, self.calls = nn.Sequential(layer(shape), nn.Tanh()), 0
        self.dims: list[int] = []
        if when == "before":
            self.layer.register_forward_pre_hook(self._before if change else self._read)
        elif when == "behind":
            self.layer.register_forward_hook(self._behind if change else self._read)
        elif when == "keywords":
            self.layer.register_forward_hook(self._keywords, with_kwargs=True)
        elif when == "backward":
            self.layer.register_full_backward_hook(self._backward if change else self._read)
        else:
            self.layer.register_full_backward_pre_hook(self._pre if change else self._read)

    def _read(self, _module: Any, *given: Any) -> None:
        self.calls += 1
        self.dims.append(len(given))

    def _before(self, _module: Any, given: Any) -> Any:
        return (given[0] * 0.5,)

    def _behind(self, _module: Any, _given: Any, made: Tensor) -> Tensor:
        return made + 0.25

    def _keywords(self, _module: Any, _given: Any, _named: Any, made: Tensor) -> Tensor:
        return made * 1.5

    def _backward(self, _module: Any, given: Any, _made: Any) -> Any:
        return tuple(None if g is None else g * 0.5 for g in given)

    def _pre(self, _module: Any, made: Any) -> Any:
        return tuple(g * 2.0 for g in made)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {
            "when": rng.choice(["before", "behind", "keywords", "backward", "backward_pre"]),
            "change": rng.random() < 0.5,
        }


@register
class Hookable(Block):
    """A layer without hooks, which the training loop gives some, or takes them away."""

    often = 2.0

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.layer = layer(shape)
        self.handles: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    @classmethod
    def events(cls, rng: random.Random, args: dict[str, Any]) -> list[Event]:
        which = ["forward", "pre", "parameter", "backward", "accumulate"]
        return [{"do": "hook", "below": "layer", "which": rng.choice(which)}, {"do": "unhook"}]


@register
class Replaced(Block):
    """forward is replaced on the instance, as quantisers and adapters do."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.layer = layer(shape)
        plain = self.layer.forward

        def forward(x: Tensor) -> Tensor:
            return torch.tanh(plain(x)) * 1.5

        self.layer.forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)
