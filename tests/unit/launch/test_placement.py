"""The report of a placement as text and data, and the facts that ranks write for it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import machines
from fivefold.cluster.node import NodeFacts
from fivefold.cluster.nvml import Slice
from fivefold.launch.environment import RankPlace, allocated_nodes
from fivefold.launch.explain import save
from fivefold.launch.node_text import text_of_node
from fivefold.launch.placement import place, text_of_findings, text_of_placement
from fivefold.launch.rank_facts import expected, gather, look, tell
from situations import SEES_NONE, job, on

NEAR = [tuple(range(16 * part, 16 * part + 16)) for part in range(4)]


@pytest.fixture
def node(tmp_path: Path) -> NodeFacts:
    return on(tmp_path / "node")


def lines(text: list[str]) -> dict[str, str]:
    return {line[2:12].strip(): line[12:] for line in text[1:]}


def test_a_report_on_four_gpus(node: NodeFacts) -> None:
    report = place(job(node, NEAR, threads=16, meeting="gpu017:24001"))
    text = text_of_placement(report)
    told = lines(text)
    assert text[0] == "placement, as the ranks found it:" and len(text) == 11
    assert told["engine"] == "srun"
    assert told["ranks"] == "4 on 1 host (gpu017)"
    assert told["cores"].startswith(
        "rank 0: 16 of 128 (mask 0-15, NUMA 0); rank 1: 16 of 128 (mask 16-31"
    )
    assert told["threads"] == "each: 16"
    assert told["GPUs"].startswith(
        "4 x NVIDIA A100-SXM4-40GB; rank 0: 0000:01:00.0 (NUMA 0); rank 1: "
    )
    assert told["network"] == "lo (all ranks are on one node)"
    assert told["backend"] == "cpu:gloo,cuda:nccl (every rank has a GPU of its own)"
    assert told["port"] == "gpu017:24001"
    assert "torch 2.13.0+cu130 (for CUDA 13.0)" in told["versions"]
    assert text_of_findings(report.findings) == ["no warnings"]


def test_ranks_on_cpus(node: NodeFacts) -> None:
    report = place(job(node, [tuple(range(128))] * 2, torch=SEES_NONE, threads=None))
    told = lines(text_of_placement(report))
    assert told["cores"] == "each: 128 of 128 (mask 0-127, NUMA 0-1)"
    assert told["threads"] == "each: one per core (OMP_NUM_THREADS is not set)"
    assert told["GPUs"] == "4 x NVIDIA A100-SXM4-40GB, not used"
    assert told["backend"] == "fivefold (CPUs: shared memory)"


def test_warnings_have_remedies_and_are_counted(node: NodeFacts) -> None:
    report = place(job(node, [(0,), (0,)], torch=SEES_NONE))
    text = text_of_findings(report.findings)
    assert text[-1] == f"{len(report.findings)} warnings" and len(report.findings) > 1
    assert text[0].startswith("warning gpu-not-used: ")
    assert text[2].startswith("  remedy: ")


@pytest.mark.parametrize(
    ("environ", "address", "network"),
    [
        ({}, "10.1.0.17", "eno1 (has the host's address, 25 Gbit/s)"),
        ({}, "10.2.0.17", "ib0 (has the host's address, 200 Gbit/s)"),
        ({}, "", "eno1 (leads outwards, 25 Gbit/s)"),
        ({"NCCL_SOCKET_IFNAME": "ib0"}, "10.1.0.17", "ib0 (NCCL_SOCKET_IFNAME says so)"),
    ],
)
def test_the_interface_between_nodes(
    node: NodeFacts, environ: dict[str, str], address: str, network: str
) -> None:
    found = job(replace(node, address=address), NEAR, nodes=2, environ=environ)
    told = lines(text_of_placement(place(found)))
    assert told["network"] == network


@pytest.mark.parametrize(
    ("changes", "backend"),
    [
        ({}, "cpu:gloo,cuda:nccl"),
        ({"masks": NEAR * 2}, "gloo"),  # 8 ranks on 4 GPUs
        ({"backend": "mpi"}, "mpi"),
        ({"torch": SEES_NONE}, "fivefold"),
        ({"torch": SEES_NONE, "masks": NEAR[:1]}, "gloo"),
    ],
)
def test_the_backend_that_start_chooses(
    node: NodeFacts, changes: dict[str, object], backend: str
) -> None:
    given = {"masks": NEAR, **changes}
    assert place(job(node, **given)).backend.name == backend  # type: ignore[arg-type]


def test_slices_are_counted_and_talk_over_gloo(node: NodeFacts) -> None:
    """One for each rank, and yet NCCL takes none."""
    own = [
        replace(gpu, slices=tuple(Slice(f"MIG-{n}{m}", "MIG 3g.20gb", m, 0, None) for m in (1, 2)))
        for n, gpu in enumerate(node.gpus)
    ]
    report = place(job(replace(node, gpus=tuple(own)), NEAR))
    told = lines(text_of_placement(report))["GPUs"]
    assert report.backend.name == "gloo"
    assert told.startswith("8 x MIG 3g.20gb; rank 0: MIG-01 (NUMA 0); "), told


def test_ranks_of_which_nothing_is_known_are_named(node: NodeFacts) -> None:
    found = replace(job(node, NEAR), world_size=8)
    assert lines(text_of_placement(place(found)))["ranks"].endswith("nothing known of 4-7")


def test_a_report_is_saved_whole_and_is_json(node: NodeFacts, tmp_path: Path) -> None:
    report = place(job(node, NEAR, threads=16))
    save(report, tmp_path / "placement.json")
    read = json.loads((tmp_path / "placement.json").read_text())
    assert read == json.loads(json.dumps(asdict(report)))
    assert read["ranks"][3]["mask"] == list(range(48, 64))
    assert read["ranks"][0]["gpus"][1]["address"] == "0000:41:00.0"
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("machine", [machines.two_sockets, machines.laptop, machines.bluefield])
def test_a_node_in_ten_lines(tmp_path: Path, machine: object) -> None:
    text = text_of_node(on(tmp_path / "other", machine))
    assert len(text) == 10
    assert all(len(line) < 400 and "None" not in line for line in text)


def test_lines_of_a_node(node: NodeFacts) -> None:
    told = {line[2:14].strip(): line[14:] for line in text_of_node(node)[1:]}
    assert told["processors"] == (
        "AMD EPYC 7543 32-Core Processor: 64 cores with 2 threads each, 2 sockets, 2 NUMA nodes"
    )
    assert told["granted"] == "128 of 128 (mask 0-127, no quota)"
    assert "eno1 (up, 10.1.0.17, 25 Gbit/s, default route)" in told["interfaces"]
    assert told["fabric"] == "mlx5_0:1 (InfiniBand, 200 Gbit/s)"
    assert told["energy"] == "package-0, package-1"


def test_facts_of_ranks_come_back_as_they_were(tmp_path: Path) -> None:
    root = machines.two_sockets(tmp_path / "node", mask="3-5")
    facts = [
        look(RankPlace(rank, 2, rank, 2, "torchrun"), {"OMP_NUM_THREADS": "2,1"}, root)
        for rank in (0, 1)
    ]
    for one in reversed(facts):
        tell(tmp_path / "told", one)
    assert facts[0].mask == (3, 4, 5) and facts[0].threads == 2
    assert facts[1].gpu is not None and facts[1].gpu.address == "0000:41:00.0"
    # The GPUs of the recorded machine came back too, as objects.
    assert gather(tmp_path / "told", 2, limit_s=10) == tuple(facts)
    assert not (tmp_path / "told").exists()


def test_ranks_that_tell_nothing_and_damaged_files_are_missing(tmp_path: Path) -> None:
    facts = look(RankPlace(0, 3, 0, 3, "torchrun"), {})
    tell(tmp_path, facts)
    (tmp_path / "rank-1.json").write_text('{"rank": 1, "ho')
    assert gather(tmp_path, 3, limit_s=0.05) == (facts,)


@pytest.mark.parametrize(
    ("text", "threads"), [("4", 4), ("4,2", 4), ("", None), ("0", None), ("x", None)]
)
def test_threads_that_openmp_is_told(tmp_path: Path, text: str, threads: int | None) -> None:
    assert (
        look(RankPlace(0, 1, 0, 1, "alone"), {"OMP_NUM_THREADS": text}, tmp_path).threads == threads
    )


def test_expected_ranks_share_the_cores_that_are_granted(node: NodeFacts) -> None:
    ranks = expected(4, node, {})
    assert [one.rank for one in ranks] == [0, 1, 2, 3]
    assert {(one.threads, one.mask) for one in ranks} == {(32, tuple(range(128)))}
    assert [one.gpu.address for one in ranks if one.gpu] == [gpu.address for gpu in node.gpus]
    assert expected(2, node, {"OMP_NUM_THREADS": "5"})[1].threads == 5
    bound = expected(2, node, {}, [(0, 1), (32, 33)])
    assert [(one.mask, one.numa) for one in bound] == [((0, 1), (0,)), ((32, 33), (1,))]


def test_nodes_of_an_allocation(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("a\na\nb\n")
    assert allocated_nodes({"SLURM_JOB_NUM_NODES": "3"}) == 3
    assert allocated_nodes({"PBS_NODEFILE": str(tmp_path / "nodes")}) == 2
    assert allocated_nodes({"PBS_NODEFILE": str(tmp_path / "missing")}) == 1
    assert allocated_nodes({}) == 1


def test_this_process_can_be_looked_at() -> None:
    facts = look(RankPlace(0, 1, 0, 1, "alone"))
    assert facts.mask == tuple(sorted(os.sched_getaffinity(0)))
