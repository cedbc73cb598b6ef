"""Rules about PyTorch and GPUs."""

from __future__ import annotations

from fivefold.launch.advice.finding import LaunchFinding
from fivefold.launch.rank_facts import RankFacts
from fivefold.launch.situation import Situation

__all__ = ["gpu_far", "gpu_not_used", "torch_unusable"]

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
