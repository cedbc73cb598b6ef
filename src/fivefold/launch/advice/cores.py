"""Rules about cores: who may run where, and with how many threads."""

from __future__ import annotations

from fivefold.cluster.reading import spans
from fivefold.launch.advice.finding import LaunchFinding
from fivefold.launch.rank_facts import RankFacts
from fivefold.launch.situation import Situation, cores_of

__all__ = [
    "all_on_one_core",
    "more_threads_than_cores",
    "one_core_mask",
    "quota_below_mask",
    "workers_on_cores",
]


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
