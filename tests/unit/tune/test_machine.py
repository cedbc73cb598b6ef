"""This machine as a cluster."""

from __future__ import annotations

import torch

from fivefold.cluster import granted_cores
from fivefold.tune import this_machine


def test_this_machine_is_measured() -> None:
    threads = torch.get_num_threads()
    cluster = this_machine()
    assert (cluster.nodes, cluster.devices, cluster.here) == (1, granted_cores(), True)
    device, link = cluster.device, cluster.within
    # Anything that runs this does between a MFLOP/s and a PFLOP/s, and sends a message within a second.
    assert 1e6 < device.flops_per_s < 1e15 and 1e6 < device.bytes_per_s < 1e14
    assert 0 < device.call_s < 1 and 0 < link.latency_s < 1 and link.reduction_s > 0
    assert device.memory_bytes > 1 << 20 and not device.overlaps
    assert torch.get_num_threads() == threads


def test_more_devices_than_cores_are_not_here() -> None:
    cluster = this_machine(granted_cores() + 1)
    assert not cluster.here and cluster.devices == granted_cores() + 1
    assert (
        cluster.name
        == f"{granted_cores() + 1} cores like those of this machine, which has {granted_cores()}"
    )
