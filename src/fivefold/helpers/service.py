"""What a helper offers to trainers, and where its script's way ends and its work begins.

    ff.loader(...)   ── offer("loader", serving)    ── 0        the script makes what it always makes;
    ff.loader(...)   ── offer("loader", serving)    ── 1        what is made says how it can be served
    ff.Validator(..) ── offer("validator", serving) ── 0
    for x, y in data ── serve(): answers trainers until the job ends, and then the process ends

Trainers name what they want by service and number: the same script makes the same things in the same order.
"""

from __future__ import annotations

import math
import os
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from fivefold.errors import UsageError
from fivefold.launch.role import is_helper
from fivefold.launch.variables import read_seconds
from fivefold.mesh.duty import undertake

if TYPE_CHECKING:
    from fivefold.helpers.link import Link
    from fivefold.wire.frames import Buffer, Message

__all__ = ["Serving", "check_identity", "is_helper", "offer", "serve"]


class Serving(Protocol):
    """How one thing that the script made is served: a loader, or a validator.

    A helper has one thread and computes one lease at a time. Each trainer that wants it opens it on its own
    link.
    """

    def identity(self) -> Mapping[str, Any]:
        """What makes it this one: trainers whose thing differs are refused."""
        ...

    def open(self, fields: Mapping[str, Any], link: Link) -> Mapping[str, Any]:
        """A trainer asks for it by an OPEN; what READY shall tell beside service and number.

        Raises `UsageError`, the message of which says why this helper cannot serve it.
        """
        ...

    def waits(self, fields: Mapping[str, Any], link: Link) -> bool:
        """Whether something that was to be sent for this lease has not come yet."""
        ...

    def lease(
        self, fields: Mapping[str, Any], link: Link
    ) -> tuple[Mapping[str, Any], Sequence[Buffer]]:
        """Compute a lease; what DONE tells of it, and its payload.

        Raises `FivefoldError`, which the trainer gets as FAILED with the traceback.
        """
        ...

    def other(self, message: Message, link: Link) -> None:
        """Anything else that a trainer sent for it: WEIGHTS, SAMPLES."""
        ...

    def left(self, link: Link) -> None:
        """The link of a trainer has ended; forget what belonged to it."""
        ...


_offered: dict[str, list[Serving]] = defaultdict(list)


def offer(service: str, serving: Serving) -> int:
    """Let trainers ask for `serving`; its number among those of this service."""
    _offered[service].append(serving)
    undertake(serve)
    return len(_offered[service]) - 1


def offered(service: object, number: object) -> Serving:
    """What was offered. Raises `UsageError` if there is no such thing."""
    things = _offered.get(service, []) if isinstance(service, str) else []
    if isinstance(number, int) and 0 <= number < len(things):
        return things[number]
    known = ", ".join(f"{len(them)} x {name}" for name, them in _offered.items() if them)
    raise UsageError(
        f"the script of this helper had made no {service} {number} when it began to serve (it had made "
        f"{known or 'nothing'}): make loaders and validators before the first batch is asked for"
    )


def check_identity(thing: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise `UsageError` unless the trainer's loader or validator is this helper's."""
    for name in ours:
        if theirs.get(name) != ours[name]:
            raise UsageError(
                f"its {thing} is another one: {name} is {ours[name]!r} here and {theirs.get(name)!r} in the "
                "trainer; run the same script with the same arguments in both"
            )


def serve() -> NoReturn:
    """Answer trainers until their job ends; then end this process.

    The exit code is 0; 1 where no trainer came, or came back, in time (a launcher's helper waits as long as
    the launcher lives); 2 where FIVEFOLD_HELPER_LISTEN or FIVEFOLD_HELPER_KEY is missing, makes no sense,
    or names an address that is in use.
    """
    code, why = 0, ""
    try:
        if why := _served():
            code = 1
    except UsageError as problem:
        code, why = problem.exit_code, str(problem)
    if why:
        sys.stderr.write(f"error: {why}\n")
    sys.stdout.flush()
    raise SystemExit(code)


def _served() -> str:
    """Answer trainers until their job ends; empty, or whom it waited for in vain."""
    from fivefold.helpers.handshake import listen, parse_key
    from fivefold.helpers.serving_loop import ServingLoop

    address = _given(
        "FIVEFOLD_HELPER_LISTEN",
        "where shall this helper listen? Start it with `fivefold helper --listen HOST:PORT script.py`, or "
        "let `fivefold run --helpers` start it",
    )
    key = _given(
        "FIVEFOLD_HELPER_KEY",
        "helpers and trainers need the same 64 hexadecimal digits, as `openssl rand -hex 32` prints them",
    )
    number = os.environ.get("FIVEFOLD_HELPER_NUMBER", "")
    # A launcher ends its helpers itself, however long its trainers take to come.
    patience_s = math.inf if number else read_seconds("FIVEFOLD_TIMEOUT_S", 600.0)
    about = {"role": "helper", "number": number}
    with (
        listen(address, parse_key(key), about=about) as listener,
        ServingLoop(listener, patience_s) as loop,
    ):
        return loop.run()


def _given(name: str, remedy: str) -> str:
    text = os.environ.get(name, "")
    if not text:
        raise UsageError(f"{name} is not set: {remedy}")
    return text
