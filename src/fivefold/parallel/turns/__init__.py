"""Tiles that one process computes by turns, so that it holds one at a time.

`net` has a recorded net for every turn, with the programs that tile ranks would have; `step` carries them
out, from one question to the next (see `asked`); `shelf` keeps what they hold meanwhile, `budget` says how
much.
"""

from __future__ import annotations

__all__: list[str] = []
