"""A contender's side of the socket that the benchmark asks through; needs Python alone."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable
from typing import Any

__all__ = ["answering"]


def answering(
    address: str, greeting: dict[str, Any], answer: Callable[[int], dict[str, Any]]
) -> None:
    """Say who is here, then answer every number that comes, until the socket closes."""
    wire = socket.socket(socket.AF_UNIX)
    wire.connect(address)
    with (
        wire,
        wire.makefile("rw", encoding="utf-8") as told,
        contextlib.suppress(BrokenPipeError),
    ):
        print(json.dumps(greeting), file=told, flush=True)
        for line in told:
            print(json.dumps(answer(int(line))), file=told, flush=True)
