"""What two processes tell each other first: versions, machine, process, and who they are."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from fivefold.errors import UsageError
from fivefold.helpers.link import Link
from fivefold.helpers.messages import Kind, LinkClosed, LinkError
from fivefold.helpers.versions import versions
from fivefold.launch.environment import locate

__all__ = ["Stranger", "Unreachable", "about_helper", "about_trainer", "called", "introduced"]

AnyLink = TypeVar("AnyLink", bound=Link)


class Unreachable(LinkClosed):
    """Nobody answers there, or not yet: trying again makes sense."""


class Stranger(UsageError):
    """Who answers is of another job, or of another Fivefold: trying again makes no sense."""


def introduced(link: AnyLink, about: Mapping[str, Any], end: float) -> AnyLink:
    """The link, after both have said HELLO; `link.hello` is the other's.

    `about` is what to say beside versions and process; `end` a time of `time.monotonic`.

    Raises `Unreachable` if the other says nothing in time, `Stranger` if it cannot be worked with; the link
    is closed then.
    """
    try:
        link.send(Kind.HELLO, {"versions": versions(), "pid": os.getpid(), "about": dict(about)})
        answer = link.receive(max(end - time.monotonic(), 0.001))
        if answer is None or answer.kind is not Kind.HELLO:
            raise Unreachable(f"{link.peer} did not say what it is")
        link.hello = answer.told
        _check_order(link)
    except LinkError as problem:
        link.close()
        raise Unreachable(str(problem)) from None
    except BaseException:
        link.close()
        raise
    return link


def _check_order(link: Link) -> None:
    """Raises `Stranger` for a machine whose numbers are written the other way round."""
    told: object = link.hello.get("versions")
    order = cast(dict[str, Any], told).get("byteorder") if isinstance(told, dict) else None
    if order != sys.byteorder:
        raise Stranger(
            f"{link.peer} stores numbers in {order}-endian order, this machine in {sys.byteorder}-endian: "
            "use helpers of the same order"
        )


def about_trainer() -> dict[str, Any]:
    """What a trainer says of itself: rank and host."""
    with contextlib.suppress(UsageError):  # not the place to complain about a launcher
        return {"rank": locate(os.environ).rank, "host": socket.gethostname()}
    return {"host": socket.gethostname()}


def about_helper() -> dict[str, Any]:
    """What a helper says of itself: its host."""
    return {"host": socket.gethostname()}


def called(hello: Mapping[str, Any]) -> str:
    """The name of a trainer, from its hello; empty if it has not said its rank."""
    about: object = hello.get("about")
    if not isinstance(about, dict) or "rank" not in about:
        return ""
    told = cast(dict[str, Any], about)
    return f"trainer {told['rank']} ({told.get('host', 'unknown host')})"
