"""Several ranks on each device: what `--instances` makes of a plan, and how many ranks that are.

Ranks are counted by the layout as ever; `instances.per_device` tells how many neighbours share a device.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TypeVar

from fivefold.cli.nodes import NodeOptions
from fivefold.cluster.cores import physical
from fivefold.cluster.gpus import gpus, visible
from fivefold.errors import UsageError
from fivefold.launch.binding import INSTANCES
from fivefold.launch.hosts import Hosts
from fivefold.launch.sharing import MPS
from fivefold.plan import AXES, Plan, Provenance, check_instances

__all__ = ["environment_of", "layout_values", "nodes_for", "with_instances"]

N = TypeVar("N", bound=NodeOptions)


def with_instances(plan: Plan, asked: int | None) -> Plan:
    """The plan with as many ranks on each device as `--instances` asks for, which a chosen layout grows by.

    Raises `UsageError` for less than one.
    """
    if asked is None:
        return plan
    if asked < 1:
        raise UsageError(f"--instances {asked}: at least 1 process per device is needed")
    if asked > plan.train.batch_size and plan.train.recipe:
        raise UsageError(
            f"--instances {asked}: a batch has {plan.train.batch_size} samples, one at least for each "
            f"process, so {plan.train.batch_size} fit"
        )
    values: dict[str, object] = {"instances.per_device": asked}
    if any(plan.origin(f"layout.{axis}").kind in ("user", "tuned") for axis in AXES):
        values["layout.data"] = plan.layout.data // plan.instances.per_device * asked
    return plan.replace(values, Provenance("user", "--instances"))


def nodes_for(nodes: N, plan: Plan | None, processes: int | None, hosts: Hosts) -> N:
    """The options with as many ranks per node as the plan's instances make, where `-n` tells nothing else.

    Other nodes are taken to have as many GPUs as this one. Raises `UsageError` if this one is to have more
    ranks than physical cores.
    """
    if plan is None or (each := plan.instances.per_device) == 1:
        return nodes
    usable = len([gpu for gpu in visible(gpus()) if gpu.granted and not gpu.integrated])
    cores, devices = len(physical(os.sched_getaffinity(0))), max(usable, 1)
    if each * devices > cores and not hosts.trainers:
        raise UsageError(
            f"instances.per_device = {each}: this node has {f'{usable} GPUs' if usable else 'no GPU'} and "
            f"{cores} physical cores, one for each process, so {max(cores // devices, 1)} fit"
        )
    return replace(nodes, ppn=each * devices) if processes is nodes.ppn is None else nodes


def layout_values(plan: Plan, axis: str, processes: int) -> dict[str, object]:
    """The values of a plan whose layout is made for so many processes along `axis`, instances along data."""
    check_instances(plan, processes)
    each = plan.instances.per_device
    if axis == "data":
        return {"layout.data": processes}
    return {"layout.data": each, f"layout.{axis}": processes // each}


def environment_of(plan: Plan | None, processes: int) -> dict[str, str]:
    """What tells engines of them. Raises `PlanError` if devices would have different numbers of ranks."""
    if plan is None:
        return {}
    check_instances(plan, processes)
    told = plan.instances
    threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(told.threads)}
    environment = threads if told.threads else {}
    if told.per_device > 1:
        environment[MPS] = f"{told.per_device}:{told.mps}:{told.percent}"
        if told.bound:
            environment[INSTANCES] = str(told.per_device)
    return environment
