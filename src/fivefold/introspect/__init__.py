"""Reports from trace files: where the time went, which rank is slow, what to do. Reads files only."""

from __future__ import annotations

__all__: list[str] = []
