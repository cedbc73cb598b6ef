"""The `fivefold` command.

To add a command: a frozen dataclass whose fields are its options (with a docstring under each), whose
docstring is its help and ends with an example, and which has `run() -> int`; then a line in `COMMANDS`.
Heavy imports (torch) belong inside `run`. What `run` raises is told here: a `UsageError` in one line with
exit code 2, any other `FivefoldError` with its own code, and no traceback for either.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, cast

from fivefold.cli.printable import printable
from fivefold.errors import FivefoldError, UsageError, suggest

__all__ = ["COMMANDS", "Command", "main", "parse_action", "parse_options"]


class Command(Protocol):
    """What a command class provides.

    It may also have `parse(words) -> Command`, a class method that takes the words after the command's
    name to pieces itself.
    """

    def run(self) -> int:
        """Do it; returns the exit code."""
        ...


@dataclass(frozen=True)
class _Command:
    home: str
    """module:class, imported only when the command is called"""
    summary: str


COMMANDS = {
    "run": _Command("fivefold.cli.run:Run", "Start a script in several processes"),
    "train": _Command("fivefold.cli.train:Train", "Train a recipe"),
    "verify": _Command("fivefold.cli.verify:Verify", "Check that a model is exact under a layout"),
    "infer": _Command(
        "fivefold.cli.infer:Infer", "Write what a model returns for images of any size"
    ),
    "plan": _Command(
        "fivefold.cli.plan:Plan", "Choose a layout that fits into memory, and is fast"
    ),
    "tune": _Command("fivefold.cli.tune:Tune", "Find by trials what is fastest on this node"),
    "report": _Command(
        "fivefold.cli.report:Report", "Tell where the time of a run went, and what to do about it"
    ),
    "doctor": _Command("fivefold.cli.doctor:Doctor", "Look at this node before a run"),
    "bench": _Command("fivefold.cli.bench:Bench", "Measure how fast processes communicate"),
    "checkpoint": _Command(
        "fivefold.cli.checkpoint:Checkpoint", "List, check and repair checkpoints"
    ),
    "helper": _Command("fivefold.cli.helper:Helper", "Start a helper of a job by hand"),
}

_HELP = """\
usage: fivefold COMMAND [OPTIONS]

Trains PyTorch models exactly on every processor of a cluster.

commands:
{commands}

options:
  -h, --help     show this help, or with a command, that command's
  --version      show the version

example:
  fivefold train digits -n 2
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (default: the process's arguments) and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except SystemExit as leaving:  # after help, or a script for completion
        code = leaving.code or 0
        return code if isinstance(code, int) else 1
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:  # `fivefold ... | head`
        sys.stdout = None
        return 141
    except FivefoldError as problem:
        if os.environ.get("FIVEFOLD_DEBUG") == "1":
            traceback.print_exc()
        return _fail(f"{problem.label}: {problem}", problem.exit_code)


def parse_action(
    actions: Mapping[str, tuple[type[Command], str]],
    words: Sequence[str],
    command: str,
    usage: str,
) -> Command:
    """The action of a command that the first word names, with its options; `usage` shows all `{actions}`.

    Raises `UsageError` for a mistake; help ends the process, and so does a command without words.
    """
    lines = [f"  {name:<14} {summary}" for name, (_, summary) in actions.items()]
    told = usage.format(actions="\n".join(lines))
    if not words:
        sys.stderr.write(told)
        raise SystemExit(UsageError.exit_code)
    name, *rest = words
    if name in ("-h", "--help", "help"):
        sys.stdout.write(told)
        raise SystemExit(0)
    if name not in actions:
        raise UsageError(f"unknown action {name!r}{suggest(name, actions)}")
    return parse_options(actions[name][0], rest, f"{command} {name}")


def parse_options(kind: type[Command], words: Sequence[str], name: str) -> Command:
    """Read the options of a command. Raises `UsageError` for a mistake; help ends the process."""
    import tyro  # half of the time that `fivefold --help` may take

    from fivefold.cli.mistakes import one_line

    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            return cast(
                Command, tyro.cli(cast(Any, kind), args=list(words), prog=f"fivefold {name}")
            )
    except SystemExit as leaving:
        if not leaving.code:
            raise
        raise UsageError(one_line(told.getvalue(), name)) from None


def _dispatch(words: list[str]) -> int:
    if not words:
        sys.stderr.write(_help())
        return UsageError.exit_code
    name, *rest = words
    if name in ("-h", "--help", "help"):
        sys.stdout.write(_help())
        return 0
    if name == "--version":
        from fivefold import __version__

        sys.stdout.write(f"fivefold {__version__}\n")
        return 0
    if name not in COMMANDS:
        raise UsageError(f"unknown command {name!r}{suggest(name, COMMANDS)}")
    module, _, kind = COMMANDS[name].home.partition(":")
    command = getattr(import_module(module), kind)
    parsed = (
        command.parse(rest) if hasattr(command, "parse") else parse_options(command, rest, name)
    )
    return cast(Command, parsed).run()


def _help() -> str:
    lines = [f"  {name:<14} {entry.summary}" for name, entry in COMMANDS.items()]
    return _HELP.format(commands="\n".join(lines))


def _fail(message: str, code: int) -> int:
    if sys.stdout is not None:  # closed by who started this, as `>&-` does
        sys.stdout.flush()
    if sys.stderr is not None:
        sys.stderr.write(printable(message) + "\n")
    return code
