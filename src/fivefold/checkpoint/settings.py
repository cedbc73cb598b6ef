"""Where a Checkpointer saves and how: explicit arguments over the plan's values, over the defaults."""

from __future__ import annotations

import os
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.errors import UsageError
from fivefold.launch.private import private_folder
from fivefold.plan import Checkpoint, Plan, Provenance

__all__ = ["LOCAL_REMEDY", "Settings", "settings_of"]

LOCAL_REMEDY = (
    "name a directory on each node's own disk or memory with local=... or checkpoint.local"
)


@dataclass(frozen=True)
class Settings:
    """What was decided, but for what needs the other ranks."""

    plan: Checkpoint
    directory: str
    """path or URL of the persistent level"""
    local: Path
    node: str
    """name of this rank's node: ranks with one name share a disk and die together"""
    timeout_s: float
    """how long ranks wait for one another"""

    def check_local(self) -> None:
        """Raise `UsageError` if `local` is the default, and somebody else could read or write there."""
        if not self.plan.local:
            private_folder(self.local.parent, "where saves go without `local`", LOCAL_REMEDY)


def settings_of(
    directory: str | os.PathLike[str], plan: Plan | None, node: str | None, given: dict[str, Any]
) -> Settings:
    """The settings of a run. `given` are arguments by the name of their key in the plan, or None.

    Raises:
        PlanError: a value is out of range.
        UsageError: the directory is no directory.
    """
    told = {key: value for key, value in given.items() if value is not None}
    if "local" in told:
        told["local"] = os.fspath(told["local"])
    why = Provenance("user", "an argument of Checkpointer")
    plan = (plan or Plan()).replace({f"checkpoint.{key}": v for key, v in told.items()}, why)
    values = plan.checkpoint
    where = os.fspath(directory)
    if "://" not in where:
        path = Path(where).expanduser().absolute()
        if path.exists() and not path.is_dir():
            raise UsageError(f"{path} is a file: checkpoints need a directory of their own")
        where = str(path)
    temporary = f"{tempfile.gettempdir()}/fivefold-{os.getuid()}/checkpoints"
    local = Path(values.local or temporary).expanduser()
    return Settings(
        values, where, local.absolute(), node or socket.gethostname(), plan.comm.timeout_s
    )
