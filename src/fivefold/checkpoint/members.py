"""Which ranks share a node: they live and die together, and one of them, the first, speaks for it."""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass
from pathlib import Path

from fivefold.checkpoint.files import FileOps
from fivefold.checkpoint.ranks import Ranks
from fivefold.checkpoint.schemes import sets_of
from fivefold.checkpoint.settings import LOCAL_REMEDY
from fivefold.errors import UsageError
from fivefold.launch.private import private_folder

__all__ = ["Members", "members_of", "resolved_scheme"]


@dataclass(frozen=True)
class Members:
    """The nodes of a run, numbered by their lowest rank."""

    hosts: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]
    """of each node"""
    me: int
    """the node of this rank"""
    rank: int

    @property
    def leads(self) -> bool:
        """Whether this rank is the first of its node."""
        return self.ranks[self.me][0] == self.rank

    @property
    def leaders(self) -> tuple[int, ...]:
        """The first rank of every node."""
        return tuple(ranks[0] for ranks in self.ranks)


def members_of(ranks: Ranks, host: str, local: Path, files: FileOps) -> Members:
    """Find out who shares a node. Collective.

    Raises:
        UsageError: ranks of one node were given different directories, or several nodes share one.
    """
    told = ranks.agree("naming nodes", lambda: {"host": host, "local": str(local)})
    numbers: dict[str, int] = {}
    sharing: list[list[int]] = []
    for rank, one in enumerate(told):
        number = numbers.setdefault(one["host"], len(sharing))
        if number == len(sharing):
            sharing.append([])
        sharing[number].append(rank)
        first = told[sharing[number][0]]["local"]
        if one["local"] != first:
            raise UsageError(
                f"ranks on {one['host']} were given different local directories, {first} and {one['local']}: "
                "give all ranks of a node the same"
            )
    found = Members(
        tuple(numbers), tuple(map(tuple, sharing)), numbers[told[ranks.rank]["host"]], ranks.rank
    )
    _check_apart(ranks, found, local, files)
    return found


def _check_apart(ranks: Ranks, members: Members, local: Path, files: FileOps) -> None:
    """Raise `UsageError` on every rank if the directory is on storage that nodes share."""
    mark = f"node-{secrets.token_hex(8)}.tmp"

    def leave() -> dict[str, str]:
        if not members.leads:
            return {}
        try:
            files.make_dir(local)
            private_folder(local, "where saves of this run go", LOCAL_REMEDY)
            (local / mark).touch()
        except OSError as problem:
            raise UsageError(
                f"cannot write to {local} on {members.hosts[members.me]}: {problem.strerror or problem}; "
                f"{LOCAL_REMEDY}"
            ) from None
        return {"mark": mark}

    marks = ranks.agree(f"using {local}", leave)
    try:
        others = {
            one["mark"]: rank
            for rank, one in enumerate(marks)
            if one.get("mark") not in (None, mark)
        }
        seen = others.keys() & set(files.list(local)) if members.leads else set[str]()
        host = members.hosts[members.me]

        def tell() -> dict[str, str]:
            if seen:
                raise UsageError(
                    f"{local} on {host} is storage that other nodes see as well: {LOCAL_REMEDY}"
                )
            return {}

        ranks.agree("using local storage", tell)
    finally:
        with contextlib.suppress(OSError):  # it was never there
            (local / mark).unlink()


def resolved_scheme(
    scheme: str, members: Members, set_size: int
) -> tuple[str, tuple[tuple[int, ...], ...]]:
    """The scheme to use and its sets; "auto" takes what the number of nodes allows.

    Raises `UsageError` if there are too few nodes for the scheme.
    """
    count = len(members.hosts)
    if scheme == "auto":
        scheme = "single" if count == 1 else "partner" if count == 2 else "xor"
    return scheme, sets_of(members.hosts, scheme, set_size)
