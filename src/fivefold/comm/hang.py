"""The hang watch: when ranks wait for one that does not come, it says who, in what, and where that one is.

    the thread of the watcher, on every rank
    idle         the training thread moves, or waits no longer than `hang_s`; others' questions are answered
    collecting   this rank waits too long, and has claimed to explain: it asks all for their state
    told         said on stderr and noted in the trace, once; when the operation goes on, that is noted too

It ends nothing: the timeout of the operation does, and its error then carries the same explanation.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from fivefold.comm.core import held_up
from fivefold.torch_private import default_store
from fivefold.trace.current import current
from fivefold.trace.file import TraceError, TraceFile, name_of
from fivefold.trace.frames import may_wait, stack, where
from fivefold.trace.machine import Machine
from fivefold.trace.stacks import Watcher
from fivefold.trace.standstill import Standstill, judge, waiting
from fivefold.trace.states import (
    LinkProgress,
    PendingCall,
    RankState,
    from_json,
    look,
    pid_namespace,
    process_state,
    to_json,
    under_way,
)
from fivefold.trace.trace import Trace

__all__ = ["HangWatch", "attend", "explained"]

_ANSWER_S = 2.0
"""how long answers are waited for, at least"""
_DYING_S = 0.5
_POLLING = 3
"""times `hang_s` after which a rank counts as waiting that asks again and again whether it may go on"""
_FEW = 64
"""ranks whose traces an error reads before it is raised"""
_SILENT = "does not answer: its interpreter is held, by C code or a debugger"
_log = logging.getLogger(__name__)


def attend(trace: Trace, hang_s: float, *, gpu: int | None = None) -> None:
    """Let figures of the machine, stacks and hangs be recorded in `trace`, whose thread has to call this.

    `hang_s`: seconds after which an operation under way counts as a hang, 0: none does; `gpu`: number of this
    rank's GPU.
    """
    machine = Machine(threading.get_native_id(), gpu=gpu)
    trace.samplers.append(machine)
    trace.after_phase.append(_beginning(trace, machine))
    trace.closers.append(machine.close)
    trace.update_meta(machine=machine.said, pid_namespace=pid_namespace())
    watcher = Watcher(trace)
    if hang_s <= 0 or int(trace.meta.get("size", 1)) < 2:
        return
    watch = HangWatch(trace, watcher, hang_s, _channel(trace))
    _watches[id(trace)] = watch
    trace.closers.append(watch.close)
    watcher.watchers.append(watch)


def _beginning(trace: Trace, machine: Machine) -> Callable[[int, int, int], None]:
    """Counts begin with the first phase: what came before belongs to no step."""

    def begin(phase: int, begin_ns: int, end_ns: int) -> None:  # noqa: ARG001
        machine.begin()
        trace.after_phase = [follow for follow in trace.after_phase if follow is not begin]

    return begin


_watches: dict[int, HangWatch] = {}


def explained(problem: BaseException) -> str:
    """What the hang watch knows of a failed operation, for its error; empty if that is nothing."""
    trace = current.trace
    watch = None if trace is None else _watches.get(id(trace))
    if watch is None:
        return ""
    try:
        return watch.last_words(problem)
    except Exception:  # noqa: BLE001 - the error that is explained matters more
        _log.exception("a hang could not be explained")
        return ""


class HangWatch:
    """Of one process; called by its `Watcher` again and again."""

    def __init__(
        self, trace: Trace, watcher: Watcher, hang_s: float, channel: Channel | None = None
    ) -> None:
        self.hang_s = hang_s
        self._trace, self._watcher = trace, watcher
        self._rank, self._size = int(trace.meta["rank"]), int(trace.meta.get("size", 1))
        self._channel: Channel = channel or Folder(trace.path.parent)
        # Others look as often, so that answers come in time.
        self._every_s = min(max(hang_s / 8, 0.1), 3.0)
        self._next = 0.0
        if self._rank == 0:  # of a run that was killed here
            self._channel.clear()
        self._answered = self._channel.get("ask")
        self._step = (trace.step, time.monotonic())
        self._asked, self._until = "", 0.0
        self._told: tuple[Standstill, int] | None = None

    def __call__(self) -> None:
        """Look once."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._every_s
        if self._step[0] != self._trace.step:
            self._step = (self._trace.step, now)
        self._answer()
        if self._told is not None:
            self._resolve()
        elif self._asked:
            self._collect(now)
        else:
            self._suspect()

    def close(self) -> None:
        """Take back what others might read."""
        _watches.pop(id(self._trace), None)
        if self._told is not None:
            self._resolve()
        if self._told is not None or self._asked:
            self._channel.clear()
        self._channel.close()

    # ---- this rank's own state

    def own_state(self) -> RankState:
        """What this rank is doing, with the stack of its training thread."""
        state = look(self._trace.file, time.monotonic_ns())
        state = replace(state, open=tuple(_with_transfer(call) for call in state.open))
        frame = self._watcher.frame
        if frame is None:
            return state
        return replace(state, stack=tuple(stack(frame)), at=where(frame), waits=may_wait(frame))

    def _stuck(self) -> bool:
        """Whether this rank has waited for an operation for longer than `hang_s`."""
        now, frame = time.monotonic(), self._watcher.frame
        still_s = now - self._watcher.since
        polls = now - self._step[1] >= _POLLING * self.hang_s
        if frame is None or not (polls or (still_s >= self.hang_s and may_wait(frame))):
            return False
        events = self._trace.file.events
        found = under_way(events)
        if not len(found):
            return False
        # One that polls may wait for anything: only where nothing has ended since.
        since = int(found["begin_ns"].min())
        if still_s < self.hang_s:
            since = max(since, int(events["end_ns"][events["kind"] > 0].max(initial=0)))
        patience_s = self.hang_s * (1 if still_s >= self.hang_s else _POLLING)
        return time.monotonic_ns() - since >= patience_s * 1e9

    # ---- asking and answering

    def _answer(self) -> None:
        asked = self._channel.get("ask")
        if asked is not None and asked != self._answered:
            self._answered = asked
            self._channel.put(f"state/{self._rank}", f"{asked}\n{to_json(self.own_state())}")

    def _suspect(self) -> None:
        claim = self._channel.get("claim")
        if claim != str(self._rank):
            if claim is not None and not self._is_gone(claim):
                return
            if not self._stuck():
                return
            # The lowest rank that waits explains: give it time to be the first.
            if claim is not None:
                self._channel.clear()
            if not self._channel.claim(self._rank):
                return
        self._asked = f"{self._rank} {time.time_ns()}"
        self._until = time.monotonic() + max(_ANSWER_S, 2 * self._every_s)
        self._channel.put("ask", self._asked)

    def _is_gone(self, claim: str) -> bool:
        """Whether who claimed to explain is no more."""
        state = self._read(int(claim)) if claim.isdigit() else None
        return state is not None and state.gone

    def _collect(self, now: float) -> None:
        states = {self._rank: self.own_state()}
        for rank in range(self._size):
            answer = self._channel.get(f"state/{rank}") if rank != self._rank else None
            if answer is not None and answer.partition("\n")[0] == self._asked:
                with contextlib.suppress(ValueError):
                    states[rank] = from_json(answer.partition("\n")[2])
        missing = [rank for rank in range(self._size) if rank not in states]
        if missing and now < self._until:
            return
        for rank in missing:
            state = self._read(rank)
            if state is not None:
                silent = _SILENT if not state.condition else state.condition
                states[rank] = replace(state, condition=silent)
        self._asked = ""
        self._decide(states)

    def _decide(self, states: dict[int, RankState]) -> None:
        lowest = min((rank for rank in waiting(states) if states[rank].stack), default=self._rank)
        if lowest != self._rank:
            self._channel.put("claim", str(lowest))
            return
        still = judge(states, self._rank)
        if still is None:
            self._channel.clear()
            return
        self._told = still, time.monotonic_ns() - int(still.call.since_s * 1e9)
        self._trace.note(still.kind, **still.fields())
        _say(f"{still.kind}: {still.text}")

    def _resolve(self) -> None:
        """Note when what was told of has gone on."""
        assert self._told is not None
        (still, begun_ns), events = self._told, self._trace.file.events
        event = events[(still.call.event - 1) % len(events)]
        same = int(event["seq"]) == still.call.event
        if same and int(event["end_ns"]) == 0:
            return
        took_s = ((int(event["end_ns"]) if same else time.monotonic_ns()) - begun_ns) / 1e9
        self._told = None
        self._channel.clear()
        text = f"rank {self._rank} goes on after {took_s:.1f} s"
        self._trace.note(
            still.kind, text=text, resolved=True, seconds=round(took_s, 3),
            waiting=list(still.waiting), missing=list(still.missing), states=[],
        )  # fmt: skip
        _say(text)

    # ---- traces of others

    def _read(self, rank: int) -> RankState | None:
        """What the file of another rank says, if it is here."""
        try:
            file = TraceFile.open(self._trace.path.parent / name_of(rank))
        except TraceError:
            return None
        here = int(file.live[0]["heartbeat_ns"])
        state = look(file, here)
        if state.host == os.uname().nodename:
            state = look(file, time.monotonic_ns())
        return replace(state, condition=process_state(state))

    def last_words(self, problem: BaseException) -> str:
        """For the error of an operation: what was told of it, or what the traces of the others say now."""
        told = "" if self._told is None else self._told[0].text
        if self._size > _FEW:
            return told
        until = time.monotonic() + _DYING_S
        while True:
            states = self._as_their_files_say()
            still = judge(states, self._rank)
            if still is None or not (still.missing or still.kind == "mismatch"):
                return told
            # A connection breaks a moment before the process that held it is gone.
            if any(r not in states or states[r].gone for r in still.missing):
                break
            if time.monotonic() > until:
                break
            time.sleep(0.05)
        self._trace.note(still.kind, error=str(problem)[:500], **still.fields())
        return still.text

    def _as_their_files_say(self) -> dict[int, RankState]:
        states = {self._rank: look(self._trace.file, time.monotonic_ns()).failing()}
        answers = self._channel.get("ask") is not None
        for rank in range(self._size):
            state = self._read(rank) if rank != self._rank else None
            if state is not None:
                states[rank] = self._with_answer(state) if answers else state
        return states

    def _with_answer(self, state: RankState) -> RankState:
        """With the stack that the rank told when it was last asked, if it is still there."""
        with contextlib.suppress(ValueError):
            told = from_json((self._channel.get(f"state/{state.rank}") or "").partition("\n")[2])
            if (told.step, told.phase) == (state.step, state.phase):
                return replace(state, stack=told.stack, at=told.at, waits=told.waits)
        return state


def _with_transfer(call: PendingCall) -> PendingCall:
    """With how far the link came that it waits for, if it is a collective of the core over several nodes."""
    found = None if call.is_message else held_up(call.group.key)
    if found is None or not 0 <= found[0] < len(call.group.ranks):
        return call
    peer, sends, moved, size = found
    return replace(call, transfer=LinkProgress(call.group.ranks[peer], sends, moved, size))


def _say(text: str) -> None:
    """On stderr, as one piece: ranks share it."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write("".join(f"fivefold: {line}\n" for line in text.splitlines()))
        sys.stderr.flush()


def _channel(trace: Trace) -> Channel:
    folder = Folder(trace.path.parent)
    if int(trace.meta.get("local_size", 1)) >= int(trace.meta.get("size", 1)):
        return folder
    client = _own_client()
    return folder if client is None else Shared(client)


def _own_client() -> Any:
    """A connection to the store of torch's default group that this thread alone uses; None without one."""
    try:
        store = default_store()
        client = store.clone()
        client.set_timeout(timedelta(seconds=5))
    except (RuntimeError, ValueError, AttributeError) as problem:
        _log.warning(
            "hangs are explained only within what the folder of the traces shows: no store (%s)",
            problem,
        )
        return None
    return client


# ---- How the watchers of a run's ranks reach each other while the ranks themselves stand still
#
#     Folder    files beside the traces: ranks of one node, or of nodes that share a file system
#     Shared    the run's store, by a connection of its own: ranks of several nodes
#
# Everything is a few keys that are written over: `ask` (a number that grows), `claim` (the rank that
# explains), `state/3` (what rank 3 answered, and to which number). Nothing blocks training; what fails is
# None.


class Channel(Protocol):
    """Small texts by key."""

    def get(self, key: str) -> str | None:
        """What was put last; None if nothing was, or it cannot be reached."""
        ...

    def put(self, key: str, text: str) -> None:
        """Replace it."""
        ...

    def claim(self, rank: int) -> bool:
        """Whether this rank is the first to claim; it then explains for all."""
        ...

    def clear(self) -> None:
        """Take the claim back."""
        ...

    def close(self) -> None:
        """Remove what is left."""
        ...


class Folder:
    """Keys are hidden files of a folder, each replaced as a whole."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._put: set[str] = set()

    def get(self, key: str) -> str | None:
        """What was put last."""
        try:
            return self._path(key).read_text()
        except OSError:
            return None

    def put(self, key: str, text: str) -> None:
        """Replace it."""
        path = self._path(key)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            partial.write_text(text)
            partial.replace(path)
            self._put.add(key)

    def claim(self, rank: int) -> bool:
        """Whether this rank is the first."""
        try:
            with self._path("claim").open("x") as file:
                file.write(str(rank))
        except OSError:
            return False
        return True

    def clear(self) -> None:
        """Take the claim back."""
        with contextlib.suppress(OSError):
            self._path("claim").unlink()

    def close(self) -> None:
        """Remove the files of this rank."""
        for key in self._put:
            with contextlib.suppress(OSError):
                self._path(key).unlink()

    def _path(self, key: str) -> Path:
        return self._folder / f".hang-{key.replace('/', '-')}"


class Shared:
    """Keys of a store, under a prefix of their own. `store`: a client that nobody else uses."""

    def __init__(self, store: dist.Store) -> None:
        self._store = dist.PrefixStore("fivefold/hang", store)

    def get(self, key: str) -> str | None:
        """What was put last."""
        try:
            if not self._store.check([key]):
                return None
            return self._store.get(key).decode(errors="replace") or None
        except RuntimeError:  # the store has ended, as it does at the end of a run
            return None

    def put(self, key: str, text: str) -> None:
        """Replace it."""
        with contextlib.suppress(RuntimeError):
            self._store.set(key, text)

    def claim(self, rank: int) -> bool:
        """Whether this rank is the first."""
        try:
            told = self._store.compare_set("claim", "", str(rank))
        except RuntimeError:
            return False
        return told.decode() == str(rank)

    def clear(self) -> None:
        """Take the claim back."""
        self.put("claim", "")

    def close(self) -> None:
        """The keys go with the store."""
