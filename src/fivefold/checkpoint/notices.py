"""Warnings of the first rank. Where they are errors (`python -W error`), all ranks raise them."""

from __future__ import annotations

from fivefold.checkpoint.ranks import Ranks
from fivefold.errors import CheckpointWarning, warn

__all__ = ["Notices"]


class Notices:
    """What is told to people. An error is kept until ranks meet: raised on one, the others would wait."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._error = ""

    @property
    def failed(self) -> bool:
        """Whether this rank keeps an error."""
        return bool(self._error)

    def warn(self, problem: str) -> None:
        """Tell it, on the first rank."""
        if self._ranks.rank == 0:
            try:
                warn(problem, CheckpointWarning)
            except CheckpointWarning as error:
                self._error = self._error or str(error)

    def meet(self) -> None:
        """Raise the first rank's error on every rank, if there is one. Collective."""
        told, self._error = self._ranks.gather({"error": self._error}), ""
        if problem := told[0]["error"]:
            raise CheckpointWarning(problem)
