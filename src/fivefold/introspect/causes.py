"""Why a rank is late.

Its phases, freed of communication, are compared with the median of the other ranks: the phase with the
largest surplus is where it loses time. How it loses it there is told by what the kernel counted, by its
loader, by its processor time and by where its main thread was seen. The first of these that explains half of
the surplus is the cause:

    throttled   its cgroup had used up its share of the processors
    delayed     it was ready and had no core
    stopped     all of its process stood still
    loader      it waits for batches
    waits       it does nothing: sleeps, reads, waits for a lock
    stopped     it does so in all phases alike and nowhere in particular
    samples     it computes more samples than others
    stage       it computes longer, as all ranks of its stage of a pipeline do
    computes    it computes longer, for a reason that the trace does not tell
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fivefold.introspect.analysis import Analysis
from fivefold.introspect.numbers import seconds_text, share_text
from fivefold.introspect.run import TracedRun
from fivefold.introspect.steps import behind_others
from fivefold.trace.phases import Phase
from fivefold.trace.reader import RankTrace
from fivefold.trace.schema import PHASES

__all__ = ["Cause", "Straggler", "cause_of", "stragglers", "usual_place"]

_LEAST_SHARE, _LEAST_S = 0.05, 2e-4
"""of a step, and seconds, that a rank has to be late on average"""
_SIGNIFICANT = 3.0
"""times its own standard error"""
_EXPLAINS = 0.5
_HELD = 0.25
"""of the surplus: stops are seen in part only"""
_LOAD = PHASES.index(Phase.LOAD)
_EMPTY = 0.5
"""batches that an empty loader has ready on average, at most"""


@dataclass(frozen=True)
class Cause:
    """Why, in words that follow "because", and what to do."""

    id: str
    text: str
    advice: str
    figures: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Straggler:
    """A rank that others wait for."""

    rank: int
    late_s: float
    """per step, mean"""
    share: float
    """of the steps in which it is late"""
    phase: str
    """where: a phase, or outside of phases"""
    surplus_s: float
    """by how much it is longer there than others, per step"""
    cause: Cause


def stragglers(analysis: Analysis) -> list[Straggler]:
    """Ranks that are late on average, latest first."""
    steps = analysis.sure_steps
    if len(steps.ranks) < 2:
        return []
    least = max(_LEAST_SHARE * steps.step_s, _LEAST_S)
    late = steps.late[:, steps.steady]
    mean = steps.mean(steps.late)
    rows = max(1, late.shape[1])
    error = np.nanstd(late, axis=1) / np.sqrt(rows)
    # Whoever is late by arrivals alone waits in a way that the recorder does not see as waiting.
    met = dict(zip(analysis.met.ranks.tolist(), analysis.met.late_s.tolist(), strict=True))
    found: list[Straggler] = []
    for at in np.argsort(-np.nan_to_num(mean), kind="stable"):
        if not mean[at] > least or mean[at] < _SIGNIFICANT * error[at]:
            continue
        rank = int(steps.ranks[at])
        share = float(np.average(late[at] > least, weights=analysis.weight))
        phase, surplus = _where(analysis, int(at))
        cause = cause_of(analysis, int(at), phase, surplus)
        cause.figures["late_at_operations_s"] = met.get(rank)
        found.append(Straggler(rank, float(mean[at]), share, _named(phase), surplus, cause))
    return found


def _where(analysis: Analysis, at: int) -> tuple[int, float]:
    """Number of the phase (or one more: in none) with the largest surplus, and the surplus."""
    steps = analysis.sure_steps
    surplus = behind_others(steps.mean(steps.computing))[at]
    phase = int(np.argmax(surplus))
    return phase, float(surplus[phase])


def _named(phase: int) -> str:
    return str(PHASES[phase]) if phase < len(PHASES) else "outside"


def cause_of(analysis: Analysis, at: int, phase: int, surplus_s: float) -> Cause:
    """Why the rank with index `at` is longer in a phase than others."""
    known = _Figures(analysis, at, phase, surplus_s)
    return (
        known.throttled() or known.delayed() or known.held() or known.loader() or known.stopped()
        or known.waits()
        or known.samples() or known.stage() or known.computes()
    )  # fmt: skip


def _stage(trace: RankTrace) -> int | None:
    told = trace.meta.get("coordinates")
    stage = told.get("pipe") if isinstance(told, dict) else None
    return stage if isinstance(stage, int) else None


def _stopped_share(trace: RankTrace) -> float:
    """Of the time from its first step to its last sign of life; 0 for files that do not tell."""
    if "stopped_ns" not in (trace.live.dtype.names or ()) or not len(trace.windows):
        return 0.0
    passed = int(trace.live["heartbeat_ns"]) - int(trace.windows[0]["begin_ns"])
    return int(trace.live["stopped_ns"]) / max(1, passed)


class _Figures:
    """What is known of one rank against the others, in seconds per step."""

    def __init__(self, analysis: Analysis, at: int, phase: int, surplus_s: float) -> None:
        steps = analysis.sure_steps
        self.analysis, self.at, self.phase, self.surplus = analysis, at, phase, surplus_s
        self.rank = int(steps.ranks[at])
        self.name = _named(phase)
        self.total = max(float(steps.mean(steps.late)[at]), surplus_s)
        self.host = analysis.host(self.rank)

    def more(self, scalar: str) -> float:
        """Surplus of a time that windows count in ns."""
        steps = self.analysis.sure_steps
        return float(behind_others(steps.mean(steps.scalars[scalar]) / 1e9)[self.at])

    def own(self, scalar: str) -> float:
        steps = self.analysis.sure_steps
        return float(steps.mean(steps.scalars[scalar])[self.at]) / 1e9

    def throttled(self) -> Cause | None:
        found = self.own("throttled_ns")
        if self.more("throttled_ns") < _EXPLAINS * self.total:
            return None
        return Cause(
            "throttled",
            f"its cgroup is throttled: its processor quota is used up for {seconds_text(found)} per step",
            f"raise the processor quota of its cgroup (cpu.max) on {self.host}, or ask for whole cores",
            {"throttled_s": found},
        )

    def delayed(self) -> Cause | None:
        found = self.own("run_delay_ns")
        if self.more("run_delay_ns") < _EXPLAINS * self.total:
            return None
        return Cause(
            "delayed",
            f"it shares its core: it was ready to run and had none for {seconds_text(found)} per step",
            f"give it a core of its own: bind ranks to cores, and end what else runs on {self.host}",
            {"run_delay_s": found},
        )

    def held(self) -> Cause | None:
        """The thread that watches the process found that all of it stood still, a fair part of the time."""
        traces = {trace.rank: trace for trace in self.analysis.run.ranks}
        steps = self.analysis.sure_steps
        found = _stopped_share(traces[self.rank]) * steps.step_s
        usual = np.median([_stopped_share(t) for r, t in traces.items() if r != self.rank])
        if found - float(usual) * steps.step_s < _HELD * self.total:
            return None
        return Cause(
            "stopped",
            f"its process is stopped again and again, for {seconds_text(found)} per step at least",
            f"see what stops it on {self.host}: a signal (SIGSTOP), a debugger, the freezer of its cgroup",
            {"stopped_s": found},
        )

    def loader(self) -> Cause | None:
        if self.phase != _LOAD:
            return None
        steps = self.analysis.sure_steps
        ready = float(steps.mean(steps.levels["ready"])[self.at])
        place = place_of(self.analysis.run, self.rank, self.name)
        at = f" at {place.text}" if place else ""
        empty = ready < _EMPTY
        what = f"its loader is empty ({ready:.1f} batches ready)" if empty else "it waits for data"
        return Cause(
            "loader",
            what + at,
            f"more workers for its loader (loader.workers), or faster reads on {self.host}"
            + (f"; look at {place.text}" if place else ""),
            {
                "ready": ready if np.isfinite(ready) else None,
                "place": place.text if place else None,
            },
        )

    def _idle(self) -> float:
        """Surplus of time in the phase without processor time."""
        steps = self.analysis.sure_steps
        if self.phase >= len(PHASES):
            return 0.0
        idle = np.maximum(steps.computing[..., self.phase] - steps.phase_cpu[..., self.phase], 0.0)
        return float(behind_others(steps.mean(idle))[self.at])

    def waits(self) -> Cause | None:
        idle = self._idle()
        outside = self.phase >= len(PHASES)
        place = place_of(self.analysis.run, self.rank, self.name)
        if not (outside and place and place.waits) and idle < _EXPLAINS * self.surplus:
            return None
        at = f" at {place.text}" if place else ""
        where = "outside of any phase" if outside else f"in {self.name}"
        return Cause(
            "waits",
            f"it waits {seconds_text(self.surplus)} per step {where}{at}",
            f"look at {place.text}: it sleeps, reads or waits for a lock there"
            if place
            else f"look at what it does {where}: it uses no processor there",
            {"idle_s": idle, "place": place.text if place else None},
        )

    def stopped(self) -> Cause | None:
        """Idle in all phases in proportion, and seen nowhere more than others are."""
        steps = self.analysis.sure_steps
        own = steps.mean(steps.computing)
        surplus, usual = behind_others(own)[self.at], own[self.at] - behind_others(own)[self.at]
        large = usual > 0.1 * usual.sum()
        large[_LOAD] = False
        large[len(PHASES)] = False
        ratio = surplus[large] / usual[large]
        if (
            large.sum() < 2
            or ratio.min() < 0.5 * ratio.max()
            or self._idle() < _EXPLAINS * self.surplus
        ):
            return None
        if place_of(self.analysis.run, self.rank, self.name) is not None:
            return None
        return Cause(
            "stopped",
            f"its process is held up in every phase alike ({share_text(float(np.median(ratio)))} longer) "
            "without computing",
            f"see what stops it on {self.host}: a signal (SIGSTOP), a limit on its processor time, swapping",
            {"ratio": float(np.median(ratio))},
        )

    def samples(self) -> Cause | None:
        steps = self.analysis.sure_steps
        all_ = steps.mean(steps.scalars["samples"])
        more = float(behind_others(all_)[self.at])
        usual = float(all_[self.at]) - more
        if usual <= 0 or more / usual < 0.05:
            return None
        return Cause(
            "samples",
            f"its share is larger: {all_[self.at]:.4g} samples per step, others have {usual:.4g}",
            "choose a batch size that the ranks divide evenly, or give slower ranks less",
            {"samples": float(all_[self.at]), "samples_of_others": usual},
        )

    def stage(self) -> Cause | None:
        steps = self.analysis.sure_steps
        late = steps.mean(steps.late)
        stages = {t.rank: _stage(t) for t in self.analysis.run.ranks}
        own = stages[self.rank]
        others = {stage for stage in stages.values() if stage is not None and stage != own}
        same = [i for i, rank in enumerate(steps.ranks) if stages[int(rank)] == own]
        if own is None or not others or not all(late[i] > 0 for i in same):
            return None
        return Cause(
            "stage",
            f"its stage of the pipeline (pipe {own}) computes {seconds_text(self.surplus)} longer",
            'cut the layers anew: pipeline.cut = "measured" makes stages equally long',
            {"stage": own},
        )

    def computes(self) -> Cause:
        place = place_of(self.analysis.run, self.rank, self.name)
        at = f" at {place.text}" if place else ""
        where = "outside of any phase" if self.phase >= len(PHASES) else f"in {self.name}"
        return Cause(
            "computes",
            f"it computes {seconds_text(self.surplus)} longer {where}{at}",
            (f"look at {place.text}; " if place else "")
            + f"if it has no more work than others, its core is slower: compare clocks and what else runs "
            f"on {self.host}",
            {"place": place.text if place else None},
        )


# ---- Where a rank's main thread was seen more often than those of others

_MORE = 0.1
"""of a rank's sightings in a phase, more than others have there"""
_LEAST = 2
_WAITING = re.compile(
    r"\b(sleep|wait|acquire|recv|read|readinto|join|select|poll|get|flock|result)\b"
)


@dataclass(frozen=True)
class CodePlace:
    """File, line and function, and the call there."""

    text: str
    share: float
    """of the sightings in the phase"""

    @property
    def waits(self) -> bool:
        """Whether the call is one that waits, by its name."""
        return _WAITING.search(self.text.partition("(")[2]) is not None


def place_of(run: TracedRun, rank: int, phase: str) -> CodePlace | None:
    """Where `rank` was seen in `phase` clearly more often than the median of the others; None: nowhere."""
    found = {trace.rank: _shares(trace, phase) for trace in run.ranks}
    own = found.pop(rank, {})
    total = max(1, _sightings(run, rank, phase))
    best: CodePlace | None = None
    surplus = _MORE
    for text, share in own.items():
        usual = float(np.median([o.get(text, 0.0) for o in found.values()])) if found else 0.0
        by_chance = 2 * np.sqrt(usual * total + 1) / total
        if share - usual > max(surplus, by_chance):
            best, surplus = CodePlace(text, share), share - usual
    return best


def usual_place(run: TracedRun, phase: str) -> CodePlace | None:
    """Where the ranks were seen in more than half of all sightings in `phase`; None: nowhere."""
    seen: Counter[str] = Counter()
    for trace in run.ranks:
        seen.update(dict(trace.stacks.get(phase) or []))
    total = seen.total()
    if total < _LEAST:
        return None
    [(text, count)] = seen.most_common(1)
    return CodePlace(text, count / total) if count > total / 2 else None


def _sightings(run: TracedRun, rank: int, phase: str) -> int:
    places = next((t.stacks.get(phase, []) for t in run.ranks if t.rank == rank), [])
    return sum(count for _, count in places)


def _shares(trace: RankTrace, phase: str) -> dict[str, float]:
    """Sightings in a phase, over all sightings of the rank there."""
    places = trace.stacks.get(phase) or []
    total = sum(count for _, count in places)
    return {text: count / total for text, count in places} if total >= _LEAST else {}
