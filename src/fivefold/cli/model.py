"""From what a user types to a model: `resnet20`, `package.module:callable`, `torchvision:NAME`."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fivefold.errors import UsageError, suggest
from fivefold.recipes import models

if TYPE_CHECKING:
    from torch import nn

__all__ = ["FORMS", "check", "check_shape", "load", "load_loss", "parse_shape", "with_hint"]

FORMS = (
    "a model is one of Fivefold's own by name, package.module:callable (a function without arguments, a "
    "class or a module), or torchvision:NAME"
)


def check(text: str) -> None:
    """Raise `UsageError` for what cannot be a model, as far as that shows without importing torch."""
    home, colon, name = text.partition(":")
    if colon and not (home and name):
        raise UsageError(
            f"{text!r} lacks a name {'after' if home else 'before'} the colon; {FORMS}"
        )
    if not colon and text not in models.names():
        raise UsageError(f"unknown model {text!r}{suggest(text, models.names())}; {FORMS}")


def check_shape(text: str, shape: Sequence[int]) -> None:
    """Raise `UsageError` for images given to a model of volumes, of which torch says something else."""
    if text in models.names() and models.dims(text) == 3 and len(shape) != 4:
        given = "x".join(map(str, shape))
        raise UsageError(
            f"--input {given} is no volume, but {text} takes volumes: channels, depth, height and width, "
            "such as 1x16x32x32"
        )


def parse_shape(text: str) -> tuple[int, ...]:
    """`3x32x32` as numbers. Raises `UsageError`.

    >>> parse_shape("3x32x32"), parse_shape("64")
    ((3, 32, 32), (64,))
    """
    parts = text.lower().split("x")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(
            f"--input {text} is not the shape of a sample; write positive numbers with x between, channels "
            "first: 3x32x32, or 64 for a vector"
        )
    return tuple(int(part) for part in parts)


def with_hint(problem: str, integers: int) -> str:
    """What went wrong with a net, and what torch does not say of one that looks its inputs up."""
    if not integers and "Long, Int" in problem:
        return f"{problem}; --integers N gives it whole numbers below N, such as tokens"
    if integers and "index out of range" in problem:
        return f"{problem}; --integers {integers} draws numbers that the model does not know: fewer"
    return problem


def load(text: str, classes: int, channels: int) -> nn.Module:
    """Build the model that `text` names. `classes` and `channels` are for Fivefold's own models.

    Modules are looked for in the working directory first. Raises `UsageError`.
    """
    check(text)
    home, colon, name = text.partition(":")
    if not colon:
        return models.build(text, classes, channels)
    if home == "torchvision":
        return _from_torchvision(name)
    return _built(text, _attribute(_imported(home), home, name))


def load_loss(text: str) -> Callable[..., Any]:
    """The loss that `package.module:name` names: a function of outputs and targets, or an nn.Module.

    A class is called without arguments. Raises `UsageError`.
    """
    home, _, name = text.partition(":")
    found = _attribute(_imported(home), home, name)
    if isinstance(found, type):
        try:
            found = found()
        except Exception as problem:
            raise UsageError(f"--loss {text}() failed: {_in_short(problem)}") from problem
    if not callable(found):
        raise UsageError(f"--loss {text} is of type {type(found).__name__}, which cannot be called")
    return found


def _imported(home: str) -> ModuleType:
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        return import_module(home)
    except ModuleNotFoundError as problem:
        if problem.name and (home == problem.name or home.startswith(f"{problem.name}.")):
            raise UsageError(
                f"there is no module {problem.name!r}: it has to be installed, or lie in the working "
                f"directory {here}; {FORMS}"
            ) from None
        raise UsageError(f"importing {home} failed: {_in_short(problem)}") from problem
    except Exception as problem:
        raise UsageError(f"importing {home} failed: {_in_short(problem)}") from problem


def _attribute(module: ModuleType, home: str, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            offered = [
                n
                for n, value in getattr(found, "__dict__", {}).items()
                if n[0] != "_" and callable(value)
            ]
            near = suggest(part, difflib.get_close_matches(part, offered, n=5) or offered[:8])
            raise UsageError(f"{home} has no {part!r}{near}")
        found = getattr(found, part)
    return found


def _built(text: str, found: Any) -> nn.Module:
    from torch import nn

    if isinstance(found, nn.Module):
        return found
    if not callable(found):
        raise UsageError(f"{text} is no model but of type {type(found).__name__}; {FORMS}")
    if needed := _arguments(found):
        raise UsageError(
            f"{text} needs arguments ({', '.join(needed)}): name a function without arguments that "
            "returns the model"
        )
    try:
        net = found()
    except Exception as problem:
        raise UsageError(f"{text}() failed: {_in_short(problem)}") from problem
    if not isinstance(net, nn.Module):
        raise UsageError(
            f"{text}() did not return a torch.nn.Module but a value of type {type(net).__name__}"
        )
    return net


def _arguments(function: Any) -> list[str]:
    """Names of the arguments that have to be given."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # built in
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]


def _from_torchvision(name: str) -> nn.Module:
    import torch

    try:
        torchvision: Any = import_module("torchvision.models")
    except Exception as problem:
        major, minor = torch.__version__.split(".")[:2]
        fits = f"torchvision==0.{int(minor) + 15}.*" if major == "2" else "torchvision"
        cpu = " --index-url https://download.pytorch.org/whl/cpu" if not torch.version.cuda else ""
        state = "is not installed" if isinstance(problem, ModuleNotFoundError) else "does not work"
        raise UsageError(
            f"torchvision {state} beside torch {torch.__version__} ({_in_short(problem)}): "
            f"pip install '{fits}'{cpu}"
        ) from problem
    known: list[str] = torchvision.list_models()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=5)
        raise UsageError(f"torchvision has no model {name!r}{suggest(name, near) if near else ''}")
    return torchvision.get_model(name, weights=None)


def _in_short(problem: BaseException) -> str:
    said = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {said[0]}" if said else type(problem).__name__
