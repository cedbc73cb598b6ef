"""Seeded faults: something in Fivefold itself is broken, as a mistake in its code would.

`python -m fuzz --mutants` counts the random cases that it takes to find each of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import torch

from fivefold.parallel import buckets, intercept, norms, randomness, rows
from fivefold.parallel.graph import guards, hooks
from fivefold.parallel.parameter_hooks import ParameterHooks
from fivefold.parallel.pipeline import gradients
from fivefold.parallel.program import exchange, net, programs, sums

__all__ = ["MUTANTS"]


@contextlib.contextmanager
def _changed(where: Any, name: str, new: Any) -> Generator[None]:
    before = getattr(where, name)
    setattr(where, name, new)
    try:
        yield
    finally:
        setattr(where, name, before)


def halo_gradients() -> Any:
    """Rules: what neighbours did with a border is not added to its gradient."""
    plain = exchange.unpack

    def unpack(*args: Any, add: bool, **more: Any) -> None:
        if not add:
            plain(*args, add=add, **more)

    return _changed(exchange, "unpack", unpack)


def local_sums() -> Any:
    """Rules: a sum over what is divided is that of the own part."""
    return _changed(sums, "_summed", lambda x, _group: x.clone())


def mask_of_the_rank() -> Any:
    """Rules: a mask follows the number of a sample on the rank, not in the batch."""
    plain = randomness.uniform

    def uniform(shape: Any, offset: int, *more: Any) -> Any:
        return plain(shape, 0 * offset, *more)

    return _changed(randomness, "uniform", uniform)


def blind_guards() -> Any:
    """Guards: nothing that a net holds is compared."""
    return _changed(guards.Guards, "broken", lambda _self: None)


def blind_settings() -> Any:
    """Guards: gradient mode, autocast and flags of torch are not looked at."""
    both = contextlib.ExitStack()
    for module in (guards, programs):
        both.enter_context(_changed(module, "settings", lambda _device: ()))
    return both


def hooks_of_parts() -> Any:
    """Hooks: those of parameters see what a rank has found."""
    return _changed(ParameterHooks, "once", lambda _self: contextlib.nullcontext(frozenset[str]()))


def deaf_hooks() -> Any:
    """Hooks: those on tensors are not called."""
    return _changed(hooks.Hooked, "__call__", lambda _self, gradient: gradient)


def mean_of_means() -> Any:
    """Reductions: statistics of a batch count every rank alike."""

    def statistics(x: torch.Tensor, count: int, group: Any) -> Any:
        mean, var, total = plain(x, min(count, 1) * 4, group)
        return mean, var, total

    plain = norms._statistics
    return _changed(norms, "_statistics", statistics)


def averaged_gradients() -> Any:
    """Reductions: gradients of ranks are averaged, not summed."""
    plain = buckets.Bucket.launch

    def launch(self: Any, group: Any, **more: Any) -> None:
        plain(self, group, **{**more, "average": True})

    return _changed(buckets.Bucket, "launch", launch)


def forgotten_gradients() -> Any:
    """Reductions: what earlier steps have left in a stage is lost."""
    return _changed(gradients, "put_back", lambda *_: None)


def zeros_for_none() -> Any:
    """Reductions: a parameter that no rank has used gets a gradient of zeros."""
    plain = buckets.Bucket.finish

    def finish(self: Any, **more: Any) -> None:
        self.pending.wait()
        self._used.fill_(1)
        plain(self, **more)

    return _changed(buckets.Bucket, "finish", finish)


def lost_writes() -> Any:
    """Effects: what a forward sets is not set."""
    return _changed(net, "apply", lambda *_args, **_more: None)


def samples_apart() -> Any:
    """Rows: samples that depend on each other are taken for independent ones."""
    return _changed(rows.Rows, "_meeting", lambda *_: "")


def batch_norm_of_the_rank() -> Any:
    """Reductions: a functional batch norm uses the statistics of the rank."""
    return _changed(intercept, "_NORMS", {})


MUTANTS = (
    "halo_gradients", "local_sums", "mask_of_the_rank", "blind_guards", "blind_settings", "hooks_of_parts",
    "deaf_hooks", "mean_of_means", "averaged_gradients", "forgotten_gradients", "zeros_for_none",
    "lost_writes", "samples_apart", "batch_norm_of_the_rank",
)  # fmt: skip
