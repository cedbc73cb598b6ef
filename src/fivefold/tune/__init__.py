"""Search for a plan: candidates, what each would take and need, and the best of them; and trials.

    search      of layouts, predicted from a recording of the net: `fivefold plan`
    instances   of processes and threads, by trials: `fivefold tune instances`

Trials start processes, and import no torch themselves; so nothing is imported here.
"""

from __future__ import annotations

__all__: list[str] = []
