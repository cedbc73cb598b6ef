"""`fivefold checkpoint interval`: how often to save."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from fivefold.errors import UsageError
from fivefold.launch.duration import seconds_of

if TYPE_CHECKING:
    from fivefold.checkpoint.interval import Interval as Found
    from fivefold.checkpoint.note import SavingCosts

__all__ = ["Interval"]


def _option(metavar: str, hint: str | None = "") -> object:
    if hint is None:
        return tyro.conf.arg(metavar=metavar)
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=hint)


@dataclass(frozen=True)
class Interval:
    """Compute how often to save: so that saving and repeated work together take least time.

    The costs are by how much one save, and one flush, lengthen training. Times are 2.5s, 10min, 4h or 7d.

    A directory that a run saves to tells what its last start measured, and the mean time between failures
    that it was given; options come before that.

    Example: fivefold checkpoint interval --save 0.5s --mtbf 1d --flush 20s --flush-mtbf 14d --step 0.8s
    """

    path: Annotated[str, tyro.conf.Positional, _option("[PATH]")] = ""
    """directory or URL of a run that has saved"""
    save: Annotated[str, _option("TIME")] = ""
    """what a save costs"""
    mtbf: Annotated[str, _option("TIME")] = ""
    """mean time between failures of the whole run that the nodes' own storage survives"""
    flush: Annotated[str, _option("TIME")] = ""
    """what a flush costs in addition; default: nothing"""
    flush_mtbf: Annotated[str, _option("TIME")] = ""
    """mean time between failures that only a flushed copy survives; default: never"""
    step: Annotated[str, _option("TIME")] = ""
    """how long a training step takes: tells the interval in steps too"""
    max_overhead: Annotated[float, _option("SHARE", None)] = 0.035
    """share of the time that saving may add; 0: no limit"""

    def run(self) -> int:
        """Compute and print."""
        from fivefold.checkpoint.interval import Level, daly, two_level, with_flushes

        costs = _measured(self.path) if self.path else None
        cost = _asked("--save", self.save, costs and costs.save_s)
        mtbf = _asked("--mtbf", self.mtbf, costs and costs.mtbf_s)
        flush = seconds_of("--flush", self.flush) if self.flush else costs.flush_s if costs else 0.0
        far = seconds_of("--flush-mtbf", self.flush_mtbf) if self.flush_mtbf else math.inf
        local, flushed = Level(cost, mtbf), Level(flush, far)
        if costs is not None and not self.flush_mtbf:  # as often as the run does
            found = with_flushes(local, flushed, costs.flush_every, self.max_overhead)
        else:
            found = two_level(local, flushed, self.max_overhead)
        if costs is not None:
            print(f"a save costs {_time(cost)} of training, a flush {_time(flush)} more")
        for line in _advice(found, seconds_of("--step", self.step) if self.step else 0.0):
            print(line)
        print(f"for comparison, one level by Daly's formula: every {_time(daly(cost, mtbf))}")
        return 0


def _measured(path: str) -> SavingCosts:
    from fivefold.checkpoint.note import newest_note
    from fivefold.checkpoint.place import place_at

    note = newest_note(place_at(path))
    if note is None or not note.costs.save_s:
        raise UsageError(
            f"no run has measured in {path} what its saves cost: name the directory of a run that has saved "
            "twice, or give --save and --mtbf"
        )
    return note.costs


def _asked(option: str, text: str, measured: float | None) -> float:
    if text:
        return seconds_of(option, text)
    if measured:
        return measured
    raise UsageError(
        f"{option} is missing: give a time, such as {option} 0.5s, or the directory of a run"
    )


def _time(seconds: float) -> str:
    """Seconds for people.

    >>> _time(0.25), _time(90.0), _time(1000.0), _time(20000.0), _time(math.inf)
    ('0.25 s', '90 s', '17 min', '5.6 h', 'never')
    >>> _time(7000.0), _time(4e6)
    ('117 min', '46 d')
    """
    if math.isinf(seconds):
        return "never"
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            count = seconds / length
            return f"{count:.1f} {unit}" if count < 10 else f"{count:.0f} {unit}"
    return f"{seconds:.3g} s"


def _advice(found: Found, step_s: float) -> list[str]:
    if math.isinf(found.every_s):
        return ["nothing fails: there is no need to save"]
    steps = f", every {found.every_steps(step_s)} steps" if step_s else ""
    lines = [f"save every {_time(found.every_s)}{steps}"]
    if found.flush_every:
        often = _time(found.every_s * found.flush_every)
        lines.append(f"flush one save in {found.flush_every}, every {often}")
    lines.append(
        f"saving adds {found.overhead:.2%}; with what is repeated after failures, {found.waste:.2%} is lost"
    )
    return lines
