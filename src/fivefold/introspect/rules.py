"""What can cost a run time: one small rule for each, none speaks without its numbers.

A gain is what a step could become shorter: the time that would leave the rank that works longest, in each row
of steps. It is an upper bound, and gains of several findings do not add up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np

from fivefold.introspect.analysis import Analysis
from fivefold.introspect.causes import Straggler, stragglers, usual_place
from fivefold.introspect.facts import first_told
from fivefold.introspect.findings import Finding, evidence
from fivefold.introspect.numbers import bytes_text, seconds_text, share_text
from fivefold.introspect.run import listed
from fivefold.introspect.steps import Floats
from fivefold.introspect.tables import Operation
from fivefold.trace.phases import Phase, Tag
from fivefold.trace.schema import PHASES, TAGS

__all__ = [
    "RULES",
    "checkpointing",
    "exposed",
    "late_ranks",
    "starved",
    "tiny",
    "turns",
    "validating",
]

_WORTH = 0.05
"""share of a step from which a rule speaks"""
_MOST = 0.5
"""share of ranks that have to wait for data, more than that, before all are said to"""
_TINY_BYTES, _TINY_SHARE, _TINY_CALLS = 4096, 0.03, 20


def late_ranks(analysis: Analysis) -> Iterator[Finding]:
    """Ranks that others wait for; those with the same cause in the same phase are one finding."""
    alike: dict[tuple[str, str], list[Straggler]] = defaultdict(list)
    for straggler in stragglers(analysis):
        alike[straggler.cause.id, straggler.phase].append(straggler)
    for found in alike.values():
        yield _late(analysis, found)


def _late(analysis: Analysis, found: list[Straggler]) -> Finding:
    steps, worst = analysis.sure_steps, found[0]
    ranks = tuple(sorted(one.rank for one in found))
    places = [steps.index(rank) for rank in ranks]
    others = np.setdiff1d(np.arange(len(steps.ranks)), places)
    work = analysis.work.copy()
    work[places] = (
        np.minimum(work[places], np.nanmedian(work[others], axis=0)) if len(others) else 0.0
    )
    gain = analysis.gain_s(work)
    who, arrive = (listed(ranks), "arrives" if len(ranks) == 1 else "arrive up to")
    cause = worst.cause
    title = (
        f"{who} {arrive} {seconds_text(worst.late_s)} late in {share_text(worst.share)} of steps because "
        + (cause.text if len(ranks) == 1 else f"of rank {worst.rank}: {cause.text}; others alike")
    )
    return Finding(
        "straggler", title, cause.advice, worst.late_s / steps.step_s, ranks, gain,
        (
            evidence("heat", f"rank {worst.rank} works {seconds_text(worst.late_s)} per step longer than the "
                     f"median of others, of {seconds_text(steps.step_s)}", ranks=ranks),
            evidence("ranks", f"of it {seconds_text(worst.surplus_s)} in {worst.phase}", ranks=ranks,
                     phase=None if worst.phase == "outside" else worst.phase),
            evidence("arrivals", _met(analysis, worst.rank), ranks=ranks),
            *([evidence("stacks", f"seen at {cause.figures['place']}", ranks=ranks, phase=worst.phase)]
              if cause.figures.get("place") else []),
        ),
        {"rank": worst.rank, "late_s": worst.late_s, "share_of_steps": worst.share, "phase": worst.phase,
         "surplus_s": worst.surplus_s, "cause": cause.id, **cause.figures},
    )  # fmt: skip


def _met(analysis: Analysis, rank: int) -> str:
    met = analysis.met
    at = int(np.searchsorted(met.ranks, rank))
    if not np.isfinite(met.late_s[at]):
        return "no operation in the rings was found on all ranks"
    return (
        f"rank {rank} comes last in {share_text(float(met.last_share[at]))} of {met.steps} steps, "
        f"others wait "
        f"{seconds_text(float(met.waited_s[:, at].sum()) / max(1, met.steps))} per step for it, all together"
    )


def turns(analysis: Analysis) -> Iterator[Finding]:
    """Ranks that are late by turns: no one to blame, and still all wait."""
    steps = analysis.sure_steps
    if len(steps.ranks) < 2:
        return
    work = analysis.work.copy()
    named = [steps.index(one.rank) for one in stragglers(analysis)]
    usual = np.nanmedian(work, axis=0)
    work[named] = np.minimum(work[named], usual)
    lost = np.average(np.nan_to_num(work.max(0) - usual), weights=analysis.weight)
    if lost < _WORTH * steps.step_s:
        return
    yield Finding(
        "jitter",
        f"ranks are late by turns: the slowest works {seconds_text(float(lost))} longer than the median",
        "find what disturbs single steps: other jobs on the nodes, uneven samples, garbage collection; fewer "
        "points where ranks meet help too (larger batches, accumulation)",
        float(lost) / steps.step_s, (), float(lost),
        (evidence("heat", f"largest less median work, mean over {len(usual)} rows: "
                          f"{seconds_text(float(lost))}"),),
        {"lost_s": float(lost)},
    )  # fmt: skip


def exposed(analysis: Analysis) -> Iterator[Finding]:
    """Communication that computing does not hide, on the rank that waits for no other."""
    steps = analysis.sure_steps
    for number, tag in enumerate(TAGS):
        gain = analysis.on_critical(steps.exposed[..., number])
        if gain < _WORTH * steps.step_s:
            continue
        mean = float(np.nanmean(steps.mean(steps.exposed[..., number])))
        asked = analysis.on_critical(steps.operations[..., number])
        hidden = max(0.0, 1 - gain / asked) if asked else 0.0
        rows = [i for i, row in enumerate(analysis.operations) if row["tag"] == str(tag)]
        yield Finding(
            "exposed", f"{share_text(gain / steps.step_s)} of the step is exposed communication of {tag}",
            for_tag(analysis, str(tag), hidden), gain / steps.step_s, (), gain,
            (
                evidence("breakdown", f"{seconds_text(gain)} per step on the rank that others wait for, "
                         f"{seconds_text(mean)} on average, waiting included; {share_text(hidden)} of its "
                         "communication is hidden", tag=str(tag)),
                evidence("operations", f"{len(rows)} sizes", rows=rows[:20], tag=str(tag)),
            ),
            {"tag": str(tag), "exposed_s": gain, "mean_exposed_s": mean, "hidden_share": hidden},
        )  # fmt: skip


def starved(analysis: Analysis) -> Iterator[Finding]:
    """All ranks wait for data."""
    steps = analysis.sure_steps
    loading = steps.computing[..., PHASES.index(Phase.LOAD)]
    mean = np.nan_to_num(steps.mean(loading))
    usual = float(np.quantile(mean, 0.25))
    if np.mean(mean > _WORTH * steps.step_s) <= _MOST:
        return
    work = analysis.work - loading[:, steps.steady]
    share = usual / steps.step_s
    who = "all ranks wait" if len(mean) > 1 else "training waits"
    ready = steps.mean(steps.levels["ready"])
    told = f", {np.nanmean(ready):.1f} batches ready on average" if np.isfinite(ready).any() else ""
    place = usual_place(analysis.run, Phase.LOAD.value)
    there = "" if place is None else f", most of it at {place.text}"
    yield Finding(
        "loader", f"{who} for data {share_text(share)} of the step{there}{told}",
        f"more workers for the loader (loader.workers{_now(analysis, 'loader.workers')}), lighter "
        f"transforms, or data "
        "nearer to the node",
        share, (), analysis.gain_s(work),
        (
            evidence("timeline", f"load takes {seconds_text(usual)} per step on the "
                                 f"median "
                     "ranks even longer", phase="load"),
            evidence("series", "batches that were ready when asked for" + told),
            *([evidence("stacks", f"seen at {place.text}", phase="load")] if place else []),
        ),
        {"load_s": usual, "ready": float(np.nanmean(ready)) if told else None,
         "place": place.text if place else None},
    )  # fmt: skip


def _now(analysis: Analysis, key: str) -> str:
    told = first_told(analysis.run, "plan")
    entry = told.get(key) if isinstance(told, dict) else None
    return f", now {entry['value']}" if isinstance(entry, dict) and "value" in entry else ""


def _phase(analysis: Analysis, phase: Phase, advice: str) -> Iterator[Finding]:
    steps = analysis.sure_steps
    spent: Floats = steps.computing[..., PHASES.index(phase)]
    gain = analysis.on_critical(spent)
    if gain < _WORTH * steps.step_s:
        return
    share = gain / steps.step_s
    yield Finding(
        phase.value, f"{phase.value} takes {share_text(share)} of the time", advice, share, (), gain,
        (evidence("breakdown", f"{seconds_text(gain)} per step, spread over all steps", phase=phase.value),
         evidence("timeline", "the steps that are longer", phase=phase.value)),
        {"seconds_per_step": gain},
    )  # fmt: skip


def validating(analysis: Analysis) -> Iterator[Finding]:
    """Validation that training waits for."""
    return _phase(
        analysis, Phase.VALIDATE, "validate less often, or with fewer samples or larger batches"
    )


def checkpointing(analysis: Analysis) -> Iterator[Finding]:
    """Checkpoints that training waits for."""
    return _phase(
        analysis, Phase.CHECKPOINT,
        "save less often (`fivefold checkpoint interval` computes how often is best), or save to memory or "
        "local storage first and let it be copied in the background",
    )  # fmt: skip


def tiny(analysis: Analysis) -> Iterator[Finding]:
    """Many operations so small that only their number costs."""
    steps = analysis.sure_steps
    rows = [
        (i, row) for i, row in enumerate(analysis.operations)
        if row["size_to_bytes"] <= _TINY_BYTES and row["operation"] != "barrier"
    ]  # fmt: skip
    total = max(1, int(steps.count.max(0).sum())) * len(analysis.run.ranks)
    calls = sum(row["count"] for _, row in rows) / total
    spent = analysis.exposed_in((row, 1.0) for _, row in rows)
    if calls < _TINY_CALLS or spent < _TINY_SHARE * steps.step_s:
        return
    tags = sorted({row["tag"] for _, row in rows})
    yield Finding(
        "tiny", f"{calls:.0f} operations per step have at most {bytes_text(_TINY_BYTES)}: they cost "
        f"{share_text(spent / steps.step_s)} of the step",
        f"put them together ({', '.join(tags)}): larger buckets, one message for several tensors, statistics "
        "less often", spent / steps.step_s, (), spent,
        (evidence("operations", f"{calls:.0f} calls per step and rank, {seconds_text(spent)} exposed",
                  rows=[i for i, _ in rows][:20]),),
        {"calls_per_step": calls, "exposed_s": spent, "tags": tags},
    )  # fmt: skip


RULES: tuple[Callable[[Analysis], Iterator[Finding]], ...] = (
    late_ranks, turns, exposed, starved, validating, checkpointing, tiny,
)  # fmt: skip
"""rules about the time of steps"""


# ---- What to do about communication that is not hidden

_LITTLE = 0.3
"""share that is hidden, below which overlapping comes first"""

_OTHER: dict[str, str] = {
    Tag.LOSS: "read the loss less often",
    Tag.HALO: 'tiles.fuse = "auto" or a larger number lets several layers share an exchange; fewer, '
    "larger tiles",
    Tag.PIPELINE: "more micro-batches, another pipeline.schedule, or stages of equal length "
    '(pipeline.cut = "measured")',
    Tag.TILES_TO_BATCH: "fewer tiles and more replicas, where memory allows it",
    Tag.CHECKPOINT: "save less often, or in the background",
    Tag.DATA: "let every rank read its own samples",
    Tag.CONTROL: "meet less often: fewer barriers, agreements and gathered texts",
    Tag.OTHER: "give the operations a tag to see what they are for; overlap them with computing",
}


def for_tag(analysis: Analysis, tag: str, hidden: float) -> str:
    """Remedies for exposed communication of a tag, of which the share `hidden` is hidden already."""
    own = _for_statistics(analysis) if tag == Tag.BATCH_NORM else _OTHER.get(tag)
    if own is not None:
        return own
    found: list[str] = []
    if hidden < _LITTLE:
        found.append(
            "start reducing while the backward pass goes on (several buckets; no graph that ends in one)"
        )
    backend = str(first_told(analysis.run, "backend") or "")
    if "gloo" in backend and str(first_told(analysis.run, "device") or "cpu") == "cpu":
        found.append("the backend fivefold instead of gloo")
    found.append("gradients in bfloat16 halve the bytes")
    found.append("accumulating over several batches before an update reduces less often")
    found.append("buckets of another size")
    return "; ".join(found)


def _for_statistics(analysis: Analysis) -> str:
    """Remedies for what bears the tag of batch norm, by what it is: other norms and buffers bear it too."""
    rows = [row for row in analysis.operations if row["tag"] == Tag.BATCH_NORM]
    told = first_told(analysis.run, "plan")
    plan = told.get("parallel.batch_norm") if isinstance(told, dict) else None
    found: list[str] = []
    if isinstance(plan, dict):
        # Statistics of a batch are gathered; norms over a sample meet its tiles only, buffers are added up.
        joined = any(
            row["operation"] == "all_gather" and _joins_replicas(analysis, row) for row in rows
        )
        if joined and plan.get("value") == "global":
            found.append(
                'parallel.batch_norm = "replica" needs none of it between replicas, and is no longer exact'
            )
    elif any(row["operation"] == "broadcast" for row in rows):
        found.append(
            "DistributedDataParallel(broadcast_buffers=False), where buffers may differ on ranks"
        )
    return "; or ".join([*found, "larger shares per rank"])


def _joins_replicas(analysis: Analysis, row: Operation) -> bool:
    """Whether ranks of an operation have different samples."""
    told = {t.rank: t.meta.get("coordinates") for t in analysis.run.ranks}
    replicas = {rank: at.get("data") for rank, at in told.items() if isinstance(at, dict)}
    return any(
        len({replicas.get(rank) for rank in group.ranks}) > 1
        for group in set(analysis.groups.values()) if group.name == row["group"]
    )  # fmt: skip
