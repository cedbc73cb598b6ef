"""The page on notebooks, run as the notebook that it describes, in a kernel of Jupyter."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from commands import CLEAN
from documents import commands, matches, options_before

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "notebooks.md"


def cells() -> list[tuple[str, str | None]]:
    """What is typed into each cell, and what the page shows of its output."""
    text, found = PAGE.read_text(), list[tuple[str, str | None]]()
    for block in re.finditer(r"```(python|console)\n(.*?)```", text, re.DOTALL):
        options = options_before(text, block.start())
        if block[1] == "console":
            shown = "output" in options
            found += [(f"!{c.line}", c.shown if shown else None) for c in commands(block[2])]
        elif name := options.get("file"):
            found.append((f"%%writefile {name}\n{block[2]}", None))
        else:
            found.append((block[2], None))
    return found


# Of jupyter_client, about the loopback interface; and its sockets, left to the collector.
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_the_page_runs_as_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ.keys() - CLEAN.keys():
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{CLEAN['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source, _ in cells()]
    )
    folder = {"metadata": {"path": str(tmp_path)}}
    client = NotebookClient(notebook, timeout=100, kernel_name="python3", resources=folder)
    client.execute()  # raises what a cell has raised
    assert any(shown for _, shown in cells())
    for (source, shown), cell in zip(cells(), notebook.cells, strict=True):
        if shown is not None:
            printed = "".join(output.get("text", "") for output in cell.outputs)
            assert matches(shown, printed), f"{source}\n{printed}"
