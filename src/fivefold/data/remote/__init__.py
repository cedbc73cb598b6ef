"""Batches made by helpers.

In the trainer, `offloaded` is what a loader uses in the place of worker processes: it decides what to wait
for and what to make itself, and grants leases (`leases`, `granting`) through the `desk` of `helpers`.
In the helper, `serving` makes batches. `parcel` is how a batch becomes bytes, and `checks` what is expected
of one that comes back.
"""

from __future__ import annotations

__all__: list[str] = []
