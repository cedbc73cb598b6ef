"""One or two sentences on a run, and what they rest on."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fivefold.introspect.analysis import Analysis
from fivefold.introspect.findings import Finding, evidence, ordered
from fivefold.introspect.helping import HELPING_RULES
from fivefold.introspect.machine_rules import MACHINE_RULES
from fivefold.introspect.numbers import seconds_text, share_text
from fivefold.introspect.rules import RULES
from fivefold.introspect.run import TracedRun, listed
from fivefold.introspect.shape import Verdict
from fivefold.trace.file import TraceError, TraceFile
from fivefold.trace.schema import PHASES, TAGS
from fivefold.trace.standstill import Standstill, judge
from fivefold.trace.states import RankState, look

__all__ = ["findings", "verdict"]

_TELLS = 0.1
"""share of a step from which exposed communication is told with what explains it"""
_EXPLAIN = ("straggler", "slow-link", "slow-network")
_NAME = re.compile(r"\S*[._=(]\w")
_MOST = 0.5
"""share of a step that can be gained, from which a run is bad"""


def findings(analysis: Analysis) -> list[Finding]:
    """What all rules find, most important first."""
    rules = (*INCIDENTS, *MACHINE_RULES, *HELPING_RULES)
    rules += RULES if analysis.steps is not None else ()
    found = [finding for rule in rules for finding in rule(analysis)]
    return ordered(_without_doubles(found))


def _without_doubles(found: list[Finding]) -> list[Finding]:
    """A throttled job is ready without a core; a slow link explains a slow network."""
    ids = {finding.id for finding in found}
    everywhere = any(f.id == "throttled" and not f.ranks for f in found)
    explained = {"cores"} if everywhere else set[str]()
    if any(f.id == "straggler" and f.figures["cause"] == "throttled" for f in found):
        explained |= {"throttled"}
    explained |= {"loader"} if "helpers-short" in ids else set()
    explained |= {"slow-network"} if "slow-link" in ids else set()
    explained |= {"killed"} if {"hang", "mismatch"} & {f.id for f in found if f.broken} else set()
    return [finding for finding in found if finding.id not in explained]


def verdict(analysis: Analysis, found: list[Finding]) -> Verdict:
    """The most important of what was found, in one or two sentences."""
    broken = [finding for finding in found if finding.broken]
    if broken:
        return {"text": _sentences([finding.says for finding in broken[:2]]), "level": "bad"}
    if analysis.steps is None:
        return {"text": "No step has ended yet: there is nothing to judge.", "level": "notice"}
    costs = [finding for finding in found if finding.gain_s]
    if not costs:
        told = [finding.says for finding in found[:1]]
        text = _sentences([_filled(analysis), *told])
        return {"text": text, "level": "notice" if told else "good"}
    worst = (costs[0].gain_s or 0.0) / analysis.steps.step_s
    return {
        "text": _sentences(_costs(analysis, costs)),
        "level": "bad" if worst > _MOST else "notice",
    }


def _costs(analysis: Analysis, costs: list[Finding]) -> list[str]:
    """The two that cost most, each time told once."""
    tiny = next((f.figures["tags"] for f in costs if f.id == "tiny"), [])
    slow = any(f.id in ("slow-link", "slow-network") for f in costs)
    kept = [f for f in costs if f.id != "exposed" or not (slow or f.figures["tag"] in tiny)]
    first = kept[0]
    if first.id not in _EXPLAIN or not (waiting := _exposed(analysis)):
        return [finding.says for finding in kept[:2]]
    others = [finding.says for finding in kept[1:] if finding.id != "exposed"]
    return [f"{waiting}; {first.says}", *others[:1]]


def _exposed(analysis: Analysis) -> str:
    """How much of the step ranks wait in communication, on average."""
    steps = analysis.sure_steps
    by_tag = np.nanmean(steps.mean(steps.exposed), axis=0) / steps.step_s
    most = int(np.argmax(by_tag))
    if by_tag[most] < _TELLS:
        return ""
    what = "reduction of gradients" if most == 0 else f"communication of {TAGS[most]}"
    return f"{share_text(float(by_tag[most]))} of the step is exposed {what}, waiting included"


def _filled(analysis: Analysis) -> str:
    steps = analysis.sure_steps
    parts = np.nanmean(steps.mean(steps.computing), axis=0)
    total = float(np.nanmean(steps.mean(steps.wall))) or 1.0
    computing = sum(
        float(parts[i]) for i, phase in enumerate(PHASES)
        if phase in ("forward", "backward", "update", "augment")
    )  # fmt: skip
    communicating = float(np.nanmean(steps.mean(steps.exposed).sum(1)))
    return (
        f"computing fills {share_text(computing / total)} of the step of {seconds_text(steps.step_s)}, "
        f"exposed communication {share_text(communicating / total)}: nothing stands out"
    )


def _sentences(parts: list[str]) -> str:
    kept = [part.strip().rstrip(".") for part in parts if part]
    # A key of the plan, or a call, is written as it is.
    return " ".join(
        f"{part if _NAME.match(part) else part[:1].upper() + part[1:]}." for part in kept
    )


# ---- What broke a run: told before anything about speed

_STANDS_S, _STOOD_S = 10.0, 5.0
"""an operation under way for so long is a standstill, of a run that goes on and of one that was killed"""
_FEW = 256
"""ranks, beyond which files are not looked into for a standstill"""


def told(analysis: Analysis) -> Iterator[Finding]:
    """Hangs and mismatches that the run itself noticed, and that did not go away."""
    for kind in ("mismatch", "hang"):
        notes = [(t.rank, n) for t in analysis.run.ranks for n in t.notes if n["kind"] == kind]
        latest = dict(notes)
        lasting = [(rank, note) for rank, note in latest.items() if not note.get("resolved")]
        for rank, note in lasting[:1]:
            yield _standstill(kind, note, rank)
        if notes and not lasting:
            yield _passed(kind, [(r, n) for r, n in notes if n.get("resolved")])


def _standstill(kind: str, note: dict[str, Any], reporter: int) -> Finding:
    text = str(note.get("text") or kind)
    first, _, rest = text.partition("\n")
    missing, waiting = _ranks(note.get("missing")), _ranks(note.get("waiting"))
    where = _where(note, missing)
    advice = {
        "mismatch": "make sure that all ranks make the same calls in the same order, with the same "
                    "sizes: look "
                    "for branches that depend on the rank or on its data",
        "hang": f"see what {listed(missing)} {'does' if len(missing) == 1 else 'do'} there" if missing
                else "see whether the network between the nodes works",
    }[kind]  # fmt: skip
    return Finding(
        kind, first + (f": {where}" if where else ""), advice + (f": {where}" if where else ""),
        ranks=missing or waiting, broken=True,
        evidence=(evidence("marks", rest or first, ranks=missing or waiting),
                  evidence("stacks", "where the ranks were seen", ranks=missing or waiting)),
        figures={"missing": list(missing), "waiting": list(waiting), "reporter": reporter,
                 "states": note.get("states") or []},
    )  # fmt: skip


def _where(note: dict[str, Any], missing: tuple[int, ...]) -> str:
    """What those are doing that others wait for."""
    states = note.get("states")
    for state in states if isinstance(states, list) else []:
        if isinstance(state, dict) and state.get("rank") in missing:
            phase, at = (
                state.get("phase"),
                state.get("at") or next(iter(state.get("stack") or []), ""),
            )
            condition = str(state.get("condition") or "")
            words = [f"is {condition}" if condition else "", f"is in {phase}" if phase else "",
                     f"at {at}" if at else ""]  # fmt: skip
            if any(words):
                return f"rank {state['rank']} " + " ".join(word for word in words if word)
    return ""


def _ranks(told: Any) -> tuple[int, ...]:
    return tuple(r for r in told if isinstance(r, int)) if isinstance(told, list) else ()


def _passed(kind: str, notes: list[tuple[int, dict[str, Any]]]) -> Finding:
    longest = max(notes, key=lambda pair: float(pair[1].get("seconds") or 0))[1]
    missing = _ranks(longest.get("missing"))
    seconds = float(longest.get("seconds") or 0)
    return Finding(
        kind, f"ranks stood still for {seconds:.0f} s" + (f" until {listed(missing)} came" if missing else "")
        + (f", {len(notes)} times in all" if len(notes) > 1 else ""),
        "see the mark on the time axis for where that was", ranks=missing,
        evidence=(evidence("marks", str(longest.get("text") or ""), ranks=missing),),
        figures={"seconds": seconds, "times": len(notes), "missing": list(missing)},
    )  # fmt: skip


def stuck(analysis: Analysis) -> Iterator[Finding]:
    """A standstill that nobody noted: read from the operations that are under way."""
    run = analysis.run
    noted = any(n["kind"] in ("hang", "mismatch") for t in run.ranks for n in t.notes)
    if noted or len(run.ranks) > _FEW or run.state not in ("running", "killed"):
        return
    states = _states(run)
    waits = [(s.open[0].since_s, r) for r, s in states.items() if s.open and s.waits]
    if not waits:
        return
    longest, reporter = max(waits)
    if longest < (_STANDS_S if run.state == "running" else _STOOD_S):
        return
    found = judge(states, reporter)
    if found is not None:
        yield _standstill(found.kind, _as_note(found), reporter)


def _as_note(found: Standstill) -> dict[str, Any]:
    return {"kind": found.kind, **found.fields()}


def _states(run: TracedRun) -> dict[int, RankState]:
    """What ranks are doing: now, or at the last moment that any of the run gave a sign."""
    last = max(int(t.live["heartbeat_ns"]) for t in run.ranks)
    now = time.monotonic_ns() if run.state == "running" and _is_here(run) else last
    found: dict[int, RankState] = {}
    for trace in run.ranks:
        try:
            found[trace.rank] = look(TraceFile.open(trace.path), now)
        except TraceError:
            continue
    return found


def _is_here(run: TracedRun) -> bool:
    import platform

    return all(trace.meta.get("host") == platform.node() for trace in run.ranks)


def failed(analysis: Analysis) -> Iterator[Finding]:
    """Errors that ended ranks: the first one is the one to look at."""
    notes = [
        (int(n.get("at_ns") or 0) + int(t.meta.get("clock_offset_ns") or 0), t.rank, n)
        for t in analysis.run.ranks for n in t.notes if n["kind"] == "failure"
    ]  # fmt: skip
    ranks = tuple(rank for rank, state in analysis.run.states.items() if state == "failed")
    if not notes and not ranks:
        return
    _, rank, note = min(
        notes, default=(0, ranks[0] if ranks else 0, {}), key=lambda entry: entry[0]
    )
    text = str(note.get("text") or "no text was recorded").partition("\n")[0]
    others = f"; {listed(set(ranks) - {rank})} failed as well" if set(ranks) - {rank} else ""
    yield Finding(
        "failure", f"rank {rank} failed: {text}{others}", "the first error is the cause of the others: "
                                                          "see the "
        f"log of rank {rank}", ranks=(rank, *(r for r in ranks if r != rank)), broken=True,
        evidence=(evidence("marks", text, ranks=[rank]),), figures={"rank": rank, "text": text},
    )  # fmt: skip


def killed(analysis: Analysis) -> Iterator[Finding]:
    """Processes that are gone without a word."""
    run = analysis.run
    ranks = tuple(rank for rank, state in run.states.items() if state == "killed")
    if not ranks:
        return
    everybody = len(ranks) == len(run.ranks)
    doing = {t.rank: int(t.live["phase"]) for t in run.ranks}
    phase = doing[ranks[0]]
    where = f" in {PHASES[phase]}" if phase < len(PHASES) else ""
    step = max(int(t.live["step"]) for t in run.ranks if t.rank in ranks)
    memory = max((int(t.windows["rss_bytes"].max()) for t in run.ranks if t.rank in ranks and len(t.windows)),
                 default=-1)  # fmt: skip
    yield Finding(
        "killed", f"{'all ranks' if everybody else listed(ranks)} ended without a word, in step "
                  f"{step}{where}",
        "a signal ended it: the batch system (time, memory), the kernel when memory ran out (dmesg), or "
        "somebody; "
        "the last rank log and the batch system's log say more", ranks=() if everybody else ranks,
        broken=not everybody or run.state == "killed",
        evidence=(evidence("ranks", f"last step {step}", ranks=ranks),),
        figures={"step": step, "rss_bytes": memory if memory >= 0 else None},
    )  # fmt: skip


INCIDENTS: tuple[Callable[[Analysis], Iterator[Finding]], ...] = (told, stuck, failed, killed)
"""rules about what broke"""
