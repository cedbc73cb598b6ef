"""What a process is for: it trains, or it helps those that train.

A helper stays outside torch's world: it runs the same script, and where a trainer would begin to train it
waits for trainers and does what they ask for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal, cast, get_args

from fivefold.errors import UsageError, suggest

__all__ = ["Role", "is_helper", "role"]

Role = Literal["trainer", "helper"]


def role(environ: Mapping[str, str] = os.environ) -> Role:
    """What FIVEFOLD_ROLE says, a trainer where it is not set. Raises `UsageError` for an unknown role."""
    told = environ.get("FIVEFOLD_ROLE") or "trainer"
    if told not in get_args(Role):
        raise UsageError(
            f"FIVEFOLD_ROLE={told}: there is no such role{suggest(told, get_args(Role))}"
        )
    return cast(Role, told)


def is_helper(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is a helper."""
    return role(environ) == "helper"
