"""Folders in which ranks of a node write what the launcher wants, where the two share none.

traces       ranks ──> spool ── agent ──> launcher, which writes copies; see `TraceSpools`
--explain    rank ──> folder ── agent ──> launcher ── agent ──> folder of rank 0's node ──> rank 0
                                          placement.json <── agent ──────── the report <──────┘
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from fivefold.errors import UsageError
from fivefold.launch.node_messages import Kind
from fivefold.launch.supervisor import Supervisor
from fivefold.launch.trace_spool import TraceSpools
from fivefold.wire import Channel, Message
from fivefold.writing import opened_anew

__all__ = ["REPORT", "NodeFolders"]

REPORT = "placement.json"
_LOOK_S = 0.05
_YIELDS = 40
"""traces wait for as many looks while the output of ranks waits"""


class NodeFolders:
    """Of one agent. `idle` says whether all that its ranks have written is on its way."""

    def __init__(self, agent: Supervisor, channel: Channel, idle: Callable[[], bool]) -> None:
        self._agent, self._channel, self._idle = agent, channel, idle
        self._traces = TraceSpools()
        self._facts: FactsFolder | None = None
        self._closed = False

    @property
    def traces(self) -> list[str]:
        """Folders with traces that have not all been sent."""
        return self._traces.places

    def variables(
        self, ranks: range, directory: str, traces: Mapping[str, str] | None, *, explains: bool
    ) -> dict[str, str]:
        """What ranks that start have to find set; arguments are those of `RankOrder`. Raises `UsageError`."""
        told: dict[str, str] = {}
        if traces is not None and not Path(directory, traces["folder"], traces["token"]).exists():
            try:
                told["FIVEFOLD_TRACE_SPOOL"] = self._traces.begin(traces["folder"])
                self._channel.send(Kind.TRACES, {"places": self.traces, "start": True})
            except OSError as problem:
                self._channel.send(Kind.TRACES, {"problem": str(problem)})
        if explains:
            try:
                self._facts = FactsFolder(ranks)
            except OSError as problem:
                raise UsageError(f"--explain on {os.uname().nodename}: {problem}") from None
            told["FIVEFOLD_PLACEMENT"] = str(self._facts.path)
            self._agent.guard_folder(self._facts.path)
            self._look(self._facts)
        return told

    def heard(self, message: Message) -> None:
        """What the launcher says of traces and facts."""
        if message.kind == Kind.FACTS and self._facts is not None:
            with contextlib.suppress(OSError):  # rank 0 waits for them, and tells whose are missing
                self._facts.put(int(message.fields["rank"]), message.payload)
        elif message.fields.get("remove"):
            self._traces.remove()
        elif message.kind == Kind.TRACES:
            self._send_traces(_YIELDS)

    def tell_facts(self) -> None:
        """Send what ranks have told by now."""
        for rank, told in () if self._facts is None or self._closed else self._facts.found():
            self._channel.send(Kind.FACTS, {"rank": rank}, [told])

    def close(self) -> None:
        """Send no more. Traces stay."""
        self._closed = True
        if self._facts is not None:
            shutil.rmtree(self._facts.path, ignore_errors=True)

    def _send_traces(self, patience: int) -> None:
        if self._closed:
            return
        if patience and not self._idle():
            self._agent.later(_LOOK_S, lambda: self._send_traces(patience - 1))
            return
        fields, payload = self._traces.next()
        self._channel.send(Kind.TRACES, fields, [payload] if payload else [])

    def _look(self, facts: FactsFolder) -> None:
        self.tell_facts()
        if facts.awaited and facts is self._facts and not self._closed:
            self._agent.later(_LOOK_S, lambda: self._look(facts))


class FactsFolder:
    """Where ranks of a node tell what they were given, and rank 0, if it is one of them, reports."""

    def __init__(self, ranks: range) -> None:
        """Raises `OSError`."""
        self.path = Path(tempfile.mkdtemp(prefix="fivefold-explain-"))
        self._facts = self.path / "placement"
        self._facts.mkdir()
        self.awaited = {-1} if 0 in ranks else set(ranks)
        """ranks whose facts have not come; -1: the report, where rank 0 reads the facts itself"""

    def found(self) -> Iterator[tuple[int, bytes]]:
        """What has come since the last time."""
        for rank in sorted(self.awaited):
            path = self._facts / f"rank-{rank}.json" if rank >= 0 else self.path / REPORT
            if path.exists():
                self.awaited.remove(rank)
                yield rank, path.read_bytes()

    def put(self, rank: int, facts: memoryview) -> None:
        """Facts of a rank elsewhere. Raises `OSError`."""
        self._facts.mkdir(exist_ok=True)  # rank 0 removes it when it waits no longer
        with opened_anew(self._facts / f"rank-{rank}.json", binary=True) as file:
            file.write(facts)
