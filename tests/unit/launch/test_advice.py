"""Every rule of advice: what makes it speak, and what leaves it silent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import machines
from fivefold.cluster.memory import Limits
from fivefold.cluster.node import NodeFacts
from fivefold.launch.advice import RULES, LaunchFinding, advise
from fivefold.launch.situation import Situation
from fivefold.launch.torch_facts import TorchFacts
from situations import GIB, SEES_NONE, job, on

# Four ranks, each on 16 physical cores, near to the GPUs in their order.
NEAR = [tuple(range(16 * part, 16 * part + 16)) for part in range(4)]


@pytest.fixture
def node(tmp_path: Path) -> NodeFacts:
    return on(tmp_path)


def said(rule: str, situation: Situation) -> LaunchFinding:
    """What the rule finds; it must find something, and say what, why and what to do."""
    found = RULES[rule](situation)
    assert found is not None, f"{rule} is silent"
    assert found.id == rule and found.what and found.why and found.remedy
    return found


def silent(rule: str, situation: Situation) -> None:
    assert RULES[rule](situation) is None


def test_a_good_placement_is_left_alone(node: NodeFacts) -> None:
    assert advise(job(node, NEAR, threads=16, workers=3)) == ()


def test_everything_wrong_is_found_in_the_order_of_the_table(node: NodeFacts) -> None:
    poor = replace(
        node,
        limits=Limits(256, 256, 65536),
        memory=replace(node.memory, shm_free_bytes=0, available_bytes=0, swap_used_bytes=GIB << 5),
        quota=0.5,
        address="127.0.1.1",
    )
    bad = job(poor, [(40,), (40,)], threads=8, workers=2, nodes=2, torch=SEES_NONE)
    found = [one.id for one in advise(bad)]
    assert found == [name for name in RULES if name in found]
    assert set(RULES) - set(found) <= {
        "torch-unusable",
        "gpu-far",
        "network-plugin",
        "quota-below-mask",
    }


# --- cores --------------------------------------------------------------------------------------


def test_all_on_one_core(node: NodeFacts) -> None:
    found = said("all-on-one-core", job(node, [(1,)] * 4))
    assert found.what == "all 4 ranks on gpu017 may use core 1 alone"
    silent("all-on-one-core", job(node, [(1,), (2,)]))
    silent("all-on-one-core", job(node, [(1,)]))


def test_a_node_with_a_single_core_can_grant_no_more(node: NodeFacts) -> None:
    single = replace(node, processors=replace(node.processors, cpus=(0,), cores=1), mask=(0,))
    silent("all-on-one-core", job(single, [(0,), (0,)]))
    silent("one-core-mask", job(single, [(0,)]))


def test_one_core_mask(node: NodeFacts) -> None:
    found = said("one-core-mask", job(node, [(0,), (1,)]))
    assert "--cpus-per-task" in found.remedy
    silent("one-core-mask", job(node, [(0, 1), (2, 3)]))
    silent("one-core-mask", job(node, [(0,), (1,)], engine="openmpi"))
    allocation = {"SLURM_JOB_ID": "42"}
    said("one-core-mask", job(node, [(0,), (1,)], engine="local", environ=allocation))


def test_one_rank_per_core_may_be_what_was_wanted(node: NodeFacts) -> None:
    full = [(core,) for core in range(64)]
    silent("one-core-mask", job(node, full, torch=SEES_NONE))
    alone = job(node, full, torch=SEES_NONE)
    silent("one-core-mask", replace(alone, ranks=alone.ranks[:1]))  # what rank 0 knows of itself
    said("one-core-mask", job(node, full, torch=SEES_NONE, workers=1))
    said("one-core-mask", job(node, full, torch=SEES_NONE, threads=2))


def test_more_threads_than_cores(node: NodeFacts) -> None:
    shared = tuple(range(8))
    found = said("more-threads-than-cores", job(node, [shared] * 4, threads=8))
    assert "32 threads in all, on 8 cores" in found.what
    assert "OMP_NUM_THREADS=2" in found.remedy
    silent("more-threads-than-cores", job(node, [shared] * 4, threads=2))


def test_without_omp_num_threads_there_is_a_thread_per_physical_core(node: NodeFacts) -> None:
    everything = tuple(range(128))
    silent("more-threads-than-cores", job(node, [everything], threads=None))
    found = said("more-threads-than-cores", job(node, [everything] * 4, threads=None))
    assert "256 threads in all, on 128 cores (OMP_NUM_THREADS is not set)" in found.what
    assert "OMP_NUM_THREADS=32" in found.remedy


def test_more_ranks_than_cores_cannot_be_helped_by_fewer_threads(node: NodeFacts) -> None:
    found = said("more-threads-than-cores", job(node, [(0, 1)] * 3, threads=1))
    assert found.remedy.startswith("start fewer ranks")


def test_a_quota_counts_as_cores(node: NodeFacts) -> None:
    limited = replace(node, quota=2.0)
    found = said("more-threads-than-cores", job(limited, [tuple(range(8))], threads=4))
    assert "4 threads in all, on 2 cores" in found.what


def test_hosts_are_counted_apart(node: NodeFacts) -> None:
    good = job(node, [(0, 1), (0, 1)], threads=2, nodes=2)
    apart = replace(good, ranks=(good.ranks[0], replace(good.ranks[1], host="gpu018")))
    silent("more-threads-than-cores", apart)
    said("more-threads-than-cores", good)


def test_workers_on_trainers_cores(node: NodeFacts) -> None:
    found = said("workers-on-trainers-cores", job(node, [tuple(range(8))] * 2, workers=4))
    assert "10 processes on 8 cores" in found.what
    assert "loader.workers = 3" in found.remedy
    silent("workers-on-trainers-cores", job(node, [tuple(range(8))] * 2, workers=3))
    silent("workers-on-trainers-cores", job(node, [(0,)] * 2, workers=0))


def test_quota_below_mask(node: NodeFacts) -> None:
    found = said("quota-below-mask", job(replace(node, quota=1.5), [tuple(range(8))]))
    assert "1.5 cores' time, but 8 cores can be seen (0-7)" in found.what
    silent("quota-below-mask", job(replace(node, quota=8.0), [tuple(range(8))]))
    silent("quota-below-mask", job(node, [tuple(range(8))]))


# --- network ------------------------------------------------------------------------------------


def test_an_address_of_rank_0_that_is_every_nodes_own(node: NodeFacts) -> None:
    for address in ("127.0.0.1", "localhost"):
        found = said("loopback-address", job(node, NEAR, nodes=2, environ={"MASTER_ADDR": address}))
        assert found.what == f"MASTER_ADDR is {address}, for ranks on 2 nodes"
        silent("loopback-address", job(node, NEAR, nodes=1, environ={"MASTER_ADDR": address}))
    silent("loopback-address", job(node, NEAR, nodes=2, environ={"MASTER_ADDR": "gpu017"}))


def test_a_name_that_resolves_to_the_loopback(node: NodeFacts) -> None:
    astray = replace(node, address="127.0.1.1")
    # Gloo tells the others what the host's name resolves to, wherever rank 0 is said to be.
    found = said("loopback-address", job(astray, NEAR, nodes=2, environ={"MASTER_ADDR": "gpu017"}))
    assert "gpu017 takes its own name for 127.0.1.1" in found.what
    assert "GLOO_SOCKET_IFNAME" in found.remedy and "(eno1?)" in found.remedy
    silent("loopback-address", job(astray, NEAR, nodes=2, environ={"GLOO_SOCKET_IFNAME": "ib0"}))
    silent("loopback-address", job(astray, NEAR, nodes=1))
    silent("loopback-address", job(node, NEAR, nodes=2))


def test_any_host_may_have_a_wrong_name(node: NodeFacts) -> None:
    good = job(node, NEAR, nodes=2)
    other = replace(good.ranks[3], host="gpu018", address="127.0.1.1")
    found = said("loopback-address", replace(good, ranks=(*good.ranks[:3], other)))
    assert found.what.startswith("gpu018 takes its own name for 127.0.1.1")


@pytest.fixture
def no_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(_name: str, **_: object) -> None:
        return None

    monkeypatch.setattr("fivefold.launch.advice.library", nothing)


@pytest.mark.usefixtures("no_libraries")
def test_network_plugin(node: NodeFacts) -> None:
    found = said("network-plugin", job(node, NEAR, nodes=2))
    assert "libibverbs" in found.what and "InfiniBand (mlx5_0)" in found.what
    said("network-plugin", job(node, NEAR, nodes=1, observed=False))
    silent("network-plugin", job(node, NEAR, nodes=1))
    silent("network-plugin", job(node, NEAR, nodes=2, environ={"NCCL_NET_PLUGIN": "aws-ofi"}))
    silent("network-plugin", job(replace(node, ports=()), NEAR, nodes=2))
    silent("network-plugin", job(replace(node, gpus=()), NEAR, nodes=2))


@pytest.mark.usefixtures("no_libraries")
def test_slingshot_needs_the_plugin_of_libfabric(tmp_path: Path) -> None:
    found = said("network-plugin", job(on(tmp_path, machines.crusher), [(0, 1)], nodes=2))
    assert found.what.startswith(
        "RCCL finds no libnccl-net*.so, which it needs for Slingshot (cxi0)"
    )
    assert "aws-ofi-rccl" in found.remedy


def test_a_plugin_on_the_library_path_is_enough(tmp_path: Path) -> None:
    node = on(tmp_path / "node", machines.crusher)
    machines.write(tmp_path / "lib", {"librccl-net.so": ""})
    where = {"LD_LIBRARY_PATH": f"/nowhere:{tmp_path / 'lib'}"}
    silent("network-plugin", job(node, [(0, 1)], nodes=2, environ=where))


def test_locked_memory(tmp_path: Path, node: NodeFacts) -> None:
    dpu = on(tmp_path / "dpu", machines.bluefield)
    found = said("low-memory-lock", job(dpu, [(0, 1)]))
    assert "only 0 MiB" in found.what and "RoCE (mlx5_0)" in found.what
    silent("low-memory-lock", job(node, NEAR))  # unlimited
    silent("low-memory-lock", job(replace(dpu, ports=()), [(0, 1)]))


# --- memory and limits --------------------------------------------------------------------------


def with_memory(node: NodeFacts, **changes: Any) -> NodeFacts:
    return replace(node, memory=replace(node.memory, **changes))


def test_small_shm(node: NodeFacts) -> None:
    tiny = with_memory(node, shm_bytes=64 << 20, shm_free_bytes=60 << 20)
    assert said("small-shm", job(tiny, NEAR)).what == "60 MiB free of 64 MiB in /dev/shm"
    none = with_memory(node, shm_bytes=0, shm_free_bytes=0)
    assert said("small-shm", job(none, NEAR)).what == "there is no /dev/shm"
    silent("small-shm", job(node, NEAR))


def test_few_open_files(node: NodeFacts) -> None:
    few = replace(node, limits=Limits(512, 4096, None))
    found = said("few-open-files", job(few, NEAR))
    assert found.remedy == "ulimit -n 1024 before the command"
    silent("few-open-files", job(replace(node, limits=Limits(1024, 4096, None)), NEAR))
    silent("few-open-files", job(replace(node, limits=Limits(None, None, None)), NEAR))


def test_more_ranks_and_workers_need_more_files(node: NodeFacts) -> None:
    usual = replace(node, limits=Limits(1024, 4096, None))
    assert "ulimit -n 1280" in said("few-open-files", job(usual, NEAR, world_size=128)).remedy
    found = said("few-open-files", job(usual, NEAR, workers=16))
    assert "the hard limit is 4096, ask for a higher one" in found.remedy


def test_little_memory(node: NodeFacts) -> None:
    assert said("little-memory", job(with_memory(node, available_bytes=3 * GIB), NEAR))
    found = said("little-memory", job(with_memory(node, limit_bytes=2 * GIB), NEAR))
    assert found.what.startswith("2.0 GiB of 502.6 GiB of memory are left for 4 ranks")
    silent("little-memory", job(node, NEAR))


def test_swap_in_use(node: NodeFacts, tmp_path: Path) -> None:
    swapped = with_memory(node, swap_bytes=64 * GIB, swap_used_bytes=40 * GIB)
    assert said("swap-in-use", job(swapped, NEAR)).what == "40.0 GiB of memory lie in swap"
    silent("swap-in-use", job(node, NEAR))
    silent("swap-in-use", job(on(tmp_path / "laptop", machines.laptop), NEAR))  # 98 MiB


# --- PyTorch and GPUs ---------------------------------------------------------------------------


def test_torch_unusable(node: NodeFacts) -> None:
    broken = TorchFacts(problem="ImportError: libcudart.so.13: cannot open shared object file")
    found = said("torch-unusable", job(node, NEAR, torch=broken))
    assert "libcudart" in found.what
    silent("torch-unusable", job(node, NEAR))
    silent("gpu-not-used", job(node, NEAR, torch=broken))  # said once


def test_gpus_that_torch_was_not_built_for(node: NodeFacts) -> None:
    found = said("gpu-not-used", job(node, NEAR, torch=SEES_NONE))
    assert found.what == (
        "4 GPUs of NVIDIA, but PyTorch sees none: this torch (2.13.0+cpu) was built for CPUs alone"
    )
    wrong = said("gpu-not-used", job(node, NEAR, torch=TorchFacts("2.13.0+rocm6", "ROCm 6.4")))
    assert "built for ROCm 6.4" in wrong.what


def test_gpus_without_a_driver_or_with_one_that_does_not_start(node: NodeFacts) -> None:
    blind = TorchFacts("2.13.0+cu130", "CUDA 13.0")
    assert "CUDA does not start" in said("gpu-not-used", job(node, NEAR, torch=blind)).what
    bare = replace(node, gpus=tuple(replace(gpu, driver="") for gpu in node.gpus))
    assert "no driver" in said("gpu-not-used", job(bare, NEAR, torch=blind)).what


def test_gpus_that_are_not_wanted_are_not_missed(node: NodeFacts, tmp_path: Path) -> None:
    silent("gpu-not-used", job(node, NEAR))
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    silent("gpu-not-used", job(node, NEAR, torch=SEES_NONE, environ=hidden))
    silent("gpu-not-used", job(on(tmp_path / "laptop", machines.laptop), NEAR, torch=SEES_NONE))


def test_gpus_that_stay_outside_a_container(node: NodeFacts) -> None:
    outside = replace(node, gpus=tuple(replace(gpu, granted=False) for gpu in node.gpus))
    silent("gpu-not-used", job(outside, NEAR))  # a job of Slurm that asked for none
    found = said("gpu-not-used", job(replace(outside, container="docker"), NEAR))
    assert found.what == "the node has 4 GPUs of NVIDIA, but none is passed on to this container"


def test_gpu_far(node: NodeFacts) -> None:
    found = said("gpu-far", job(node, list(reversed(NEAR))))
    assert found.what.startswith(
        "rank 0 uses GPU 0000:01:00.0 of NUMA node 0, but its cores belong to node 1, and 3 more ranks"
    )
    silent("gpu-far", job(node, NEAR))
    silent("gpu-far", job(node, [tuple(range(128))] * 4))  # not bound at all
    silent("gpu-far", job(node, list(reversed(NEAR)), torch=SEES_NONE))
