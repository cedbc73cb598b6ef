"""Runs every code block of the documentation as a test.

| block       | is run as                                                                        |
|-------------|----------------------------------------------------------------------------------|
| ```python   | Python in this process; blocks of one document share their names                 |
| ```console  | each line `$ command`, in bash; it must succeed, what it prints is not compared   |
| ```toml     | a plan, or a cluster if it has links: it must parse                              |

All blocks of a document share one temporary folder, their working directory. A comment on the line
before a block changes this:

    <!-- test: file=train.py -->   write the block into that file instead of running it
    <!-- test: exit=2 -->          the last command must end with this code
    <!-- test: output -->          compare what commands print; `...` stands for anything
    <!-- test: once -->            the first command, which finds an empty folder, is run for the first of the
                                   documents that have it, and the others get a copy of what it leaves there
    <!-- skip: next "reason" -->   do not run it

Any other language is refused by tests/unit/test_house.py, and so is a skip without a reason.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sybil import Document, Example, Region, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import SkipParser
from sybil.parsers.markdown.lexers import FencedCodeBlockLexer

from commands import programs
from real_torchvision import declare_missing

__all__ = [
    "DATA",
    "PATTERNS",
    "RUNNERS",
    "Command",
    "commands",
    "documents",
    "matches",
    "options_before",
    "pytest_collect_file",
]

ROOT = Path(__file__).resolve().parent.parent
PATTERNS = ("*.md", "docs/**/*.md", "examples/*.md", "src/**/README.md", "benchmarks/**/README.md")
# Languages of blocks that show something and cannot be run.
DATA = ("text",)
TIMEOUT_S = 100

_LAUNCHERS = ("mpirun", "mpiexec", "srun", "torchrun")

# Key of the working directory among the names of a document.
_FOLDER = "_folder"
_FENCE = FencedCodeBlockLexer("[a-z]+", mapping={"language": "language", "source": "source"})
_OPTIONS = re.compile(r"<!--\s*test:\s*(?P<options>[^>]*?)\s*-->\s*\Z")


def documents() -> list[Path]:
    """Every document whose code blocks are run."""
    found = {path for pattern in PATTERNS for path in ROOT.glob(pattern)}
    return sorted(path for path in found if "_build" not in path.parts)


def options_before(text: str, start: int) -> dict[str, str]:
    """What the comment before the block at `start` asks for, `{"file": "train.py"}` for one."""
    found = _OPTIONS.search(text, 0, start)
    words = found["options"].split() if found else []
    options = dict(word.partition("=")[::2] for word in words)
    if unknown := options.keys() - {"file", "exit", "output", "once"}:
        raise ValueError(
            f"unknown {sorted(unknown)} in a `test:` comment; valid: file, exit, output, once"
        )
    return options


@dataclass(frozen=True)
class Command:
    """One `$ command` of a console block and what is shown below it."""

    line: str
    shown: str


def commands(block: str) -> list[Command]:
    """The commands of a console block; a command goes on after a trailing backslash."""
    found: list[Command] = []
    lines = iter(block.splitlines())
    for text in lines:
        if text.startswith("$ "):
            line = text[2:]
            while line.endswith("\\"):
                line += "\n" + next(lines)
            found.append(Command(line, ""))
        elif found:
            found[-1] = Command(found[-1].line, found[-1].shown + text + "\n")
        else:
            raise ValueError(f"a console block begins with '$ command', not with {text!r}")
    return found


def matches(shown: str, printed: str) -> bool:
    """Whether `printed` is what the document shows, where `...` stands for anything."""
    pattern = ".*".join(re.escape(part) for part in shown.strip().split("..."))
    return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None


def _console(example: Example) -> None:
    options = example.parsed.options
    todo = commands(example.parsed.source)
    for number, command in enumerate(todo, start=1):
        if "once" in options and number == 1:
            code, printed = _once(command.line, example.namespace)
        else:
            code, printed = _bash(command.line, example.namespace[_FOLDER])
        expected = int(options.get("exit", "0")) if number == len(todo) else 0
        told = f"$ {command.line}\n{printed}"
        assert code == expected, f"exit code {code} instead of {expected}:\n{told}"
        if "output" in options:
            assert matches(command.shown, printed), f"the document shows otherwise:\n{told}"


def _once(line: str, namespace: dict[str, Any]) -> tuple[int, str]:
    """As `_bash`, for the first that asks. Test processes of one run find what another has made."""
    folder = namespace[_FOLDER]
    assert not any(Path(folder).iterdir()), "not the first command of its document"
    shared: Path = namespace["tmp_path_factory"].getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    kept = shared / f"once-{hashlib.sha256(line.encode()).hexdigest()[:16]}"
    kept.mkdir(exist_ok=True)
    with (kept / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (printed := kept / "printed").exists():
            shutil.rmtree(kept / "left", ignore_errors=True)
            (kept / "left").mkdir()
            code, text = _bash(line, str(kept / "left"))
            if code:
                return code, text
            printed.write_text(text)
    shutil.copytree(kept / "left", folder, symlinks=True, dirs_exist_ok=True)
    return 0, printed.read_text()


def _bash(line: str, folder: str) -> tuple[int, str]:
    """Exit code and output of one command; whatever it has started ends with it."""
    # Launchers of others start Python as they would anywhere.
    ours = [] if any(launcher in line for launcher in _LAUNCHERS) else [programs()]
    environment = {
        "OMP_NUM_THREADS": "1",  # ranks share the cores, as in tests/conftest.py
        **os.environ,
        "PATH": os.pathsep.join(map(str, [*ours, Path(sys.executable).parent, os.environ["PATH"]])),
        "COLUMNS": "80",
        "NO_COLOR": "1",
        # Open MPI refuses root and more ranks than cores unless told otherwise.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    with subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", line],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=TIMEOUT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, printed


def _python(example: Example) -> None:
    region = Region(example.region.start, example.region.end, parsed=example.parsed.source)
    inner = Example(example.document, example.line, example.column, region, example.namespace)
    declare_missing()  # which packages that a block imports may import
    with contextlib.chdir(example.namespace[_FOLDER]):
        PythonEvaluator()(inner)


def _toml(example: Example) -> None:
    from fivefold import Plan
    from fivefold.cluster.description import Cluster

    source = example.parsed.source
    (Cluster if "[within]" in source else Plan).parse(source, example.path)


RUNNERS: dict[str, Callable[[Example], None]] = {
    "console": _console,
    "python": _python,
    "toml": _toml,
}


@dataclass(frozen=True)
class _Block:
    language: str
    source: str
    options: dict[str, str]


def _run(example: Example) -> None:
    block: _Block = example.parsed
    if name := block.options.get("file"):
        Path(example.namespace[_FOLDER], name).write_text(block.source)
    if block.language == "toml" or not name:
        RUNNERS[block.language](example)


def _blocks(document: Document) -> Iterator[Region]:
    for region in _FENCE(document):
        language = region.lexemes["language"]
        if language in RUNNERS:
            options = options_before(document.text, region.start)
            region.parsed = _Block(language, region.lexemes["source"], options)
            region.evaluator = _run
            yield region


def _enter(namespace: dict[str, object]) -> None:
    namespace["_kept"] = kept = tempfile.TemporaryDirectory(prefix="fivefold-document-")
    namespace[_FOLDER] = kept.name


def _leave(namespace: dict[str, object]) -> None:
    kept = namespace.pop("_kept")
    assert isinstance(kept, tempfile.TemporaryDirectory)
    kept.cleanup()


pytest_collect_file = Sybil(
    parsers=[SkipParser(), _blocks],
    patterns=PATTERNS,
    path=str(ROOT),
    setup=_enter,
    teardown=_leave,
    fixtures=["tmp_path_factory"],
).pytest()
