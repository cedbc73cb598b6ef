"""Tiles: every image is divided among ranks, and the net computes what it would compute on whole images."""

from __future__ import annotations

from fivefold.parallel.tiles import rules

__all__ = ["rules"]
