"""The helpers of a job as data: where each runs, at which address, and on which cores.

Trainers are told all addresses before any helper runs; a helper that comes late, or never, is waited for by
nobody.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fivefold.cluster import granted_cores
from fivefold.cluster.cores import affinity, physical
from fivefold.cluster.reading import spans
from fivefold.errors import UsageError
from fivefold.launch.hosts import LOCAL, Host, processes

__all__ = ["ALONE", "Helper", "Helpers", "narrowed", "plan_helpers", "remote_shell"]

ALONE = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}
"""the place of a rank that is alone, which a helper's script may look for"""
_RSH = "ssh -o BatchMode=yes"
_FIRST_PORT, _LAST_PORT = 20000, 32000  # below those that systems give away (from 32768)


@dataclass(frozen=True)
class Helper:
    """One helper process."""

    number: int
    host: str
    """`LOCAL`, or where a remote shell starts it"""
    address: str
    """where trainers find it"""
    cores: tuple[int, ...] = ()
    """logical cores it runs on; empty: any"""
    python: str = ""

    @property
    def local(self) -> bool:
        """Whether it runs on this node."""
        return self.host == LOCAL

    @property
    def name(self) -> str:
        """For people."""
        return f"helper {self.number} ({'this node' if self.local else self.address})"

    @property
    def listens(self) -> str:
        """Where it listens: at all addresses of its host, which may call itself 127.0.1.1."""
        return self.address if self.local else f"0.0.0.0:{self.address.rpartition(':')[2]}"


@dataclass(frozen=True)
class Helpers:
    """The helpers of a job."""

    members: tuple[Helper, ...]
    command: tuple[str, ...]
    """what each runs: that of the trainers"""
    folder: Path
    """of the sockets of those on this node; made when the job starts, gone when it ends"""
    trainer_cores: tuple[int, ...]
    """logical cores of this node that are left to the trainers"""
    threads: int
    """how many threads the trainers may have together"""
    key: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)

    def for_trainers(self) -> dict[str, str]:
        """What trainers find in their environment."""
        addresses = ",".join(helper.address for helper in self.members)
        return {"FIVEFOLD_HELPERS": addresses, "FIVEFOLD_HELPER_KEY": self.key}

    def for_helper(self, helper: Helper) -> dict[str, str]:
        """What a helper finds in its environment, the key apart."""
        threads = max(1, len(helper.cores) // self._sharing(helper)) if helper.cores else 1
        return {
            "FIVEFOLD_ROLE": "helper",
            "FIVEFOLD_HELPERS": self.for_trainers()["FIVEFOLD_HELPERS"],
            "FIVEFOLD_HELPER_LISTEN": helper.listens,
            "FIVEFOLD_HELPER_NUMBER": str(helper.number),
            "OMP_NUM_THREADS": str(threads),
            "PYTHONUNBUFFERED": "1",
            **ALONE,
        }

    def command_of(self, helper: Helper) -> list[str]:
        """The command of one helper; its host may have another Python."""
        command = list(self.command)
        if helper.python and command[0] == sys.executable:
            command[0] = helper.python
        return command

    def _sharing(self, helper: Helper) -> int:
        return sum((h.host, h.cores) == (helper.host, helper.cores) for h in self.members)


def plan_helpers(
    hosts: Sequence[Host],
    command: Sequence[str],
    *,
    share_cores: bool = False,
    environ: Mapping[str, str] = os.environ,
) -> Helpers | None:
    """Give every helper a number, an address and its cores; None if there are none.

    Helpers of this node get its last cores, each a physical one, unless the host file names others; these
    cores are taken from the trainers, unless `share_cores`.

    Raises `UsageError` if no core is left for the trainers, or there is no remote shell.
    """
    if not processes(hosts):
        return None
    for name in ("FIVEFOLD_HELPERS", "FIVEFOLD_HELPER_LISTEN"):
        if environ.get(name):
            raise UsageError(
                f"{name} is set, and helpers are to be started too: unset it, or leave out --helpers"
            )
    if any(host.host != LOCAL for host in hosts):
        remote_shell(environ)
    folder = _folder()
    cores = _Cores(hosts, share_cores)
    members: list[Helper] = []
    for host in hosts:
        port = host.port or _FIRST_PORT + secrets.randbelow(_LAST_PORT - _FIRST_PORT - host.slots)
        for slot in range(host.slots):
            number = len(members)
            if host.host == LOCAL:
                where = f"unix:{folder / f'{number}.sock'}"
                members.append(Helper(number, LOCAL, where, cores.give(host), host.python))
            else:
                where = f"{host.host.rpartition('@')[2]}:{port + slot}"
                members.append(Helper(number, host.host, where, host.cores, host.python))
    return Helpers(tuple(members), tuple(command), folder, cores.left, cores.threads)


def remote_shell(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The words of FIVEFOLD_RSH. Raises `UsageError` if there is no such program."""
    told = environ.get("FIVEFOLD_RSH") or _RSH
    try:
        words = shlex.split(told)
    except ValueError as problem:
        raise UsageError(f"FIVEFOLD_RSH={told}: {problem}") from None
    if not words or shutil.which(words[0], path=environ.get("PATH")) is None:
        raise UsageError(
            f"other nodes are reached through {told!r}, and there is no such program: set "
            "FIVEFOLD_RSH to a remote shell of this site, or start them there by `fivefold helper`"
        )
    return words


class _Cores:
    """Divides the cores of this node between helpers and trainers."""

    def __init__(self, hosts: Sequence[Host], share: bool) -> None:
        granted, mask = granted_cores(), affinity()
        here = [host for host in hosts if host.host == LOCAL]
        named = {core for host in here for core in host.cores}
        if strange := sorted(named - set(mask)):
            raise UsageError(
                f"cores={spans(strange)} of the host file are not granted to this job, which has cores "
                f"{spans(mask)}"
            )
        wanted = 0 if share else processes(host for host in here if not host.cores)
        free = [core for core in physical(mask) if not named & set(core)]
        self._pile = free[len(free) - wanted :] if wanted else []
        taken = {core for cores in self._pile for core in cores} | (set() if share else named)
        self.left = tuple(core for core in mask if core not in taken)
        self.threads = min(len(self.left), granted - len(taken)) if taken else granted
        if wanted > len(free) or self.threads < 1:
            raise UsageError(
                f"{processes(here)} helpers on this node leave no core for the trainers: "
                f"{granted} {'is' if granted == 1 else 'are'} granted; start fewer of them "
                "(--helpers local:N), or let them run on the trainers' cores: offload.share_cores = true"
            )

    def give(self, host: Host) -> tuple[int, ...]:
        """The cores of the next helper of this host."""
        return host.cores or (self._pile.pop(0) if self._pile else ())


def _folder() -> Path:
    """A new name in the folder for temporary files; addresses of sockets hold 107 bytes."""
    name = f"fivefold-{secrets.token_hex(8)}"
    folder = Path(tempfile.gettempdir()) / name
    return folder if len(bytes(folder)) < 90 else Path("/tmp") / name  # noqa: S108


@contextlib.contextmanager
def narrowed(helpers: Helpers | None) -> Generator[None]:
    """While it lasts this process, and what it starts, runs on the cores that are left to the trainers."""
    if helpers is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, helpers.trainer_cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
