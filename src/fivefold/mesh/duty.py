"""What a helper does where a trainer would begin to train.

The rooms that train (`parallel`, `checkpoint`) know nothing of the one that serves (`data`), and need not:
what is offered to trainers says here how it is served, and whoever begins to train asks for it here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from fivefold.errors import UsageError
from fivefold.launch.role import is_helper

__all__ = ["help_instead", "undertake"]

_duty: Callable[[], NoReturn] | None = None


def undertake(serve: Callable[[], NoReturn]) -> None:
    """Call `serve` in this process, a helper, when its script begins to train."""
    global _duty  # noqa: PLW0603 - a process has one role
    _duty = serve


def help_instead() -> None:
    """In a helper, serve until the job ends, and end the process; in a trainer, nothing.

    Raises `UsageError` in a helper whose script has made nothing that it could help with.
    """
    if not is_helper():
        return
    if _duty is None:
        raise UsageError(
            "this helper has nothing to offer: the script trains without a loader or validator of "
            "Fivefold; make one (ff.loader), or run it without helpers"
        )
    _duty()
