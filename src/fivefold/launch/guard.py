"""A watchman that outlives the launcher by a second.

The kernel kills a rank whose launcher dies (PR_SET_PDEATHSIG), but not what the rank has started, its
loader workers for one. The guard is a shell that waits at a pipe. While the launcher lives the pipe is
open; when it closes without the guard having been dismissed, every process group named on it is ended.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable

__all__ = ["Guard", "dies_with_parent"]

_SCRIPT = """
trap '' INT TERM HUP QUIT
groups=
while read -r group; do groups="$groups -$group"; done
kill -s TERM -- $groups 2>/dev/null
sleep 1
kill -s KILL -- $groups 2>/dev/null
"""

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Guard:
    """Ends the process groups it was told of if this process dies without dismissing it."""

    def __init__(self) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def add(self, group: int) -> None:
        """Put a process group under guard."""
        pipe = self._shell.stdin
        assert pipe is not None
        try:
            pipe.write(b"%d\n" % group)
            pipe.flush()
        except BrokenPipeError:
            pass  # somebody killed the guard; the ranks still die with us

    def dismiss(self) -> None:
        """The launcher has ended all groups itself."""
        self._shell.kill()
        self._shell.wait()
        assert self._shell.stdin is not None
        self._shell.stdin.close()


def dies_with_parent(signum: int = signal.SIGKILL) -> Callable[[], None]:
    """For `Popen(preexec_fn=...)`: the child gets `signum` when the thread that started it ends."""
    parent = os.getpid()

    def in_child() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(signum))
        if os.getppid() != parent:  # the launcher died in between
            os._exit(128 + signal.SIGKILL)

    return in_child
