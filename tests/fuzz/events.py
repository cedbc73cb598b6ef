"""What happens between steps, to a plain net or to one under a layout."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn

from fuzz.grammar import GLOBALS, Event

__all__ = ["ANYTIME", "happen"]


def happen(net: nn.Module, loss: Any, event: Event, model: Any = None) -> None:
    """Let `event` happen. `model` is what `parallelize` returned, where the net is under a layout."""
    _DOES[event["do"]](net, loss, event, model)


def _module(net: nn.Module, event: Event) -> Any:
    path = ".".join(part for part in (event.get("at", ""), event.get("below", "")) if part)
    return net.get_submodule(path)


def _set(net: nn.Module, _loss: Any, event: Event, _model: Any) -> None:
    setattr(_module(net, event), event["name"], event["value"])


def _deep(net: nn.Module, _loss: Any, event: Event, _model: Any) -> None:
    thing, (*path, last) = _module(net, event), event["path"]
    for name in path:
        thing = getattr(thing, name) if hasattr(thing, str(name)) else thing[name]
    if isinstance(thing, dict | list):
        thing[last] = event["value"]
    else:
        setattr(thing, last, event["value"])


def _dilate(net: nn.Module, _loss: Any, event: Event, _model: Any) -> None:
    conv = _module(net, event)
    conv.dilation = conv.padding = (event["value"],) * len(conv.kernel_size)


def _mode(net: nn.Module, _loss: Any, event: Event, model: Any) -> None:
    module = model if model is not None and not event.get("at") else _module(net, event)
    module.train(event["training"])


def _call(net: nn.Module, _loss: Any, event: Event, _model: Any) -> None:
    getattr(_module(net, event), event["name"])(event["value"])


def _global(_net: nn.Module, _loss: Any, event: Event, _model: Any) -> None:
    GLOBALS[event["name"]] = event["value"]


def _deterministic(_net: nn.Module, _loss: Any, event: Event, _model: Any) -> None:
    torch.use_deterministic_algorithms(event["value"], warn_only=True)


def _tensor(net: nn.Module, _loss: Any, event: Event, _model: Any) -> None:
    module = _module(net, event)
    setattr(module, event["name"], torch.full_like(getattr(module, event["name"]), event["value"]))


@torch.no_grad()
def _fill(net: nn.Module, _loss: Any, event: Event, _model: Any) -> None:
    getattr(_module(net, event), event["name"]).fill_(event["value"])


def _replace(net: nn.Module, _loss: Any, event: Event, _model: Any) -> None:
    setattr(_module(net, event), event["name"], nn.Softsign())


def _method(net: nn.Module, _loss: Any, event: Event, _model: Any) -> None:
    module = getattr(_module(net, event), event["name"])

    def forward(_self: nn.Module, x: Tensor) -> Tensor:
        return x * 0.5

    module.forward = types.MethodType(forward, module)


def _require(net: nn.Module, _loss: Any, event: Event, _model: Any) -> None:
    _module(net, event).requires_grad_(event["value"])


def _freeze(net: nn.Module, _loss: Any, event: Event, _model: Any) -> None:
    parameters = list(net.parameters())
    parameters[event["number"] % len(parameters)].requires_grad_(event["value"])


@torch.no_grad()
def _shrink(net: nn.Module, _loss: Any, _event: Event, model: Any) -> None:
    for parameter in (net if model is None else model).parameters():
        parameter.mul_(0.9)


def _load(net: nn.Module, _loss: Any, _event: Event, model: Any) -> None:
    plain = net.state_dict() if model is None else model.full_state_dict()
    changed = {
        name: value.clone() * 0.8
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in plain.items()
    }
    (net if model is None else model).load_state_dict(changed)


def _hook(net: nn.Module, _loss: Any, event: Event, _model: Any) -> None:
    module, which = _module(net, event), event["which"]
    if which == "forward":
        handle = module.register_forward_hook(lambda _m, _i, made: made * 0.5)
    elif which == "pre":
        handle = module.register_forward_pre_hook(lambda _m, given: (given[0] * 0.5,))
    elif which == "backward":
        handle = module.register_full_backward_hook(lambda _m, given, _o: (given[0] * 0.5,))
    elif which == "accumulate":
        handle = module.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
    else:
        handle = module.weight.register_hook(lambda grad: grad.clamp(-1e-2, 1e-2))
    net.get_submodule(event["at"]).handles.append(handle)


def _unhook(net: nn.Module, _loss: Any, event: Event, _model: Any) -> None:
    handles = net.get_submodule(event["at"]).handles
    if handles:
        handles.pop().remove()


def _of_loss(_net: nn.Module, loss: Any, event: Event, _model: Any) -> None:
    setattr(loss, event["name"], event["value"])


_DOES = {
    "set": _set, "deep": _deep, "dilate": _dilate, "mode": _mode, "call": _call, "global": _global,
    "tensor": _tensor, "fill": _fill, "replace": _replace, "method": _method, "require": _require,
    "freeze": _freeze, "shrink": _shrink, "load": _load, "hook": _hook, "unhook": _unhook, "loss": _of_loss,
    "deterministic": _deterministic,
}  # fmt: skip

ANYTIME: tuple[Event, ...] = (
    {"do": "freeze", "number": 0, "value": False},
    {"do": "freeze", "number": 3, "value": False},
    {"do": "shrink"},
    {"do": "load"},
    {"do": "mode", "at": "", "training": False},
)
"""what may happen to any net"""
