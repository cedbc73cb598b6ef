"""Lines in the trace of the run that say which save is where."""

from __future__ import annotations

from fivefold.trace import active

__all__ = ["tell_flushed", "tell_saved"]


def tell_saved(step: int, size_bytes: int, *, local_s: float, protected_s: float) -> None:
    """The save after `step` steps, of which this rank holds `size_bytes`, is on its node and protected.

    `local_s`: from its beginning until it was written; `protected_s`: from then until others can rebuild it.
    """
    trace = active()
    if trace is not None:
        fields = {"step": step, "bytes": size_bytes}
        trace.note("checkpoint", level="local", seconds=local_s, **fields)
        trace.note("checkpoint", level="protected", seconds=protected_s, **fields)


def tell_flushed(step: int, seconds: float) -> None:
    """The save after `step` steps is on the persistent level."""
    trace = active()
    if trace is not None:
        trace.note("checkpoint", level="flushed", step=step, seconds=seconds)
