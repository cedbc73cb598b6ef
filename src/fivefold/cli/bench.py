"""`fivefold bench`: how fast ranks of a node, or of several, communicate; contenders side by side."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import tyro

from fivefold.cli import parse_options
from fivefold.cli.nodes import IN_LINE, NodeOptions
from fivefold.errors import FivefoldError, UsageError, suggest
from fivefold.launch.engine import choose
from fivefold.launch.job import NodeRanks
from fivefold.writing import write_whole

if TYPE_CHECKING:
    from fivefold.bench import Sweep

__all__ = ["Bench"]

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _option(metavar: str, hint: str | None = None) -> object:
    if hint is None:
        return tyro.conf.arg(metavar=metavar)
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=hint)


@dataclass(frozen=True)
class Bench:
    """Measure collectives and messages between processes, of this node or of several.

    Contenders take turns at every size, in an order that changes from round to round; the idle ones are
    blocked. Results are checked. Times are means over calls and ranks, the median over rounds, as the OSU
    benchmarks define them; the first contender is the one that the others are compared with.

    Example: fivefold bench allreduce --against gloo,openmpi
    """

    operation: Annotated[str, tyro.conf.Positional, _option("OPERATION")]
    """allreduce, allgather, reduce-scatter, alltoall, bcast, reduce, gather, scatter or barrier; of messages
    between the first and the last rank p2p (latency), bw and bibw (64 under way, one way or both), between
    both halves of the ranks multi-p2p and multi-bw"""
    processes: Annotated[
        int | None, tyro.conf.arg(aliases=["-n", "-np"], metavar="N", help_behavior_hint="")
    ] = None
    """how many ranks; default: as many as the hosts have room for, or 2"""
    contender: Annotated[str, _option("NAME")] = "fivefold"
    """fivefold, fivefold-arena (tensors that all ranks see), fivefold-direct and fivefold-doubling (how small
    sums of three nodes and more are made), fivefold-openmpi and fivefold-mpich (which carry what goes between
    nodes), gloo, openmpi or mpich"""
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
    tune: Annotated[Path | None, _option("PLAN", hint="")] = None
    """allreduce on three nodes or more: measure small sums in both ways, and write from where on to double
    (comm.direct_bytes) to this plan, with the reason; what else the file has stays"""
    json: Annotated[Path | None, _option("FILE", hint="")] = None
    """write all figures and the environment to this file"""
    plot: Annotated[Path | None, _option("FILE", hint="")] = None
    """draw times over sizes into this SVG file (needs matplotlib)"""
    nodes: Annotated[NodeOptions, IN_LINE] = field(default_factory=NodeOptions)

    @classmethod
    def parse(cls, words: Sequence[str]) -> Bench:
        """Read the options."""
        return cast(Bench, parse_options(cls, words, "bench"))

    def run(self) -> int:
        """Measure, and print a table."""
        sweep = self._swept() if self.tune is None else self._tuned(self.tune)
        return 0 if all(m.right for found in sweep.results.values() for m in found) else 1

    def _tuned(self, path: Path) -> Sweep:
        """Measure small sums in both ways, and write to a plan from where on to double."""
        from fivefold.bench.tuning import CHOICES, SIZES, direct_bytes
        from fivefold.plan import Plan, Provenance

        if self.operation != "allreduce":
            raise UsageError(f"--tune is for allreduce, not {self.operation}")
        self._check()
        plan = Plan.load(path) if path.exists() else Plan()
        direct, doubling = CHOICES
        sweep = replace(self, contender=direct, against=doubling, sizes=SIZES, tune=None)._swept()  # noqa: SLF001
        value, why = direct_bytes(sweep)
        plan.replace({"comm.direct_bytes": value}, Provenance("tuned", why)).save(path)
        print(f"comm.direct_bytes = {value} in {path}: {why}")
        return sweep

    def _swept(self) -> Sweep:
        sizes, names = self._sizes(), self._names()
        self._check()
        hosts = self.nodes.hosts_told()
        ranks = self.processes or max(2, self.nodes.room(hosts))
        nodes = self.nodes.chosen_nodes(hosts, ranks)
        self._check_nodes(names, ranks, nodes)
        sweep = self._measured(names, sizes, ranks, nodes)
        from rich.console import Console

        from fivefold.bench.report import plot, show

        show(sweep, Console())
        if self.json is not None:
            write_whole(self.json, json.dumps(sweep.record(), indent=1) + "\n", "the figures")
        if self.plot is not None:
            plot(sweep, self.plot)
        return sweep

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
        from fivefold.bench import MESSAGES, OPERATIONS

        if self.operation not in OPERATIONS:
            raise UsageError(
                f"unknown operation {self.operation!r}{suggest(self.operation, OPERATIONS)}"
            )
        if self.rounds < 1:
            raise UsageError(f"--rounds {self.rounds}: at least 1 is needed")
        if self.overlap and self.operation in MESSAGES:
            raise UsageError(f"--overlap is for collectives; {self.operation} measures messages")
        for path in (self.json, self.plot, self.tune):
            if path is not None and not path.resolve().parent.is_dir():
                raise UsageError(f"{path}: there is no folder {path.resolve().parent}")

    def _check_nodes(self, names: Sequence[str], ranks: int, nodes: Sequence[NodeRanks]) -> None:
        if ranks < 2:
            raise UsageError(f"{ranks} rank: at least 2 ranks are needed; -n 2")
        choose(self.nodes.engine, several_nodes=bool(nodes))
        alone = self.nodes.fork or self.nodes.stage or self.nodes.engine not in ("auto", "local")
        if alone and not nodes:
            raise UsageError(
                "--fork, --stage and --engine are for ranks on several nodes; leave them out, or name nodes "
                "with -H"
            )
        several = sum(node.ranks > 0 for node in nodes)
        if several < 3 and {"fivefold-direct", "fivefold-doubling"} & {*names}:
            raise UsageError(
                f"{several or 1} node{'s' if several > 1 else ''}: small sums can be made in two ways "
                "from three nodes on; name them with -H"
            )
        if several > 1 and "fivefold-arena" in names:
            raise UsageError(
                "fivefold-arena is for ranks of one node, whose memory they share; leave it out"
            )

    def _sizes(self) -> list[int]:
        from fivefold.bench.measure import sizes_between

        least, colon, most = self.sizes.partition(":")
        found = sizes_between(_bytes(least), _bytes(most if colon else least))
        if not found:
            raise UsageError(f"--sizes {self.sizes}: FROM is larger than TO")
        return found[:1] if self.operation == "barrier" else found

    def _measured(
        self, names: Sequence[str], sizes: Sequence[int], ranks: int, nodes: Sequence[NodeRanks]
    ) -> Sweep:
        from rich.progress import Progress

        from fivefold.bench import MeasureTask, Sweep, begun, measure
        from fivefold.bench.report import environment

        request = MeasureTask(self.operation, self.dtype, ranks, self.overlap)
        found = environment() | {"nodes": sum(node.ranks > 0 for node in nodes) or 1}
        with ExitStack() as stack:
            folder = stack.enter_context(_folder(kept_after_errors=bool(nodes)))
            options = self.nodes.words()
            running = [
                stack.enter_context(begun(name, ranks, folder, nodes=nodes, options=options).meet())
                for name in names
            ]
            bar = stack.enter_context(Progress(transient=True))
            task = bar.add_task("", total=len(sizes) * len(names) * self.rounds)

            def progress(size: int, name: str) -> None:
                bar.update(task, advance=1, description=f"{self.operation} {size} bytes: {name}")

            results = measure(request, running, sizes, self.rounds, progress)
            return Sweep(request, dict(results), found)


@contextmanager
def _folder(*, kept_after_errors: bool) -> Generator[Path]:
    """A temporary folder; messages of ranks that were started on other nodes name logs in it."""
    folder, keep = Path(tempfile.mkdtemp(prefix="fivefold-bench-")), False
    try:
        yield folder
    except FivefoldError:
        keep = kept_after_errors
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


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
