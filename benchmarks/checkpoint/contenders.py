"""The contenders: how each of them is started, and what it is called."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from contender import Kind

__all__ = ["HERE", "TITLES", "kinds", "missing"]

HERE = Path(__file__).resolve().parent
TITLES = {
    "none": "no checkpoints",
    "rank0": "torch.save on rank 0, barrier",
    "dcp": "dcp.save",
    "dcp-thread": "dcp.async_save, thread",
    "dcp-process": "dcp.async_save, process",
    "dcp-staged": "dcp.async_save, thread, kept stager",
    "lm-resiliency": "lm-resiliency 0.2.0, memory of a peer",
    "single": "fivefold, single",
    "partner": "fivefold, partner",
    "xor": "fivefold, xor",
    "xor-flushed": "fivefold, xor, every one flushed",
}


def kinds(nodes: int, disk_mib: int, throttle: float) -> dict[str, Kind]:
    """All of them, with a rank of one thread on each of so many nodes."""
    launcher = (
        str(HERE / "on_nodes.py"),
        *("--nodes", str(nodes), "--disk-mib", str(disk_mib), "--throttle", f"{throttle:g}"),
    )
    return {name: Kind(name, title, launcher, nodes, 1) for name, title in TITLES.items()}


def missing(name: str) -> str:
    """Why a contender cannot take part, or nothing."""
    if name == "lm-resiliency" and importlib.util.find_spec("lm_resiliency") is None:
        return "not installed: pip install --no-deps lm-resiliency==0.2.0"
    return ""
