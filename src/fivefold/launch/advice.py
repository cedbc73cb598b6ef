"""Advice on a placement: small rules, each of which is silent or says what, why, and what to do.

To add one: a function that takes a `Situation`, a line in `RULES`, and a test of both its answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from fivefold.cluster.fabric import library
from fivefold.cluster.network import interface_for
from fivefold.cluster.reading import spans
from fivefold.launch.rank_facts import RankFacts
from fivefold.launch.situation import Situation, cores_of

__all__ = ["RULES", "LaunchFinding", "advise", "gib"]

# ---- Rules about PyTorch and GPUs

_BUILDS = {"NVIDIA": "CUDA", "AMD": "ROCm", "Intel": "XPU"}


def torch_unusable(job: Situation) -> LaunchFinding | None:
    """PyTorch is missing, broken or very slow to import."""
    if not job.torch.problem:
        return None
    return LaunchFinding(
        "torch-unusable",
        f"PyTorch cannot be used: {job.torch.problem}",
        "no rank can train",
        "try python -c 'import torch' with the Python of this command; where the import is slow, copy the "
        "environment from the network file system to the node's own disk",
    )


def gpu_not_used(job: Situation) -> LaunchFinding | None:
    """The node has GPUs, and PyTorch sees none of them."""
    found = [gpu for one in job.ranks for gpu in one.gpus]
    if job.torch.problem or job.torch.devices:
        return None
    if not found:
        return _not_passed_on(job)
    vendor, build = found[0].vendor, _BUILDS[found[0].vendor]
    count = len({gpu.address for gpu in found})
    if not job.torch.gpus_of.startswith(build):
        built = job.torch.gpus_of or "CPUs alone"
        why, remedy = (
            f"this torch ({job.torch.version}) was built for {built}",
            (
                f"install the build of PyTorch for {build}: pytorch.org/get-started shows the command"
            ),
        )
    elif not all(gpu.driver for gpu in found):
        why, remedy = (
            "no driver holds them",
            "load the driver (modprobe), or ask the administrators",
        )
    else:
        why, remedy = (
            f"{build} does not start",
            (
                "see whether the driver is new enough for this torch (nvidia-smi, rocm-smi), and whether "
                "container and scheduler pass the devices on (--gpus all, --nv, --rocm, --gpus-per-node)"
            ),
        )
    return LaunchFinding(
        "gpu-not-used",
        f"{_count(count, vendor)}, but PyTorch sees none: {why}",
        "the run uses the CPU, and nothing says so",
        f"{remedy}; if the CPU is what you want, hide them: CUDA_VISIBLE_DEVICES=''",
    )


def _not_passed_on(job: Situation) -> LaunchFinding | None:
    """GPUs that stay outside a container. On bare nodes, whoever asked for no GPU rightly gets none."""
    withheld = [gpu for gpu in job.node.gpus if not gpu.granted and not gpu.integrated]
    if not withheld or not job.node.container:
        return None
    return LaunchFinding(
        "gpu-not-used",
        f"the node has {_count(len(withheld), withheld[0].vendor)}, but none is passed on to this container",
        "the run uses the CPU, and nothing says so",
        "start the container with its GPUs (docker --gpus all, apptainer --nv or --rocm), if that is wanted",
    )


def _count(count: int, vendor: str) -> str:
    return f"{count} GPU{'s' if count > 1 else ''} of {vendor}"


def gpu_far(job: Situation) -> LaunchFinding | None:
    """Ranks whose cores are near to another part of memory than their GPU is."""
    far = [one for one in job.ranks if _is_far(job, one)]
    if not far:
        return None
    one, gpu = far[0], job.gpu_of(far[0])
    assert gpu is not None
    more = f", and {len(far) - 1} more ranks likewise" if len(far) > 1 else ""
    return LaunchFinding(
        "gpu-far",
        f"rank {one.rank} uses GPU {gpu.address} of NUMA node {gpu.numa}, but its cores belong to node "
        f"{', '.join(map(str, one.numa))}{more}",
        "all data for the GPU crosses the link between the sockets",
        f"bind each rank to the cores of its GPU: numactl --cpunodebind={gpu.numa} for this one, srun "
        "--gpu-bind=closest, or mpirun --map-by ppr:K:numa --bind-to numa",
    )


def _is_far(job: Situation, one: RankFacts) -> bool:
    gpu = job.gpu_of(one)
    return gpu is not None and gpu.numa is not None and bool(one.numa) and gpu.numa not in one.numa


# ---- Rules about the network between nodes

_LEAST_LOCKED_BYTES = 64 << 20


def loopback_address(job: Situation) -> LaunchFinding | None:
    """Ranks on several nodes are told an address that every node takes for itself."""
    told = job.environ.get("MASTER_ADDR", "")
    astray = [one for one in job.ranks if one.address.startswith("127.")]
    if job.nodes < 2:
        return None
    if told.startswith("127.") or told == "localhost":
        what = f"MASTER_ADDR is {told}, for ranks on {job.nodes} nodes"
        remedy = "set MASTER_ADDR to the name or address under which other nodes reach the node of rank 0"
    elif astray and "GLOO_SOCKET_IFNAME" not in job.environ:
        one = astray[0]
        leads = interface_for(job.node.interfaces, "")
        what = f"{one.host} takes its own name for {one.address}, in a job of {job.nodes} nodes"
        remedy = (
            f"correct the line of {one.host} in /etc/hosts, or set GLOO_SOCKET_IFNAME to the interface "
            f"that leads to the other nodes{f' ({leads.name}?)' if leads else ''}"
        )
    else:
        return None
    return LaunchFinding(
        "loopback-address",
        what,
        "ranks look for each other on their own nodes, and wait until the time is up",
        remedy,
    )


def network_plugin(job: Situation) -> LaunchFinding | None:
    """A fast network that NCCL or RCCL will not use, because a library is missing."""
    if not any(one.gpus for one in job.ranks) or (job.observed and job.nodes < 2):
        return None
    if "NCCL_NET_PLUGIN" in job.environ or "NCCL_NET" in job.environ:
        return None
    amd = any(gpu.vendor == "AMD" for one in job.ranks for gpu in one.gpus)
    name = "RCCL" if amd else "NCCL"
    for port in job.node.ports:
        wanted = ("libnccl-net", "librccl-net") if port.plugin else ("libibverbs",)
        if port.active and not any(library(w, environ=job.environ) for w in wanted):
            plugin = (
                f"the plug-in aws-ofi-{name.lower()}" if port.plugin else "rdma-core (libibverbs)"
            )
            return LaunchFinding(
                "network-plugin",
                f"{name} finds no {wanted[0]}*.so, which it needs for {port.kind} ({port.adapter})",
                "it then uses TCP between nodes, without saying so",
                f"load your site's module with {plugin}, add its folder to LD_LIBRARY_PATH (in a container: "
                "bind it), and look for the network's name in the output of NCCL_DEBUG=INFO",
            )
    return None


def locked_memory(job: Situation) -> LaunchFinding | None:
    """Too little memory may be locked for adapters that read and write it themselves."""
    limit = job.node.limits.locked_bytes
    active = [
        port for port in job.node.ports if port.active and port.kind in ("InfiniBand", "RoCE")
    ]
    if limit is None or limit >= _LEAST_LOCKED_BYTES or not active:
        return None
    return LaunchFinding(
        "low-memory-lock",
        f"only {gib(limit)} of memory may be locked, and there is {active[0].kind} ({active[0].adapter})",
        "the adapter's buffers cannot be registered: communication fails, or goes over TCP",
        "ulimit -l unlimited before the command; in a container, --ulimit memlock=-1; under Slurm, ask the "
        "administrators for PropagateResourceLimitsExcept=MEMLOCK and a higher limit for slurmd",
    )


# ---- Rules about memory and limits of the node

_LEAST_SHM_BYTES = 512 << 20
_LEAST_FILES = 1024
_LEAST_MEMORY_BYTES = 1 << 30
_MUCH_SWAP_BYTES = 1 << 30


def small_shm(job: Situation) -> LaunchFinding | None:
    """Little room in /dev/shm, as in a container that was started without a thought of it."""
    memory = job.node.memory
    if memory.shm_free_bytes >= _LEAST_SHM_BYTES:
        return None
    size = gib(memory.shm_bytes)
    room = f"{gib(memory.shm_free_bytes)} free of {size} in" if memory.shm_bytes else "there is no"
    return LaunchFinding(
        "small-shm",
        f"{room} /dev/shm",
        "torch's DataLoader workers and NCCL pass data through it, and are killed by SIGBUS when it is full; "
        "Fivefold itself does without",
        "in a container, --shm-size=8g or --ipc=host; else remove what ended programs left there",
    )


def few_open_files(job: Situation) -> LaunchFinding | None:
    """Fewer open files than connections to other ranks and workers may need."""
    limit, hard = job.node.limits.open_files, job.node.limits.open_files_hard
    # Gloo connects every pair of a group; tensors that workers pass on are a file each.
    needed = max(_LEAST_FILES, 256 + 8 * job.world_size + 256 * job.workers)
    if limit is None or limit >= needed:
        return None
    ask = needed if hard is None else min(needed, hard)
    beyond = "" if ask == needed else f"; the hard limit is {hard}, ask for a higher one"
    return LaunchFinding(
        "few-open-files",
        f"a process may open {limit} files; one of {job.world_size} ranks with {job.workers} loader "
        f"workers may need {needed}",
        "the run ends with 'Too many open files', often only after hours",
        f"ulimit -n {ask} before the command{beyond}",
    )


def little_memory(job: Situation) -> LaunchFinding | None:
    """Others use nearly all memory, or the control group grants little."""
    memory = job.node.memory
    here = len(job.by_host.get(job.node.host, ())) or 1
    room = min(memory.available_bytes, memory.limit_bytes or memory.available_bytes)
    if not memory.total_bytes or room >= max(_LEAST_MEMORY_BYTES * here, memory.total_bytes // 20):
        return None
    return LaunchFinding(
        "little-memory",
        f"{gib(room)} of {gib(memory.total_bytes)} of memory are left for {here} "
        f"rank{'s' if here > 1 else ''}",
        "the kernel ends a rank with SIGKILL when nothing is left",
        "look who uses it (top -o %MEM), ask the scheduler for more memory, or start fewer ranks",
    )


def swap_in_use(job: Situation) -> LaunchFinding | None:
    """Much memory lies on the disk."""
    memory = job.node.memory
    if memory.swap_used_bytes <= max(_MUCH_SWAP_BYTES, memory.total_bytes // 20):
        return None
    return LaunchFinding(
        "swap-in-use",
        f"{gib(memory.swap_used_bytes)} of memory lie in swap",
        "a rank that touches such memory waits for the disk, and all others wait for that rank",
        "end what is not needed, or start fewer ranks per node",
    )


# ---- Rules about cores: who may run where, and with how many threads


def all_on_one_core(job: Situation) -> LaunchFinding | None:
    """Several ranks of a host share one core, while the node has more."""
    for host, ranks in job.by_host.items():
        shared = {core for one in ranks for core in one.mask}
        if len(ranks) > 1 and len(shared) == 1 and len(job.node.processors.cpus) > 1:
            return LaunchFinding(
                "all-on-one-core",
                f"all {len(ranks)} ranks on {host} may use core {min(shared)} alone",
                f"they take turns, so that {len(ranks)} ranks are no faster than one",
                "have every rank get cores of its own: --cpus-per-task=K for sbatch and srun, --bind-to none "
                "for mpirun, no taskset around the command",
            )
    return None


def one_core_mask(job: Situation) -> LaunchFinding | None:
    """Slurm gave every rank one core, although it has use for more, or others lie idle."""
    narrow = [one for one in job.ranks if len(one.mask) == 1]
    if not job.slurm or not narrow or len(job.node.processors.cpus) == 1:
        return None
    first = narrow[0]
    busy = job.workers > 0 or job.threads_of(first) > 1 or job.gpu_of(first) is not None
    if not busy and first.local_size >= job.node.processors.cores:
        return None  # one rank per core fills the node: that is what was wanted
    return LaunchFinding(
        "one-core-mask",
        f"rank {first.rank} may use core {first.mask[0]} alone",
        "its threads, the loader's workers and the communication all run on that one core",
        "srun --cpus-per-task=K (srun does not take it over from sbatch; SRUN_CPUS_PER_TASK=K does), or "
        "srun --cpu-bind=none; for the ranks of fivefold run, the K of sbatch or salloc counts",
    )


def more_threads_than_cores(job: Situation) -> LaunchFinding | None:
    """The ranks of a host compute with more threads than they have cores together."""
    for host, ranks in job.by_host.items():
        threads, cores = sum(map(job.threads_of, ranks)), cores_of(ranks)
        if threads > cores:
            fit = max(1, int(cores / len(ranks)))
            lower = fit * len(ranks) < threads
            return LaunchFinding(
                "more-threads-than-cores",
                f"{_ranks(ranks)} on {host} {'have' if len(ranks) > 1 else 'has'} {threads} threads in all, "
                f"on {_cores(cores)}{_set(next(iter(ranks)))}",
                "threads that wait for each other lose their cores meanwhile: often slower than one thread",
                f"{f'set OMP_NUM_THREADS={fit}' if lower else 'start fewer ranks'}, or have more cores "
                "granted",
            )
    return None


def workers_on_cores(job: Situation) -> LaunchFinding | None:
    """Ranks and the workers of their loaders are more than the cores of a host."""
    for host, ranks in job.by_host.items():
        processes, cores = len(ranks) * (1 + job.workers), cores_of(ranks)
        if job.workers and processes > cores:
            fit = max(0, int(cores / len(ranks)) - 1)
            return LaunchFinding(
                "workers-on-trainers-cores",
                f"{_ranks(ranks)} on {host} with {job.workers} loader workers each are {processes} "
                f"processes on {_cores(cores)}",
                "workers take the cores away from the ranks that wait for them",
                f"set loader.workers = {fit} in the plan, or have more cores granted",
            )
    return None


def quota_below_mask(job: Situation) -> LaunchFinding | None:
    """The control group grants less time than the mask shows cores."""
    for one in job.ranks:
        if one.quota is not None and one.quota < len(one.mask):
            granted = max(1, int(one.quota))
            return LaunchFinding(
                "quota-below-mask",
                f"the control group grants {one.quota:g} cores' time, but {len(one.mask)} cores can be seen "
                f"({spans(one.mask)})",
                "libraries that count cores start too many threads, and all halt when the time is used up",
                "let the container see only the cores that it may use (--cpuset-cpus instead of --cpus), or "
                f"set OMP_NUM_THREADS={granted}",
            )
    return None


def _ranks(ranks: tuple[RankFacts, ...]) -> str:
    return f"{len(ranks)} ranks" if len(ranks) > 1 else "1 rank"


def _cores(count: float) -> str:
    return f"{count:g} core{'' if count == 1 else 's'}"


def _set(one: RankFacts) -> str:
    return f" (OMP_NUM_THREADS={one.threads})" if one.threads else " (OMP_NUM_THREADS is not set)"


RULES: dict[str, Rule] = {
    "torch-unusable": torch_unusable,
    "gpu-not-used": gpu_not_used,
    "gpu-far": gpu_far,
    "all-on-one-core": all_on_one_core,
    "one-core-mask": one_core_mask,
    "more-threads-than-cores": more_threads_than_cores,
    "workers-on-trainers-cores": workers_on_cores,
    "quota-below-mask": quota_below_mask,
    "loopback-address": loopback_address,
    "network-plugin": network_plugin,
    "low-memory-lock": locked_memory,
    "small-shm": small_shm,
    "few-open-files": few_open_files,
    "little-memory": little_memory,
    "swap-in-use": swap_in_use,
}
"""All rules by the id of what they find, the dearest losses first."""


def advise(job: Situation) -> tuple[LaunchFinding, ...]:
    """What all rules find."""
    return tuple(found for rule in RULES.values() if (found := rule(job)))


# ---- What a rule finds


@dataclass(frozen=True)
class LaunchFinding:
    """Something that makes a run slow, or makes it fail, and that can be helped."""

    id: str
    """of the rule, for scripts to look for"""
    what: str
    why: str
    """what it does to a run"""
    remedy: str


Rule: TypeAlias = Callable[[Situation], LaunchFinding | None]
"""Silent (None), or what it found."""


def gib(size_bytes: float) -> str:
    """A size for people.

    >>> gib(64 << 20), gib(3 << 30)
    ('64 MiB', '3.0 GiB')
    """
    if size_bytes < 1 << 30:
        return f"{size_bytes / (1 << 20):.0f} MiB"
    return f"{size_bytes / (1 << 30):.1f} GiB"
