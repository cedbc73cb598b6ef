"""Which way small sums are made, from figures of both."""

from __future__ import annotations

import pytest

from fivefold.bench.measure import Measurement, MeasureTask, Sweep
from fivefold.bench.tuning import CHOICES, direct_bytes


def sweep(straight_us: list[float], doubled_us: list[float]) -> Sweep:
    results = {
        name: [Measurement(4**at, [1e-6 * time]) for at, time in enumerate(times, start=1)]
        for name, times in zip(CHOICES, (straight_us, doubled_us), strict=True)
    }
    return Sweep(MeasureTask("allreduce", ranks=8), results, {"nodes": 4})


@pytest.mark.parametrize(
    ("straight_us", "doubled_us", "value"),
    [
        ([10, 20, 40], [30, 20, 30], 16),
        ([30, 40, 50], [30, 20, 10], 0),
        ([10, 20, 30], [40, 40, 40], 1 << 20),
        ([50, 20, 40], [40, 30, 30], 64),
    ],
)
def test_doubling_begins_where_it_is_as_fast_at_all_larger_sizes(
    straight_us: list[float], doubled_us: list[float], value: int
) -> None:
    found, why = direct_bytes(sweep(straight_us, doubled_us))
    assert found == value
    assert "8 ranks on 4 nodes" in why and "us by doubling" in why
