"""What was chosen, as a table: what each unit of a net holds, what is done with it, and what that costs."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from fivefold.parallel.memory.profile import Profile
from fivefold.parallel.memory.simulate import AGAIN, KEEP, Simulator, State

__all__ = ["StepChoices", "choices_of"]

_WHAT = {KEEP: "kept", AGAIN: "computed again"}


@dataclass(frozen=True)
class StepChoices:
    """What steps on some batch do under a budget. Printed, it is a table."""

    text: str
    step_s: float = math.nan
    """seconds of a step, simulated with what was measured; nan where nothing is simulated"""
    free_s: float = math.nan
    """the same without a budget"""
    bound_s: float = math.nan
    """the same if all copies hid behind each other and behind what is computed"""

    def __str__(self) -> str:
        return self.text


def choices_of(
    simulator: Simulator, state: State, standing_bytes: int, workspace_bytes: int, limit_bytes: int
) -> StepChoices:
    """Units with what they make for backward. Times are those of the simulated step."""
    profile, told = simulator.profile, simulator.run([simulator.start(), state])
    header = ("forward", "makes for backward", "", "kept", "spilled", "costs", "out at", "back at")
    rows: list[tuple[str, ...]] = [header]
    alone, _ = simulator.held(simulator.start())
    again_s, out_s, back_s = simulator.again_s(state), told.out_s[1], told.back_s[1]
    for unit, (kept, spilled) in enumerate(zip(*simulator.held(state), strict=True)):
        what = _WHAT.get(int(state.units[unit]), "again, with the next")
        rows.append((
            _ms(simulator.forward_s[unit]), _mib(alone[unit]), what, _mib(kept), _mib(spilled),
            _ms(again_s[unit]) if again_s[unit] else "",
            "" if math.isnan(out_s[unit]) else _ms(out_s[unit]),
            "" if math.isnan(back_s[unit]) else _ms(back_s[unit]),
        ))  # fmt: skip
    names = ["nodes", *(_name(profile, *pair) for pair in itertools.pairwise(simulator.bounds))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = [
        "  ".join([name.ljust(max(map(len, names))), *_padded(row, widths)]).rstrip()
        for name, row in zip(names, rows, strict=True)
    ]
    free_s, seconds = told.seconds
    lines.append(
        f"a step of {_ms(seconds)}, {_ms(free_s)} without a budget; of {_mib(limit_bytes)} there are "
        f"{_mib(standing_bytes)} before it begins"
        + (f", and workspaces take {_mib(workspace_bytes)}" if workspace_bytes else "")
    )
    copied_s = 0.0
    if simulator.link is not None:
        lines[-1] += f"; there is room to spill {_mib(simulator.link.room_bytes)}"
        size = float(simulator.held(state)[1].sum())
        copied_s = size / simulator.link.out_bytes_per_s + size / simulator.link.back_bytes_per_s
    bound_s = max(free_s, copied_s) + again_s.sum()
    return StepChoices("\n".join(lines), float(seconds), float(free_s), float(bound_s))


def _name(profile: Profile, first: int, stop: int) -> str:
    one, last = profile.where[first], profile.where[stop - 1]
    return one if stop - first == 1 else f"{one} to {last}"


def _padded(row: tuple[str, ...], widths: list[int]) -> list[str]:
    return [
        text.ljust(width) if column == 2 else text.rjust(width)
        for column, (text, width) in enumerate(zip(row, widths, strict=True))
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"
