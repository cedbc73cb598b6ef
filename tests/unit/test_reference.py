"""The reference pages list what the code has and nothing else; links in the documents lead somewhere."""

from __future__ import annotations

import ast
import json
import re
import runpy
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from documents import commands, documents, options_before
from fivefold.cli import COMMANDS
from fivefold.errors import PlanError
from fivefold.launch.environment import FAMILIES
from fivefold.launch.variables import GIVEN, READ
from fivefold.plan import Plan, Provenance
from fivefold.recipes import models
from fivefold.trace import Phase
from fivefold.train import EpochReport

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
USER = Provenance("user", "test")
PUBLIC = ("fivefold", "fivefold.data", "fivefold.integrations", "fivefold.mesh", "fivefold.offload",
          "fivefold.parallel", "fivefold.recipes", "fivefold.recipes.models", "fivefold.trace",
          "fivefold.train", "fivefold.errors")  # fmt: skip


def text_of(page: str) -> str:
    return (REFERENCE / f"{page}.md").read_text()


def rows(page: str) -> dict[str, dict[str, str]]:
    """The rows of a page's tables by their first cell, each as column -> cell, code marks left out."""
    found: dict[str, dict[str, str]] = {}
    columns: list[str] = []
    for line in text_of(page).splitlines():
        if not line.startswith("|"):
            columns = []
            continue
        cells = [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]
        if not columns:
            columns = cells
        elif not cells[0].startswith("---"):
            assert cells[0] not in found, f"{cells[0]} is listed twice"
            found[cells[0]] = dict(zip(columns, cells, strict=True))
    return found


def plan_keys() -> dict[str, object]:
    """Every key of a plan and its type."""
    sections = [(f.name, type(getattr(Plan(), f.name))) for f in fields(Plan)]
    return {
        f"{section}.{key}": hint
        for section, kind in sections
        if section != "provenance"
        for key, hint in get_type_hints(kind).items()
    }


def test_every_key_of_the_plan_is_listed_with_its_default() -> None:
    listed = {key: row for key, row in rows("plan").items() if "default" in row}
    assert list(listed) == list(plan_keys())
    for key, row in listed.items():
        assert row["default"] == json.dumps(Plan().value(key)), key


def test_the_choices_of_the_plan_are_listed() -> None:
    for key, hint in plan_keys().items():
        if get_origin(hint) is Literal:
            listed = [json.loads(choice) for choice in rows("plan")[key]["choices"].split(", ")]
            assert set(listed) == set(get_args(hint)), key


def test_the_least_values_of_the_plan_are_listed() -> None:
    listed = {key: float(row["least"]) for key, row in rows("plan").items() if row.get("least")}
    for key, hint in plan_keys().items():
        if hint not in (int, float) or key.startswith(("layout.", "numerics.")):
            continue
        if key in listed:
            least = hint(listed[key])
            assert Plan().replace({key: least}, USER).value(key) == least
            with pytest.raises(PlanError, match="at least"):
                Plan().replace({key: hint(least - 1)}, USER)
        else:
            assert Plan().replace({key: hint(-1)}, USER).value(key) == -1


def test_the_kinds_of_provenance_are_listed() -> None:
    kinds = get_args(get_type_hints(Provenance)["kind"])
    assert [name for name, row in rows("plan").items() if "begins with" in row] == list(kinds)


def test_the_models_are_listed() -> None:
    told = rows("plan")["train.model"]["meaning"]
    assert told.partition(": ")[2].split(", ") == list(models.names())


def test_the_environment_variables_are_listed() -> None:
    listed = rows("environment")
    for variable in (*READ, *GIVEN):
        row = listed.pop(variable.name)
        expected = (variable.default, variable.meaning.replace("`", ""))
        assert (row["default"], row["meaning"]) == expected
    assert not [name for name, row in listed.items() if "meaning" in row]


def test_the_launchers_are_listed_in_their_order() -> None:
    listed = {name: row for name, row in rows("environment").items() if "rank" in row}
    assert list(listed) == [*(family.launcher for family in FAMILIES), "srun"]
    for family in FAMILIES:
        row = listed[family.launcher]
        named = (family.rank, family.world_size, family.local_rank)
        assert (row["rank"], row["world size"], row["local rank"]) == named
        assert row["local size"] == family.local_size or callable(family.local_size)


def test_the_figures_of_an_epoch_are_listed() -> None:
    listed = [name for name, row in rows("run-directory").items() if "unit" in row]
    assert listed == [field.name for field in fields(EpochReport)]
    phases = re.search(r"phases are (.*?)\. ", text_of("run-directory"), re.DOTALL)
    assert phases and set(re.findall(r"`(\w+)`", phases[1])) == {phase.value for phase in Phase}


def test_the_operations_that_tiles_know_are_listed() -> None:
    """By the script that writes the page."""
    written = runpy.run_path(str(ROOT / "docs" / "operations.py"))["page"]()
    assert text_of("operations") == written, "run: python docs/operations.py"


def test_the_help_of_every_command_is_shown() -> None:
    """The runner of the documents compares it with what the command prints."""
    text = text_of("command-line")
    shown = {
        command.line
        for block in re.finditer(r"```console\n(.*?)```", text, re.DOTALL)
        if "output" in options_before(text, block.start())
        for command in commands(block[1])
    }
    assert {"fivefold --help", *(f"fivefold {name} --help" for name in COMMANDS)} <= shown


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_described(module: str) -> None:
    described: set[str] = set()
    home = ""
    for word, name in re.findall(r"^\.\. (\w+):: ([\w.]+)", text_of("api"), re.MULTILINE):
        if word == "currentmodule":
            home = name
        described.add(name if "." in name else f"{home}.{name}")
    names = {name for name in import_module(module).__all__ if not name.startswith("__")}
    missing = {n for n in names if not {f"{module}.{n}", f"fivefold.{n}"} & described}
    assert not missing


def anchors(path: Path) -> set[str]:
    """What the headings of a page are called in links."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    prose = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if "://" not in link:
            name, _, anchor = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_keys_that_troubleshooting_advises_are_in_the_plan() -> None:
    text = (ROOT / "docs" / "how-to" / "troubleshooting.md").read_text()
    sections = "|".join({key.partition(".")[0] for key in plan_keys()})
    advised = set(re.findall(rf"`((?:{sections})\.\w+)(?![\w.(])", text)) - {"train.py"}
    assert len(advised) > 5 and advised <= plan_keys().keys()


def sentences() -> list[str]:
    """Every text of the sources but docstrings, with three dots where it puts in something."""
    found: list[str] = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if node in docstrings:
                continue
            if isinstance(node, ast.JoinedStr):
                parts = [p.value if isinstance(p, ast.Constant) else "..." for p in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def quoted() -> list[str]:
    """What the first cells of the troubleshooting tables quote, from three words on."""
    text = (ROOT / "docs" / "how-to" / "troubleshooting.md").read_text()
    cells = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")]
    return [q for cell in cells for q in re.findall(r"`([^`]+)`", cell) if q.count(" ") >= 2]


def test_sentences_that_troubleshooting_quotes_are_said() -> None:
    said = sentences()
    assert len(quoted()) > 40
    for quote in quoted():
        pattern = re.compile(".*?".join(re.escape(part) for part in quote.split("...")), re.DOTALL)
        assert any(pattern.search(text) for text in said), f"nothing in the sources says: {quote}"


def test_the_functions_that_a_sample_passes_are_where_the_page_says() -> None:
    text = (ROOT / "docs" / "explanation" / "one-sample.md").read_text()
    names = sorted(set(re.findall(r"`(fivefold(?:\.\w+)+)`", text)))
    assert len(names) > 30
    for name in names:
        module = next(n for n in _prefixes(name) if find_spec(n) is not None)
        thing: object = import_module(module)
        for part in name.removeprefix(module).strip(".").split(".") if name != module else []:
            thing = getattr(thing, part)
        assert getattr(thing, "__module__", module) == module, name


def _prefixes(name: str) -> Iterator[str]:
    """The modules that a dotted name may lie in, the deepest first."""
    while name:
        with suppress(ModuleNotFoundError):
            find_spec(name)
            yield name
        name = name.rpartition(".")[0]
