"""Calls that no mode of torch sees: autograd functions of the user's, checkpoints, scripted functions."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointFunction, noop_context_fn

from fivefold.parallel.graph.recorder import CallRecorder
from fivefold.torch_private import (
    CHECKPOINT,
    FUNCTION,
    SCRIPTED,
    apply_of,
    early_stops,
    restore_apply,
)

__all__ = ["unseen_calls_noted"]

_recording = threading.local()
_lock = threading.Lock()
_watchers = 0
_plain_checkpoint: Any = vars(torch_checkpoint)[CHECKPOINT]
_plain_scripts: dict[Any, Any] = {kind: kind.__call__ for kind in SCRIPTED}


def _watched_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    apply = apply_of(cls)
    recorder: CallRecorder | None = getattr(_recording, "recorder", None)
    if recorder is None or cls.__module__.startswith("fivefold."):
        return apply(*args, **kwargs)
    if cls is CheckpointFunction:  # (function, preserve_rng_state, *inputs)
        # As torch has it, gradients flow only if they flow into an input.
        grad = any(leaf.requires_grad for leaf in args[2:] if isinstance(leaf, Tensor))
        grad = grad and torch.is_grad_enabled()
        recorder.reentrant |= grad
        first = grad and not recorder.as_before
        with (
            torch.set_grad_enabled(grad), recorder.again(), recorder.own_pass(),
            torch.set_grad_enabled(first),
        ):  # fmt: skip
            return args[0](*args[2:])
    return recorder.opaque(apply, f"{cls.__name__}.apply", args)


def _watched_checkpoint(*args: Any, **kwargs: Any) -> Generator[None]:
    """What `checkpoint` does around a function: memory is the plan's business."""
    recorder: CallRecorder | None = getattr(_recording, "recorder", None)
    if recorder is None:
        yield from _plain_checkpoint(*args, **kwargs)
        return
    given = inspect.signature(_plain_checkpoint).bind(*args, **kwargs)
    given.apply_defaults()
    chosen, early = given.arguments["context_fn"], early_stops(given.arguments["early_stop"])
    with recorder.again(known=chosen is noop_context_fn, early_stop=early):
        yield


def _watched_script(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand-ins would end the process: TorchScript raises where C++ may not."""
    recorder: CallRecorder | None = getattr(_recording, "recorder", None)
    if recorder is not None:
        recorder.refuse(
            "calls a scripted function (torch.jit), inside which no call is seen: call the plain function"
        )
    return _plain_scripts[type(function)](function, *args, **kwargs)


@contextmanager
def unseen_calls_noted(recorder: CallRecorder) -> Generator[None]:
    """Within the block, what this thread calls without a mode's seeing it is noted whole, or refused."""
    global _watchers  # noqa: PLW0603 - torch has one class of functions
    with _lock:
        _watchers += 1
        FUNCTION.apply = classmethod(_watched_apply)
        setattr(torch_checkpoint, CHECKPOINT, _watched_checkpoint)
        for kind in SCRIPTED:
            kind.__call__ = _watched_script
    _recording.recorder = recorder
    try:
        yield
    finally:
        _recording.recorder = None
        with _lock:
            _watchers -= 1
            if not _watchers:
                restore_apply()
                setattr(torch_checkpoint, CHECKPOINT, _plain_checkpoint)
                for kind, call in _plain_scripts.items():
                    kind.__call__ = call
