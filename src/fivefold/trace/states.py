"""What a rank is doing at a moment: read from its trace, whether its process lives, hangs or is gone."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fivefold.cluster.processes import process_stat
from fivefold.trace.file import TraceFile
from fivefold.trace.schema import DTYPES, KINDS, NOTHING, PHASES, TAGS, ProcessState

__all__ = [
    "LinkProgress",
    "PendingCall",
    "RankGroup",
    "RankState",
    "from_json",
    "look",
    "pid_namespace",
    "process_state",
    "to_json",
    "under_way",
]

_MESSAGES = ("send", "receive")
_RECENT = 8
"""calls per group that a state remembers, to be compared with those of other ranks"""
_OPEN, _GROUPS = 16, 32


@dataclass(frozen=True)
class RankGroup:
    """A group of ranks. `key` and `ranks` together are the same on all of them."""

    name: str
    key: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class LinkProgress:
    """Bytes that a collective moves to or from another node, of which it waits for more."""

    peer: int
    """rank of the job"""
    sends: bool
    moved_bytes: int
    size_bytes: int


@dataclass(frozen=True)
class PendingCall:
    """An operation that a rank has asked for."""

    kind: str
    number: int
    """among the collectives of the group, or the messages to or from `peer`"""
    size_bytes: int
    dtype: str
    tag: str = ""
    group: RankGroup = field(default_factory=lambda: RankGroup("", "", ()))
    peer: int = -1
    """of a message, a rank of the group; root of a broadcast; else -1"""
    since_s: float = 0.0
    event: int = 0
    """number of the event in the trace of the rank"""
    transfer: LinkProgress | None = None
    """what it waits for by now, where the rank itself has told"""

    @property
    def is_message(self) -> bool:
        """Whether only one other rank takes part."""
        return self.kind in _MESSAGES

    @property
    def waits_for(self) -> tuple[int, ...]:
        """Ranks of the job that have to take part."""
        if self.is_message:
            ranks = self.group.ranks
            return (ranks[self.peer],) if 0 <= self.peer < len(ranks) else ()
        return self.group.ranks

    def __str__(self) -> str:
        where = f"number {self.number} of {self.group.name or 'a group'}"
        what = [f"{self.size_bytes:,} bytes" + (f" of {self.dtype}" if self.dtype else "")]
        if self.is_message and self.waits_for:
            what.append(f"{'to' if self.kind == 'send' else 'from'} rank {self.waits_for[0]}")
        what += [self.tag] if self.tag and self.tag != "other" else []
        return f"{self.kind} {where} ({', '.join(what)})"


@dataclass(frozen=True)
class RankState:
    """What one rank is doing."""

    rank: int
    host: str = ""
    pid: int = 0
    space: int = 0
    """the pid namespace that `pid` belongs to: its inode number, 0 if unknown"""
    step: int = 0
    phase: str = ""
    """of the training thread; empty between phases"""
    since_s: float = 0.0
    """how long it has been there"""
    open: tuple[PendingCall, ...] = ()
    """operations under way, oldest first, messages that are sent last: nobody may note the end of these"""
    waits: bool = True
    """whether the training thread may be waiting for an operation; where it stands says so"""
    recent: tuple[PendingCall, ...] = ()
    """latest calls of its groups, the last of each included"""
    stack: tuple[str, ...] = ()
    """of the training thread, innermost line first; empty where nobody could ask"""
    at: str = ""
    """the line of the user's code, and the call in it"""
    condition: str = ""
    """dead, stopped, ... as its node says; empty while it runs"""

    @property
    def gone(self) -> bool:
        """Whether it will not come by itself."""
        return self.condition.startswith(("dead", "ended", "failed", "stopped"))

    @property
    def held(self) -> bool:
        """Whether it cannot do its part of what it has asked for; one that has failed may have done it."""
        return self.condition.startswith(("dead", "stopped"))

    def failing(self) -> RankState:
        """As it was before its last call failed, which may have been noted as the end of it."""
        last = max(self.recent, key=lambda call: call.event, default=None)
        return self if self.open or last is None else replace(self, open=(last,))

    def reached(self, group: RankGroup) -> int:
        """The number of the last collective of `group` that it asked for, -1 for none."""
        own = (c.number for c in self.recent if _same(c.group, group) and not c.is_message)
        return max(own, default=-1)

    def call(self, like: PendingCall) -> PendingCall | None:
        """What it asked for under the number of a collective, if that is still known."""
        own = (c for c in self.recent if c.number == like.number and not c.is_message)
        return next((c for c in own if _same(c.group, like.group)), None)


def _same(one: RankGroup, other: RankGroup) -> bool:
    return one.key == other.key and one.ranks == other.ranks


def under_way(events: NDArray[np.void]) -> NDArray[np.void]:
    """Operations that have not ended, oldest first, messages that are sent last."""
    found = events[(events["end_ns"] == 0) & (events["seq"] > 0) & (events["kind"] > 0)]
    return found[np.lexsort((found["begin_ns"], found["kind"] == KINDS.index("send")))]


def look(file: TraceFile, now_ns: int) -> RankState:
    """What the rank of a trace is doing; `now_ns` by the clock of its node."""
    meta = _meta(file)
    live, groups = file.live[0].copy(), _groups(file)
    events = file.events.copy()
    open_ = under_way(events) if int(live["state"]) == ProcessState.RUNNING else events[:0]
    phase = int(live["phase"])
    return RankState(
        rank=int(meta.get("rank", -1)),
        host=str(meta.get("host", "")),
        pid=int(live["pid"]),
        space=int(meta.get("pid_namespace") or 0),
        step=int(live["step"]),
        phase=PHASES[phase] if phase < len(PHASES) else "",
        since_s=max(0, now_ns - int(live["phase_since_ns"])) / 1e9,
        open=tuple(_call(event, groups, now_ns) for event in open_[:_OPEN]),
        recent=_recent(events, groups, now_ns),
        condition={ProcessState.ENDED: "ended", ProcessState.FAILED: "failed"}.get(
            ProcessState(int(live["state"])), ""
        ),
    )


def _recent(
    events: NDArray[np.void], groups: Mapping[int, RankGroup], now_ns: int
) -> tuple[PendingCall, ...]:
    found: list[PendingCall] = []
    used = events[(events["seq"] > 0) & (events["kind"] > 0)]
    used = used[(used["kind"] != KINDS.index("send")) & (used["kind"] != KINDS.index("receive"))]
    for index in sorted(set(used["group"].tolist()))[:_GROUPS]:
        own = used[used["group"] == index]
        last = own[np.argsort(own["seq"])[-_RECENT:]]
        found += [_call(event, groups, now_ns) for event in last]
    return tuple(found)


def _call(event: np.void, groups: Mapping[int, RankGroup], now_ns: int) -> PendingCall:
    index, tag = int(event["group"]), int(event["tag"])
    unknown = RankGroup("", f"index {index}" if index != NOTHING else "", ())
    return PendingCall(
        kind=KINDS[int(event["kind"])],
        number=int(event["number"]),
        size_bytes=int(event["size_bytes"]),
        dtype=DTYPES[int(event["dtype"])],
        tag=TAGS[tag] if tag < len(TAGS) else "",
        group=groups.get(index, unknown),
        peer=int(event["peer"]),
        since_s=max(0, now_ns - int(event["begin_ns"])) / 1e9,
        event=int(event["seq"]),
    )


def _meta(file: TraceFile) -> dict[str, Any]:
    try:
        return cast("dict[str, Any]", json.loads(file.text("meta") or "{}"))
    except ValueError:  # being written
        return {}


def _groups(file: TraceFile) -> dict[int, RankGroup]:
    found: dict[int, RankGroup] = {}
    for line in file.text("notes").splitlines():
        if '"kind": "group"' not in line:
            continue
        try:
            note = json.loads(line)
            found[int(note["index"])] = RankGroup(
                str(note["name"]), str(note.get("key", "")), tuple(map(int, note["ranks"]))
            )
        except (ValueError, KeyError, TypeError):
            continue
    return found


def pid_namespace(root: Path = Path("/")) -> int:
    """The inode number of this process's pid namespace, 0 where there is no /proc."""
    try:
        return (root / "proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


def process_state(state: RankState, root: Path = Path("/")) -> str:
    """What the kernel says of a process of this node, where that is a reason to stand still.

    Empty for one that runs or sleeps, and for processes of other nodes.
    """
    if state.condition or state.host != os.uname().nodename or state.space != pid_namespace(root):
        return state.condition
    found = process_stat(state.pid, root)
    if found is None or found.ended:
        return "dead"
    return {
        "T": "stopped by a signal", "t": "stopped by a debugger",
        "D": "in an uninterruptible wait for a disk or network file system",
    }.get(found.state, "")  # fmt: skip


def to_json(state: RankState) -> str:
    """As text, for another process."""
    return json.dumps(asdict(state))


def from_json(text: str) -> RankState:
    """What `to_json` made. Raises `ValueError` for anything else."""
    try:
        told: dict[str, Any] = json.loads(text)
        for name in ("open", "recent"):
            told[name] = tuple(_read_call(call) for call in told[name])
        told["stack"] = tuple(map(str, told["stack"]))
        return RankState(**told)
    except (KeyError, TypeError, AttributeError) as problem:
        raise ValueError(f"no state of a rank: {problem!r}") from None


def _read_call(told: dict[str, Any]) -> PendingCall:
    group, transfer = told.pop("group"), told.pop("transfer", None)
    return PendingCall(
        **told,
        group=RankGroup(group["name"], group["key"], tuple(group["ranks"])),
        transfer=None if transfer is None else LinkProgress(**transfer),
    )
