"""How an agent, or another process of a job on another node, reaches the launcher."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Sequence

from fivefold.errors import LaunchError, UsageError
from fivefold.wire import OtherKey, OtherProtocol, Protocol

__all__ = ["ADDRESSES", "KEY", "call", "told"]

ADDRESSES = "FIVEFOLD_AGENT_ADDRESSES"
KEY = "FIVEFOLD_AGENT_KEY"
_MOST_BYTES = 1 << 16
_CALL_S = 10.0
_CONNECT_S = 3.0
"""an address of the launcher may lead nowhere from here"""


def told(*, from_input: bool) -> tuple[list[str], bytes]:
    """Addresses and key of the launcher. They leave the environment: ranks have no use for them."""
    addresses, key = os.environ.pop(ADDRESSES, ""), os.environ.pop(KEY, "")
    try:
        if from_input:
            brief: dict[str, str] = json.loads(sys.stdin.buffer.readline(_MOST_BYTES))
            addresses, key = brief["addresses"], brief["key"]
        found = [address for address in addresses.split(",") if address]
        assert found
        return found, bytes.fromhex(key)
    except (ValueError, KeyError, TypeError, AssertionError):
        raise UsageError(
            "this is for `fivefold run`, which starts it on every node and tells it where to call; by hand, "
            "start a script on several nodes by: fivefold run -H node1:4,node2:4 script.py"
        ) from None


def call(addresses: Sequence[str], key: bytes, protocol: Protocol) -> socket.socket:
    """A line to who speaks `protocol`, and knows the key, at one of the addresses (HOST:PORT).

    Raises `LaunchError` if none answers.
    """
    reasons: list[str] = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        end = time.monotonic() + _CALL_S
        try:
            line = socket.create_connection((host, int(port)), _CONNECT_S)
        except OSError as problem:
            reasons.append(f"{address}: {problem.strerror or problem}")
            continue
        try:
            protocol.call(line, key, end)
        except OtherProtocol:
            reasons.append(f"{address}: another program, or another version of Fivefold, answers")
        except OtherKey:
            reasons.append(f"{address}: the launcher of another job answers")
        except OSError as problem:
            reasons.append(f"{address}: {problem.strerror or problem}")
        else:
            return line
        line.close()
    raise LaunchError(f"{os.uname().nodename} cannot reach the launcher ({'; '.join(reasons)})")
