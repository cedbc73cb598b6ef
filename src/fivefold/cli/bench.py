"""`fivefold bench`: how fast ranks of one node communicate, several contenders side by side."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import tyro

from fivefold.cli import parse_options
from fivefold.errors import UsageError, suggest
from fivefold.writing import write_whole

if TYPE_CHECKING:
    from fivefold.bench import MeasureTask, Sweep

__all__ = ["Bench"]

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _option(metavar: str, hint: str | None = None) -> object:
    if hint is None:
        return tyro.conf.arg(metavar=metavar)
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=hint)


@dataclass(frozen=True)
class Bench:
    """Measure collectives and messages between the processes of this node.

    Contenders take turns at every size, in an order that changes from round to round; the idle ones are
    blocked. Results are checked. Times are means over calls and ranks, the median over rounds, as the OSU
    benchmarks define them; the first contender is the one that the others are compared with.

    Example: fivefold bench allreduce --against gloo,openmpi
    """

    operation: Annotated[str, tyro.conf.Positional, _option("OPERATION")]
    """allreduce, allgather, reduce-scatter, alltoall, bcast, reduce, p2p or barrier"""
    processes: Annotated[int, tyro.conf.arg(aliases=["-n", "-np"], metavar="N")] = 2
    """how many ranks"""
    contender: Annotated[str, _option("NAME")] = "fivefold"
    """fivefold, fivefold-arena (tensors that all ranks see), gloo, openmpi or mpich"""
    against: Annotated[str, _option("NAME,...", hint="")] = ""
    """contenders to compare it with"""
    sizes: Annotated[str, _option("FROM:TO")] = "4:64M"
    """bytes that a rank contributes, in steps of 4 times"""
    dtype: Annotated[str, _option("NAME")] = "float32"
    """of the elements"""
    rounds: Annotated[int, _option("N")] = 3
    """how often each contender has its turn at a size"""
    overlap: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")] = (
        False
    )
    """the call goes on while the caller computes: reports its pure, compute and total time"""
    json: Annotated[Path | None, _option("FILE", hint="")] = None
    """write all figures and the environment to this file"""
    plot: Annotated[Path | None, _option("FILE", hint="")] = None
    """draw times over sizes into this SVG file (needs matplotlib)"""

    @classmethod
    def parse(cls, words: Sequence[str]) -> Bench:
        """Read the options."""
        return cast(Bench, parse_options(cls, words, "bench"))

    def run(self) -> int:
        """Measure, and print a table."""
        sizes, names = self._sizes(), self._names()
        self._check()
        sweep = self._measured(names, sizes)
        from rich.console import Console

        from fivefold.bench.report import plot, show

        show(sweep, Console())
        if self.json is not None:
            write_whole(self.json, json.dumps(sweep.record(), indent=1) + "\n", "the figures")
        if self.plot is not None:
            plot(sweep, self.plot)
        return 0 if all(m.right for found in sweep.results.values() for m in found) else 1

    def _request(self) -> MeasureTask:
        from fivefold.bench import MeasureTask

        return MeasureTask(self.operation, self.dtype, self.processes, self.overlap)

    def _names(self) -> list[str]:
        from fivefold.bench import CONTENDERS

        names = [self.contender, *filter(None, (n.strip() for n in self.against.split(",")))]
        for name in names:
            if name not in CONTENDERS:
                raise UsageError(f"unknown contender {name!r}{suggest(name, CONTENDERS)}")
        if len(set(names)) < len(names):
            raise UsageError(f"a contender is named twice: {', '.join(names)}")
        return names

    def _check(self) -> None:
        from fivefold.bench import OPERATIONS

        if self.operation not in OPERATIONS:
            raise UsageError(
                f"unknown operation {self.operation!r}{suggest(self.operation, OPERATIONS)}"
            )
        if self.processes < 2 or self.rounds < 1:
            raise UsageError(
                f"-n {self.processes} --rounds {self.rounds}: at least 2 ranks and 1 round"
            )
        if self.overlap and self.operation == "p2p":
            raise UsageError("--overlap is for collectives; p2p measures latency")
        for path in (self.json, self.plot):
            if path is not None and not path.resolve().parent.is_dir():
                raise UsageError(f"{path}: there is no folder {path.resolve().parent}")

    def _sizes(self) -> list[int]:
        from fivefold.bench.measure import sizes_between

        least, colon, most = self.sizes.partition(":")
        found = sizes_between(_bytes(least), _bytes(most if colon else least))
        if not found:
            raise UsageError(f"--sizes {self.sizes}: FROM is larger than TO")
        return found[:1] if self.operation == "barrier" else found

    def _measured(self, names: Sequence[str], sizes: Sequence[int]) -> Sweep:
        from contextlib import ExitStack

        from rich.progress import Progress

        from fivefold.bench import Sweep, measure, start
        from fivefold.bench.report import environment

        with ExitStack() as stack:
            folder = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="fivefold-bench-"))
            )
            running = [stack.enter_context(start(name, self.processes, folder)) for name in names]
            bar = stack.enter_context(Progress(transient=True))
            task = bar.add_task("", total=len(sizes) * len(names) * self.rounds)

            def progress(size: int, name: str) -> None:
                bar.update(task, advance=1, description=f"{self.operation} {size} bytes: {name}")

            results = measure(self._request(), running, sizes, self.rounds, progress)
            return replace(Sweep(self._request(), {}, environment()), results=dict(results))


def _bytes(text: str) -> int:
    """`64K` as a number. Raises `UsageError`.

    >>> _bytes("4"), _bytes("64k"), _bytes("1M")
    (4, 65536, 1048576)
    """
    number, unit = text.strip().upper(), ""
    if number[-1:] in _UNITS:
        number, unit = number[:-1], number[-1:]
    if not number.isdecimal() or int(number) < 1:
        raise UsageError(
            f"--sizes: {text!r} is no number of bytes; write 4, 64K or 16M, and 4:64M for a range"
        )
    return int(number) * _UNITS[unit]
