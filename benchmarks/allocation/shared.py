"""What a start asks of the file system that holds the environment: operations, counted by throttle.c.

shared/env    a virtual environment with torch and Fivefold      counted
shared/job    the script                                         counted
nodes/N       a node's own storage                               not counted, nor is the base's Python
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from contender import BenchmarkError
from figures import environment, table
from throttle import Throttle

import fivefold

__all__ = ["counted", "modelled", "section_of_counts", "section_of_model"]

HERE = Path(__file__).resolve().parent
WAYS = {
    "fivefold run": [],
    "--fork": ["--fork"],
    "--stage": ["--stage"],
    "--stage, a second job": ["--stage"],
}
CASES = ((2, 1), (4, 1), (4, 2))
"""nodes, and ranks on each"""
_SHELL = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
export TMPDIR="$(dirname "$0")/nodes/$1"
mkdir -p "$TMPDIR"
shift
exec sh -c "$*"
"""
"""a remote shell that goes nowhere; a node's own storage is a folder"""


def _files(name: str, seen: set[str]) -> Iterator[Path]:
    """Of a package and what it needs, as installed: paths within `site-packages`."""
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key in seen:
        return
    seen.add(key)
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return  # for another system
    if key != "fivefold":  # its source is copied
        yield from (Path(str(file)) for file in found.files or ())
    for needed in found.requires or ():
        if "extra ==" not in needed and (match := re.match(r"[\w.-]+", needed)):
            yield from _files(match[0], seen)


def _make_shared(folder: Path) -> Path:
    """An environment that holds what Fivefold and its ranks need; its Python."""
    base = os.path.realpath(sys.executable)
    subprocess.run([base, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
    (site,) = (folder / "env").glob("lib/python*/site-packages")
    home = Path(str(metadata.distribution("torch").locate_file("")))
    source = Path(fivefold.__file__).parent
    shutil.copytree(source, site / "fivefold")  # not linked: somebody may write to it
    for path in _files("fivefold", set()):
        old, new = home / path, site / path
        if old.is_file() and ".." not in path.parts and not new.exists():
            new.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(old, new)
            except OSError:  # another disk
                shutil.copy2(old, new)
    (folder / "job").mkdir()
    shutil.copy2(HERE / "started.py", folder / "job")
    return folder / "env" / "bin" / "python"


def counted() -> dict[str, Any]:
    """Operations of each way and case; see the module."""
    before = environment()
    kept = ("PATH", "HOME", "LANG", "USER")
    found: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory(prefix="fivefold-bench-") as name:
        folder = Path(name)
        python = _make_shared(folder / "shared")
        count = Throttle(folder, 1e15)
        shell = folder / "shell"
        shell.write_text(_SHELL)
        shell.chmod(0o755)
        environ = {key: os.environ[key] for key in kept if key in os.environ}
        environ |= {"FIVEFOLD_RSH": str(shell), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
        environ |= count.variables(folder / "shared")

        def ran(*words: str) -> tuple[int, int]:
            count.reset()
            done = subprocess.run(
                [str(python), *words], cwd=folder / "shared" / "job", env=environ, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, check=False, timeout=300,
            )  # fmt: skip
            if done.returncode:
                raise BenchmarkError(f"{' '.join(words)}\n{done.stderr[-3000:]}")
            return count.operations, count.passed[1]

        size = sum(path.lstat().st_size for path in (folder / "shared" / "env").rglob("*"))
        ran("-c", "import torch, fivefold.parallel")  # bytecode is written
        one, _ = ran("-c", "import torch")
        for way, options in WAYS.items():
            for nodes, ranks in CASES:
                if not way.endswith("second job"):
                    shutil.rmtree(folder / "nodes", ignore_errors=True)
                told = folder / "told"
                told.mkdir()
                hosts = ",".join(f"n{node}:{ranks}" for node in range(nodes))
                words = (
                    "-P",
                    "-m",
                    "fivefold",
                    "run",
                    "--log-dir",
                    str(told / "logs"),
                    "-H",
                    hosts,
                )
                operations, read = ran(*words, *options, "started.py", "ours", str(told))
                case = found.setdefault(f"{nodes}x{ranks}", {})
                case[way], case[f"{way}, bytes read"] = operations, read
                shutil.rmtree(told)
                print(f"{way}, {nodes} nodes x {ranks}: {operations} operations", flush=True)
    told_torch = metadata.version("torch")
    return {
        "benchmark": "shared-files", "environment": {**before, "torch": told_torch},
        "import_torch": one, "environment_bytes": size, "operations": found,
    }  # fmt: skip


def _by(result: dict[str, Any], way: str) -> tuple[float, float, float]:
    """Operations of a job, of a node more with a rank, and of a rank more on a node that has one."""
    of = [result["operations"][f"{nodes}x{ranks}"][way] for nodes, ranks in CASES]
    node, rank = (of[1] - of[0]) / 2, (of[2] - of[1]) / 4
    return of[0] - 2 * node, node, rank


def section_of_counts(result: dict[str, Any], title: str, conditions: str) -> str:
    """Its table, for the README."""
    rows = [
        (way, *(f"{result['operations'][f'{n}x{r}'][way]:,}" for n, r in CASES),
         *(f"{value:,.0f}" for value in _by(result, way)))
        for way in WAYS
    ]  # fmt: skip
    header = ("", *(f"{n} nodes x {r}" for n, r in CASES), "a job", "a node", "a rank more")
    read = result["operations"]["4x2"]["--stage, bytes read"] / 1e6
    about = (
        "Operations (open, stat, list, read a link) on files of the environment and of the script, by all "
        f"processes of a job; `python -c 'import torch'` alone makes {result['import_torch']:,}. Of the "
        f"environment's {result['environment_bytes'] / 1e6:,.0f} MB, `--stage` reads {read:,.0f} MB once, "
        "for any number of nodes. What remains for a node is its agent, which runs from the shared "
        "environment. Files of the base's Python are not counted."
    )
    return f"### {title}\n\n{table(header, rows)}\n\n{about} {conditions}"


# ---- A model of a large job, from these figures

MODEL_NODES, MODEL_RANKS = 256, 8
OPERATIONS_PER_S = 20_000
LINK_BYTES_PER_S, BLOCK_BYTES = 1e9, 4 << 20
CALL_S = 2e-4


def modelled(counts: dict[str, Any]) -> dict[str, Any]:
    """What the file system and the links would take for a large job, from counts of small ones.

    With `--stage` a block passes all links of the chain, and the others follow it closely.
    """
    ways: dict[str, dict[str, float]] = {}
    for way in WAYS:
        job, node, rank = _by(counts, way)
        operations = job + MODEL_NODES * (node + (MODEL_RANKS - 1) * rank)
        sent = "--stage" in way and not way.endswith("second job")
        sent_bytes = (counts["environment_bytes"] + MODEL_NODES * BLOCK_BYTES) * sent
        ways[way] = {
            "operations": operations,
            "metadata_s": operations / OPERATIONS_PER_S,
            "sending_s": sent_bytes / LINK_BYTES_PER_S,
        }
    return {
        "benchmark": "model", "environment": counts["environment"], "ways": ways,
        "in_turn": _by(counts, "--stage")[0],
    }  # fmt: skip


def section_of_model(result: dict[str, Any], title: str, conditions: str) -> str:
    """Its table, for the README."""
    rows = [
        (
            way,
            f"{told['operations']:,.0f}",
            f"{told['metadata_s']:,.1f}",
            f"{told['sending_s']:.1f}",
        )
        for way, told in result["ways"].items()
    ]
    header = ("", "operations", "metadata, s", "sending, s")
    about = (
        f"A model, no measurement: the operations above, for {MODEL_NODES} nodes with {MODEL_RANKS} ranks "
        f"each, by a server of metadata that does {OPERATIONS_PER_S:,} in a second, and the environment "
        f"along a chain of links of {LINK_BYTES_PER_S / 1e9:g} GB/s. Beside it each node imports torch, and "
        "writes the copy, at its own speed; and with `--stage`, one process makes the "
        f"{result['in_turn']:,.0f} operations of a job one after another: at {CALL_S * 1e3:g} ms each, if "
        f"they take that, {result['in_turn'] * CALL_S:.0f} s."
    )
    return f"### {title}\n\n{table(header, rows)}\n\n{about} {conditions}"
