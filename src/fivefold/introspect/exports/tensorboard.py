"""Scalars for TensorBoard: a value for every row of steps, means over ranks where ranks differ.

    loss                       of rank 0, as read
    step/seconds               the slowest rank's
    step/samples_per_second    of all ranks
    phase/forward              seconds per step, mean over ranks
    exposed/halo exchange      seconds per step, mean over ranks
    memory/bytes               the largest rank's

Written with TensorBoard's own writer, which needs no PyTorch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.errors import UsageError
from fivefold.introspect.exports.clock import wall_s
from fivefold.trace.figures import StepFigures
from fivefold.trace.reader import RankTrace
from fivefold.trace.schema import PHASES, TAGS

__all__ = ["scalars", "write_tensorboard"]


def write_tensorboard(traces: Sequence[RankTrace], out: Path) -> str:
    """An event file in the folder `out`. Raises `UsageError` without TensorBoard."""
    try:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        raise UsageError(
            "this export needs tensorboard: pip install 'fivefold[exports]', or export csv"
        ) from None
    # Their names appear when the modules are loaded: type checkers do not see them.
    event: Any = event_pb2
    summary: Any = summary_pb2
    out.mkdir(parents=True, exist_ok=True)
    writer = EventFileWriter(str(out))
    count = 0
    for step, at_s, found in scalars(traces):
        values = [summary.Summary.Value(tag=n, simple_value=v) for n, v in found.items()]
        told = summary.Summary(value=values)
        writer.add_event(event.Event(wall_time=at_s, step=step, summary=told))
        count += 1
    writer.close()
    return f"wrote {count:,} rows of scalars to {out}: tensorboard --logdir {out}"


def scalars(traces: Sequence[RankTrace]) -> Iterator[tuple[int, float, dict[str, float]]]:
    """Step, time in seconds since 1970, and scalars by name, for every row of steps that all ranks have."""
    rows: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for trace in traces:
        for row in trace.windows:
            rows[int(row["first_step"]), int(row["steps"])].append(row)
    for (first, steps), found in sorted(rows.items()):
        if len(found) == len(traces):
            step = first + steps - 1
            yield step, wall_s(traces[0], int(found[0]["end_ns"])), _scalars(np.array(found), steps)


def _scalars(rows: NDArray[np.void], steps: int) -> dict[str, float]:
    took = (rows["end_ns"] - rows["begin_ns"]) / 1e9
    loss, samples, rss = float(rows["loss"][0]), int(rows["samples"].sum()), rows["rss_bytes"]
    phases, exposed = (
        {w: float(mean) for w, mean in zip(words, rows[field].mean(0) / 1e9 / steps, strict=False) if mean}
        for field, words in (("phase_ns", PHASES), ("tag_blocked_ns", TAGS))
    )  # fmt: skip
    return StepFigures(
        step=int(rows["first_step"][0]) + steps - 1,
        steps=steps,
        loss=loss if math.isfinite(loss) else None,
        step_s=float(took.max()) / steps,
        samples_per_s=samples / float(took.max()) if samples else None,
        phases_s=phases,
        exposed_s=exposed,
        rss_bytes=int(rss.max()) if (rss >= 0).all() else None,
    ).scalars()
