"""One or two sentences on a run, and what they rest on."""

from __future__ import annotations

import re

import numpy as np

from fivefold.introspect.analysis import Analysis
from fivefold.introspect.findings import Finding, ordered
from fivefold.introspect.helping import HELPING_RULES
from fivefold.introspect.incidents import INCIDENTS
from fivefold.introspect.machine_rules import MACHINE_RULES
from fivefold.introspect.numbers import seconds_text, share_text
from fivefold.introspect.rules import RULES
from fivefold.introspect.shape import Verdict
from fivefold.trace.schema import PHASES, TAGS

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
