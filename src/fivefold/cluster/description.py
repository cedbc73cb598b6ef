"""A cluster as data: nodes, what a device computes and holds, and the two kinds of links between devices.

```toml
name = "two racks"
nodes = 256
devices_per_node = 8
cores_per_node = 8        # of CPUs that devices share; left out: each device has a processor to itself

[device]
memory = "80GiB"
flops_per_s = 2e13        # what convolutions reach in float32, not the data sheet's peak
bytes_per_s = 2e12        # of memory

[within]                  # a node
latency_s = 1e-5
bytes_per_s = 2e11        # of one device, while all of them send

[between]                 # nodes
latency_s = 2e-5
bytes_per_s = 2.5e10
```

The cluster need not exist. Ranks lie on devices in order, so tiles, which are innermost, share a node.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

from fivefold.errors import UsageError, suggest
from fivefold.sections import bytes_of

__all__ = ["Cluster", "Device", "LinkCost"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class LinkCost:
    """What a message costs: its latency, and its bytes. Letters: alpha and beta of Hockney's model."""

    latency_s: float
    """of a message of no size"""
    bytes_per_s: float
    """of one device, while all devices of its node use links of this kind"""
    reduction_s: float = 0.0
    """latency of a reduction per doubling of its ranks; 0: that of two messages"""

    @classmethod
    def through(
        cls, small: tuple[int, float], large: tuple[int, float], reduction_s: float = 0.0
    ) -> LinkCost:
        """The line through a small and a large message: bytes and seconds of each.

        On a busy machine a small message may seem to take as long as a large one: most of what the large one
        takes is for its bytes all the same.
        """
        latency_s = min(small[1], large[1] / 2)
        spent_s = max(large[1] - latency_s, 1e-9)
        return cls(latency_s, (large[0] - small[0]) / spent_s, reduction_s)

    def message_s(self, size_bytes: float) -> float:
        """One message."""
        return self.latency_s + size_bytes / self.bytes_per_s

    def all_reduce_s(self, size_bytes: float, ranks: int) -> float:
        """A sum over ranks that all get it, as halving and doubling does it.

        Source: Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH
        (2005), section 4.5.
        """
        moved = 2 * (ranks - 1) / ranks * size_bytes
        return self._rounds_s(ranks) + moved / self.bytes_per_s

    def all_gather_s(self, size_bytes: float, ranks: int) -> float:
        """Every rank gets what every rank has, `size_bytes` each."""
        return self._rounds_s(ranks) + (ranks - 1) * size_bytes / self.bytes_per_s

    def _rounds_s(self, ranks: int) -> float:
        return math.ceil(math.log2(ranks)) * (self.reduction_s or 2 * self.latency_s)


@dataclass(frozen=True)
class Device:
    """What one rank computes on: a GPU, or a core, which it may have to share."""

    memory_bytes: int
    flops_per_s: float
    """floating-point operations that convolutions reach in float32"""
    bytes_per_s: float
    """of its memory"""
    call_s: float = 0.0
    """of an operation that computes nothing: what a call costs"""
    overlaps: bool = True
    """whether it computes while messages travel; a core that also sends them does not"""
    alone: float = 1.0
    """how many times as fast it computes while the others of its node idle"""


@dataclass(frozen=True)
class Cluster:
    """Nodes that are all alike."""

    name: str
    nodes: int
    devices_per_node: int
    device: Device
    within: LinkCost
    """between devices of one node"""
    between: LinkCost
    """between devices of two nodes"""
    here: bool = False
    """whether it is this machine and its figures were measured"""
    cores_per_node: int = 0
    """that its devices share when all of them compute; 0: none of them waits for another"""

    @property
    def devices(self) -> int:
        """Of all nodes."""
        return self.nodes * self.devices_per_node

    def link(self, ranks: int, stride: int = 1) -> LinkCost:
        """The slowest link within groups of `ranks` ranks that lie `stride` apart."""
        span, node = ranks * stride, self.devices_per_node
        return self.within if ranks == 1 or (span <= node and node % span == 0) else self.between

    def speed(self, computing: int) -> float:
        """Of one device while as many of its node compute: 1 where there are as many cores as devices.

        Fewer share what the node has, each at most a core, which is faster by up to `device.alone`.
        """
        cores = self.cores_per_node
        if not cores:
            return 1.0
        idle = max(cores - computing, 0) / max(cores - 1, 1)
        return min(1.0, cores / computing) * (1.0 + (self.device.alone - 1.0) * idle)

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a TOML file. Raises `UsageError` when it is missing, malformed, or says what cannot be."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            said = problem.strerror if isinstance(problem, OSError) else problem
            raise UsageError(f"cannot read the cluster {path}: {said}") from None
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, source: str = "text") -> Cluster:
        """Read TOML as the module shows it. Raises `UsageError` that names the key."""
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as problem:
            raise UsageError(f"{source} is not valid TOML: {problem}") from None
        data.setdefault("name", Path(source).stem)
        device = _section(data, "device", source)
        if "memory" in device:
            device["memory_bytes"] = _memory(device.pop("memory"), source)
        made = {
            "device": _made(Device, device, "[device]", source),
            "within": _made(LinkCost, _section(data, "within", source), "[within]", source),
            "between": _made(LinkCost, _section(data, "between", source), "[between]", source),
        }
        return _made(cls, {**data, **made}, "the top level", source)


def _memory(value: object, source: str) -> int:
    try:
        return bytes_of(str(value))
    except UsageError as problem:
        raise UsageError(f"memory in [device] of {source}: {problem}") from None


def _section(data: dict[str, Any], name: str, source: str) -> dict[str, object]:
    section = data.get(name)
    if isinstance(section, dict):
        return dict(cast(dict[str, object], section))
    if section is None:
        raise UsageError(f"{source} lacks [{name}]; a cluster has [device], [within] and [between]")
    raise UsageError(f"{name} in {source} has to be a section, [{name}]")


def _made(kind: type[_T], values: Mapping[str, object], where: str, source: str) -> _T:
    """A dataclass from a table. Raises `UsageError` for keys and values that it cannot have."""
    known = {f.name: f for f in fields(cast(Any, kind)) if f.name != "here"}
    shown = ["memory" if name == "memory_bytes" else name for name in known]
    for key in values:
        if key not in known:
            raise UsageError(f"unknown key {key!r} at {where} of {source}{suggest(key, shown)}")
    for name, key in zip(shown, known.values(), strict=True):
        if key.default is MISSING and key.name not in values:
            raise UsageError(f"{source} lacks {name} at {where}; keys there: {', '.join(shown)}")
    hints = get_type_hints(kind)
    return kind(**{key: _checked(key, value, hints[key], source) for key, value in values.items()})


def _checked(key: str, value: object, hint: Any, source: str) -> object:
    if hint not in (int, float):
        expected = {str: "a string", bool: "true or false"}
        if hint in expected and not isinstance(value, hint):
            raise UsageError(f"{key} = {value!r} in {source}: expected {expected[hint]}")
        return value
    whole = isinstance(value, int) and not isinstance(value, bool)
    number = value if whole or (hint is float and isinstance(value, float)) else math.nan
    if isinstance(number, (int, float)) and math.isfinite(number) and number > 0:
        return hint(number)
    kind = "a whole number of at least 1" if hint is int else "a number above 0"
    raise UsageError(f"{key} = {value!r} in {source}: expected {kind}")
