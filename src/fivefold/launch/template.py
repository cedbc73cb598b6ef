r"""A process that imports torch once for all ranks of its node, and is forked into each of them.

    agent ── rank, its variables, two files ──> template ──fork──> rank
          <── rank, its process, how it ended ──   \──fork──> rank

    python -P -c "from fivefold.launch.template import main; exec(main())" FD script.py arguments...

It has the environment of the ranks but for what differs between them, one thread, and has asked no GPU for
anything. What differs in a forked rank: hashes of strings are those of its siblings, and rank 0 has no input.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import CodeType, TracebackType

from fivefold.launch.guard import dies_with_parent
from fivefold.launch.progress import VARIABLE, is_told

__all__ = ["Forked", "TemplateProcess", "forkable", "main", "words"]

_MODULES = (
    "torch", "torch.distributed", "torch.nn.parallel", "torch.optim", "fivefold.mesh", "fivefold.parallel",
    "fivefold.data",
)  # fmt: skip
_LATER = (
    "torch._dynamo.config", "torch._decomp", "fivefold.parallel.model", "fivefold.checkpoint.checkpointer",
)  # fmt: skip
"""what a first step imports, and takes a second for: before ranks start again"""
_IDLE_MS = 500
_MOST_BYTES = 1 << 17


def forkable(command: Sequence[str]) -> bool:
    """Whether ranks of this command can be forked: a script or a module, by a Python without options."""
    if len(command) < 2 or not Path(command[0]).name.startswith("python"):
        return False
    return (command[1] == "-m" and len(command) > 2) or not command[1].startswith("-")


def words(python: str, fd: int, command: Sequence[str]) -> list[str]:
    """The command of a template."""
    begin = "from fivefold.launch.template import main; exec(main())"
    return [python, "-P", "-c", begin, str(fd), *command[1:]]


# ---- In the agent


class Forked:
    """A rank that a template has forked, as `subprocess.Popen` would show it."""

    def __init__(self, pid: int, template: TemplateProcess) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._template = template

    def poll(self) -> int | None:
        """How it ended; None while it runs."""
        return self.returncode

    def wait(self) -> int:
        """The same, once it has ended."""
        while self.returncode is None:
            self._template.take()
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)


class TemplateProcess:
    """What an agent knows of a template: the line to it, and the ranks that it has forked.

    Args:
        line: to the template, of type SOCK_SEQPACKET.
    """

    def __init__(self, line: socket.socket) -> None:
        self.line = line
        self.gone = False
        self._ranks: dict[int, Forked] = {}

    def fork(
        self, variables: Mapping[str, str], cores: Sequence[int], out: int, err: int
    ) -> Forked:
        """Have it fork a rank that writes to two descriptors. Raises `OSError` if it is gone."""
        order = json.dumps({"variables": dict(variables), "cores": list(cores)}).encode()
        socket.send_fds(self.line, [order], [out, err])
        pid = 0
        while not pid:
            if self.gone:
                raise ConnectionError("the process that imports torch for all ranks ended")
            pid = self.take()
        rank = self._ranks[pid] = Forked(pid, self)
        return rank

    def take(self) -> int:
        """Wait for what it says: the number of a process that it has forked, else 0 where one ended."""
        said = self.line.recv(_MOST_BYTES)
        if not said:
            self.gone = True
            for rank in self._ranks.values():  # the kernel has ended them with it
                rank.returncode = -signal.SIGKILL
            self._ranks.clear()
            return 0
        told: dict[str, int] = json.loads(said)
        if "code" not in told:
            return told["pid"]
        if (ended := self._ranks.pop(told["pid"], None)) is not None:
            ended.returncode = told["code"]
        return 0


# ---- The template


@dataclass(frozen=True)
class _Order:
    variables: dict[str, str]
    cores: list[int]
    files: list[int]


def main() -> CodeType:
    """Import, fork as ordered, and tell how ranks end. Returns in a forked rank: what it is to execute."""
    line, command = socket.socket(fileno=int(sys.argv[1])), sys.argv[2:]
    for name in _MODULES:
        import_module(name)
    order = _serve(line)
    if order is None:
        sys.exit(0)
    line.close()
    return _become(order, command)


def _serve(line: socket.socket) -> _Order | None:
    """Until the agent is gone; in a forked rank it returns the rank's order."""
    poll = select.poll()
    poll.register(line, select.POLLIN)
    children: dict[int, int] = {}
    later = [*_LATER]
    while True:
        # Ranks may start again only where somebody wants to know how far they are. Whoever ends while this
        # imports, for a second or two in all, is noticed after it.
        ready = poll.poll(_IDLE_MS if later and VARIABLE in os.environ else None)
        if not ready and (not children or is_told(os.environ[VARIABLE])):
            with contextlib.suppress(Exception):  # ranks that need it will say what is wrong
                import_module(later.pop(0))
        for fd, _ in ready:
            if fd in children:
                poll.unregister(fd)
                os.close(fd)
                pid = children.pop(fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                line.send(json.dumps({"pid": pid, "code": code}).encode())
                continue
            said, files, _, _ = socket.recv_fds(line, _MOST_BYTES, 2)
            if not said:
                return None
            order = _Order(**json.loads(said), files=list(files))
            dies = dies_with_parent()
            pid = os.fork()
            if pid == 0:
                dies()
                os.setpgid(0, 0)
                for other in children:
                    os.close(other)
                return order
            with contextlib.suppress(OSError):
                os.setpgid(pid, pid)  # whoever comes first: the agent may end its group at once
            for file in files:
                os.close(file)
            pidfd = os.pidfd_open(pid)
            children[pidfd] = pid
            poll.register(pidfd, select.POLLIN)
            line.send(json.dumps({"pid": pid}).encode())


def _become(order: _Order, command: list[str]) -> CodeType:
    """Be the rank; what its module `__main__` executes next."""
    for file, number in zip(order.files, (1, 2), strict=True):
        os.dup2(file, number)
        os.close(file)
    if order.cores:
        os.sched_setaffinity(0, order.cores)
    os.environ.update(order.variables)
    vars(sys.modules["fivefold"])["_see_scripts"]()
    for name in ("numpy", "torch"):  # those of a fork are its siblings'; random sees to itself
        if (found := sys.modules.get(name)) is not None:
            (found.random.seed if name == "numpy" else found.seed)()
    sys.excepthook = partial(_told, sys.excepthook)
    script = command[0]
    sys.orig_argv = [sys.executable, *command]
    if safe := script == "-P":
        script, command = command[1], command[1:]
    main = vars(sys.modules["__main__"])
    del main["main"]
    if script == "-m":
        if not safe:
            sys.path.insert(0, str(Path.cwd()))
        sys.argv = command[1:]
        return compile(_AS_MODULE.format(command[1]), __file__, "exec")
    sys.path.insert(0, str(Path(script).resolve().parent))
    sys.argv = command
    main["__file__"] = str(Path(script).absolute())
    return compile(Path(script).read_bytes(), main["__file__"], "exec")


_AS_MODULE = "__import__('runpy').run_module({!r}, run_name='__main__', alter_sys=True)"


def _told(
    tell: Callable[[type[BaseException], BaseException, TracebackType | None], object],
    kind: type[BaseException],
    problem: BaseException,
    trace: TracebackType | None,
) -> None:
    """What ends a script, as it is told without `--fork`: nothing of what came before the script."""
    while trace is not None and trace.tb_frame.f_code.co_filename in ("<string>", __file__):
        trace = trace.tb_next
    tell(kind, problem.with_traceback(trace), trace)
