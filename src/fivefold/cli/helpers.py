"""Which helpers a command starts: what its options say, else what its plan says."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fivefold.launch.helpers import Helpers, plan_helpers
from fivefold.launch.hosts import Hosts, parse_helpers

if TYPE_CHECKING:
    from fivefold.plan import Plan

__all__ = ["chosen_helpers"]


def chosen_helpers(
    options: Sequence[str],
    hosts: Hosts | None,
    plan: Plan | None,
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
) -> Helpers | None:
    """The helpers of `--helpers` and of a host file, without either those of the plan; None for none.

    `environment` is what is added to that of every process. Raises `UsageError` for what cannot be.
    """
    places = [place for text in options for place in parse_helpers(text)]
    places += hosts.helpers if hosts is not None else ()
    if not options and not places and plan is not None:
        places = list(parse_helpers(plan.offload.helpers, "offload.helpers ="))
    share = plan is not None and plan.offload.share_cores
    environ = {**os.environ, **(environment or {})}
    return plan_helpers(places, command, share_cores=share, environ=environ)
