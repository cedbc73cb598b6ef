"""What a run of a program does with what backward needs: it is kept, computed again, or spilled.

A program's nodes are divided into spans. What a span that is computed again makes is not kept, but for what
it takes. Of all that is kept, some is spilled: by value, or by the node that made it on its way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Choice", "Key", "NodeSpan"]

Key = tuple[str, int, int]
"""("value", number, 0), or ("within", number of the node, how many of the node's came before)"""


@dataclass(frozen=True)
class NodeSpan:
    """Nodes [first, stop) of a tape."""

    first: int
    stop: int
    again: bool
    """whether it is computed again"""


@dataclass(frozen=True)
class Choice:
    """For one program."""

    spans: tuple[NodeSpan, ...]
    spilled: frozenset[Key] = frozenset()

    @classmethod
    def keep_all(cls, nodes: int) -> Choice:
        """Without a budget."""
        return cls((NodeSpan(0, nodes, False),))

    @property
    def again(self) -> bool:
        """Whether anything is computed again."""
        return any(one.again for one in self.spans)

    def within(self, first: int, stop: int) -> Sequence[NodeSpan]:
        """The spans of nodes [first, stop), which may begin and end within one."""
        cut = (
            NodeSpan(max(one.first, first), min(one.stop, stop), one.again) for one in self.spans
        )
        return [one for one in cut if one.first < one.stop]
