"""Groups of ranks: the same one may have another number on every rank."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.introspect.run import TracedRun

__all__ = ["Group", "groups"]


@dataclass(frozen=True)
class Group:
    """Ranks that communicate with each other."""

    name: str
    ranks: tuple[int, ...]
    backend: str = ""

    @property
    def size(self) -> int:
        """Ranks in it."""
        return len(self.ranks)


def groups(run: TracedRun) -> dict[tuple[int, int], Group]:
    """By rank and the group's number there. A number without a note means all ranks that have it."""
    found: dict[tuple[int, int], Group] = {}
    for trace in run.ranks:
        for note in trace.notes:
            if note.get("kind") != "group" or not isinstance(note.get("index"), int):
                continue
            ranks = tuple(rank for rank in note.get("ranks") or () if isinstance(rank, int))
            name = str(note.get("name") or f"group {note['index']}")
            found[trace.rank, note["index"]] = Group(name, ranks, str(note.get("backend") or ""))
    for trace in run.ranks:
        for index in {int(i) for i in trace.sums["group"][trace.sums["kind"] > 0]}:
            if (trace.rank, index) not in found:
                found[trace.rank, index] = _untold(run, index)
    return found


def _untold(run: TracedRun, index: int) -> Group:
    having = (
        t.rank for t in run.ranks if bool(((t.sums["group"] == index) & (t.sums["kind"] > 0)).any())
    )
    return Group("no group" if index == 255 else f"group {index}", tuple(having))
