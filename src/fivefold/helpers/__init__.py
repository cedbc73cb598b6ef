"""The runtime of helpers: messages, the links that carry them, and the memory they lie in.

    trainer                                     helper
    grants a lease        ── LEASE ──>          does what it asks for
    tray (memory of the trainer) <── DONE ──    writes it into the tray, or sends it there

`messages` says what travels, `link` how it is sent and received, `greeting` how two processes that know the
job's key meet, `packer` and `opener` how values become bytes and values again, `trays` where these bytes lie.

In the trainer, all that helpers are asked for goes through the `desk`, whose `switchboard` listens to them.
`service` and `loop` are the helper. What is asked for is of its clients: `data.remote` and `offload`.
"""

from __future__ import annotations

__all__: list[str] = []
