"""What a remote shell starts on another node: it starts a helper there, and ends it when the pipe closes.

    python -m fivefold.launch.remote  < one line of JSON, then nothing until the end

The line tells command, directory, cores and environment, the job's key among it. When the launcher ends, or
is killed, or the connection breaks, standard input ends, and with it the helper and all it has started.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self

from fivefold.errors import UsageError
from fivefold.launch.guard import Guard, dies_with_parent, why_not_started

__all__ = ["main"]

_MOST_BYTES = 1 << 20
_GRACE_S = 2.0
_TURN_S = 0.5


@dataclass(frozen=True)
class _Brief:
    command: list[str]
    directory: str
    cores: list[int]
    environment: dict[str, str]

    @classmethod
    def parse(cls, line: bytes) -> Self:
        """Raises `UsageError` if that is not what a launcher writes."""
        try:
            told: dict[str, Any] = json.loads(line)
            brief = cls(**told)
            assert brief.command
            assert all(isinstance(value, str) for value in brief.environment.values())
        except (ValueError, TypeError, AttributeError, AssertionError):
            raise UsageError(
                "this is for launchers, which tell through standard input what to start; by hand, start a "
                "helper by: fivefold helper --listen HOST:PORT script.py"
            ) from None
        return brief


def main() -> int:
    """Start the helper and wait; returns its exit code, 128 + signal where one ended it."""
    try:
        brief = _Brief.parse(sys.stdin.buffer.readline(_MOST_BYTES))
        return _run(brief)
    except UsageError as problem:
        sys.stderr.write(f"error: {problem}\n")
        return problem.exit_code


def _run(brief: _Brief) -> int:
    guard = Guard()
    try:
        helper = _start(brief)
        guard.add(helper.pid)
        code = _wait(helper)
        _end(helper)
    finally:
        guard.dismiss()
    return code if code >= 0 else 128 - code


def _start(brief: _Brief) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            brief.command,
            cwd=brief.directory,
            env={**os.environ, **brief.environment},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=dies_with_parent(cores=brief.cores),  # noqa: PLW1509 - no threads here
        )
    except (OSError, subprocess.SubprocessError) as problem:
        why = why_not_started(problem, brief.command, brief.directory, brief.cores, "helpers")
        raise UsageError(why) from None


def _wait(helper: subprocess.Popen[bytes]) -> int:
    """Until the helper has ended, or the launcher has gone, or asks for the end by a signal."""
    asked: list[int] = []

    def ask(signum: int, _frame: FrameType | None) -> None:
        asked.append(signum)

    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(signum, ask)
    poll = select.poll()
    poll.register(sys.stdin.fileno(), select.POLLIN)
    with contextlib.suppress(OSError):
        poll.register(os.pidfd_open(helper.pid), select.POLLIN)
    while helper.poll() is None and not asked:
        for fd, _ in poll.poll(_TURN_S * 1000):
            if fd == sys.stdin.fileno() and not os.read(fd, 4096):
                return _ended(helper)
    return helper.returncode if helper.returncode is not None else _ended(helper)


def _ended(helper: subprocess.Popen[bytes]) -> int:
    """Asked for, so however the helper ends it has ended well."""
    _end(helper)
    return 0


def _end(helper: subprocess.Popen[bytes]) -> None:
    """End the helper and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(helper.pid, signal.SIGTERM)
        end = time.monotonic() + _GRACE_S
        while helper.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        os.killpg(helper.pid, signal.SIGKILL)
    helper.wait()


if __name__ == "__main__":
    sys.exit(main())
