"""This machine as a cluster."""

from __future__ import annotations

import torch

from fivefold.cluster import granted_cores
from fivefold.tune.machine import this_machine


def test_this_machine_is_measured() -> None:
    threads = torch.get_num_threads()
    cluster = this_machine()
    assert (cluster.nodes, cluster.devices, cluster.here) == (1, granted_cores(), True)
    device, link = cluster.device, cluster.within
    # Anything that runs this does between a MFLOP/s and a PFLOP/s, and sends a message within a second.
    assert 1e6 < device.flops_per_s < 1e15 and 1e6 < device.bytes_per_s < 1e14
    assert (
        device.alone >= 1
        and 0 < device.call_s < 1
        and 0 < link.latency_s < 1
        and link.reduction_s > 0
    )
    assert device.memory_bytes > 1 << 20 and not device.overlaps
    assert torch.get_num_threads() == threads


def test_more_devices_than_cores_share_them() -> None:
    cluster, cores = this_machine(granted_cores() + 1), granted_cores()
    assert cluster.here and (cluster.devices, cluster.cores_per_node) == (cores + 1, cores)
    assert cluster.name == f"this machine, which share its {cores} cores"
    assert cluster.speed(cores + 1) == cores / (cores + 1) and cluster.speed(cores) == 1.0
    assert cluster.speed(1) == (cluster.device.alone if cores > 1 else 1.0)
