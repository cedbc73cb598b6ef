"""A program in whose place a template forks a process, as `python` and `fivefold` would start one.

It passes on signals, ends as that one ends, and that one ends with it. It imports little to be quick.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

__all__ = ["order", "stand_in"]


_PASSED_ON = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT
)  # fmt: skip


def order(line: socket.socket, asked: Mapping[str, Any], files: Sequence[int]) -> None:
    """Ask a template for a process that has these standard files."""
    text = json.dumps(asked).encode()
    head = struct.pack("Q", len(text))
    if files:
        socket.send_fds(line, [head], files)
    else:
        line.sendall(head)
    line.sendall(text)


def stand_in(path: str, argv: Sequence[str]) -> NoReturn:
    """Have Python with these arguments forked by the template at `path`; end when it ends, and as it does."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(path)
        asked = {"argv": argv, "env": dict(os.environ), "folder": os.getcwd()}  # noqa: PTH109 - as above
        order(line, asked, [0, 1, 2])
        with line.makefile() as answers:
            pid = int(answers.readline())
            for number in _PASSED_ON:
                if signal.getsignal(number) != signal.SIG_IGN:
                    signal.signal(number, lambda signum, _: _passed_on(pid, signum))
            code = int(answers.readline() or -signal.SIGKILL)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _passed_on(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)
