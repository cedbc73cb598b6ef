"""The contenders: how each of them is started, and what it is called."""

from __future__ import annotations

import importlib.util
import os
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


def kinds(
    nodes: int, disk_mib: int, throttle: float, lm_resiliency: Path | None = None
) -> dict[str, Kind]:
    """All of them, with a rank of one thread on each of so many nodes.

    `lm_resiliency`: where it is installed. Its own ranks alone find it: torch loads a plugin of it into every
    process that can.
    """
    launcher = (
        str(HERE / "on_nodes.py"),
        *("--nodes", str(nodes), "--disk-mib", str(disk_mib), "--throttle", f"{throttle:g}"),
    )
    made = {name: Kind(name, title, launcher, nodes, 1) for name, title in TITLES.items()}
    if lm_resiliency is not None:
        there = [str(lm_resiliency.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
        name = "lm-resiliency"
        environ = {"PYTHONPATH": os.pathsep.join(there)}
        made[name] = Kind(name, TITLES[name], launcher, nodes, 1, environ)
    return made


def missing(name: str, lm_resiliency: Path | None = None) -> str:
    """Why a contender cannot take part, or nothing."""
    if name != "lm-resiliency":
        return ""
    if lm_resiliency is not None and (lm_resiliency / "lm_resiliency").is_dir():
        return ""
    if lm_resiliency is None and importlib.util.find_spec("lm_resiliency") is not None:
        return ""
    where = "" if lm_resiliency is None else f" in {lm_resiliency}"
    return (
        f"not installed{where}: `pip install --no-deps --target DIR lm-resiliency==0.2.0`, then "
        "`--lm-resiliency DIR`"
    )
