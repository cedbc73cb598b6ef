"""Rules about memory and limits of the node."""

from __future__ import annotations

from fivefold.launch.advice.finding import LaunchFinding, gib
from fivefold.launch.situation import Situation

__all__ = ["few_open_files", "little_memory", "small_shm", "swap_in_use"]

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
