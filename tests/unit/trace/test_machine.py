"""Figures of the machine: read from recorded trees of /proc and /sys, and from this machine."""

from __future__ import annotations

import math
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from fivefold.trace import machine as machine_module
from fivefold.trace.counters import EnergyCounter, Network, OpenFile, Resident, RunDelay, Throttled
from fivefold.trace.machine import GpuUse, Machine, Used
from fivefold.trace.windows import new_row

DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo: 999 1 0 0 0 0 0 0 999 1 0 0 0 0 0 0
  eth0: {received} 5 0 0 0 0 0 0 {sent} 4 0 0 0 0 0 0
  ib0: 70 5 0 0 0 0 0 0 80 4 0 0 0 0 0 0
  br0: 1000 5 0 0 0 0 0 0 2000 4 0 0 0 0 0 0
"""  # noqa: E501


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A node of version 1 of control groups, with Ethernet, a bridge over it, InfiniBand and RAPL."""
    write(tmp_path, "proc/self/task/7/schedstat", "100 5000 3\n")
    write(tmp_path, "proc/self/statm", "900 200 50 1 0 400 0\n")
    write(tmp_path, "proc/self/cgroup", "2:cpu,cpuacct:/job\n")
    write(tmp_path, "sys/fs/cgroup/cpu,cpuacct/job/cpu.stat", "nr_throttled 1\nthrottled_time 70\n")
    write(tmp_path, "sys/fs/cgroup/cpu,cpuacct/cpu.stat", "nr_throttled 0\nthrottled_time 0\n")
    write(tmp_path, "proc/self/net/dev", DEV.format(received=10, sent=20))
    for name, kind in (("eth0", 1), ("ib0", 32), ("br0", 1), ("lo", 772)):
        write(tmp_path, f"sys/class/net/{name}/type", f"{kind}\n")
    for name in ("eth0", "ib0"):
        write(tmp_path, f"sys/class/net/{name}/device/numa_node", "0\n")
    port = "sys/class/infiniband/mlx5_0/ports/1/counters"
    write(tmp_path, f"{port}/port_xmit_data", "100\n")
    write(tmp_path, f"{port}/port_rcv_data", "200\n")
    for zone, name, value in (
        ("intel-rapl:0", "package-0", 900), ("intel-rapl:0:0", "core", 300),
        ("intel-rapl:0:1", "dram", 50), ("intel-rapl:1", "psys", 5000),
    ):  # fmt: skip
        write(tmp_path, f"sys/class/powercap/{zone}/name", f"{name}\n")
        write(tmp_path, f"sys/class/powercap/{zone}/energy_uj", f"{value}\n")
        write(tmp_path, f"sys/class/powercap/{zone}/max_energy_range_uj", "1000\n")
    return tmp_path


def test_run_delay_is_the_second_number_of_schedstat(node: Path) -> None:
    delay = RunDelay(node, 7)
    assert delay.read() == 5000
    write(node, "proc/self/task/7/schedstat", "100 9000 3\n")
    assert delay.read() == 9000
    delay.close()
    assert RunDelay(node, 8).read() is None


def test_throttling_of_both_versions(node: Path, tmp_path: Path) -> None:
    one = Throttled(node)
    assert one.read() == 70
    one.close()
    other = tmp_path / "two"
    write(other, "proc/self/cgroup", "0::/job/step\n")
    write(other, "sys/fs/cgroup/cpu.stat", "usage_usec 5\n")
    write(other, "sys/fs/cgroup/job/cpu.stat", "usage_usec 5\nthrottled_usec 3\n")
    two = Throttled(other)
    assert two.read() == 3000
    two.close()
    none = Throttled(tmp_path / "nothing")
    assert none.read() is None


def test_the_network_counts_each_byte_once(node: Path) -> None:
    network = Network(node)
    assert network.read() == (20 + 400, 10 + 800)
    network.close()


def test_a_container_has_interfaces_without_devices(node: Path) -> None:
    for name in ("eth0", "ib0"):
        (node / f"sys/class/net/{name}/device/numa_node").unlink()
        (node / f"sys/class/net/{name}/device").rmdir()
    network = Network(node)
    assert network.read() == (20 + 2000 + 400, 10 + 1000 + 800)
    network.close()


def test_energy_of_packages_and_memory_over_the_end_of_the_range(node: Path) -> None:
    energy = EnergyCounter(node)
    assert energy.said == "packages and memory, by RAPL"
    assert energy.read() == 0
    write(node, "sys/class/powercap/intel-rapl:0/energy_uj", "100\n")  # 1000 passed: 200 more
    write(node, "sys/class/powercap/intel-rapl:0:1/energy_uj", "57\n")
    assert energy.read() == pytest.approx(207e-6)
    energy.close()


def test_without_counters_the_reason_is_told(tmp_path: Path) -> None:
    energy = EnergyCounter(tmp_path)
    assert energy.read() is None
    assert energy.said.startswith("not available: ")


class Fast:
    """Counters are read at every call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("_OFTEN_NS", "_SOMETIMES_NS", "_RARELY_NS", "_LONGEST_NS"):
            monkeypatch.setattr(machine_module, name, 0)


def test_a_row_holds_what_happened_since_the_last(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Fast(monkeypatch)
    machine = Machine(7, root=node)
    write(node, "proc/self/task/7/schedstat", "100 5400 3\n")
    write(node, "sys/fs/cgroup/cpu,cpuacct/job/cpu.stat", "throttled_time 100\n")
    write(node, "proc/self/net/dev", DEV.format(received=15, sent=30))
    write(node, "sys/class/powercap/intel-rapl:0/energy_uj", "950\n")
    first, second = new_row(), new_row()
    begun = time.process_time_ns()
    while time.process_time_ns() < begun + 3_000_000:
        pass
    machine(first)
    assert first["run_delay_ns"] == 400
    assert first["throttled_ns"] == 30
    assert (first["sent_bytes"], first["received_bytes"]) == (10, 5)
    assert first["energy_j"] == pytest.approx(50e-6)
    assert first["cpu_ns"] >= 3_000_000
    assert first["rss_bytes"] >= 200 * os.sysconf("SC_PAGE_SIZE")
    assert first["gpu_bytes"] == -1
    assert np.isnan(first["gpu_busy"])
    machine(second)
    assert second["run_delay_ns"] == second["throttled_ns"] == second["sent_bytes"] == 0
    assert second["energy_j"] == 0.0
    assert second["cpu_ns"] < first["cpu_ns"]
    machine.close()


def test_short_steps_lose_nothing(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_SOMETIMES_NS", "_RARELY_NS"):  # a busy machine makes any step long
        monkeypatch.setattr(machine_module, name, 10**12)
    machine = Machine(7, root=node)
    write(node, "proc/self/task/7/schedstat", "100 5400 3\n")
    write(node, "proc/self/net/dev", DEV.format(received=15, sent=30))
    early, late = new_row(), new_row()
    machine(early)
    assert early["run_delay_ns"] == early["sent_bytes"] == 0
    assert early["rss_bytes"] > 0
    Fast(monkeypatch)
    machine(late)
    assert (late["run_delay_ns"], late["sent_bytes"]) == (400, 10)
    machine.close()


def test_looks_that_take_long_are_rare(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(7, root=node)
    monkeypatch.setattr(machine_module, "_SOMETIMES_NS", 0)
    monkeypatch.setattr(machine_module, "_PAUSE", 10**9)  # so that any look takes long
    rows = [new_row() for _ in range(3)]
    for delay_ns, row in zip((5400, 6400, 7400), rows, strict=True):
        write(node, "proc/self/task/7/schedstat", f"100 {delay_ns} 3\n")
        if row is rows[-1]:
            time.sleep(0.25)
        machine(row)
    assert [row["run_delay_ns"] for row in rows] == [400, 0, 2000]
    machine.close()


def test_quotas_are_read_often_only_of_a_group_that_stood_lately(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Fast(monkeypatch)
    machine = Machine(7, root=node)
    read: list[int] = []
    for used_ns, rarely_ns in ((70, 10**12), (90, 0), (95, 10**12), (95, 10**12), (99, 10**12)):
        monkeypatch.setattr(machine_module, "_RARELY_NS", rarely_ns)
        write(node, "sys/fs/cgroup/cpu,cpuacct/job/cpu.stat", f"throttled_time {used_ns}\n")
        row = new_row()
        machine(row)
        read.append(int(row["throttled_ns"]))
    assert read == [0, 20, 5, 0, 0]  # the last 4 are told half a second later
    machine.close()


def test_what_the_machine_does_not_tell_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Fast(monkeypatch)
    machine = Machine(7, root=tmp_path)
    row = new_row()
    machine(row)
    for name in ("run_delay_ns", "throttled_ns", "rss_bytes", "sent_bytes", "received_bytes"):
        assert row[name] == -1, name
    assert np.isnan(row["energy_j"])
    assert set(machine.said) == {"energy", "network", "run_delay", "throttled"}
    assert all(text.startswith("not available") for text in machine.said.values())


class OneGpu:
    said = ""

    def __init__(self, energy_j: float) -> None:
        self.energy_j = energy_j
        self.closed = False

    def read(self) -> Used | None:
        self.energy_j += 5.0
        return Used(0.75, 1 << 30, self.energy_j)

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(("energy_j", "told"), [(100.0, 5.0), (math.nan, math.nan)])
def test_a_gpu_fills_its_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, energy_j: float, told: float
) -> None:
    Fast(monkeypatch)
    gpu = OneGpu(energy_j)
    machine, row = Machine(7, gpu=gpu, root=tmp_path), new_row()
    machine(row)
    assert row["gpu_busy"] == 0.75
    assert row["gpu_bytes"] == 1 << 30
    assert row["energy_j"] == pytest.approx(told, nan_ok=True)
    assert machine.said["gpu"] == "by NVML"
    machine.close()
    assert gpu.closed


def test_without_a_gpu_the_reason_is_told() -> None:
    gpu = GpuUse(10_000)
    assert gpu.read() is None
    assert "no GPU" in gpu.said
    gpu.close()


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    Fast(monkeypatch)
    machine, row = Machine(threading.get_native_id()), new_row()
    block = bytearray(os.urandom(1 << 20) * 64)  # 64 MiB in use
    machine(row)
    assert row["cpu_ns"] > 0
    assert row["rss_bytes"] >= len(block)
    assert row["run_delay_ns"] >= 0 or "run_delay" in machine.said
    assert row["sent_bytes"] >= 0 or "network" in machine.said
    assert not np.isnan(row["energy_j"]) or "not available" in machine.said["energy"]
    machine.close()


def test_a_file_that_is_gone_says_nothing(tmp_path: Path) -> None:
    missing = OpenFile(tmp_path / "none")
    assert missing.read() is None
    missing.close()
    assert Resident(tmp_path).read() is None
