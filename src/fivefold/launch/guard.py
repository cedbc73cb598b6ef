"""A watchman that outlives the launcher by a second.

The kernel kills a rank whose launcher dies (PR_SET_PDEATHSIG), but not what the rank has started, its
loader workers for one. The guard is a shell that waits at a pipe. While the launcher lives the pipe is
open; when it closes without the guard having been dismissed, every process group named on it is ended.
What starts agents on other nodes is given time: with it some engines end the agents at once, and these see
for themselves that the launcher is gone, and let their ranks save.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

__all__ = ["Guard", "dies_with_parent", "why_not_started"]

_SCRIPT = """
trap '' INT TERM HUP QUIT
groups= late= after_s=0
without() {  # GROUP OTHERS...
  gone=$1 left=
  shift
  for group; do [ "$group" = "$gone" ] || left="$left $group"; done
}
end() {
  kill -s TERM -- $1 2>/dev/null
  sleep 1
  kill -s KILL -- $1 2>/dev/null
}
while read -r line; do
  case $line in
    /*) set -- "$@" "$line" ;;
    -*) without "$line" $groups; groups=$left
        without "$line" $late; late=$left ;;
    *" "*) late="$late -${line% *}" after_s=${line#* } ;;
    *) groups="$groups -$line" ;;
  esac
done
end "$groups"
[ $# -eq 0 ] || rm -rf -- "$@"
[ -z "$late" ] || { sleep "$after_s"; end "$late"; }
"""

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Guard:
    """Ends the process groups it was told of if this process dies without dismissing it.

    Folders that it was told of are removed then.
    """

    def __init__(self) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def add(self, group: int, after_s: float = 0.0) -> None:
        """Put a process group under guard; it is ended that long after the others."""
        self._tell(b"%d %g" % (group, after_s) if after_s else b"%d" % group)

    def drop(self, group: int) -> None:
        """This one has ended."""
        self._tell(b"-%d" % group)

    def add_folder(self, folder: Path) -> None:
        """Put a folder under guard."""
        assert folder.is_absolute()
        self._tell(bytes(folder))

    def _tell(self, line: bytes) -> None:
        pipe = self._shell.stdin
        assert pipe is not None
        try:
            pipe.write(line + b"\n")
            pipe.flush()
        except BrokenPipeError:
            pass  # somebody killed the guard; the ranks still die with us

    def dismiss(self) -> None:
        """The launcher has ended all groups itself."""
        self._shell.kill()
        self._shell.wait()
        assert self._shell.stdin is not None
        self._shell.stdin.close()


def dies_with_parent(
    signum: int = signal.SIGKILL, cores: Collection[int] = ()
) -> Callable[[], None]:
    """For `Popen(preexec_fn=...)`: the child gets `signum` when the thread that started it ends.

    It runs on these logical cores; on any that it may use, if there are none.
    """
    parent = os.getpid()

    def in_child() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(signum))
        if os.getppid() != parent:  # the launcher died in between
            os._exit(128 + signal.SIGKILL)
        if cores:
            os.sched_setaffinity(0, cores)

    return in_child


def why_not_started(
    problem: Exception, command: Sequence[str], directory: str, cores: Sequence[int], what: str
) -> str:
    """Why this node could not start a command for a launcher elsewhere, from what `Popen` raised.

    `what` it would have been, in the plural.
    """
    host = os.uname().nodename
    if not Path(directory).is_dir():
        return f"{host} has no directory {directory}: {what} run in that of the launcher"
    if isinstance(problem, subprocess.SubprocessError):
        return f"{host} does not grant cores {[*cores]} of the host file"
    assert isinstance(problem, OSError)
    return f"{host} cannot start {command[0]}: {problem.strerror}"
