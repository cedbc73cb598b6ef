"""Fast networks between nodes, and the libraries that GPUs need to use them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fivefold.cluster import reading

__all__ = ["Port", "library", "ports"]

_FOLDERS = (
    "usr/lib", "usr/lib64", "usr/local/lib", "lib64", "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu", "usr/local/nvidia/lib64", "usr/local/cuda/lib64",
    "opt/amazon/ofi-nccl/lib", "opt/rocm/lib",
)  # fmt: skip


@dataclass(frozen=True)
class Port:
    """One port of an adapter that moves data without the kernel (RDMA)."""

    adapter: str
    """such as mlx5_0 or cxi0"""
    number: int
    kind: str
    """InfiniBand, RoCE, EFA (Amazon) or Slingshot"""
    active: bool
    bytes_per_s: float | None
    numa: int | None

    @property
    def plugin(self) -> bool:
        """Whether NCCL and RCCL need a plug-in (aws-ofi) to use it; InfiniBand and RoCE they know."""
        return self.kind in ("EFA", "Slingshot")


def ports(root: Path = Path("/")) -> tuple[Port, ...]:
    """All ports, from sysfs."""
    found: list[Port] = []
    for adapter in reading.entries(root / "sys/class/infiniband"):
        found += [_port(adapter, port) for port in reading.entries(adapter / "ports")]
    for adapter in reading.entries(root / "sys/class/cxi"):
        told = reading.text(adapter / "device/properties/link_state") or "up"
        found.append(
            Port(adapter.name, 1, "Slingshot", told == "up", None, reading.numa(adapter / "device"))
        )
    return tuple(found)


def library(
    name: str, root: Path = Path("/"), environ: Mapping[str, str] = os.environ
) -> Path | None:
    """A shared library whose file name begins with `name`, on LD_LIBRARY_PATH or in the usual folders."""
    told = [Path(part) for part in environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if part]
    for folder in [*told, *(root / part for part in _FOLDERS)]:
        for path in reading.entries(folder):
            if path.name.startswith(name) and ".so" in path.name:
                return path
    return None


def _port(adapter: Path, port: Path) -> Port:
    layer = reading.text(port / "link_layer") or "InfiniBand"
    kind = "EFA" if adapter.name.startswith(("efa", "rdmap")) else layer
    rate = (reading.text(port / "rate") or "").split()  # 200 Gb/sec (4X HDR)
    return Port(
        adapter=adapter.name,
        number=int(port.name),
        kind="RoCE" if kind == "Ethernet" else kind,
        active=(reading.text(port / "state") or "").endswith("ACTIVE"),  # 4: ACTIVE
        bytes_per_s=float(rate[0]) * 125e6 if rate else None,
        numa=reading.numa(adapter / "device"),
    )
