"""Starts the helpers of a job beside its ranks; one of this node that is killed is started again.

    launcher ──── helper on this node                           (the kernel ends it with the launcher)
        └── ssh ═══ pipe ═══ fivefold.launch.remote ── helper   (ends when the pipe closes)

What a remote helper needs to know, the key too, goes through the pipe: a command line is for all to read.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import IO, Any

from fivefold.launch.guard import dies_with_parent
from fivefold.launch.helpers import Helper, Helpers, remote_shell
from fivefold.launch.job import Job, ended, helper_log_path, opened_log, tail
from fivefold.launch.output import LogLines, Stream
from fivefold.launch.watch import Watch

__all__ = ["attend", "brief", "remote_words"]

_TAIL_LINES = 8
_AGAIN = 3
"""how many times a helper is started again"""
_PAUSE_S = 1.0
"""before that: what killed it, such as a lack of memory, may pass"""


def attend(job: Job, engine: str, watch: Watch) -> None:
    """Start the helpers of `job`; when its ranks have ended, `watch` ends them.

    Raises `UsageError` if there is no remote shell for those on other nodes.
    """
    if job.helpers is None:
        return
    job.helpers.folder.mkdir(mode=0o700)
    watch.callback(lambda: shutil.rmtree(_folder(job), ignore_errors=True))
    watch.guard_folder(job.helpers.folder)
    environ = job.rank_environment(engine)
    for helper in job.helpers.members:
        _Attended(job, job.helpers, helper, environ, watch).start()


def _folder(job: Job) -> str:
    assert job.helpers is not None
    return str(job.helpers.folder)


class _Attended:
    """One helper, as often as it is started."""

    def __init__(
        self, job: Job, helpers: Helpers, helper: Helper, environ: Mapping[str, str], watch: Watch
    ) -> None:
        self._job, self._helpers, self._helper, self._watch = job, helpers, helper, watch
        self._environ = {**environ, **helpers.for_helper(helper)}
        self._who = f"h{helper.number}"
        self._path = helper_log_path(job.log_dir, helper.number)
        self._log = watch.keep(opened_log(self._path))
        self._started = 0

    def start(self) -> None:
        """Start it, and read what it writes."""
        helper, watch = self._helper, self._watch
        try:
            process = subprocess.Popen(
                self._helpers.command_of(helper) if helper.local else remote_words(helper),
                env=self._environ if helper.local else None,
                stdin=subprocess.DEVNULL if helper.local else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
                preexec_fn=dies_with_parent(cores=helper.cores if helper.local else ()),  # noqa: PLW1509 - no threads here
            )
        except OSError as problem:
            watch.display.note(f"{helper.name} cannot be started: {problem.strerror}")
            return
        self._started += 1
        kept = [LogLines(self._log), LogLines(self._log)]
        watch.start(process, lambda code: self._ended(code, kept), awaited=False)
        assert process.stdout is not None and process.stderr is not None
        watch.read(process.stdout, _sink(kept[0], self._who, "out", watch))
        watch.read(process.stderr, _sink(kept[1], self._who, "err", watch))
        if process.stdin is not None:
            told = brief(self._job, self._helpers, helper)
            told["environment"]["FIVEFOLD_HELPER_KEY"] = self._helpers.key
            _brief_through(watch.keep(process.stdin), told)

    def _ended(self, code: int, kept: list[LogLines]) -> None:
        for lines in kept:
            lines.flush()
        self._watch.display.close(self._who)
        if code in (0, -signal.SIGTERM):
            return
        # Of those that a signal killed: one with an exit code has ended itself, and would do so again.
        killed = self._helper.local and code < 0
        if killed and self._started <= _AGAIN:
            self._tell(code, f"it is started again ({self._started} of {_AGAIN} times)")
            self._watch.later(_PAUSE_S, self.start)
        else:
            often = f", which has been started again {_AGAIN} times" if killed else ""
            self._tell(code, f"the job goes on without it{often}")

    def _tell(self, code: int, then: str) -> None:
        how = ended(code)
        if not self._helper.local and code == 255:
            how += " (the remote shell failed, or the connection broke)"
        lines = "".join(f"\n    {line}" for line in tail(self._path, _TAIL_LINES))
        quoted = f"\n  last lines of {self._path}:{lines}"
        said = quoted if lines else f"; it wrote nothing to {self._path}"
        self._watch.display.note(f"warning: {self._helper.name} {how}; {then}{said}")


def remote_words(helper: Helper) -> list[str]:
    """The command that starts a helper on another node; the rest follows through its standard input."""
    python = helper.python or sys.executable
    return [*remote_shell(), helper.host, f"exec {python} -P -m fivefold.launch.remote"]


def brief(job: Job, helpers: Helpers, helper: Helper) -> dict[str, Any]:
    """What `fivefold.launch.remote` has to know of a helper, the key apart."""
    return {
        "command": helpers.command_of(helper),
        "directory": os.getcwd(),  # noqa: PTH109 - as the shell calls it
        "cores": list(helper.cores),
        "environment": {**job.environment, **helpers.for_helper(helper)},
    }


def _brief_through(pipe: IO[bytes], told: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # it has ended already, which is told elsewhere
        pipe.write(json.dumps(told).encode() + b"\n")


def _sink(lines: LogLines, who: str, stream: Stream, watch: Watch) -> Callable[[bytes], None]:
    def take(chunk: bytes) -> None:
        lines.feed(chunk)
        watch.display.feed(who, stream, chunk)

    return take
