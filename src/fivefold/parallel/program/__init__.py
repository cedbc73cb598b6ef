"""Programs: what each rank computes and exchanges of a recorded net, what that costs, and how it runs.

    tape ── placing ──> spreads ── margins ──> program ── run ──> results
            `rule`      who holds what         moves and computations, priced by `costs`

`net` is the whole of it, a `RecordedNet`: recorded for each kind of batch, planned, and run. `exchange` has
the moves, each with its adjoint; `loss` shares of a loss over tiles; `memory` what a program will take.
"""

from __future__ import annotations

__all__: list[str] = []
