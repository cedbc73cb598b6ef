"""The environment of ranks on other nodes: the launcher's, but for what belongs to a node."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["node_environment", "portable"]

# A node's own: what its shell, its login, its scheduler and its launcher said there.
_OWN = re.compile(
    r"HOSTNAME|HOST|PWD|OLDPWD|SHLVL|_|DISPLAY|XAUTHORITY|TERM|LS_COLORS|TMUX.*|STY|WINDOWID|MAIL|LOGNAME"
    r"|SSH_.*|XDG_.*|DBUS_.*|TMPDIR|CUDA_VISIBLE_DEVICES|ROCR_VISIBLE_DEVICES|HIP_VISIBLE_DEVICES"
    r"|ZE_AFFINITY_MASK|GPU_DEVICE_ORDINAL|NVIDIA_VISIBLE_DEVICES|SLURMD_NODENAME|SLURM_NODEID"
    r"|SLURM_PROCID|SLURM_LOCALID|SLURM_TASK_PID|SLURM_GTIDS|SLURM_STEP_.*|SLURM_STEPID|SLURM_LAUNCH_.*"
    r"|SLURM_SRUN_.*|SLURM_CPU_BIND.*|SLURM_MEM_BIND.*|SLURM_TOPOLOGY_.*|SLURM_GPUS_ON_NODE"
    r"|SLURM_CPUS_ON_NODE|SLURM_UMASK"
)


def portable(environ: Mapping[str, str]) -> dict[str, str]:
    """What of the launcher's environment may be sent to other nodes."""
    return {name: value for name, value in environ.items() if not _OWN.fullmatch(name)}


def node_environment(told: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """The environment of a rank: what the launcher told, and what only its node knows.

    What the engine told its processes there (PMI_RANK and the like) is the agent's, and goes no further.
    """
    return {name: value for name, value in own.items() if _OWN.fullmatch(name)} | dict(told)
