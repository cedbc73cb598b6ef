"""The runtime of helpers: messages, the links that carry them, and the memory they lie in.

    trainer                                     helper
    grants a lease            ── LEASE ──>      does what it asks for
    buffer (trainer's memory) <── DONE ──       writes it into the buffer, or sends it there

`messages` says what travels, `link` how it is sent and received, `handshake` how two processes that know the
job's key meet, `encode` and `decode` how values become bytes and values again, `receive_buffers` where these
bytes lie.

In the trainer, all that helpers are asked for goes through the `dispatcher`, whose `event_loop` listens to
them. `service` and `serving_loop` are the helper. What is asked for is of the dispatcher's clients:
`data.remote.loader_client` and `offload.validator_client`.
"""

from __future__ import annotations

__all__: list[str] = []
