"""Pipelines: a model cut into stages, and micro-batches that pass them.

A *schedule* says which rank does what in which order: data that is drawn, checked and simulated before it
runs, without torch.
"""

from __future__ import annotations

__all__: list[str] = []
