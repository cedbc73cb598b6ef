"""Results as JSON, and as tables between the two markers of a README."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contender import leave_properly
from figures import FEWEST_ROUNDS

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


@dataclass(frozen=True)
class Page:
    """A page of a benchmark, in the folder `home`: a section for each kept part, in this order."""

    home: Path
    section: Callable[[dict[str, Any]], str]
    order: Sequence[str]
    name: str = "README.md"

    def publish(
        self, parts: Iterable[str], measured: Callable[[str], dict[str, Any]], folder: Path
    ) -> int:
        """Measure each part, show its section and keep it, see `keep`; the exit code."""
        begun = time.monotonic()
        with leave_properly():
            for part in parts:
                result = measured(part)
                print(f"\n{self.section(result)}\n", flush=True)
                keep(result, part, folder, self.home, self.renewed, page=self.name)
        print(f"all of it took {time.monotonic() - begun:.0f} s")
        return 0

    def renewed(self, text: str, folder: Path) -> str:
        """The text of the README with the figures that are kept in a folder."""
        results = kept(folder)
        sections = [self.section(results[name]) for name in self.order if name in results]
        return with_sections(text, sections)


def keep(
    result: dict[str, Any],
    name: str,
    folder: Path,
    home: Path,
    renewed: Callable[[str, Path], str],
    *,
    page: str = "README.md",
) -> None:
    """Write `name`.json; if `folder` is that of the published results in `home`, renew the page there.

    A result of too few rounds is not kept: it would replace one that means something. Counts, which are
    exact, have no rounds.
    """
    if result.get("rounds", FEWEST_ROUNDS) < FEWEST_ROUNDS:
        print(f"not kept: {result['rounds']} rounds are fewer than {FEWEST_ROUNDS}", flush=True)
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    if folder.resolve() == home / "results":
        readme = home / page
        readme.write_text(renewed(readme.read_text(), folder))


def kept(folder: Path) -> dict[str, dict[str, Any]]:
    """All results in a folder, by name."""
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def with_sections(text: str, sections: Sequence[str]) -> str:
    """The text of a README with these sections between its markers."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + "\n\n".join([BEGIN, *sections, END]) + after


def conditions(result: dict[str, Any]) -> str:
    """One line: on what, with what, when."""
    told = result["environment"]
    device = "" if told.get("device", "cpu") == "cpu" else f"{told['device']}, "
    words = [
        f"{device}{told['cpu']}, {told['cores']} cores",
        f"torch {told['torch']}, Python {told['python']}, Linux {told['kernel']}",
        f"commit {told['commit']}, {told['date']}",
    ]
    if "rounds" in result:
        repeated = told["disturbed_rounds"]
        again = f" and {repeated} more that others disturbed" if repeated else ""
        words.append(f"{result['rounds']} rounds{again}")
        if "used_by_others" in told:
            words.append(f"cores used by others meanwhile: {told['used_by_others']:.0%}")
    return "; ".join(words) + "."
