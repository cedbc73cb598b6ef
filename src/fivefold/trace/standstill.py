"""Why ranks stand still: who waits in what, for whom, and what those do instead.

rank 0   all_reduce number 7 ───────────────►  waits for 1 and 2
rank 1   all_reduce number 7 ───────────────►  waits too
rank 2   load ── reader.py:12 read ─────────►  waits for no rank: here it is
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fivefold.trace.states import PendingCall, RankState

__all__ = ["Standstill", "judge", "listed", "waiting"]

_EQUAL = ("all_reduce", "reduce", "broadcast", "reduce_scatter")
"""collectives in which all ranks give or take equally many bytes"""
_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_TOLD = 8
"""ranks that a text describes one by one"""
_KEPT = 16
_LINKS = 4


@dataclass(frozen=True)
class Standstill:
    """What was found."""

    kind: str
    """hang, or mismatch: ranks have asked for things that do not belong together"""
    text: str
    """a few lines for people; the first says it all"""
    call: PendingCall
    """what the rank that reports waits for"""
    waiting: tuple[int, ...]
    """ranks that wait for others"""
    missing: tuple[int, ...]
    """ranks that others wait for, and that do something else or are gone"""
    states: tuple[tuple[RankState, PendingCall | None], ...]
    """of those that matter, with what each waits for"""

    def fields(self) -> dict[str, Any]:
        """As the fields of a note."""
        return {
            "text": self.text,
            "waiting": list(self.waiting),
            "missing": list(self.missing),
            "states": [_told_state(*each) for each in self.states],
        }


def judge(states: Mapping[int, RankState], reporter: int) -> Standstill | None:
    """Explain what `reporter` waits for; None if it waits for nothing. `states`: of all who are known."""
    return _Case(states, reporter).judged()


def waiting(states: Mapping[int, RankState]) -> list[int]:
    """The ranks that wait for others."""
    return _Case(states, -1).waiting


class _Case:
    """One rank that waits, and what is known of all."""

    def __init__(self, states: Mapping[int, RankState], reporter: int) -> None:
        self.states, self.reporter = states, reporter
        self._late: dict[tuple[str, tuple[int, ...], int], list[int]] = {}
        self.calls = {rank: call for rank in sorted(states) if (call := self._waits_in(rank))}
        """of those that wait, what they wait for"""
        self.waiting = list(self.calls)

    def judged(self) -> Standstill | None:
        call = self.calls.get(self.reporter)
        if call is None:
            return None
        for own in self.states[self.reporter].open:
            for rank in sorted(set(own.group.ranks) & set(self.states) - {self.reporter}):
                other = self.states[rank].call(own)
                if not own.is_message and other is not None and _differ(own, other):
                    return self._mismatched(own, rank, other)
        missing = self._missing(call)
        roots = [rank for rank in missing if rank not in self.calls]
        return self._circle(call, missing) if missing and not roots else self._hung(call, roots)

    def _waits_in(self, rank: int) -> PendingCall | None:
        """The first operation that others are missing in; else the last, which all have asked for."""
        state = self.states[rank]
        if state.gone or not state.waits or not state.open:
            return None
        late = (call for call in state.open if self._absent(call, rank))
        return next(late, state.open[-1])

    def _missing(self, call: PendingCall) -> list[int]:
        """Ranks that have to take part and have not come, directly or behind others that wait."""
        todo, found = [(self.reporter, call)], dict[int, None]()
        while todo:
            waiter, wanted = todo.pop()
            for rank in self._absent(wanted, waiter):
                if rank not in found and rank != self.reporter:
                    found[rank] = None
                    todo += [(rank, self.calls[rank])] if rank in self.calls else []
        return sorted(found)

    def _absent(self, call: PendingCall, waiter: int) -> list[int]:
        """Those whom one call waits for."""
        if call.is_message:
            return [rank for rank in call.waits_for if rank != waiter]
        known = call.group.key, call.group.ranks, call.number  # the same for all who wait in it
        if known not in self._late:
            self._late[known] = [rank for rank in call.waits_for if self._is_late(rank, call)]
        return [rank for rank in self._late[known] if rank != waiter]

    def _is_late(self, rank: int, call: PendingCall) -> bool:
        state = self.states.get(rank)
        return state is None or state.held or state.reached(call.group) < call.number

    def _mismatched(self, own: PendingCall, rank: int, other: PendingCall) -> Standstill:
        says = [
            f"{call}{f', root {call.peer}' if call.kind in _ROOTED else ''}{_place(self.states[who])}"
            for who, call in ((self.reporter, own), (rank, other))
        ]
        text = (
            f"ranks do not agree on an operation: rank {self.reporter} asks for {says[0]}, rank {rank} "
            f"for {says[1]}; all ranks of a group have to make the same calls in the same order"
        )
        return self._made("mismatch", text, own, [rank], [self.reporter, rank])

    def _circle(self, call: PendingCall, missing: Sequence[int]) -> Standstill:
        text = (
            f"rank {self.reporter} waits in {call} for {listed(missing)}, which "
            f"{'waits' if len(missing) == 1 else 'wait'} in other operations: each waits for another to "
            "come; all ranks have to make the calls they share in the same order"
        )
        return self._made("mismatch", text, call, missing, [self.reporter, *missing])

    def _hung(self, call: PendingCall, roots: Sequence[int]) -> Standstill:
        same = [r for r in self.waiting if self.calls[r].group == call.group] or [self.reporter]
        have = "has" if len(same) == 1 else "have"
        text = f"{listed(same)} {have} waited {_seconds(call.since_s)} in {call}"
        if roots:
            text += f" for {listed(roots)}"
        else:
            text += f"; all ranks have asked for it: {self._what_stands_still(same)}"
        return self._made("hang", text, call, roots, [*roots, *same])

    def _what_stands_still(self, ranks: Sequence[int]) -> str:
        """The links over which those who have come wait for more."""
        told: dict[tuple[int, int], str] = {}
        for rank in ranks:
            transfer = self.calls[rank].transfer if rank in self.calls else None
            if transfer is None:
                continue
            ends = (rank, transfer.peer) if transfer.sends else (transfer.peer, rank)
            if transfer.sends and ends in told:
                continue  # what has come is nearer to the truth than what has been sent
            far = f"{transfer.moved_bytes:,} of {transfer.size_bytes:,} bytes"
            told[ends] = f"from {self._at(ends[0])} to {self._at(ends[1])} ({far})"
        links = [*told.values()]
        if not links:
            return "the network or the backend stands still"
        more = f" and {len(links) - _LINKS} more" if len(links) > _LINKS else ""
        return f"what goes {', '.join(links[:_LINKS])}{more} does not arrive, or is slow"

    def _at(self, rank: int) -> str:
        host = self.states[rank].host if rank in self.states else ""
        return f"rank {rank}{f' on {host}' if host else ''}"

    def _made(
        self,
        kind: str,
        text: str,
        call: PendingCall,
        missing: Sequence[int],
        involved: Sequence[int],
    ) -> Standstill:
        order = [rank for rank in dict.fromkeys(involved) if rank in self.states]
        lines = [_line(self.states[rank], self.calls.get(rank)) for rank in order[:_TOLD]]
        unknown = [rank for rank in missing if rank not in self.states]
        lines += [f"  {listed(unknown)}: nothing is known of {_it(unknown)}"] if unknown else []
        lines += [f"  and {len(order) - _TOLD} more"] if len(order) > _TOLD else []
        return Standstill(
            kind,
            "\n".join([text, *lines]),
            call,
            tuple(self.waiting),
            tuple(missing),
            tuple((self.states[rank], self.calls.get(rank)) for rank in order[:_KEPT]),
        )


def _differ(one: PendingCall, other: PendingCall) -> bool:
    if one.kind != other.kind or (one.kind in _ROOTED and one.peer != other.peer):
        return True
    return one.kind in _EQUAL and (one.size_bytes, one.dtype) != (other.size_bytes, other.dtype)


def _it(ranks: Sequence[int]) -> str:
    return "it" if len(ranks) == 1 else "them"


def _line(state: RankState, call: PendingCall | None) -> str:
    where = f"  rank {state.rank}{f' on {state.host}' if state.host else ''}"
    if state.condition == "dead":
        return f"{where}: its process {state.pid} is dead; it was in step {state.step}"
    if state.condition in ("ended", "failed"):
        return f"{where}: its run has {state.condition}, in step {state.step}"
    what = f"{state.phase or 'between phases'} for {_seconds(state.since_s)}"
    if call is not None:
        what = f"waits {_seconds(call.since_s)} in {call}"
    condition = f", {state.condition}" if state.condition else ""
    return f"{where}: step {state.step}, {what}{condition}{_place(state)}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.{0 if seconds >= 10 else 1}f} s"


def _place(state: RankState) -> str:
    return f" at {state.at}" if state.at else ""


def _told_state(state: RankState, call: PendingCall | None) -> dict[str, Any]:
    about: dict[str, Any] = {}
    if call is not None:
        moved = call.transfer
        about = {
            "op": call.kind, "number": call.number, "group": call.group.name,
            "size_bytes": call.size_bytes, "dtype": call.dtype,
            **({} if moved is None else {"transfer": asdict(moved)}),
        }  # fmt: skip
    return {
        "rank": state.rank, "host": state.host, "step": state.step, "phase": state.phase,
        "since_s": round(state.since_s if call is None else call.since_s, 3), **about,
        "at": state.at, "condition": state.condition, "stack": list(state.stack),
    }  # fmt: skip


def listed(ranks: Sequence[int], most: int = 12) -> str:
    """Ranks in words.

    >>> listed([2]), listed([0, 1, 3])
    ('rank 2', 'ranks 0, 1, 3')
    """
    told = ", ".join(map(str, ranks[:most])) + (", ..." if len(ranks) > most else "")
    return f"rank{'' if len(ranks) == 1 else 's'} {told}"
