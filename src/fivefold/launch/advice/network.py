"""Rules about the network between nodes."""

from __future__ import annotations

from fivefold.cluster.fabric import library
from fivefold.cluster.network import interface_for
from fivefold.launch.advice.finding import LaunchFinding, gib
from fivefold.launch.situation import Situation

__all__ = ["locked_memory", "loopback_address", "network_plugin"]

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
