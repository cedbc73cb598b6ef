"""What becomes of the checkpoint agents of a node when its ranks have ended.

    rank ── starts ──► checkpoint agent ── calls ──► launcher, or the agent of the node: `CheckpointAgents`
    has ended          waits           ◄── "end": the ranks start again, or
                                       ◄── "flush 5": they do not; copy what is on the nodes alone
                                       ── a line for people ──►
                       hangs up with its end

A caller waits in the kernel until there is something to say: nothing runs here meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

from fivefold.arena import ArenaError, Connection, Gate
from fivefold.closing import Closing

__all__ = ["SUPERVISOR", "CheckpointAgents", "supervisor_address"]

SUPERVISOR = "FIVEFOLD_SUPERVISOR"
_ENDING_S = 4.0
"""an agent that was told to end removes what it has not committed"""


def supervisor_address() -> str:
    """Of who knows what follows; empty if nobody does: torchrun within a rank does not say."""
    return "" if "TORCHELASTIC_RUN_ID" in os.environ else os.environ.get(SUPERVISOR, "")


class CheckpointAgents(Closing):
    """Those that the ranks of this node start; `address` is for their environment."""

    def __init__(self) -> None:
        self._gate = Gate()
        self.address = self._gate.address

    def end(self) -> None:
        """Before ranks start again: what the last ones have left writes no more."""
        self._say("end", _ENDING_S)

    def flush(self, limit_s: float) -> list[str]:
        """When no ranks follow: let them copy what is on the nodes alone. Lines for people."""
        return self._say(f"flush {limit_s:g}", limit_s + _ENDING_S)

    def _say(self, word: str, patience_s: float) -> list[str]:
        end = time.monotonic() + patience_s
        callers: list[Connection] = []
        with contextlib.suppress(ArenaError):  # raised when there is none left
            while True:
                callers.append(self._gate.accept(0.001))
        for caller in callers:
            with contextlib.suppress(ArenaError):  # its run ended well, and so did it
                caller.send(word.encode())
        told: list[str] = []
        for caller in callers:
            with caller:
                self._hear(caller, end, told)
        return told

    def _hear(self, caller: Connection, end: float, told: list[str]) -> None:
        """Until it hangs up, or has to be ended."""
        try:
            while True:
                caller.line.settimeout(max(0.001, end - time.monotonic()))
                told.append(caller.receive()[0].decode())
        except ArenaError as problem:
            if isinstance(problem.__cause__, TimeoutError):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(caller.pid, signal.SIGKILL)

    def close(self) -> None:
        """Who still waits for a word ends without one."""
        self._gate.close()
