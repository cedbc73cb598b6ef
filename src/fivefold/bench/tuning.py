"""Which way small sums of several nodes are made, from figures of both."""

from __future__ import annotations

from fivefold.bench.measure import Sweep
from fivefold.sections import ALWAYS_DIRECT

__all__ = ["CHOICES", "SIZES", "direct_bytes"]

CHOICES = ("fivefold-direct", "fivefold-doubling")
SIZES = "4:16K"
"""up to where the core makes sums in one of these ways"""


def direct_bytes(sweep: Sweep) -> tuple[int, str]:
    """From how many bytes on doubling is at least as fast at all sizes, as `comm.direct_bytes`, and why."""
    straight, doubled = (sweep.results[name] for name in CHOICES)
    pairs = [*zip(straight, doubled, strict=True)]
    faster = [one.median_s >= other.median_s for one, other in pairs]
    first = next((at for at in range(len(pairs)) if all(faster[at:])), len(pairs))
    at = min(first, len(pairs) - 1)
    one, other = pairs[at]
    figures = (
        f"all-reduce of {one.size_bytes} bytes, {sweep.request.ranks} ranks on "
        f"{sweep.environment['nodes']} nodes: {1e6 * one.median_s:.0f} us straight, "
        f"{1e6 * other.median_s:.0f} us by doubling"
    )
    if first == len(pairs):
        return ALWAYS_DIRECT, figures
    return (0 if first == 0 else one.size_bytes), figures
