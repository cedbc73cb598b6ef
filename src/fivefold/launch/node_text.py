"""A node in some lines for people."""

from __future__ import annotations

from fivefold.cluster.fabric import Port
from fivefold.cluster.gpus import Gpu
from fivefold.cluster.memory import Limits
from fivefold.cluster.network import Interface
from fivefold.cluster.node import NodeFacts
from fivefold.cluster.reading import spans
from fivefold.launch.advice import gib

__all__ = ["speed", "text_of_node"]


def text_of_node(node: NodeFacts) -> list[str]:
    """What the node has, and what of it was granted."""
    energy = node.energy
    rows = (
        ("machine", node.model or "its firmware does not tell"),
        ("processors", _processors(node)),
        ("granted", _granted(node)),
        ("GPUs", "; ".join(map(_gpu, node.gpus)) or "none"),
        ("interfaces", "; ".join(map(_interface, _known(node.interfaces))) or "none"),
        (
            "fabric",
            "; ".join(map(_port, node.ports)) or "none (no InfiniBand, RoCE, EFA or Slingshot)",
        ),
        ("limits", _limits(node.limits)),
        ("energy", ", ".join(energy.names) if energy.names else f"not available: {energy.reason}"),
        ("container", node.container or "no sign of one"),
    )
    name = f"{node.host} ({node.address or 'its name resolves to no address'})"
    return [f"node {name}:", *(f"  {name:<12}{value}" for name, value in rows)]


def speed(bytes_per_s: float | None) -> str:
    """Of a link, as its makers state it.

    >>> speed(3.125e9), speed(None)
    ('25 Gbit/s', 'speed unknown')
    """
    return "speed unknown" if bytes_per_s is None else f"{bytes_per_s / 125e6:g} Gbit/s"


def _processors(node: NodeFacts) -> str:
    p = node.processors
    smt = f" with {p.threads_per_core} threads each" if p.threads_per_core > 1 else ""
    sockets = f"{p.sockets} socket{'s' if p.sockets > 1 else ''}"
    numa = f"{len(p.numa)} NUMA node{'s' if len(p.numa) > 1 else ''}"
    cores = f"{p.cores} core{'s' if p.cores > 1 else ''}"
    return f"{p.model or 'unknown'}: {cores}{smt}, {sockets}, {numa}"


def _granted(node: NodeFacts) -> str:
    limit = "no quota" if node.quota is None else f"quota {node.quota:g} cores' time"
    return f"{node.granted} of {len(node.processors.cpus)} (mask {spans(node.mask)}, {limit})"


def _gpu(gpu: Gpu) -> str:
    parts = [gpu.address]
    if gpu.numa is not None:
        parts.append(f"NUMA {gpu.numa}")
    if gpu.memory_bytes is not None:
        parts.append(gib(gpu.memory_bytes))
    parts.append(f"driver {gpu.driver}" if gpu.driver else "no driver")
    if not gpu.granted:
        parts.append("not granted")
    if gpu.integrated:
        parts.append("part of the processor")
    return f"{gpu.name or gpu.vendor} ({', '.join(parts)})"


def _known(interfaces: tuple[Interface, ...]) -> list[Interface]:
    """Without those that are no more than prepared."""
    return [one for one in interfaces if one.addresses or not one.virtual]


def _interface(one: Interface) -> str:
    if one.kind == "loopback":
        return f"{one.name} (loopback)"
    address = one.addresses[0] if one.addresses else "no address"
    default = ", default route" if one.default else ""
    return f"{one.name} ({one.state}, {address}, {speed(one.bytes_per_s)}{default})"


def _port(port: Port) -> str:
    state = speed(port.bytes_per_s) if port.active else "down"
    return f"{port.adapter}:{port.number} ({port.kind}, {state})"


def _limits(limits: Limits) -> str:
    files = "any number of" if limits.open_files is None else str(limits.open_files)
    locked = "any amount" if limits.locked_bytes is None else gib(limits.locked_bytes)
    return f"{files} open files, {locked} of locked memory"
