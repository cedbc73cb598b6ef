"""What discovery makes of recorded machines, and of this one."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

import machines
from fivefold.cluster import reading
from fivefold.cluster.node import NodeFacts, container, this_node

NOTHING: dict[str, str] = {}


@pytest.fixture
def server(tmp_path: Path) -> NodeFacts:
    return this_node(machines.two_sockets(tmp_path), NOTHING)


@pytest.fixture
def carrel(tmp_path: Path) -> NodeFacts:
    return this_node(machines.laptop(tmp_path), NOTHING)


@pytest.fixture
def dpu(tmp_path: Path) -> NodeFacts:
    return this_node(machines.bluefield(tmp_path), NOTHING)


@given(st.sets(st.integers(0, 300)))
def test_lists_of_numbers_are_read_as_they_are_written(found: set[int]) -> None:
    assert reading.numbers(reading.spans(found)) == tuple(sorted(found))


def test_this_machine_tells_something() -> None:
    node = this_node()
    assert node.host == socket.gethostname()
    assert node.mask == tuple(sorted(os.sched_getaffinity(0)))
    assert set(node.mask) <= set(node.processors.cpus)
    assert 1 <= node.granted <= len(node.mask)
    assert node.memory.total_bytes > node.memory.available_bytes > 0
    assert any(one.kind == "loopback" for one in node.interfaces)
    json.dumps(asdict(node))


def test_a_folder_without_anything_is_a_node_of_which_little_is_known(tmp_path: Path) -> None:
    node = this_node(tmp_path, NOTHING)
    assert (node.processors.cores, node.processors.sockets, len(node.processors.numa)) == (1, 1, 1)
    assert (node.gpus, node.interfaces, node.ports, node.quota) == ((), (), (), None)
    assert (node.memory.total_bytes, node.memory.shm_bytes, node.limits.open_files) == (0, 0, None)


def test_two_sockets(server: NodeFacts) -> None:
    p = server.processors
    assert p.model == "AMD EPYC 7543 32-Core Processor"
    assert (len(p.cpus), p.cores, p.sockets, p.threads_per_core) == (128, 64, 2, 2)
    assert [node.number for node in p.numa] == [0, 1]
    assert p.numa[1].cpus == (*range(32, 64), *range(96, 128))
    assert p.numa[0].memory_bytes == 263_000_000 << 10
    assert p.numa_of((0, 70)) == (0,)
    assert p.numa_of((0, 127)) == (0, 1)
    assert server.granted == 128
    assert server.model == "Dell Inc. PowerEdge XE8545"
    assert (server.host, server.address) == ("gpu017", "10.1.0.17")


def test_gpus_have_address_name_and_numa_node(server: NodeFacts) -> None:
    assert [(gpu.address, gpu.numa) for gpu in server.gpus] == [
        ("0000:01:00.0", 0), ("0000:41:00.0", 0), ("0000:81:00.0", 1), ("0000:c1:00.0", 1),
    ]  # fmt: skip
    assert {(gpu.vendor, gpu.name, gpu.driver) for gpu in server.gpus} == {
        ("NVIDIA", "NVIDIA A100-SXM4-40GB", "nvidia")
    }
    assert not any(gpu.integrated for gpu in server.gpus)


def test_interfaces_and_fabric(server: NodeFacts) -> None:
    found = {one.name: one for one in server.interfaces}
    assert found["eno1"].bytes_per_s == 25e9 / 8
    assert found["eno1"].addresses == ("10.1.0.17", "2001:db8::17")
    assert found["eno1"].default and found["eno1"].usable and found["eno1"].numa == 1
    assert found["ib0"].kind == "infiniband" and found["ib0"].addresses == ("10.2.0.17",)
    assert found["eno2"].bytes_per_s is None and not found["eno2"].usable
    assert found["lo"].addresses == ("127.0.0.1",) and not found["lo"].usable
    (port,) = server.ports
    assert (port.adapter, port.kind, port.active, port.numa) == ("mlx5_0", "InfiniBand", True, 0)
    assert port.bytes_per_s == 25e9 and not port.plugin


def test_memory_limits_and_energy(server: NodeFacts) -> None:
    assert server.memory.limit_bytes == 256 << 30
    assert server.memory.available_bytes == 480_000_000 << 10
    assert (server.memory.swap_bytes, server.memory.swap_used_bytes) == (0, 0)
    assert server.memory.shm_bytes >= server.memory.shm_free_bytes > 0
    assert (server.limits.open_files, server.limits.locked_bytes) == (131072, None)
    assert server.energy.names == ("package-0", "package-1") and not server.energy.reason


def test_a_mask_of_one_core(tmp_path: Path) -> None:
    node = this_node(machines.two_sockets(tmp_path, mask="64"), NOTHING)
    assert (node.mask, node.granted, len(node.processors.cpus)) == ((64,), 1, 128)


def test_a_laptop(carrel: NodeFacts) -> None:
    p = carrel.processors
    assert (len(p.cpus), p.cores, p.sockets, p.threads_per_core) == (16, 12, 1, 1)
    (graphics,) = carrel.gpus
    assert (graphics.vendor, graphics.integrated, graphics.numa) == ("Intel", True, None)
    assert carrel.address == "127.0.1.1"
    assert carrel.memory.swap_used_bytes == 100_000 << 10
    assert (carrel.limits.open_files, carrel.limits.open_files_hard) == (1024, 1048576)
    wireless = next(one for one in carrel.interfaces if one.default)
    assert (wireless.name, wireless.bytes_per_s, wireless.virtual) == ("wlp0s20f3", None, False)


def test_energy_that_cannot_be_read_has_a_reason(carrel: NodeFacts) -> None:
    assert carrel.energy.counters == ()
    assert carrel.energy.reason.endswith("cannot be read: Is a directory")


def test_a_dpu(dpu: NodeFacts) -> None:
    p = dpu.processors
    assert (p.model, len(p.cpus), p.cores, p.sockets) == ("Cortex-A72", 8, 8, 1)
    assert [node.cpus for node in p.numa] == [tuple(range(8))]
    assert [(port.kind, port.active) for port in dpu.ports] == [("RoCE", True), ("RoCE", False)]
    assert dpu.model == "https://www.mellanox.com BlueField SoC"
    assert dpu.address == "10.3.0.44"
    assert "no RAPL" in dpu.energy.reason


def test_amd_and_slingshot(tmp_path: Path) -> None:
    node = this_node(machines.crusher(tmp_path), NOTHING)
    inside, apart = node.gpus
    assert inside.integrated and not apart.integrated
    assert (apart.vendor, apart.name, apart.memory_bytes) == (
        "AMD",
        "AMD Instinct MI250X",
        64 << 30,
    )
    (port,) = node.ports
    assert (port.kind, port.plugin, port.active, port.numa) == ("Slingshot", True, True, 1)


@pytest.mark.parametrize(
    ("files", "environ", "kind"),
    [
        ({}, {}, ""),
        ({".dockerenv": ""}, {}, "docker"),
        ({"run/.containerenv": ""}, {}, "podman"),
        ({".singularity.d/runscript": ""}, {}, "apptainer"),
        ({}, {"APPTAINER_NAME": "torch.sif"}, "apptainer"),
        ({}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ({"proc/self/cgroup": "0::/kubepods.slice/pod1\n"}, {}, "kubernetes"),
        ({"proc/self/cgroup": "0::/user.slice\n"}, {}, ""),
    ],
)  # fmt: skip
def test_hints_of_containers(
    tmp_path: Path, files: dict[str, str], environ: dict[str, str], kind: str
) -> None:
    assert container(machines.write(tmp_path, files), environ) == kind
