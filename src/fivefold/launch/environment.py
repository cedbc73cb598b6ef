"""Who am I? One table that reads the answer from whatever launched this process.

    launcher   rank                    world size              local rank                   local size
    torchrun   RANK                    WORLD_SIZE              LOCAL_RANK                   LOCAL_WORLD_SIZE
    openmpi    OMPI_COMM_WORLD_RANK    OMPI_COMM_WORLD_SIZE    OMPI_COMM_WORLD_LOCAL_RANK   ..._LOCAL_SIZE
    pals       PALS_RANKID             PMI_SIZE                PALS_LOCAL_RANKID            PALS_LOCAL_SIZE
    mpich      PMI_RANK                PMI_SIZE                MPI_LOCALRANKID              MPI_LOCALNRANKS
    flux       FLUX_TASK_RANK          FLUX_JOB_SIZE           FLUX_TASK_LOCAL_ID           size / nodes
    srun       SLURM_PROCID            SLURM_STEP_NUM_TASKS    SLURM_LOCALID                tasks of this node

The first family that is present wins. `RANK` comes first because torchrun and Fivefold run inside other
launchers' jobs; MPI comes before Slurm because mpirun starts its helpers with srun, whose variables the
ranks inherit; Slurm comes last because its variables are everywhere in an allocation.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fivefold.errors import UsageError
from fivefold.launch import slurm

__all__ = [
    "FAMILIES",
    "Family",
    "RankPlace",
    "allocated_nodes",
    "launched",
    "locate",
    "without_places",
]

Environ = Mapping[str, str]


@dataclass(frozen=True)
class RankPlace:
    """The place of this process in its job, whatever launched it.

    `launcher` is one of alone, torchrun (Fivefold's own engines included), openmpi, mpich, pals, flux,
    srun. `job` is the launcher's own name of the job, None where it has none.
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    launcher: str
    job: str | None = None


ALONE = RankPlace(0, 1, 0, 1, "alone")


@dataclass(frozen=True)
class Family:
    """The variables of one launcher. A name may list alternatives, separated by a space."""

    launcher: str
    rank: str
    world_size: str
    local_rank: str
    local_size: str | Callable[[Environ], int]
    job: str
    needs: str
    """present only if this variable is set as well"""


def _flux_local_size(environ: Environ) -> int:
    size, nodes = _number(environ, "FLUX_JOB_SIZE"), _number(environ, "FLUX_JOB_NNODES")
    if nodes < 1 or size % nodes:
        raise UsageError(
            f"flux does not tell how {size} tasks are spread over {nodes} nodes; start equally many on "
            "each: flux run -N NODES --tasks-per-node=K"
        )
    return size // nodes


_OMPI = "OMPI_COMM_WORLD"
FAMILIES = (
    Family(
        "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "RANK"
    ),
    Family(
        "openmpi", f"{_OMPI}_RANK", f"{_OMPI}_SIZE", f"{_OMPI}_LOCAL_RANK", f"{_OMPI}_LOCAL_SIZE",
        "PMIX_NAMESPACE OMPI_MCA_ess_base_jobid", f"{_OMPI}_RANK",
    ),
    Family(
        "pals", "PALS_RANKID", "PALS_SIZE PMI_SIZE", "PALS_LOCAL_RANKID PMI_LOCAL_RANK",
        "PALS_LOCAL_SIZE PMI_LOCAL_SIZE", "PALS_APID PMI_JOBID", "PALS_RANKID",
    ),
    # Hydra: MPICH, Intel MPI, MVAPICH. Slurm sets PMI_RANK too, but not MPI_LOCALRANKID.
    Family(
        "mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_JOBID",
        "MPI_LOCALRANKID",
    ),
    Family(
        "flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", _flux_local_size,
        "FLUX_JOB_ID", "FLUX_TASK_RANK",
    ),
)  # fmt: skip
"""The table, in order of precedence; srun, which needs more than names, follows in `locate`."""

# Set by launchers we have no row for. Ignoring them would make every process rank 0 of 1.
_UNKNOWN = ("PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK", "MPI_RANKID")


def locate(environ: Environ = os.environ) -> RankPlace:
    """Rank, world size, local rank and local size of this process, and what launched it.

    Raises `UsageError` when the variables contradict each other, when they are incomplete, or when
    an allocation of several tasks runs this process outside any of them ("forgot srun").
    `FIVEFOLD_ENGINE=alone` overrules everything.
    """
    if environ.get("FIVEFOLD_ENGINE") == "alone":
        return ALONE
    place = _find(environ)
    if place is None:
        slurm.refuse_forgotten_srun(environ)
        _refuse_unknown(environ)
        return ALONE
    _check(place, environ)
    return place


def launched(environ: Environ = os.environ) -> bool:
    """Whether a launcher started this process as one of its ranks.

    Unlike `locate`, never complains about a forgotten srun: a command that starts ranks itself, such
    as `fivefold run -n 2`, has every right to run in the shell of an allocation.
    """
    return environ.get("FIVEFOLD_ENGINE") != "alone" and _find(environ) is not None


def without_places(environ: Environ) -> dict[str, str]:
    """A copy without the ranks that torchrun, MPI, PALS or flux gave: for ranks started anew.

    Slurm's variables stay: they describe the allocation, and mpirun reads them.
    """
    named = [f"{f.rank} {f.world_size} {f.local_rank} {f.local_size}" for f in FAMILIES]
    drop = {"MASTER_ADDR", "MASTER_PORT", "FIVEFOLD_ENGINE"}
    drop |= {
        "FIVEFOLD_INSTANCES",
        "FIVEFOLD_PROGRESS",
        "FIVEFOLD_LAUNCH",
        "FIVEFOLD_RESTART",
        "FIVEFOLD_RESUME_BEFORE",
        "FIVEFOLD_SUPERVISOR",
        "FIVEFOLD_TRACE_SPOOL",
        "FIVEFOLD_PLACEMENT",
        "FIVEFOLD_ENDS_AT",
    }
    drop.update(name for names in named for name in names.split())
    # TORCHELASTIC_USE_AGENT_STORE, left standing, would make ranks wait for a store that nobody holds.
    outer = ("TORCHELASTIC_", "GROUP_", "ROLE_")
    return {k: v for k, v in environ.items() if k not in drop and not k.startswith(outer)}


def allocated_nodes(environ: Environ = os.environ) -> int:
    """Nodes of the allocation, as far as Slurm or PBS tell; 1 outside any."""
    told = environ.get("SLURM_JOB_NUM_NODES", "")
    if told.isdecimal():
        return max(1, int(told))
    try:
        return len(set(Path(environ["PBS_NODEFILE"]).read_text().split())) or 1
    except (KeyError, OSError):
        return 1


def _find(environ: Environ) -> RankPlace | None:
    for family in FAMILIES:
        if environ.get(family.needs) and _first(environ, family.rank):
            if callable(family.local_size):
                local_size = family.local_size(environ)
            else:
                local_size = _number(environ, family.local_size)
            return RankPlace(
                rank=_number(environ, family.rank),
                world_size=_number(environ, family.world_size),
                local_rank=_number(environ, family.local_rank),
                local_size=local_size,
                launcher=family.launcher,
                job=_first(environ, family.job) or None,
            )
    if slurm.in_step(environ):
        return RankPlace(
            rank=_number(environ, "SLURM_PROCID"),
            world_size=_number(environ, "SLURM_STEP_NUM_TASKS SLURM_NTASKS"),
            local_rank=_number(environ, "SLURM_LOCALID"),
            local_size=slurm.tasks_here(environ),
            launcher="srun",
            job=slurm.step_name(environ),
        )
    return None


def _check(place: RankPlace, environ: Environ) -> None:
    p = place
    if not 0 <= p.rank < p.world_size:
        raise UsageError(
            f"{p.launcher} gave rank {p.rank} of {p.world_size}: ranks go from 0 to size - 1"
        )
    if not 0 <= p.local_rank < p.local_size <= p.world_size:
        raise UsageError(
            f"{p.launcher} gave local rank {p.local_rank} of {p.local_size} on this node, in a world of "
            f"{p.world_size}: expected local rank < local size <= world size"
        )
    if p.launcher == "torchrun":
        _refuse_stale_ranks(p, environ)
    elif environ.get("WORLD_SIZE", str(p.world_size)) != str(p.world_size):
        raise UsageError(
            f"WORLD_SIZE={environ['WORLD_SIZE']}, but {p.launcher} started {p.world_size} processes; "
            f"unset WORLD_SIZE, or start {environ['WORLD_SIZE']} processes"
        )


def _refuse_stale_ranks(place: RankPlace, environ: Environ) -> None:
    """RANK=0 left over in a shell from which mpirun then starts four processes: all would be rank 0."""
    if environ.get("TORCHELASTIC_RUN_ID"):
        return  # torchrun inside an MPI or Slurm job, one agent per node: sizes differ rightly
    for family in FAMILIES[1:]:
        size = _first(environ, family.world_size) if environ.get(family.needs) else ""
        if size and size != str(place.world_size):
            raise UsageError(
                f"RANK={environ['RANK']} and WORLD_SIZE={place.world_size} contradict {family.launcher}, "
                f"which started {size} processes; unset RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE"
            )


def _refuse_unknown(environ: Environ) -> None:
    found = next((name for name in _UNKNOWN if environ.get(name)), None)
    if found and not environ.get("SLURM_JOB_ID"):
        raise UsageError(
            f"{found} is set, so a launcher that Fivefold does not know started this process; have it set "
            "RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE (or FIVEFOLD_ENGINE=alone for one process)"
        )


def _first(environ: Environ, names: str) -> str:
    return next((environ[name] for name in names.split() if environ.get(name)), "")


def _number(environ: Environ, names: str) -> int:
    text = _first(environ, names)
    if not text:
        raise UsageError(
            f"{names.replace(' ', ' or ')} is not set, but other variables of the same launcher are; rank, "
            "world size, local rank and local size are needed (each node one process: LOCAL_RANK=0 and "
            "LOCAL_WORLD_SIZE=1)"
        )
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{names.split(maxsplit=1)[0]}={text}: expected a whole number") from None
