"""This node: all that discovery finds out about it, without torch and without starting anything."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fivefold.cluster import reading
from fivefold.cluster.cores import affinity, granted_cores, quota
from fivefold.cluster.energy import Energy, energy
from fivefold.cluster.fabric import Port, ports
from fivefold.cluster.gpus import Gpu, gpus
from fivefold.cluster.memory import Limits, Memory, limits, memory
from fivefold.cluster.network import Interface, interfaces, resolve
from fivefold.cluster.processors import Processors, processors

__all__ = ["NodeFacts", "container", "this_node"]


@dataclass(frozen=True)
class NodeFacts:
    """What a node has, and what of it was granted to this process."""

    host: str
    address: str
    """what this node takes its own name for: what other nodes are told to connect to; empty if unknown"""
    model: str
    """of the machine, as its firmware says; empty in most containers"""
    processors: Processors
    mask: tuple[int, ...]
    """logical cores on which this process may run"""
    quota: float | None
    """how many cores' time the control groups grant; None without a limit"""
    granted: int
    """cores that this process can really use: the smaller of both"""
    gpus: tuple[Gpu, ...]
    interfaces: tuple[Interface, ...]
    ports: tuple[Port, ...]
    memory: Memory
    limits: Limits
    energy: Energy
    container: str
    """docker, podman, kubernetes, apptainer or another kind; empty outside containers"""


def this_node(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> NodeFacts:
    """Look at this node. `root` is where /proc, /sys, /etc and /dev are found."""
    host = reading.text(root / "proc/sys/kernel/hostname") or socket.gethostname()
    return NodeFacts(
        host=host,
        address=resolve(host, root),
        model=_model(root),
        processors=processors(root),
        mask=affinity(root),
        quota=quota(root),
        granted=granted_cores(root),
        gpus=gpus(root),
        interfaces=interfaces(root),
        ports=ports(root),
        memory=memory(root),
        limits=limits(root),
        energy=energy(root),
        container=container(root, environ),
    )


def container(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> str:
    """The kind of container that this process runs in, as far as hints tell; empty if there are none."""
    if environ.get("APPTAINER_NAME") or environ.get("SINGULARITY_NAME"):
        return "apptainer"
    if environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    for name, kind in ((".dockerenv", "docker"), ("run/.containerenv", "podman")):
        if (root / name).exists():
            return kind
    if (root / ".singularity.d").exists():
        return "apptainer"
    told = reading.text(root / "proc/self/cgroup") or ""
    kinds = {"kubepods": "kubernetes", "docker": "docker", "libpod": "podman", "lxc": "lxc"}
    found = re.search(r"/.*?(kubepods|docker|libpod|lxc)", told)
    return kinds[found[1]] if found else ""


def _model(root: Path) -> str:
    """From the firmware's tables (DMI), or from the device tree of ARM machines."""
    maker = reading.text(root / "sys/class/dmi/id/sys_vendor") or ""
    product = reading.text(root / "sys/class/dmi/id/product_name") or ""
    return f"{maker} {product}".strip() or reading.text(root / "proc/device-tree/model") or ""
