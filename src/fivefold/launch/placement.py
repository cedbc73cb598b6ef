"""The report of a placement: about ten lines on where ranks run and with what, as data and as text."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from fivefold.cluster.network import interface_for
from fivefold.cluster.node import NodeFacts
from fivefold.cluster.reading import spans
from fivefold.launch.advice import LaunchFinding, advise, gib
from fivefold.launch.node_text import speed
from fivefold.launch.rank_facts import RankFacts
from fivefold.launch.situation import Situation
from fivefold.launch.torch_facts import TorchFacts

__all__ = ["Choice", "Placement", "place", "text_of_findings", "text_of_placement"]

_SHOWN = 4


@dataclass(frozen=True)
class Choice:
    """Something that was chosen, and why."""

    name: str
    why: str


@dataclass(frozen=True)
class Placement:
    """Where the ranks of a job run and with what: the file placement.json."""

    observed: bool
    """whether the ranks themselves told it; else it is what is expected"""
    engine: str
    world_size: int
    ranks: tuple[RankFacts, ...]
    missing: tuple[int, ...]
    """ranks that told nothing in time"""
    network: Choice
    """interface that messages between ranks take"""
    backend: Choice
    """of torch.distributed, if the script calls fivefold.start()"""
    meeting: str
    """where the ranks meet"""
    fivefold: str
    python: str
    torch: TorchFacts
    node: NodeFacts
    """that of rank 0"""
    findings: tuple[LaunchFinding, ...]
    helpers: str = ""
    """how many, and where; empty without any"""


def place(job: Situation) -> Placement:
    """Make the report."""
    return Placement(
        observed=job.observed,
        engine=job.engine,
        world_size=job.world_size,
        ranks=job.ranks,
        missing=job.missing,
        network=_network(job),
        backend=_backend(job),
        meeting=job.meeting,
        fivefold=_version("fivefold"),
        python=platform.python_version(),
        torch=job.torch,
        node=job.node,
        findings=advise(job),
        helpers=_helpers(job),
    )


def _network(job: Situation) -> Choice:
    if job.world_size == 1:
        return Choice("none", "one process")
    if job.nodes == 1:
        return Choice("lo", "all ranks are on one node")
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if name := job.environ.get(variable):
            return Choice(name, f"{variable} says so")
    found = interface_for(job.node.interfaces, job.node.address)
    if found is None:
        return Choice("unknown", "no interface leads to other nodes")
    how = "has the host's address" if job.node.address in found.addresses else "leads outwards"
    return Choice(found.name, f"{how}, {speed(found.bytes_per_s)}")


def _helpers(job: Situation) -> str:
    told = [address for address in job.environ.get("FIVEFOLD_HELPERS", "").split(",") if address]
    hosts = Counter(
        "this node" if address.startswith("unix:") else address.rpartition(":")[0]
        for address in told
    )
    return ", ".join(f"{count} on {host}" for host, count in hosts.items())


def _backend(job: Situation) -> Choice:
    """As `fivefold.mesh.start` chooses it; what it does with GPUs it can ask them only when it runs."""
    if job.backend != "auto":
        return Choice(job.backend, "the plan says so")
    if job.torch.devices:
        alone = all(
            len({gpu.address for gpu in map(job.gpu_of, ranks) if gpu and not gpu.is_slice})
            == len(ranks)
            for ranks in job.by_host.values()
        )
        if alone:
            return Choice("cpu:gloo,cuda:nccl", "every rank has a GPU of its own")
        return Choice("gloo", "ranks share a GPU, which NCCL refuses")
    if job.world_size == 1:
        return Choice("gloo", "one process: nothing to send")
    where = "shared memory" if job.nodes == 1 else "shared memory in a node, streams between nodes"
    return Choice("fivefold", f"CPUs: {where}")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def text_of_placement(report: Placement) -> list[str]:
    """About ten lines for people."""
    known = "as the ranks found it" if report.observed else "as it would be"
    rows = (
        ("engine", report.engine),
        ("ranks", _ranks(report)),
        *([("helpers", report.helpers)] if report.helpers else []),
        ("cores", _per_rank(report.ranks, lambda one: _cores(one, report.node))),
        ("threads", _per_rank(report.ranks, _threads)),
        ("GPUs", _gpus(report)),
        ("memory", _memory(report.node)),
        ("network", f"{report.network.name} ({report.network.why})"),
        ("backend", f"{report.backend.name} ({report.backend.why})"),
        ("port", report.meeting or "none: one process"),
        ("versions", _versions(report)),
    )
    return [f"placement, {known}:", *(f"  {name:<10}{value}" for name, value in rows)]


def text_of_findings(findings: tuple[LaunchFinding, ...]) -> list[str]:
    """What the rules found, with the remedies; the last line counts them."""
    lines: list[str] = []
    for one in findings:
        lines += [
            f"warning {one.id}: {one.what}",
            f"  why:    {one.why}",
            f"  remedy: {one.remedy}",
        ]
    count = len(findings)
    return [*lines, f"{count or 'no'} warning{'' if count == 1 else 's'}"]


def _ranks(report: Placement) -> str:
    hosts = list(dict.fromkeys(one.host for one in report.ranks))
    shown = ", ".join(hosts[:_SHOWN]) + (", ..." if len(hosts) > _SHOWN else "")
    text = f"{report.world_size} on {len(hosts)} host{'s' if len(hosts) != 1 else ''} ({shown})"
    if report.missing:
        text += f"; nothing known of {spans(report.missing)}"
    return text


def _per_rank(ranks: tuple[RankFacts, ...], told: Callable[[RankFacts], str]) -> str:
    """What holds for every rank, once; else for groups of ranks."""
    groups: dict[str, list[int]] = {}
    for one in ranks:
        groups.setdefault(told(one), []).append(one.rank)
    if len(groups) == 1:
        each = "each: " if len(ranks) > 1 else ""
        return each + next(iter(groups))
    parts = [f"rank {spans(of)}: {text}" for text, of in list(groups.items())[:_SHOWN]]
    return "; ".join(parts) + ("; ..." if len(groups) > _SHOWN else "")


def _cores(one: RankFacts, node: NodeFacts) -> str:
    numa = f", NUMA {spans(one.numa)}" if len(node.processors.numa) > 1 and one.numa else ""
    limit = f", {one.quota:g} cores' time" if one.quota is not None else ""
    here = f" of {len(node.processors.cpus)}" if one.host == node.host else ""
    return f"{len(one.mask)}{here} (mask {spans(one.mask)}{numa}{limit})"


def _threads(one: RankFacts) -> str:
    return str(one.threads) if one.threads else "one per core (OMP_NUM_THREADS is not set)"


def _gpus(report: Placement) -> str:
    found = {gpu.uuid or gpu.address: gpu for one in report.ranks for gpu in one.gpus}
    if not found:
        return "none"
    first = next(iter(found.values()))
    kind = first.name or first.vendor
    if not report.torch.devices:
        return f"{len(found)} x {kind}, not used"
    used = _per_rank(report.ranks, _gpu)
    return f"{len(found)} x {kind}; {used}"


def _gpu(one: RankFacts) -> str:
    gpu = one.gpu
    if gpu is None:
        return "none"
    place = gpu.uuid if gpu.is_slice else gpu.address
    return place + ("" if gpu.numa is None else f" (NUMA {gpu.numa})")


def _memory(node: NodeFacts) -> str:
    limit = f", {gib(node.memory.limit_bytes)} granted" if node.memory.limit_bytes else ""
    free = f"{gib(node.memory.available_bytes)} free of {gib(node.memory.total_bytes)}"
    return f"{free}{limit}; /dev/shm {gib(node.memory.shm_free_bytes)} free"


def _versions(report: Placement) -> str:
    torch = report.torch
    told = f"torch {torch.version} (for {torch.gpus_of or 'CPUs'})" if torch.version else "no torch"
    return f"Fivefold {report.fivefold}, {told}, Python {report.python}"
