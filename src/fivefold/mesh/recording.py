"""The trace of a rank of a mesh."""

from __future__ import annotations

import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fivefold.comm.tracing import begin
from fivefold.launch.environment import RankPlace, locate
from fivefold.mesh.mesh import Mesh
from fivefold.plan import AXES, Plan
from fivefold.trace import active
from fivefold.trace.trace import Trace

__all__ = ["record"]


def record(mesh: Mesh, folder: Path, place: RankPlace | None = None) -> Trace | None:
    """Begin to record this rank into `folder`; a trace that is active already goes on. Collective.

    None when there is a trace, or none can be written, which is said.
    """
    everyone = mesh.group(*AXES) if mesh.size > 1 else None
    facts: dict[str, Any] = {
        "layout": asdict(mesh.layout),
        "coordinates": {axis: mesh.coordinate(axis) for axis in AXES},
        "backend": str(dist.get_backend(everyone)) if everyone is not None else "none",
        "plan": _told(mesh.plan),
    }
    if (trace := active()) is not None:
        if "layout" not in trace.meta:
            trace.update_meta(**facts, device=str(mesh.device))
        return None
    place = place or (locate() if mesh.owns_world else _place(mesh))
    rows = {"events": mesh.plan.trace.events}
    hang_s = mesh.plan.trace.hang_s
    return begin(folder, place, everyone, mesh.device, rows=rows, hang_s=hang_s, **facts)


def _place(mesh: Mesh) -> RankPlace:
    """Where torch.distributed was running before."""
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", mesh.size))
    local_rank = int(os.environ.get("LOCAL_RANK", mesh.rank % local_size))
    return RankPlace(mesh.rank, mesh.size, local_rank, local_size, "running")


def _told(plan: Plan) -> dict[str, Any]:
    """Every value of the plan, and where it came from."""
    keys = [
        f"{section.name}.{key.name}"
        for section in fields(plan)
        if section.name != "provenance"
        for key in fields(getattr(plan, section.name))
    ]
    return {key: {"value": plan.value(key), "origin": str(plan.origin(key))} for key in keys}
