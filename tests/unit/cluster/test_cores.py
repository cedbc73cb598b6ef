"""Granted cores: the affinity mask and the quotas of control groups, of both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fivefold.cluster import granted_cores

ALL = len(os.sched_getaffinity(0))


def machine(root: Path, groups: str, **files: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_this_machine() -> None:
    assert 1 <= granted_cores() <= ALL


def test_without_control_groups_the_mask_counts(tmp_path: Path) -> None:
    assert granted_cores(tmp_path) == ALL


def test_version_2_without_a_limit(tmp_path: Path) -> None:
    root = machine(tmp_path, "0::/job\n", job__cpu_dot_max="max 100000\n")
    assert granted_cores(root) == ALL


@pytest.mark.parametrize(
    ("quota", "cores"), [("100000 100000", 1), ("150000 100000", 1), ("1000 100000", 1)]
)
def test_version_2_with_a_quota(tmp_path: Path, quota: str, cores: int) -> None:
    assert granted_cores(machine(tmp_path, "0::/job\n", job__cpu_dot_max=quota)) == cores


def test_a_group_further_out_limits_too(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        "0::/pod/job\n",
        pod__cpu_dot_max="100000 100000",
        pod__job__cpu_dot_max="max 100000",
    )
    assert granted_cores(root) == 1


def test_inside_a_container_only_the_root_is_visible(tmp_path: Path) -> None:
    assert granted_cores(machine(tmp_path, "0::/host/pod\n", cpu_dot_max="100000 100000")) == 1


def test_version_1(tmp_path: Path) -> None:
    groups = "5:cpuset:/\n4:cpu,cpuacct:/slurm/job\n1:name=systemd:/\n"
    root = machine(
        tmp_path,
        groups,
        **{
            "cpu,cpuacct__slurm__job__cpu_dot_cfs_quota_us": "100000",
            "cpu,cpuacct__slurm__job__cpu_dot_cfs_period_us": "100000",
        },
    )
    assert granted_cores(root) == 1


def test_version_1_without_a_limit(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        "4:cpu:/\n",
        cpu__cpu_dot_cfs_quota_us="-1",
        cpu__cpu_dot_cfs_period_us="100000",
    )
    assert granted_cores(root) == ALL


def test_an_affinity_mask_counts(tmp_path: Path) -> None:
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mine)})
    try:
        assert granted_cores(tmp_path) == 1
    finally:
        os.sched_setaffinity(0, mine)
