"""The directory of a run: what was decided, what happened, what came out.

    runs/digits-001/
      plan.toml       every decision, and where it came from
      metrics.jsonl   one line per epoch
      weights.pt      the model's state_dict, for plain PyTorch: torch.load(..., weights_only=True); mode 0600

A run gets the next free number; an existing directory is never written to. Rank 0 writes. Files other than
the growing metrics appear whole or not at all.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from fivefold import comm
from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.plan import AXES
from fivefold.writing import for_torch, opened_anew, reason_of, told_if_unwritten, write_whole

__all__ = ["RunDirectory"]


class RunDirectory:
    """Where a run is written. Every method may be called on every rank; rank 0 acts."""

    def __init__(self, path: Path, *, writes: bool) -> None:
        self.path = path
        self.writes = writes

    @classmethod
    def create(cls, parent: str | Path, name: str, mesh: Mesh) -> RunDirectory:
        """Make `parent/name-001`, or the next free number, and tell all ranks. Collective.

        Raises `UsageError` on every rank when the directory cannot be made.
        """
        told = _attempt(Path(parent), name) if mesh.rank == 0 else None
        made, _, text = comm.broadcast_text(told, mesh.group(*AXES), mesh.device).partition(" ")
        if made != "made":
            raise UsageError(text)
        run = cls(Path(text), writes=mesh.rank == 0)
        logs = Path(os.environ.get("FIVEFOLD_LOG_DIR", ""))
        if run.writes and logs.name and logs.is_dir():  # not where the launcher is on another node
            link = logs / "run"  # tells the launcher where we are
            with told_if_unwritten(link, "the link to the run"):
                link.unlink(missing_ok=True)  # of ranks that were started before
                link.symlink_to(run.path.resolve())
        return run

    @property
    def files(self) -> list[str]:
        """Names of what has been written so far; none on other ranks than 0, whose nodes may not see it."""
        return [] if not self.writes else sorted(path.name for path in self.path.iterdir())

    def write(self, name: str, text: str) -> None:
        """Write a text file. Like `log` and `save_weights`, raises `UsageError` if it cannot be written."""
        if self.writes:
            write_whole(self.path / name, text, "the run's")

    def log(self, figures: Mapping[str, object]) -> None:
        """Append one line to metrics.jsonl."""
        path = self.path / "metrics.jsonl"
        if self.writes:
            with told_if_unwritten(path, "the run's"), path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(figures) + "\n")

    def save_weights(self, state_dict: Mapping[str, Tensor]) -> None:
        """Write the state_dict of a plain net, on the CPU and in the usual order of dims."""
        path = self.path / "weights.pt"
        if self.writes:
            state = {key: value.detach().cpu().contiguous() for key, value in state_dict.items()}
            with (
                told_if_unwritten(path, "the run's"),
                opened_anew(path, binary=True, mode=0o600) as file,
                for_torch(file) as stream,
            ):
                torch.save(state, cast(Any, stream))


def _attempt(parent: Path, name: str) -> str:
    """'made PATH', or 'failed' and the message that all ranks shall raise."""
    try:
        return f"made {_next_free(parent, name)}"
    except OSError as problem:
        return f"failed cannot write runs to {parent}: {reason_of(problem)}; choose another place with --out"


def _next_free(parent: Path, name: str) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    pattern = re.compile(re.escape(name) + r"-(\d+)")
    taken = [int(m[1]) for entry in parent.iterdir() if (m := pattern.fullmatch(entry.name))]
    number = max(taken, default=0) + 1
    while True:
        path = parent / f"{name}-{number:03d}"
        try:
            path.mkdir()
        except FileExistsError:  # another run was faster
            number += 1
        else:
            return path
