"""Batches made by helpers.

In the trainer, `offloaded` is what a loader uses in the place of worker processes: it decides what to wait
for and what to make itself; `loader_client` grants `leases` to helpers, by how fast each of them has been.
In the helper, `serving` makes batches. `checks` is what is expected of one that comes back.
"""

from __future__ import annotations

__all__: list[str] = []
