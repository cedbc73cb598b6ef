"""The two ends of a link as processes of their own.

    python link_ends.py listen ADDRESS KEY          a helper; prints where it listens
    python link_ends.py connect ADDRESS KEY FILE    a trainer; runs all checks, writes how they ended

Without FILE a trainer waits for the end of the link.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from fivefold.helpers.handshake import connect, listen
from fivefold.wire.frames import LinkClosed
from link_checks import LIMIT_S, results, serve


def listening(address: str, key: str, file: str = "") -> None:
    """A helper, which writes where it listens into a file, or prints it."""
    with listen(address, bytes.fromhex(key)) as listener:
        if file:
            Path(f"{file}.tmp").write_text(listener.address)
            Path(f"{file}.tmp").rename(file)
        else:
            print(listener.address, flush=True)
        while True:
            if (link := listener.accept(1.0)) is not None:
                serve(link)
                link.close()


def _connect(address: str, key: str, file: str) -> None:
    end = time.monotonic() + LIMIT_S
    while True:
        try:
            link = connect(address, bytes.fromhex(key), timeout_s=2.0, silent_s=3.0)
            break
        except LinkClosed:
            assert time.monotonic() < end
            time.sleep(0.1)
    if file:
        Path(file).write_text(json.dumps(results(link)))
    else:
        print("connected", flush=True)
        try:
            print(link.receive(LIMIT_S), flush=True)
        except LinkClosed as problem:
            print("LinkClosed:", problem, flush=True)
    link.close()


if __name__ == "__main__":
    {"listen": listening, "connect": _connect}[sys.argv[1]](*sys.argv[2:])
