"""Calling a helper until it answers: it may start late, and come back after it was lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from fivefold.errors import FivefoldError
from fivefold.helpers.messages import LinkClosed

if TYPE_CHECKING:
    from fivefold.helpers.lines import Line
    from fivefold.helpers.link import Link

__all__ = ["Call", "Dial", "dialled"]

Dial = Callable[[str, bytes, str, float], "Link"]
"""(address, key, name of the helper, timeout in s) to a link"""

_ANSWER_S = 5.0
_FIRST_PAUSE_S, _MOST_PAUSE_S = 0.1, 5.0


def dialled(address: str, key: bytes, name: str, timeout_s: float) -> Link:
    """A link to the helper at `address`; imported when needed: it brings sockets and memory."""
    from fivefold.helpers.greeting import connect

    return connect(address, key, name=name, timeout_s=timeout_s)


class Call(threading.Thread):
    """A thread that ends when the helper has answered, cannot be of use, or `closing` is set.

    `answered(line, link, why)` is called once: with a link, or with None and the reason.
    """

    def __init__(
        self,
        line: Line,
        key: bytes,
        dial: Dial,
        answered: Callable[[Line, Link | None, str], None],
        closing: threading.Event,
    ) -> None:
        super().__init__(name=f"fivefold-call-{line.number}", daemon=True)
        self._line, self._key, self._dial = line, key, dial
        self._answered, self._closing = answered, closing
        self.start()

    def run(self) -> None:
        """Call, with longer and longer pauses."""
        pause_s = _FIRST_PAUSE_S
        while not self._closing.is_set():
            try:
                link = self._dial(self._line.address, self._key, self._line.name, _ANSWER_S)
            except (LinkClosed, OSError):  # not there yet, or too busy to answer
                self._closing.wait(pause_s)
                pause_s = min(pause_s * 1.5, _MOST_PAUSE_S)
            except FivefoldError as problem:
                self._answered(self._line, None, str(problem))
                return
            else:
                self._answered(self._line, link, "")
                return
