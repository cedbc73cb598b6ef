"""Reports for the tests of the page: made from traces of a run in which much can be seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.introspect.compare import compared
from fivefold.introspect.document import document
from fivefold.introspect.run import TracedRun
from fivefold.trace.phases import Phase, Tag
from fivefold.trace.schema import KINDS, PHASES, TAGS
from traces import MS, Story

__all__ = ["Busy", "busy", "comparison", "report"]

_BEGAN = 10**12
_OTHERS = (
    ("all_reduce", Tag.BATCH_NORM, Phase.FORWARD, 512, 60_000),
    ("all_reduce", Tag.BATCH_NORM, Phase.FORWARD, 128, 45_000),
    ("all_reduce", Tag.BATCH_NORM, Phase.BACKWARD, 512, 58_000),
    ("all_reduce", Tag.GRADIENTS, Phase.BACKWARD, 1 << 18, 400_000),
    ("all_reduce", Tag.LOSS, Phase.BACKWARD, 4, 20_000),
    ("broadcast", Tag.DATA, Phase.LOAD, 2048, 30_000),
)
"""operations of every step besides those of a Story: size in bytes, duration in ns"""

_STACKS = {
    "load": [("dataset.py:18 __getitem__ (time.sleep)", 412), ("dataset.py:22 decode", 41)],
    "forward": [("model.py:42 forward", 300), ("model.py:57 block", 120)],
}


class Busy(Story):
    """Operations of several tags and sizes."""

    def _events(self, rank: int, begins: NDArray[np.int64], before: NDArray[np.int64],
                last: NDArray[np.int64]) -> NDArray[np.void]:  # fmt: skip
        rows = super()._events(rank, begins, before, last)
        random = np.random.default_rng(rank)
        of_step = len(rows) // self.steps
        more = np.repeat(rows[::of_step], len(_OTHERS))
        for place, (kind, tag, phase, size, ns) in enumerate(_OTHERS):
            row = more[place :: len(_OTHERS)]
            start = begins + last - 25 * MS + place * MS
            took = (ns * random.lognormal(0, 0.3, self.steps)).astype(np.int64)
            row["kind"], row["tag"], row["group"] = KINDS.index(kind), TAGS.index(tag), 0
            row["phase"], row["dtype"], row["size_bytes"] = PHASES.index(phase), 1, size
            row["begin_ns"], row["end_ns"], row["cpu_ns"] = start, start + took, 0
            row["blocked_ns"] = took if tag != Tag.GRADIENTS else 0
            row["number"] = 100_000 + len(_OTHERS) * np.arange(self.steps) + place
        found = np.concatenate([rows, more])
        found = found[np.argsort(found["begin_ns"], kind="stable")]
        found["seq"] = np.arange(1, len(found) + 1)
        return found

    def _windows(self, rank: int, begins: NDArray[np.int64], length: NDArray[np.int64],
                 blocked: NDArray[np.int64]) -> NDArray[np.void]:  # fmt: skip
        rows = super()._windows(rank, begins, length, blocked)
        for _, tag, _, size, ns in _OTHERS:
            rows["tag_ns"][:, TAGS.index(tag)] += ns
            rows["tag_blocked_ns"][:, TAGS.index(tag)] += ns if tag != Tag.GRADIENTS else 0
            rows["tag_bytes"][:, TAGS.index(tag)] += size
        random = np.random.default_rng(rank)
        rows["energy_j"] = 3.1 + 0.2 * random.random(self.steps)
        rows["sent_bytes"] = 2_300_000 * random.lognormal(0, 0.05, self.steps)
        rows["received_bytes"] = 2_200_000 * random.lognormal(0, 0.05, self.steps)
        rows["ready"] += np.where(rows["ready"] > 0, random.random(self.steps), 0)
        rows["loss"] = 0.4 + 1.9 / (1 + np.arange(self.steps) / 30) + random.random(self.steps) / 9
        return rows


def busy(ranks: int = 4, steps: int = 240, late: int = 3, workers: int = 0) -> Busy:
    """A run in which rank `late` has a slow loader, unless it has `workers`."""
    step = 80 * MS
    saves = [
        {
            "kind": "checkpoint", "at_ns": _BEGAN + steps * step * i // 4, "step": steps * i // 4,
            "level": "local", "seconds": 0.041, "bytes": 19_083_264,
        }
        for i in (1, 2, 3)
    ]  # fmt: skip
    warning = {
        "kind": "recovery", "at_ns": _BEGAN + steps * step * 5 // 8, "step": steps * 5 // 8,
        "text": "rank 1 was started again",
    }  # fmt: skip
    story = Busy(
        ranks=ranks, steps=steps, per_node=max(1, min(4, ranks)), size_bytes=1 << 20, notes=[*saves, warning],
        meta=_meta(ranks, workers),
        stacks={late % ranks: _STACKS},
    )  # fmt: skip
    random = np.random.default_rng(1)
    story.work[:] = story.work * random.lognormal(0, 0.03, (1, steps, 1))
    story.work[:] = story.work * random.lognormal(0, 0.003, (ranks, steps, 1))
    story.work[:, 0] *= 4
    if not workers:
        story.slow_loader(late % ranks, 20 * MS)
    return story


def _meta(ranks: int, workers: int) -> dict[str, Any]:
    sizes = [4**i for i in range(2, 13)]
    return {
        "calibration": [
            {"op": "all_reduce", "group": 0, "size_bytes": n, "seconds": 7e-6 + n / 3.4e8} for n in sizes
        ],
        "links": [{"ranks": [0, 4], "latency_s": 2.1e-5, "bytes_per_s": 1.1e9}] if ranks > 4 else [],
        "one_process_samples_per_s": 590.0, "engine": "local", "launcher": "fivefold run",
        "plan": {
            "layout.data": {"value": ranks, "origin": "user"},
            "loader.workers": {"value": workers, "origin": "user" if workers else "default"},
            "trace.enabled": {"value": True, "origin": "default"},
        },
        "environment": {"OMP_NUM_THREADS": "1", "FIVEFOLD_TRACE": "trace"},
    }  # fmt: skip


def report(folder: Path, story: Story | None = None) -> dict[str, Any]:
    """The document of a run that is written to `folder`."""
    return dict(document(TracedRun.load((story or busy()).write(folder))))


def comparison(folder: Path) -> dict[str, Any]:
    """The run with the slow loader, and the same with four workers."""
    a = document(TracedRun.load(busy(steps=120).write(folder / "no-workers")))
    b = document(TracedRun.load(busy(steps=120, workers=4).write(folder / "four-workers")))
    return dict(compared(a, b))
