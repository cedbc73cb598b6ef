"""`fivefold helper`: one helper, started by hand."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, cast

import tyro

from fivefold.cli import parse_options
from fivefold.cli.run import resolve, split
from fivefold.errors import UsageError
from fivefold.launch.environment import without_places
from fivefold.launch.helpers import ALONE

__all__ = ["Helper"]


@dataclass(frozen=True)
class Helper:
    """Start one helper by hand: it runs the script of the trainers, and serves them.

    Trainers find it by FIVEFOLD_HELPERS; both need the same FIVEFOLD_HELPER_KEY.

    Example: fivefold helper --listen dpu01:21001 train.py
    """

    listen: Annotated[str, tyro.conf.arg(metavar="ADDRESS", help_behavior_hint="")] = ""
    """where it listens: HOST:PORT, or unix:PATH for trainers on the same node"""
    command: tyro.conf.Suppress[tuple[str, ...]] = ()

    @classmethod
    def parse(cls, words: Sequence[str]) -> Helper:
        """Read our options up to the script, and leave the rest to it."""
        options, command = split(words)
        return replace(cast(Helper, parse_options(cls, options, "helper")), command=tuple(command))

    def run(self) -> int:
        """Become the helper."""
        listens, named = _address(self.listen)
        _check_key()
        if not self.command:
            raise UsageError(
                "no script given; for example: fivefold helper --listen dpu01:21001 train.py"
            )
        command = resolve(self.command)
        sys.stdout.write(
            f"on the trainers: export FIVEFOLD_HELPERS={shlex.quote(named)}, several separated by commas, "
            "and the same FIVEFOLD_HELPER_KEY as here\n"
        )
        sys.stdout.flush()
        told = {"FIVEFOLD_ROLE": "helper", "FIVEFOLD_HELPER_LISTEN": listens}
        environ = {**without_places(os.environ), **ALONE, **told}
        try:
            os.execvpe(command[0], command, environ)  # noqa: S606 - becoming the script is the purpose
        except OSError as problem:
            raise UsageError(f"cannot start {command[0]}: {problem.strerror}") from None


def _address(text: str) -> tuple[str, str]:
    """Where to listen, and what to call it on the trainers. Raises `UsageError` if that is no address."""
    if text.startswith("unix:") and len(text) > len("unix:"):
        path = os.path.abspath(text.removeprefix("unix:"))  # noqa: PTH100 - the rest of it may not exist
        return f"unix:{path}", f"unix:{path}"
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(
            f"--listen {text or 'is missing'}: expected HOST:PORT, such as dpu01:21001, or unix:PATH"
        )
    return f"{host or '0.0.0.0'}:{port}", f"{host or socket.gethostname()}:{port}"  # noqa: S104


def _check_key() -> None:
    text = os.environ.get("FIVEFOLD_HELPER_KEY", "")
    try:
        good = len(bytes.fromhex(text)) == 32
    except ValueError:
        good = False
    if not good:
        raise UsageError(
            f"FIVEFOLD_HELPER_KEY is {'no key' if text else 'not set'}: make one, and set it here and on the "
            "trainers: export FIVEFOLD_HELPER_KEY=$(openssl rand -hex 32)"
        )
