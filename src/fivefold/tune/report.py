"""A choice in words: the best candidates as a table, why the first won, and the plan that it makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from fivefold.cluster.description import Cluster
from fivefold.errors import UsageError
from fivefold.parallel.pipeline.cut import MEASURED
from fivefold.plan import Plan, Provenance
from fivefold.tune.predict import Prediction
from fivefold.tune.search import ALIKE, SearchResult

__all__ = ["Question", "nothing_fits", "plan_of", "reasons", "rows"]

_WORDS = {
    "compute_s": "computing",
    "exchange_s": "exchanging borders of tiles",
    "statistics_s": "summing statistics of norms",
    "idle_s": "waiting for other stages",
    "gradients_s": "summing gradients",
    "update_s": "updating weights",
    "again_s": "computing again",
    "gather_s": "gathering parameters",
}


@dataclass(frozen=True)
class Question:
    """What a plan was asked for."""

    model: str
    sample: tuple[int, ...]
    batch: int
    devices: int
    memory_bytes: int
    cluster: Cluster
    optimizer: str = "sgd"
    measured: bool = False
    """whether operations were timed, not estimated"""

    @property
    def basis(self) -> str:
        """What the predictions rest on, in a line."""
        device = self.cluster.device
        how = "steps timed here" if self.measured else "operations estimated"
        return (
            f"{how}, {device.flops_per_s / 1e9:,.0f} GFLOP/s and {device.bytes_per_s / 1e9:,.1f} GB/s per "
            f"device, {_link(self.cluster)}"
        )


def rows(found: SearchResult) -> list[tuple[str, ...]]:
    """The best candidates: layout, schedule, recomputation, time and memory; a heading comes first."""
    table: list[tuple[str, ...]] = [
        ("", "layout", "schedule", "micro-batches", "recompute", "step", "memory")
    ]
    for number, told in enumerate(found.best, 1):
        c = told.candidate
        micro = str(c.micro_batches) if c.schedule else "-"
        where = str(c.layout) if c.shard == "none" else f"{c.layout}, shard {c.shard}"
        again = "by budget" if c.budget else str(c.recompute or "-")
        table.append(
            (
                str(number), where, c.schedule or "-", micro, again,
                seconds(told.step_s), size(told.memory_bytes),
            )
        )  # fmt: skip
    return table


def reasons(found: SearchResult, question: Question) -> list[str]:
    """Why the first won, in a few lines."""
    first = found.best[0]
    largest = sorted(asdict(first.parts).items(), key=lambda part: -part[1])
    where = ", ".join(
        f"{_WORDS[name]} {value / first.step_s:.0%}"
        for name, value in largest
        if value >= 0.005 * first.step_s
    )
    lines = [f"{first.candidate}: {where} of a step."]
    if len(found.best) > 1:
        lines.append(_behind(first, _next(found.best)))
    if found.norms and first.candidate.micro_batches > 1:
        samples = max(question.batch // first.candidate.micro_batches, 1)
        lines.append(
            f"Batch norm sees a micro-batch of all replicas at a time: {samples} of {question.batch} samples."
        )
    lines.append(
        f"{found.candidates:,} candidates: {found.impossible:,} impossible, {found.too_large:,} larger than "
        f"{size(question.memory_bytes)}, {found.simulated:,} simulated, the others slower in any case."
    )
    return lines


def nothing_fits(found: SearchResult, question: Question) -> UsageError:
    """What to say when there is no plan."""
    if found.closest is None:
        return UsageError(
            f"{question.model} cannot be divided over {question.devices} devices with a batch of "
            f"{question.batch}: use fewer devices, a larger batch or larger images"
        )
    candidate, need = found.closest
    over = need - question.memory_bytes
    remedy = ["more devices" if question.sample[1:] else "a larger --memory"]
    if question.batch > candidate.layout.data:
        remedy.append("a smaller --batch")
    if question.optimizer == "adam":
        remedy.append("--optimizer sgd")
    return UsageError(
        f"no plan fits: the closest ({candidate}) needs {size(need)} per device, {size(over)} more than "
        f"{size(question.memory_bytes)}. What helps: --memory {size(1.05 * need)}, {', '.join(remedy)}"
    )


def plan_of(found: SearchResult, question: Question) -> Plan:
    """The first choice as a plan, whose values say that they are predictions."""
    first = found.best[0]
    told = "" if question.cluster.here else f" on {question.cluster.name}, simulated"
    why = (
        f"predicted {seconds(first.step_s)} a step and {size(first.memory_bytes)} per device for "
        f"{question.model}{told}"
    )
    values = first.candidate.values()
    if question.measured and first.candidate.schedule:
        values["pipeline.cut"] = MEASURED
    plan = Plan().replace(values, Provenance("tuned", why))
    asked: dict[str, object] = {"train.batch_size": question.batch}
    if ":" not in question.model:
        asked["train.model"] = question.model
    if question.optimizer != plan.train.optimizer:
        asked["train.optimizer"] = question.optimizer
    return plan.replace(asked, Provenance("user", "fivefold plan"))


def seconds(value: float) -> str:
    """A time with three digits.

    >>> seconds(0.01234), seconds(12.345), seconds(0.0000123)
    ('12.3 ms', '12.3 s', '12.3 us')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-6:.3g} us"


def size(value: float) -> str:
    """Bytes in the largest unit that gives at least 1, as `bytes_of` reads it.

    >>> size(17179869184), size(1500), size(6)
    ('16GiB', '1.5KiB', '6B')
    """
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= scale:
            return f"{value / scale:.1f}".removesuffix(".0") + unit
    return f"{value:.0f}B"


def _next(best: Sequence[Prediction]) -> Prediction:
    """The best of another kind: layouts that differ only in which way tiles lie tell little."""
    first = best[0].candidate
    kind = (first.layout.data, first.layout.pipe, first.schedule)
    others = (
        p
        for p in best[1:]
        if (p.candidate.layout.data, p.candidate.layout.pipe, p.candidate.schedule) != kind
    )
    return next(others, best[1])


def _behind(first: Prediction, second: Prediction) -> str:
    more = {
        name: value - getattr(first.parts, name)
        for name, value in asdict(second.parts).items()
        if name in _WORDS
    }
    worst = max(more, key=lambda name: more[name])
    slower = second.step_s / first.step_s - 1
    if slower < ALIKE:
        return f"{second.candidate} is as fast within half a per cent."
    return (
        f"{second.candidate} is {slower:.1%} slower: it spends {seconds(more[worst])} more "
        f"{_WORDS[worst]}."
    )


def _link(cluster: Cluster) -> str:
    told = [("within a node", cluster.within)]
    if cluster.nodes > 1:
        told.append(("between nodes", cluster.between))
    return " and ".join(
        f"{link.latency_s * 1e6:,.0f} us and {link.bytes_per_s / 1e9:,.1f} GB/s {where}"
        for where, link in told
    )
