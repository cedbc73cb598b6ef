"""Hooks that a user has registered on parameters: called once in a step, on the complete gradient.

Autograd would call them on what a rank has found, of a micro-batch even. So within a step they are taken off;
when the gradients of all ranks are summed, they are called as autograd calls them:

    hooks of the gradient     g = hook(g) ...               Tensor.register_hook
    the gradient is added     p.grad = p.grad + g
    hooks afterwards          hook(p)                       register_post_accumulate_grad_hook
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.parallel.sharded import placed, whole
from fivefold.torch_private import accumulate_hooks, gradient_hooks, is_dtensor, own_parameters

__all__ = ["ParameterHooks"]

_Hooks = dict[int, Callable[..., Any]]


@dataclass
class _Taken:
    """A parameter within a step."""

    name: str
    parameter: nn.Parameter
    on_gradient: list[tuple[_Hooks, _Hooks]]
    """dicts of hooks that torch knows, and what was in them"""
    afterwards: list[tuple[_Hooks, _Hooks]]
    before: Tensor | None
    """the gradient that earlier steps have left"""


class ParameterHooks:
    """The hooks of parameters of a net, and of a loss that has some.

    Made before replicas divide the net's, which gives it other ones.
    """

    def __init__(self, *modules: nn.Module) -> None:
        named = {f"{number}.": module for number, module in enumerate(modules)}
        self._first = {
            start + name: p for start, one in named.items() for name, p in one.named_parameters()
        }
        self._held = [
            (f"{start}{path}." if path else start, own_parameters(module))
            for start, one in named.items()
            for path, module in one.named_modules()
        ]

    @contextmanager
    def once(self) -> Generator[frozenset[str]]:
        """Within the block a step is made; at its end the hooks are called. Collective where replicas divide
        parameters, as all of them have the same hooks.

        Yields the names of the parameters of the first module that have some.
        """
        taken = [one for name, p in self._parameters() if (one := self._taken(name, p))]
        try:
            yield frozenset(one.name.removeprefix("0.") for one in taken if one.name[:2] == "0.")
            for one in reversed(taken):  # as gradients come
                _apply(one)
        finally:
            for one in taken:
                for known, held in (*one.on_gradient, *one.afterwards):
                    known.update(held)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return any(True for _ in self._parameters())

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters that may have hooks; most have one of ours, or none."""
        seen = set[int]()
        for prefix, held in self._held:
            for name, parameter in held.items():
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    first = self._first.get(prefix + name, parameter)
                    if _has_hooks(parameter) or (first is not parameter and _has_hooks(first)):
                        yield prefix + name, parameter

    def _taken(self, name: str, parameter: nn.Parameter) -> _Taken | None:
        first = self._first.get(name, parameter)
        owners = [parameter] if first is parameter else [first, parameter]
        on_gradient = [pair for p in owners if (pair := _taken_off(p, "_backward_hooks"))]
        afterwards = [
            pair for p in owners if (pair := _taken_off(p, "_post_accumulate_grad_hooks"))
        ]
        if not (on_gradient or afterwards):
            return None
        before, parameter.grad = parameter.grad, None
        return _Taken(name, parameter, on_gradient, afterwards, before)


def _has_hooks(parameter: nn.Parameter) -> bool:
    if gradient_hooks(parameter):
        return True
    return not all(map(_is_ours, accumulate_hooks(parameter).values()))


def _taken_off(parameter: nn.Parameter, kind: str) -> tuple[_Hooks, _Hooks] | None:
    """Empty one of torch's dicts of hooks but for ours; the dict, and what was in it. None if nothing was."""
    known: _Hooks | None = getattr(parameter, kind, None)
    held = {key: hook for key, hook in known.items() if not _is_ours(hook)} if known else {}
    if known is None or not held:
        return None
    for key in held:
        del known[key]
    return known, held


def _is_ours(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    module = str(getattr(hook, "__module__", "") or "")
    return module.startswith(("fivefold.parallel", "torch.distributed"))


def _apply(one: _Taken) -> None:
    """Call the hooks of a parameter, and add what they make of its gradient."""
    parameter, gradient = one.parameter, one.parameter.grad
    if gradient is not None:
        for _, hooks in one.on_gradient:
            for hook in hooks.values():
                gradient = _changed(hook, gradient)
    with torch.no_grad():
        if gradient is not None and one.before is not None:
            gradient = (
                one.before.add_(gradient) if not one.before.is_sparse else one.before + gradient
            )
    parameter.grad = one.before if gradient is None else gradient
    if gradient is not None:
        for _, hooks in one.afterwards:
            for hook in hooks.values():
                hook(parameter)


def _changed(hook: Callable[[Tensor], Tensor | None], gradient: Tensor) -> Tensor:
    complete = whole(gradient)
    found = hook(complete)
    if is_dtensor(gradient):
        return placed(complete if found is None else found, gradient)
    return complete if found is None else found
