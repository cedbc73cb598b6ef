"""Finding out which run a directory holds, and claiming it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fivefold.checkpoint.lease import STALE_S, Lease
from fivefold.checkpoint.note import notes
from fivefold.checkpoint.problems import described
from fivefold.checkpoint.ranks import Ranks
from fivefold.checkpoint.run import LOCAL, RunHistory, new_run_id
from fivefold.checkpoint.store import PersistentStore
from fivefold.closing import Closing
from fivefold.errors import CheckpointError, FivefoldError, UsageError
from fivefold.launch import slurm
from fivefold.launch.environment import locate
from fivefold.launch.variables import read_seconds

__all__ = ["Opened", "open_run", "seen"]


class Opened(Closing):
    """The run of a directory, and what this start of it may do there.

    Args:
        store: the directory.
        run: as recorded; without starts where nothing was saved yet.
    """

    def __init__(self, store: PersistentStore, run: RunHistory) -> None:
        self.store, self.run = store, run
        self.resumed: tuple[int, int] | None = None
        """(step, epoch) of the save that this start went on from"""
        self._claimed = False
        self._lease: Lease | None = None
        """of the first rank"""

    @property
    def known(self) -> bool:
        """Whether the run was started before."""
        return bool(self.run.starts)

    @property
    def epoch(self) -> int:
        """The number of this start."""
        return self.run.epoch + 1

    @property
    def started(self) -> RunHistory:
        """The record with this start."""
        return self.run.started(self.resumed, self.epoch)

    def claim(self, ranks: Ranks, before: Mapping[str, str] | None = None) -> None:
        """Make sure that no other job writes there; the first rank keeps the lease. Collective.

        Once it has succeeded, another call does nothing.

        Args:
            ranks: all of them.
            before: what was `seen` there when saves were looked for; None if they have not been yet.

        Raises:
            InUse: another job writes there.
            UsageError: it cannot be written to.
            CheckpointError: it was written to since it was opened, or since saves were looked for.
        """
        if self._claimed:
            return

        def take() -> dict[str, Any]:
            if ranks.rank == 0:
                self._lease = _lease(self.store)
                now = self.store.read_run()
                saved_since = before is not None and notes(self.store.place) != before
                if saved_since or (now is not None and now != self.run):
                    raise CheckpointError(
                        f"{self.store.place.where()} was written to by another job since this one began: "
                        "start again"
                    )
            return {}

        try:
            ranks.agree(f"claiming {self.store.place.where()}", take)
        except FivefoldError:
            self.close()
            raise
        self._claimed = True

    def check(self) -> None:
        """Raise `InUse` if another job has taken the directory over; on the first rank."""
        if self._lease is not None:
            self._lease.check()

    def record(self, local: Path) -> None:
        """Enter this start into the record of the run, and where nodes save, before its first save."""
        self.check()
        run = self.started
        self.store.write_run(replace(run, extra={**run.extra, LOCAL: str(local)}))

    def close(self) -> None:
        """Let go of the directory, and wait for nobody."""
        if self._lease is not None:
            self._lease.close()
            self._lease = None


def open_run(ranks: Ranks, store: PersistentStore) -> Opened:
    """Read the record of the run; a new one gets a name. Collective; nothing is written."""

    def read() -> dict[str, Any]:
        if ranks.rank != 0:
            return {}
        try:
            run = store.read_run()
        except NotADirectoryError as problem:
            raise UsageError(f"{described(problem)}: a part of this path is a file") from problem
        return {"run": (run or RunHistory(new_run_id(), ())).to_json()}

    told = ranks.agree(f"reading {store.place.where()}", read)
    return Opened(store, RunHistory.parse(told[0]["run"]))


def seen(ranks: Ranks, store: PersistentStore) -> Mapping[str, str]:
    """What the starts of the run have noted by now, for `claim`. Collective."""

    def read() -> dict[str, Any]:
        return {"notes": notes(store.place) if ranks.rank == 0 else {}}

    return ranks.agree(f"reading {store.place.where()}", read)[0]["notes"]


def _lease(store: PersistentStore) -> Lease:
    stale_s = read_seconds("FIVEFOLD_LEASE_S", STALE_S)
    job, start = _job()
    restart = os.environ.get("FIVEFOLD_RESTART", "")
    try:
        return Lease(
            store.place,
            job=job,
            start=start,
            launch=os.environ.get("FIVEFOLD_LAUNCH", ""),
            restart=int(restart) if restart.isdecimal() else 0,
            wait_s=stale_s * 1.2,
            beat_s=stale_s / 6,
            stale_s=stale_s,
        )
    except OSError as problem:
        raise UsageError(
            f"cannot write to {store.place.where()}: {described(problem)}; checkpoints need a directory that "
            "all nodes see and rank 0 may write to"
        ) from None


def _job() -> tuple[str, int]:
    """What this process is part of, and how often that was started.

    Only Slurm's word counts for the second: it ends a job before it starts it again. The restarts that
    torchrun tells are of a name that users choose, and that two jobs may have at a time.
    """
    if (requeued := slurm.requeued()) is not None:
        return requeued
    with contextlib.suppress(UsageError):  # an allocation without srun: nothing is known of the job
        return locate().job or "", 0
    return "", 0
