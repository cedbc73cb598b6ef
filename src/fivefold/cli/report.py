"""`fivefold report`: where the time of a run went. Reads files only, and needs no torch."""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from fivefold.cli.printable import printable
from fivefold.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fivefold.introspect.run import TracedRun

__all__ = ["Report"]

_Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]


def _option(metavar: str, hint: str | None = "") -> object:
    if hint is None:
        return tyro.conf.arg(metavar=metavar)
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=hint)


_OTHERS = ("--serve", "--export", "--out")


@dataclass(frozen=True)
class Report:
    """Tell where the time of a run went, which rank is slow, and what to do about it.

    RUN is a directory that `fivefold train` or `fivefold run --trace` has made, or the folder with its trace
    files; it may still be running. Two of them are compared. A page with everything goes to RUN/report.html.

    With --serve the page is shown while the run goes on, at an address of this machine that holds a secret.

    Example: fivefold report runs/digits-001
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, _option("RUN...")]
    """one run, or two"""
    json: _Flag = False
    """print everything as JSON instead; docs/reference/report-json.md says what it holds"""
    one_process: Annotated[str, _option("RUN")] = ""
    """a run of one process with the same configuration: the throughput is compared with it, times ranks. Of
    two runs, one of them does for the other"""
    html: Annotated[str, _option("FILE")] = ""
    """where the page goes; none: nowhere. Default: report.html in RUN, compare.html in the second RUN"""
    serve: _Flag = False
    """show the page, kept up to date, until Ctrl-C"""
    port: Annotated[int, _option("PORT", None)] = 8765
    """of --serve; 0 is any free one"""
    host: Annotated[str, _option("ADDRESS", None)] = "127.0.0.1"
    """of this machine that --serve listens at"""
    export: Annotated[str, _option("FORMAT")] = ""
    """write the traces for other programs: perfetto, csv, parquet, prometheus or tensorboard"""
    out: Annotated[str, _option("PATH")] = ""
    """where --export writes; default: a folder in RUN named like the format"""

    def run(self) -> int:
        """Read, judge, print."""
        from fivefold.introspect.run import TracedRun

        if not 1 <= len(self.runs) <= 2:
            count = len(self.runs) or "no"
            raise UsageError(f"{count} runs given: name one to look at, or two to compare")
        if self.serve or self.export or self.out:
            return self._serve_or_export()
        with warnings.catch_warnings():
            # Numbers of a damaged trace that make no sense become nan, and are shown so.
            warnings.simplefilter("ignore", RuntimeWarning)
            made = self._made([TracedRun.load(path) for path in self.runs])
        if self.json:
            json.dump(made, sys.stdout, allow_nan=False)  # ASCII: no terminal obeys it
            sys.stdout.write("\n")
        else:
            self._show(made)
        if self.html != "none":
            self._write(made)
        return 0

    def _serve_or_export(self) -> int:
        """What takes one run, and shows neither text nor JSON."""
        from fivefold.introspect import exports
        from fivefold.introspect.serve import serve

        chosen = {"--serve": self.serve, "--export": bool(self.export), "--json": self.json}
        options = [name for name, given in chosen.items() if given]
        if len(options) > 1:
            raise UsageError(f"{' and '.join(options)} exclude each other: choose one")
        if self.one_process:
            raise UsageError(
                f"--one-process is for reports: it goes with neither {' nor '.join(_OTHERS)}"
            )
        if not (self.serve or self.export):
            raise UsageError("--out says where --export writes: name a format with --export")
        if len(self.runs) > 1:
            raise UsageError(f"{options[0]} takes one run, not two")
        run = next(iter(self.runs))
        if self.serve:
            serve(run, host=self.host, port=self.port, say=lambda line: print(line, flush=True))
            return 0
        exports.check(self.export)
        traces, problems = exports.read(run)
        for problem in problems:
            sys.stderr.write(f"note: {printable(problem)}\n")
        folder = (run if run.is_dir() else run.parent) / self.export
        if not self.out and folder.is_symlink():
            raise UsageError(f"{folder} is a link, maybe of somebody else: name a place with --out")
        print(exports.export(self.export, traces, Path(self.out or folder)))
        return 0

    def _made(self, runs: list[TracedRun]) -> Any:
        from fivefold.introspect.compare import compared
        from fivefold.introspect.document import document
        from fivefold.introspect.efficiency import beside_each_other, beside_one
        from fivefold.introspect.run import TracedRun

        made = [document(run) for run in runs]
        if self.one_process:
            alone = document(TracedRun.load(Path(self.one_process)))
            made = [beside_one(of, alone) for of in made]
        elif len(made) == 2:
            made = beside_each_other(*made)
        return made[0] if len(made) == 1 else compared(*made)

    def _show(self, made: Any) -> None:
        from rich.console import Console

        from fivefold.introspect.text import show, show_comparison

        console = Console(markup=False, emoji=False)  # what traces tell is text
        if not console.is_terminal:
            console.width = max(console.width, 160)  # whole lines: for grep and for logs
        (show if made["kind"] == "run" else show_comparison)(printable(made), console)

    def _write(self, made: Mapping[str, Any]) -> None:
        """The page. A directory that cannot be written to is no error unless it was asked for."""
        from fivefold.introspect.page import html
        from fivefold.writing import opened_anew, reason_of

        name = "report.html" if made["kind"] == "run" else "compare.html"
        home = self.runs[-1] if self.runs[-1].is_dir() else self.runs[-1].parent
        path = Path(self.html) if self.html else home / name
        try:
            with opened_anew(path) as file:
                file.write(html(made))
        except OSError as problem:
            said = f"cannot write the page {path}: {reason_of(problem)}; choose another place with --html"
            if self.html:
                raise UsageError(said) from None
            sys.stderr.write(f"note: {said}\n")
            return
        sys.stderr.write(f"page: {path}\n")
