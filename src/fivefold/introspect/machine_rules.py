"""What the machines under a run can do wrong: links, cores, quotas, memory, GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from fivefold.introspect.analysis import Analysis
from fivefold.introspect.facts import calibrated, first_told
from fivefold.introspect.findings import Finding, evidence
from fivefold.introspect.link_use import Way, ways
from fivefold.introspect.numbers import bytes_text, seconds_text, share_text
from fivefold.introspect.run import TracedRun, listed
from fivefold.introspect.steps import Floats

__all__ = [
    "MACHINE_RULES",
    "crowded",
    "idle_gpus",
    "leaking",
    "slow_links",
    "slow_network",
    "throttled",
]

_SLOW = 0.5
"""of what was measured at start, or of the faster quarter of links"""
_FEEBLE_BYTES_PER_S = 60e6
"""half of gigabit Ethernet: slow for any cluster"""
_EXPOSED = 0.03
"""share of a step from which communication matters"""
_OFTEN, _LEAST_S = 0.2, 1e-4
"""calls per step and rank, and time, from which an operation is compared with the calibration"""
_CROWDED, _THROTTLED, _THROTTLED_ALONE = 0.10, 0.02, 0.05
_GPU_BUSY = 0.5
_IN_USE, _SLOW_LINK = 0.2, 0.5
"""of the time, and of the median speed of the other links"""
_LEAK_SHARE, _LEAK_BYTES, _LEAK_STEPS = 0.05, 32 << 20, 20


def slow_links(analysis: Analysis) -> Iterator[Finding]:
    """A link between nodes that is slower than the others, or than any cluster's."""
    links = [link for link in calibrated(analysis.run)["links"] if link.get("bytes_per_s")]
    if not links:
        return
    speeds = np.array([float(link["bytes_per_s"]) for link in links])
    usual = float(np.quantile(speeds, 0.75))
    slow = speeds < (_SLOW * usual if len(links) > 2 else 0)
    slow |= speeds < _FEEBLE_BYTES_PER_S
    cost = analysis.on_critical(analysis.sure_steps.exposed.sum(2)) if analysis.steps else 0.0
    if not slow.any() or (analysis.steps and cost < _EXPOSED * analysis.steps.step_s):
        return
    worst = [links[int(i)] for i in np.argsort(speeds) if slow[int(i)]]
    ranks = tuple(sorted(_at_fault(worst)))
    first, speed = worst[0], float(worst[0]["bytes_per_s"])
    others = (
        f", the fastest of {len(links)} links have {bytes_text(usual)}/s or more"
        if len(links) > 2
        else ""
    )
    gain = cost * max(0.0, 1 - speed / usual) if len(links) > 2 and speed < usual else cost
    yield Finding(
        "slow-link",
        f"the link between {_ends(first)} is slow: {bytes_text(speed)}/s{others}",
        "see which interface is used and whether a faster one is there; have the cable, the port and other "
        "traffic on these nodes checked",
        gain / analysis.steps.step_s if analysis.steps else None, ranks, gain if analysis.steps else None,
        (evidence("calibration", f"{bytes_text(speed)}/s between {_ends(first)}{others}", ranks=ranks),),
        {"bytes_per_s": speed, "usual_bytes_per_s": usual, "ranks": list(first.get("ranks") or [])},
    )  # fmt: skip


def _at_fault(links: list[dict[str, Any]]) -> set[int]:
    """Who is at an end of all slow links; else all who are at an end of one."""
    ends = [set(link.get("ranks") or []) for link in links]
    common = set.intersection(*ends) if len(ends) > 1 else set()
    return common or set.union(*ends)


def _ends(link: dict[str, Any]) -> str:
    ranks, hosts = link.get("ranks") or [], link.get("hosts") or []
    names = [
        f"{host} (rank {rank})" if host else f"rank {rank}"
        for rank, host in zip(ranks, hosts, strict=False)
    ]
    return " and ".join(names) or "two nodes"


def slow_network(analysis: Analysis) -> Iterator[Finding]:
    """Operations that take far longer than the same ones when the run started, and the link at fault.

    A link far slower than the others is told too where the start was as slow, as it is on crowded cores.
    """
    if analysis.steps is None:
        return
    link = slowed(analysis.run)
    often = _OFTEN * int(analysis.steps.count.max(0).sum()) * len(analysis.run.ranks)
    rows = [
        (i, row) for i, row in enumerate(analysis.operations)
        if row["expected_ratio"] is not None and row["expected_ratio"] < _SLOW
        and row["count"] >= often and (row["transfer_s"] or 0) > _LEAST_S
    ]  # fmt: skip
    gain = analysis.exposed_in((row, 1 - (row["expected_ratio"] or 0)) for _, row in rows)
    if not rows or gain < _EXPOSED * analysis.steps.step_s:
        if link is not None and link[1] is not None and not any(slow_links(analysis)):
            yield from _slow_beside(analysis, link[0], link[1])
        return
    at, worst = max(rows, key=lambda pair: pair[1]["exposed_s"])
    slower = (
        f"{worst['operation']} of {bytes_text(worst['bytes'] / worst['count'])} takes "
        f"{seconds_text(worst['transfer_s'] or 0)} instead of {seconds_text(worst['expected_s'] or 0)}"
    )
    if link is not None:
        yield replace(
            _slow_since(*link, slower, at), gain_s=gain, share=gain / analysis.steps.step_s
        )
        return
    yield Finding(
        "slow-network", f"communication is slower than when the run started: {slower}",
        "see who else uses the network or the cores: computing on all cores slows communication of CPUs "
        "(leave one core free); other jobs on the nodes; a link that has become slow",
        gain / analysis.steps.step_s, (), gain,
        (evidence("operations", f"{share_text(worst['expected_ratio'] or 0)} of the calibrated speed",
                  rows=[at, *(i for i, _ in rows if i != at)][:20]),
         evidence("calibration", f"{seconds_text(worst['expected_s'] or 0)} when the run started")),
        {"operation": worst["operation"], "size_bytes": worst["bytes"] / worst["count"],
         "transfer_s": worst["transfer_s"], "expected_s": worst["expected_s"],
         "ratio": worst["expected_ratio"]},
    )  # fmt: skip


def _slow_beside(analysis: Analysis, way: Way, usual: float) -> Iterator[Finding]:
    """A link that is slow by comparison with the others alone."""
    assert analysis.steps is not None
    over = [(row, 1 - way.bytes_per_s / usual) for row in analysis.operations if row["transfer_s"]]
    gain = analysis.exposed_in(over)
    if gain < _EXPOSED * analysis.steps.step_s:
        return
    yield replace(
        _slow_since(way, usual, "", None), gain_s=gain, share=gain / analysis.steps.step_s
    )


def _slow_since(way: Way, usual: float | None, slower: str, row: int | None) -> Finding:
    """`slower` says which operation is slower than at start, and `row` where it stands."""
    speed = f"{bytes_text(way.bytes_per_s)}/s while it is in use"
    others = f", the median of the others has {bytes_text(usual)}/s" if usual else ""
    ranks = tuple(sorted({*way.ranks[0], *way.ranks[1]}))
    told = [] if row is None else [evidence("operations", slower, rows=[row])]
    title = f"the link {way.text} is slow: {speed}{others}"
    if slower:
        title = f"the link {way.text} has become slow: {speed}{others}; {slower}"
    return Finding(
        "slow-link", title,
        "see what else uses this link now; have the cables, the ports and the interfaces of these two "
        "nodes checked, or leave out one of them",
        None, ranks, None,
        (*told,
         evidence("ranks", f"{share_text(way.in_use)} of the time something is on its way there: {speed}"
                           f"{others}", ranks=ranks)),
        {"bytes_per_s": way.bytes_per_s, "usual_bytes_per_s": usual, "in_use": way.in_use,
         "hosts": list(way.hosts), "ranks": [list(way.ranks[0]), list(way.ranks[1])]},
    )  # fmt: skip


def crowded(analysis: Analysis) -> Iterator[Finding]:
    """More threads that want to run than cores, on most ranks."""
    found = _share(analysis, "run_delay_ns")
    if found is None or not _most(found, _CROWDED):
        return
    steps = analysis.sure_steps
    delay = steps.scalars["run_delay_ns"] / 1e9
    share = float(np.nanmedian(found))
    threads, per_node = first_told(analysis.run, "threads"), _cores(analysis)
    many = f"{threads} thread{'s' if threads != 1 else ''} per rank, " if threads else ""
    yield Finding(
        "cores", f"ranks are ready and have no core {share_text(share)} of the time ({many}{per_node})",
        _for_cores(analysis),
        share, (), min(analysis.on_critical(delay), steps.step_s),
        (evidence("ranks", f"waiting for a core takes {seconds_text(share * steps.step_s)} per step on "
                           f"the median "
                  "rank"),),
        {"run_delay_share": share},
    )  # fmt: skip


def _for_cores(analysis: Analysis) -> str:
    threads = first_told(analysis.run, "threads")
    hosts = _by_host(analysis)
    crowded = [
        host
        for host, (ranks, cores) in hosts.items()
        if cores and ranks * int(threads or 1) > cores
    ]
    if threads and all(cores for _, cores in hosts.values()) and not crowded:
        return (
            "ranks and their threads are no more than cores: something else runs on them (other jobs, loader "
            "workers, helpers); end it, or ask for cores of your own"
        )
    return (
        "fewer ranks or threads per node (OMP_NUM_THREADS, --ppn), fewer loader workers, or more cores "
        "for the "
        "job; nothing else should run on them"
    )


def _cores(analysis: Analysis) -> str:
    hosts = _by_host(analysis)
    host, (ranks, cores) = max(hosts.items(), key=lambda entry: entry[1][0])
    named = f"{ranks} rank{'s' if ranks > 1 else ''}"
    return (
        f"{named} on {cores} core{'s' if cores > 1 else ''} of {host}"
        if cores
        else f"{named} per node"
    )


def _by_host(analysis: Analysis) -> dict[str, tuple[int, int]]:
    """Ranks and granted cores (0: unknown) of every node."""
    cores: dict[str, set[int]] = {}
    ranks: dict[str, int] = {}
    for trace in analysis.run.ranks:
        host, granted = str(trace.meta.get("host")), trace.meta.get("cores")
        cores.setdefault(host, set()).update(granted if isinstance(granted, list) else [])
        ranks[host] = ranks.get(host, 0) + 1
    return {host: (count, len(cores[host])) for host, count in ranks.items()}


def throttled(analysis: Analysis) -> Iterator[Finding]:
    """Most ranks' cgroups use up their quota."""
    found = _share(analysis, "throttled_ns")
    if found is None:
        return
    if not _most(found, _THROTTLED):
        yield from _some_throttled(analysis, np.nan_to_num(found))
        return
    steps, share = analysis.sure_steps, float(np.nanmedian(found))
    lost = steps.scalars["throttled_ns"] / 1e9
    yield Finding(
        "throttled", f"the job's cgroup is throttled {share_text(share)} of the time: its processor "
                     f"quota is used up",
        "raise the quota (cpu.max of the cgroup, the CPU limit of the container), or start fewer "
        "threads than "
        "it allows for",
        share, (), min(analysis.on_critical(lost), steps.step_s),
        (evidence("ranks", f"throttled {seconds_text(share * steps.step_s)} per step on the median rank"),),
        {"throttled_share": share},
    )  # fmt: skip


def _most(values: Floats, least: float) -> bool:
    """Whether more than half of the ranks reach `least`."""
    return float(np.mean(np.nan_to_num(values) >= least)) > 0.5


def _some_throttled(analysis: Analysis, found: Floats) -> Iterator[Finding]:
    """Ranks whose own cgroup is. That stops them anywhere: they need not be late for it."""
    steps = analysis.sure_steps
    at = np.flatnonzero(found >= _THROTTLED_ALONE)
    if not len(at):
        return
    worst = int(at[np.argmax(found[at])])
    ranks = tuple(int(rank) for rank in steps.ranks[at])
    lost, host = float(found[worst]) * steps.step_s, analysis.host(int(steps.ranks[worst]))
    yield Finding(
        "throttled",
        f"the cgroup of {listed(ranks)} is throttled {share_text(float(found[worst]))} of the time: its "
        f"processor "
        "quota is used up",
        f"raise the processor quota of that cgroup (cpu.max) on {host}, or ask for whole cores",
        float(found[worst]), ranks, min(lost, steps.step_s),
        (evidence("ranks", f"throttled {seconds_text(lost)} per step", ranks=ranks),),
        {"throttled_share": float(found[worst])},
    )  # fmt: skip


def _share(analysis: Analysis, name: str) -> Floats | None:
    """Of each rank's time, what windows count in ns."""
    if analysis.steps is None:
        return None
    steps = analysis.steps
    return steps.mean(steps.scalars[name]) / 1e9 / steps.mean(steps.wall)


def idle_gpus(analysis: Analysis) -> Iterator[Finding]:
    """GPUs that compute less than half of the time."""
    if analysis.steps is None:
        return
    busy = analysis.steps.mean(analysis.steps.levels["gpu_busy"])
    known = busy[np.isfinite(busy)]
    if not len(known) or float(np.median(known)) >= _GPU_BUSY:
        return
    middle = float(np.median(known))
    low = [
        int(rank)
        for rank, value in zip(analysis.steps.ranks, busy, strict=True)
        if value < _GPU_BUSY
    ]
    yield Finding(
        "gpu", f"GPUs are busy {share_text(middle)} of the time", "what else this report names keeps "
                                                            "them waiting; "
        "else larger batches per GPU, or several ranks on one GPU", None, tuple(low), None,
        (evidence("ranks", f"median of {len(known)} GPUs: {share_text(middle)} busy", ranks=low),),
        {"gpu_busy": middle},
    )  # fmt: skip


def leaking(analysis: Analysis) -> Iterator[Finding]:
    """Memory that grows with every step, in the second half as much as in the first."""
    if analysis.steps is None or int(analysis.steps.count.max(0).sum()) < _LEAK_STEPS:
        return
    steps = analysis.steps
    rss = steps.levels["rss_bytes"][:, steps.steady]
    if rss.shape[1] < 8:
        return
    growth = steps.growth(steps.levels["rss_bytes"])
    length = float(steps.first_step[-1] - steps.first_step[0])
    first, middle, last = rss[:, 0], rss[:, rss.shape[1] // 2], rss[:, -1]
    grown = last - first
    leak = (grown > np.maximum(_LEAK_SHARE * first, _LEAK_BYTES)) & (last - middle > 0.3 * grown)
    leak &= growth * length > 0.5 * grown
    if not leak.any():
        return
    at = np.flatnonzero(leak)
    worst = int(at[np.argmax(growth[at])])
    ranks = tuple(int(steps.ranks[i]) for i in at)
    yield Finding(
        "memory",
        f"memory of {listed(ranks)} grows by {bytes_text(float(growth[worst]))} per step: from "
        f"{bytes_text(float(first[worst]))} to {bytes_text(float(last[worst]))}",
        "something keeps what it should drop: tensors with their graph in a list (use loss.item() or "
        ".detach()), "
        "caches, an open iterator", None, ranks, None,
        (evidence("series", f"rank {steps.ranks[worst]}: {bytes_text(float(grown[worst]))} more in "
                            f"{length:.0f} "
                  "steps", ranks=ranks),),
        {"bytes_per_step": float(growth[worst]), "first_bytes": float(first[worst]),
         "last_bytes": float(last[worst])},
    )  # fmt: skip


def slowed(run: TracedRun) -> tuple[Way, float | None] | None:
    """The slow one, and the median speed of the others; None if none stands out.

    Between two nodes there is no other to compare with: the one that is in use most is taken.
    """
    found = ways(run)
    used = sorted((way for way in found if way.in_use >= _IN_USE), key=lambda way: -way.in_use)
    for way in used:
        others = [other.bytes_per_s for other in found if set(other.hosts) != set(way.hosts)]
        if not others:
            return way, None
        usual = float(np.median(others))
        if way.bytes_per_s < _SLOW_LINK * usual:
            return way, usual
    return None


MACHINE_RULES: tuple[Callable[[Analysis], Iterator[Finding]], ...] = (
    slow_links, slow_network, crowded, throttled, idle_gpus, leaking,
)  # fmt: skip
"""rules about machines"""
