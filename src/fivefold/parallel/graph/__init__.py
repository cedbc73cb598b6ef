"""A net as data: what it calls, recorded once, and what else that recording has seen.

See `tape` for what a recording is, `record` for how it is made, `reach` and `guards` for when it still holds.
"""

from __future__ import annotations

__all__: list[str] = []
