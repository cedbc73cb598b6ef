"""Batches made by other processes: messages, the links that carry them, and the memory they lie in.

    trainer                                     helper
    grants a lease on a batch  ── LEASE ──>     makes the batch
    tray (memory of the trainer) <── DONE ──    writes it into the tray, or sends it there

`messages` says what travels, `link` how it is sent and received, `greeting` how two processes that know the
job's key meet, `parcel` how a batch becomes bytes and a batch again, `trays` where these bytes lie.

In the trainer, `offloaded` is what a loader uses in the place of worker processes: it decides what to wait
for and what to make itself (`rates`), and grants leases (`leases`, `granting`) through the `desk`, which all
loaders and validators share; its `switchboard` listens to helpers. `service`, `loop`, `serving`: the helper.
"""

from __future__ import annotations

__all__: list[str] = []
