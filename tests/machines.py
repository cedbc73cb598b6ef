"""Recorded machines: what /proc, /sys and /etc of four kinds of nodes hold, as far as discovery reads it.

two_sockets   2 x AMD EPYC 7543 (32 cores, 2 threads each), 4 x A100, InfiniBand, Slurm with control groups v2
laptop        Intel Core i7-1260P (4 fast cores with 2 threads, 8 small ones), graphics in the processor
bluefield     BlueField-2 DPU: 8 Cortex-A72, no NUMA nodes, RoCE
crusher       AMD MI250X parts, Slingshot, names as on Cray EX
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["bluefield", "crusher", "laptop", "pretended", "two_sockets", "write"]

LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units     
Max cpu time              unlimited            unlimited            seconds   
Max open files            {soft:<20} {hard:<20} files     
Max locked memory         {locked:<20} {locked:<20} bytes     
"""  # noqa: W291 - as the kernel writes it

FIB_TRIE = """\
Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 universe UNICAST
     +-- 127.0.0.0/8 2 0 2
        |-- 127.0.0.1
           /32 host LOCAL
{leaves}
Local:
     +-- 127.0.0.0/8 2 0 2
        |-- 127.0.0.1
           /32 host LOCAL
{leaves}
"""


def write(root: Path, files: dict[str, str]) -> Path:
    """Write these files below `root`; a text `-> PATH` makes a link."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text.startswith("-> "):
            path.symlink_to(text[3:])
        else:
            path.write_text(text)
    return root


def pretended(folder: Path, numa: list[list[int]]) -> dict[str, str]:
    """Variables by which ranks are bound as if these logical cores were NUMA nodes of the machine."""
    nodes = {f"sys/devices/system/node/node{n}/cpulist": own for n, own in enumerate(numa)}
    root = write(folder / "root", {name: ",".join(map(str, own)) for name, own in nodes.items()})
    lines = "from pathlib import Path\nimport fivefold.launch.binding as binding\n"
    lines += f"binding.bound.__defaults__ = (Path({str(root)!r}),)\n"
    write(folder / "startup", {"sitecustomize.py": lines})
    # With a seed to read at its start, Python is started, not forked from what has started already.
    return {"PYTHONPATH": str(folder / "startup"), "PYTHONHASHSEED": "0"}


def cpus(sockets: dict[int, list[list[int]]]) -> dict[str, str]:
    """Topology of logical cores: for each socket, the groups that share a core."""
    files: dict[str, str] = {}
    count = 0
    for socket, groups in sockets.items():
        for core, siblings in enumerate(groups):
            for cpu in siblings:
                folder = f"sys/devices/system/cpu/cpu{cpu}/topology"
                files[f"{folder}/physical_package_id"] = f"{socket}\n"
                files[f"{folder}/core_id"] = f"{core}\n"
                files[f"{folder}/thread_siblings_list"] = ",".join(map(str, siblings)) + "\n"
                count += 1
    files["sys/devices/system/cpu/online"] = f"0-{count - 1}\n"
    return files


def numa(number: int, listed: str, kib: int) -> dict[str, str]:
    """A NUMA node."""
    folder = f"sys/devices/system/node/node{number}"
    meminfo = f"Node {number} MemTotal:  {kib} kB\nNode {number} MemFree:  {kib // 2} kB\n"
    return {f"{folder}/cpulist": listed + "\n", f"{folder}/meminfo": meminfo}


def meminfo(total: int, available: int, swap: int = 0, swap_free: int = 0) -> str:
    """KiB."""
    return (
        f"MemTotal:       {total} kB\nMemAvailable:   {available} kB\nHugePages_Total:       0\n"
        f"SwapTotal:      {swap} kB\nSwapFree:       {swap_free} kB\n"
    )


def net(
    name: str, kind: int = 1, state: str = "up", speed: int | None = None, device: str = ""
) -> dict[str, str]:
    """An interface; `device` is its folder on the PCI bus."""
    folder = f"sys/class/net/{name}"
    files = {f"{folder}/type": f"{kind}\n", f"{folder}/operstate": f"{state}\n"}
    if speed is not None:
        files[f"{folder}/speed"] = f"{speed}\n"
    if device:
        files[f"{folder}/device"] = f"-> ../../../bus/pci/devices/{device}"
    return files


def four(address: str) -> str:
    """As /proc/net/route writes an address on little-endian machines."""
    return "".join(f"{int(part):02X}" for part in reversed(address.split(".")))


def routes(
    default: tuple[str, str] | None, subnets: list[tuple[str, str, str, str]]
) -> dict[str, str]:
    """Default interface and gateway; (interface, subnet, mask, own address)."""
    lines = ["Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT"]
    if default:
        lines.append(
            f"{default[0]}\t00000000\t{four(default[1])}\t0003\t0\t0\t100\t00000000\t0\t0\t0"
        )
    leaves: list[str] = []
    for name, subnet, mask, own in subnets:
        lines.append(f"{name}\t{four(subnet)}\t00000000\t0001\t0\t0\t100\t{four(mask)}\t0\t0\t0")
        leaves.append(f"        |-- {own}\n           /32 host LOCAL")
    trie = FIB_TRIE.format(leaves="\n".join(leaves))
    return {"proc/net/route": "\n".join(lines) + "\n", "proc/net/fib_trie": trie}


def pci(
    address: str, vendor: str, kind: str, node: int, driver: str = "", **more: str
) -> dict[str, str]:
    """A device on the PCI bus."""
    folder = f"sys/bus/pci/devices/{address}"
    files = {
        f"{folder}/vendor": vendor,
        f"{folder}/class": kind,
        f"{folder}/numa_node": f"{node}\n",
    }
    if driver:
        files[f"{folder}/driver"] = f"-> ../../drivers/{driver}"
    return files | {f"{folder}/{name}": text for name, text in more.items()}


def two_sockets(root: Path, mask: str = "0-127") -> Path:
    """Two sockets with 64 cores together, and four GPUs."""
    files = cpus({s: [[c, c + 64] for c in range(32 * s, 32 * s + 32)] for s in (0, 1)})
    files |= numa(0, "0-31,64-95", 263_000_000) | numa(1, "32-63,96-127", 264_000_000)
    places = {"0000:01:00.0": 0, "0000:41:00.0": 0, "0000:81:00.0": 1, "0000:c1:00.0": 1}
    for index, (address, node) in enumerate(places.items()):
        files[f"dev/nvidia{index}"] = ""
        files |= pci(address, "0x10de\n", "0x030200\n", node, "nvidia")
        files[f"proc/driver/nvidia/gpus/{address}/information"] = (
            "Model: \t\t NVIDIA A100-SXM4-40GB\nIRQ:   \t\t 412\n"
            f"GPU UUID: \t GPU-{index}1b2c3d4-0000-4000-8000-00000000000{index}\n"
            f"Bus Location: \t {address}\nDevice Minor: \t {index}\n"
        )
    files |= pci("0000:62:00.0", "0x1a03\n", "0x030000\n", 0, "ast")  # the console's
    files |= pci("0000:21:00.0", "0x15b3\n", "0x020700\n", 0, "mlx5_core")
    files |= pci("0000:a1:00.0", "0x14e4\n", "0x020000\n", 1, "bnxt_en")
    files |= net("lo", 772, "unknown") | net("eno1", speed=25000, device="0000:a1:00.0")
    files |= net("ib0", 32, speed=200000, device="0000:21:00.0") | net(
        "eno2", state="down", speed=-1
    )
    files |= routes(
        ("eno1", "10.1.255.254"),
        [
            ("eno1", "10.1.0.0", "255.255.0.0", "10.1.0.17"),
            ("ib0", "10.2.0.0", "255.255.0.0", "10.2.0.17"),
        ],
    )
    port = "sys/class/infiniband/mlx5_0/ports/1"
    files |= {
        f"{port}/state": "4: ACTIVE\n",
        f"{port}/rate": "200 Gb/sec (4X HDR)\n",
        f"{port}/link_layer": "InfiniBand\n",
        "sys/class/infiniband/mlx5_0/device": "-> ../../../bus/pci/devices/0000:21:00.0",
        "proc/net/if_inet6": (
            "fe80000000000000ae1f6bfffe000001 02 40 20 80     eno1\n"
            "20010db8000000000000000000000017 02 40 00 80     eno1\n"
        ),
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: AMD EPYC 7543 32-Core Processor\n",
        "proc/meminfo": meminfo(527_000_000, 480_000_000),
        "proc/self/status": f"Name:\tpython\nCpus_allowed_list:\t{mask}\n",
        "proc/self/cgroup": "0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_0\n",
        "proc/self/limits": LIMITS.format(soft=131072, hard=131072, locked="unlimited"),
        "sys/fs/cgroup/system.slice/slurmstepd.scope/job_42/cpu.max": "max 100000\n",
        "sys/fs/cgroup/system.slice/slurmstepd.scope/job_42/memory.max": f"{256 << 30}\n",
        "sys/class/powercap/intel-rapl:0/name": "package-0\n",
        "sys/class/powercap/intel-rapl:0/energy_uj": "123456789\n",
        "sys/class/powercap/intel-rapl:1/name": "package-1\n",
        "sys/class/powercap/intel-rapl:1/energy_uj": "987654321\n",
        "sys/class/dmi/id/sys_vendor": "Dell Inc.\n",
        "sys/class/dmi/id/product_name": "PowerEdge XE8545\n",
        "proc/sys/kernel/hostname": "gpu017\n",
        "etc/hosts": "127.0.0.1 localhost\n10.1.0.17 gpu017.cluster gpu017 # own\n",
        "dev/shm/.keep": "",
    }
    return write(root, files)


def laptop(root: Path) -> Path:
    """A laptop as a newcomer has it."""
    files = cpus({0: [[0, 1], [2, 3], [4, 5], [6, 7], *([c] for c in range(8, 16))]})
    files |= numa(0, "0-15", 16_000_000)
    files |= pci("0000:00:02.0", "0x8086\n", "0x030000\n", -1, "i915")
    files |= (
        net("lo", 772, "unknown")
        | net("wlp0s20f3", device="0000:00:14.3")
        | net("docker0", state="down")
    )
    files |= pci("0000:00:14.3", "0x8086\n", "0x028000\n", -1, "iwlwifi")
    files |= routes(
        ("wlp0s20f3", "192.168.1.1"),
        [
            ("wlp0s20f3", "192.168.1.0", "255.255.255.0", "192.168.1.33"),
            ("docker0", "172.17.0.0", "255.255.0.0", "172.17.0.1"),
        ],
    )
    files |= {
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: 12th Gen Intel(R) Core(TM) i7-1260P\n",
        "proc/meminfo": meminfo(16_000_000, 9_000_000, 8_000_000, 7_900_000),
        "proc/self/status": "Cpus_allowed_list:\t0-15\n",
        "proc/self/cgroup": "0::/user.slice/user-1000.slice/session-2.scope\n",
        "proc/self/limits": LIMITS.format(soft=1024, hard=1048576, locked=8388608),
        # Only root may read it since 2020: a folder fails for the root of a container as well.
        "sys/class/powercap/intel-rapl:0/energy_uj/.keep": "",
        "sys/class/powercap/intel-rapl:0/name": "package-0\n",
        "proc/sys/kernel/hostname": "carrel\n",
        "etc/hosts": "127.0.0.1\tlocalhost\n127.0.1.1\tcarrel\n::1 ip6-localhost\n",
        "dev/shm/.keep": "",
    }
    return write(root, files)


def bluefield(root: Path) -> Path:
    """A DPU: no socket, no NUMA node, no speed of its cores' memory is told."""
    files = cpus({-1: [[cpu] for cpu in range(8)]})
    for index, name in enumerate(("p0", "p1")):
        files |= net(
            name,
            speed=25000 if index == 0 else -1,
            state=("up", "down")[index],
            device=f"0000:03:00.{index}",
        )
        files |= pci(f"0000:03:00.{index}", "0x15b3\n", "0x020000\n", -1, "mlx5_core")
        port = f"sys/class/infiniband/mlx5_{index}/ports/1"
        files[f"{port}/state"] = ("4: ACTIVE\n", "1: DOWN\n")[index]
        files[f"{port}/rate"] = "25 Gb/sec (1X EDR)\n"
        files[f"{port}/link_layer"] = "Ethernet\n"
    files |= net("lo", 772, "unknown") | net("tmfifo_net0") | net("oob_net0", speed=1000)
    files |= routes(
        ("oob_net0", "10.3.0.1"),
        [
            ("oob_net0", "10.3.0.0", "255.255.255.0", "10.3.0.44"),
            ("tmfifo_net0", "192.168.100.0", "255.255.255.252", "192.168.100.2"),
        ],
    )
    files |= {
        "proc/cpuinfo": (
            "processor\t: 0\nBogoMIPS\t: 400.00\nCPU implementer\t: 0x41\nCPU architecture: 8\n"
            "CPU variant\t: 0x1\nCPU part\t: 0xd08\n"
        ),
        "proc/meminfo": meminfo(16_300_000, 12_000_000),
        "proc/self/status": "Cpus_allowed_list:\t0-7\n",
        "proc/self/cgroup": "0::/user.slice\n",
        "proc/self/limits": LIMITS.format(soft=65536, hard=65536, locked=65536),
        "sys/class/dmi/id/sys_vendor": "https://www.mellanox.com\n",
        "sys/class/dmi/id/product_name": "BlueField SoC\n",
        "proc/sys/kernel/hostname": "dpu04\n",
        "etc/hosts": "127.0.0.1 localhost\n10.3.0.44 dpu04\n",
        "dev/shm/.keep": "",
    }
    return write(root, files)


def crusher(root: Path) -> Path:
    """One GPU of AMD and one adapter of Slingshot, on one socket."""
    files = (
        cpus({0: [[cpu] for cpu in range(4)]})
        | numa(0, "0-1", 1_000_000)
        | numa(1, "2-3", 1_000_000)
    )
    files |= pci(
        "0000:c1:00.0", "0x1002\n", "0x038000\n", 1, "amdgpu",
        mem_info_vram_total=f"{64 << 30}\n", product_name="AMD Instinct MI250X\n",
    )  # fmt: skip
    files |= pci(
        "0000:05:00.0", "0x1002\n", "0x030000\n", 0, "amdgpu", mem_info_vram_total=f"{512 << 20}\n"
    )
    files |= {
        "sys/class/cxi/cxi0/device/properties/link_state": "up\n",
        "sys/class/cxi/cxi0/device/numa_node": "1\n",
        "proc/sys/kernel/hostname": "x1000c0s0b0n0\n",
        "proc/self/status": "Cpus_allowed_list:\t0-3\n",
    }
    return write(root, files)
