"""`fivefold report`: where the time of a run went. Reads files only, and needs no torch."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

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


@dataclass(frozen=True)
class Report:
    """Tell where the time of a run went, which rank is slow, and what to do about it.

    RUN is a directory that `fivefold train` or `fivefold run --trace` has made, or the folder with its trace
    files; it may still be running. Two of them are compared. A page with everything goes to RUN/report.html.

    Example: fivefold report runs/digits-001
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, _option("RUN...")]
    """one run, or two"""
    json: _Flag = False
    """print everything as JSON instead; docs/reference/report-json.md says what it holds"""
    html: Annotated[str, _option("FILE")] = ""
    """where the page goes; none: nowhere. Default: report.html in RUN, compare.html in the second RUN"""

    def run(self) -> int:
        """Read, judge, print."""
        from fivefold.introspect.run import TracedRun

        if not 1 <= len(self.runs) <= 2:
            count = len(self.runs) or "no"
            raise UsageError(f"{count} runs given: name one to look at, or two to compare")
        made = self._made([TracedRun.load(path) for path in self.runs])
        if self.json:
            json.dump(made, sys.stdout, allow_nan=False, ensure_ascii=False)
            sys.stdout.write("\n")
        else:
            self._show(made)
        if self.html != "none":
            self._write(made)
        return 0

    def _made(self, runs: list[TracedRun]) -> Any:
        from fivefold.introspect.compare import compare
        from fivefold.introspect.document import document

        return document(runs[0]) if len(runs) == 1 else compare(*runs)

    def _show(self, made: Any) -> None:
        from rich.console import Console

        from fivefold.introspect.text import show, show_comparison

        console = Console()
        if not console.is_terminal:
            console.width = max(console.width, 160)  # whole lines: for grep and for logs
        (show if made["kind"] == "run" else show_comparison)(made, console)

    def _write(self, made: Mapping[str, Any]) -> None:
        """The page. A directory that cannot be written to is no error unless it was asked for."""
        from fivefold.introspect.page import html

        name = "report.html" if made["kind"] == "run" else "compare.html"
        home = self.runs[-1] if self.runs[-1].is_dir() else self.runs[-1].parent
        path = Path(self.html) if self.html else home / name
        partial = path.with_name(f".{path.name}.partial")
        try:
            partial.write_text(html(made), encoding="utf-8")
            partial.replace(path)
        except OSError as problem:
            partial.unlink(missing_ok=True)
            reason = problem.strerror or str(problem)
            said = f"cannot write the page {path}: {reason}; choose another place with --html"
            if self.html:
                raise UsageError(said) from None
            sys.stderr.write(f"note: {said}\n")
            return
        sys.stderr.write(f"page: {path}\n")
