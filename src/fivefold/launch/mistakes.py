"""A mistake in a script that `fivefold run` has started: one line and exit code 2, as for any command.

    raise UsageError(...) ── error: ... (train.py:12) ── held back by the launcher, told once for all ranks

FIVEFOLD_DEBUG=1 shows the traceback instead.
"""

from __future__ import annotations

import os
import sys
import traceback
from types import TracebackType
from typing import Any

from fivefold.errors import UsageError

__all__ = ["tell_in_one_line"]


def tell_in_one_line() -> None:
    """Let a `UsageError` that nobody catches end this process so."""
    sys.excepthook = _telling(sys.excepthook)


def _telling(hook: Any) -> Any:
    def told(
        kind: type[BaseException], problem: BaseException, where: TracebackType | None
    ) -> None:
        if not isinstance(problem, UsageError) or os.environ.get("FIVEFOLD_DEBUG") == "1":
            hook(kind, problem, where)
            return
        notes: list[str] = getattr(problem, "__notes__", [])
        text = " ".join("; ".join([str(problem), *notes]).split())
        sys.stdout.flush()
        # Torch wraps this hook, and drops what it writes to `sys.stderr` if it does not return.
        os.write(2, f"error: {text}{_place(where)}\n".encode())
        raise SystemExit(problem.exit_code)

    return told


def _place(where: TracebackType | None) -> str:
    """The innermost line of the script itself."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    lines = [frame for frame in traceback.extract_tb(where) if frame.filename == script]
    return f" ({os.path.basename(script)}:{lines[-1].lineno})" if script and lines else ""  # noqa: PTH119
