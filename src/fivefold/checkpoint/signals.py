"""Signals that ask a run to save and end: noted when they come, acted upon when all ranks agree.

SIGTERM, SIGUSR1  ->  a mark  ->  the next `maybe_save` or `poll` compares marks  ->  save, end
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

from fivefold.closing import Closing

__all__ = ["STOPPED", "Signals"]

STOPPED = 75
"""exit code of a run that saved and ended because a signal asked: EX_TEMPFAIL of sysexits.h, try again"""

_unheard = 0
"""what came when a Checkpointer looked no more: the next one acts on it"""
_ASKING = (signal.SIGTERM, signal.SIGUSR1)


class Signals(Closing):
    """Handlers of SIGTERM and SIGUSR1 of this process. Only the main thread gets any.

    The second signal does what it did before: nobody has to wait for a save that does not end.
    """

    def __init__(self) -> None:
        self.received = _unheard
        """number of the signal that came, or 0"""
        self.acted = False
        """whether the run ends for it"""
        self._owner = os.getpid()
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in _ASKING:
                self._before[number] = signal.signal(number, self._noted)

    def _noted(self, number: int, frame: FrameType | None) -> None:
        del frame
        # Processes that were forked from this one, such as workers of a loader, are not the run.
        if os.getpid() == self._owner and not self.received:
            self.received = number
            return
        signal.signal(number, self._before.get(number) or signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def close(self) -> None:
        """Handle signals as before."""
        global _unheard  # noqa: PLW0603 - a signal is for the process
        _unheard = 0 if self.acted else self.received
        if os.getpid() == self._owner:
            for number, handler in self._before.items():
                signal.signal(number, handler or signal.SIG_DFL)
        self._before = {}
