"""Communication added up over ranks, by operation, tag, group and size, against what the machine can do.

    algorithm bandwidth = bytes of the operation / time              as an application sees it
    bus bandwidth       = algorithm bandwidth x f(operation, ranks)  what a link has to carry
    f: all_reduce 2 (n - 1) / n;  all_gather, reduce_scatter, all_to_all (n - 1) / n;  others 1

as in nccl-tests (PERFORMANCE.md). Bytes of an all_gather are those of its result: n times what a rank gives.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.introspect.arrivals import Meetings, Transfer
from fivefold.introspect.groups import Group
from fivefold.introspect.run import TracedRun
from fivefold.introspect.tables import Operation
from fivefold.trace.schema import KINDS, TAGS

__all__ = ["Calibrated", "bus_factor", "calibration", "operations", "quantile"]

_ENOUGH = 5
"""operations in the rings from which a time is told"""
_WAITED = 0.2
"""share of the time that is exposed, from which the end of an operation is known well"""
_MOST_RATIO = 2.0
"""faster than calibrated by more than that, what is measured is not how long a transfer takes"""
_WHOLE = ("all_gather",)
"""operations whose size is that of the result: ranks times what each gives"""


def bus_factor(operation: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth.

    >>> bus_factor("all_reduce", 4), bus_factor("all_gather", 4), bus_factor("broadcast", 4)
    (1.5, 0.75, 1.0)
    """
    if ranks < 2:
        return 1.0
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (
        (ranks - 1) / ranks if operation in ("all_gather", "reduce_scatter", "all_to_all") else 1.0
    )


def quantile(histogram: NDArray[np.integer], share: float) -> float:
    """In seconds, of durations in a histogram of a trace; right to within a factor of the root of two.

    >>> counts = np.zeros(40, int)
    >>> counts[11] = 10  # of 1,024 to 2,047 ns
    >>> round(quantile(counts, 0.5) * 1e9)
    1448
    """
    total = int(histogram.sum())
    if not total:
        return 0.0
    place = int(np.searchsorted(np.cumsum(histogram), math.ceil(share * total)))
    return 2.0 ** (place - 0.5) / 1e9 if place else 0.0


@dataclass(frozen=True)
class Calibrated:
    """Time by size of one operation over one group, measured at start."""

    operation: str
    group: int
    sizes_bytes: tuple[int, ...]
    seconds: tuple[float, ...]

    def expected_s(self, size_bytes: float) -> float | None:
        """Interpolated between neighbouring sizes on logarithmic axes; beyond the last by its bandwidth.

        >>> Calibrated("all_reduce", 0, (1000, 4000), (1.0, 4.0)).expected_s(2000)
        2.0
        """
        if not self.sizes_bytes or size_bytes <= 0:
            return None
        at = bisect.bisect_left(self.sizes_bytes, size_bytes)
        if at == 0:
            return self.seconds[0]
        if at == len(self.sizes_bytes):
            return self.seconds[-1] * size_bytes / self.sizes_bytes[-1]
        (a, b), (s, t) = self.sizes_bytes[at - 1 : at + 1], self.seconds[at - 1 : at + 1]
        part = math.log(size_bytes / a) / math.log(b / a)
        return round(math.exp((1 - part) * math.log(s) + part * math.log(t)), 12)


def calibration(run: TracedRun) -> list[Calibrated]:
    """What the first rank that has it measured at start; malformed entries are left out."""
    found: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    told: Any = next((t.meta["calibration"] for t in run.ranks if t.meta.get("calibration")), [])
    rows: Any = told.get("operations", []) if isinstance(told, dict) else told
    for row in rows if isinstance(rows, list) else []:
        try:
            size, seconds = int(row["size_bytes"]), float(row["seconds"])
            if size > 0 and seconds > 0:
                found[str(row["op"]), int(row.get("group", 0))][size] = seconds
        except (KeyError, TypeError, ValueError):
            continue
    return [
        Calibrated(op, group, tuple(sorted(times)), tuple(times[size] for size in sorted(times)))
        for (op, group), times in sorted(found.items())
    ]


def operations(
    run: TracedRun, known: Mapping[tuple[int, int], Group], met: Meetings
) -> list[Operation]:
    """A row per operation, tag, group and size; those that take most time first."""
    curves = {(c.operation, c.group): c for c in calibration(run)}
    parts: dict[Transfer, list[tuple[Group, int, NDArray[np.void]]]] = defaultdict(list)
    for rank, index, key, rows in _by_key(run):
        group = known.get((rank, index), Group(f"group {index}", ()))
        parts[Transfer(key[0], key[1], group.name, key[2])].append((group, index, rows))
    found = [_operation(key, rows, met, curves) for key, rows in parts.items()]
    return sorted(found, key=lambda row: -row["total_s"])


def _by_key(run: TracedRun) -> Iterator[tuple[int, int, tuple[int, int, int], NDArray[np.void]]]:
    """Rank, number of the group, (kind, tag, bucket), and the rows of sums that are alike in these."""
    for trace in run.ranks:
        sums = trace.sums[trace.sums["kind"] > 0]
        codes = np.zeros((len(sums), 4), np.uint8)
        for column, name in enumerate(("group", "kind", "tag", "bucket")):
            codes[:, column] = sums[name]
        flat = codes.view(np.uint32)[:, 0]
        order = np.argsort(flat, kind="stable")
        for places in np.split(order, np.flatnonzero(np.diff(flat[order])) + 1):
            if len(places):
                group, kind, tag, bucket = (int(part) for part in codes[places[0]])
                yield trace.rank, group, (kind, tag, bucket), sums[places]


def _operation(
    key: Transfer,
    parts: list[tuple[Group, int, NDArray[np.void]]],
    met: Meetings,
    curves: dict[tuple[str, int], Calibrated],
) -> Operation:
    rows = np.concatenate([part[2] for part in parts])
    group, index = parts[0][0], parts[0][1]
    name = KINDS[key.kind] if key.kind < len(KINDS) else "other"
    count, size = int(rows["count"].sum()), int(rows["size_bytes"].sum())
    total, blocked = int(rows["total_ns"].sum()), int(rows["blocked_ns"].sum())
    histogram = rows["histogram"].sum(0)
    waiting = met.waiting_share.get(key)
    whole = size / count * (group.size or 1 if name in _WHOLE else 1)
    transfer = _transfer(met.served_s.get(key), [part[2] for part in parts])
    curve = curves.get((name, index)) if index in {part[1] for part in parts} else None
    # What nobody waits for may have ended long before anybody looked.
    expected = curve.expected_s(size / count) if curve and blocked > _WAITED * total else None
    ratio = expected / transfer if expected and transfer else None
    seen = ratio is None or ratio <= _MOST_RATIO  # else the last to come found all parts there
    speed = whole / transfer if seen and transfer and whole else None
    return {
        "operation": name, "tag": TAGS[key.tag] if key.tag < len(TAGS) else "untold", "group": key.group,
        "group_size": group.size or None,
        "size_from_bytes": 1 << (key.bucket - 1) if key.bucket else 0,
        "size_to_bytes": (1 << key.bucket) - 1,
        "count": count, "bytes": size, "total_s": total / 1e9, "mean_s": total / count / 1e9,
        "min_s": int(rows["min_ns"].min()) / 1e9, "max_s": int(rows["max_ns"].max()) / 1e9,
        "p50_s": quantile(histogram, 0.5), "p90_s": quantile(histogram, 0.9),
        "p99_s": quantile(histogram, 0.99),
        "exposed_s": blocked / 1e9, "waiting_s": None if waiting is None else waiting * blocked / 1e9,
        "hidden_s": max(0, total - blocked) / 1e9,
        "transfer_s": transfer, "algorithm_bytes_per_s": speed,
        "bus_bytes_per_s": speed * bus_factor(name, group.size) if speed else None,
        "expected_s": expected,
        "expected_ratio": ratio if seen else None,
    }  # fmt: skip


def _transfer(served: NDArray[np.float64] | None, parts: list[NDArray[np.void]]) -> float | None:
    """How long it takes once all have come: from the rings, else of the rank that waits least."""
    if served is not None and len(served) >= _ENOUGH:
        return float(np.median(served)) or None
    means = [int(rows["total_ns"].sum()) / max(1, int(rows["count"].sum())) for rows in parts]
    return min(means) / 1e9 or None
