"""The runner of the documentation's code blocks runs them, and fails where they fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from documents import Command, commands, matches, options_before

RUNNER = Path(__file__).resolve().parents[1] / "documents.py"


@pytest.fixture(autouse=True)
def _modules_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(RUNNER.parent))


def run(pytester: pytest.Pytester, text: str, *more: str) -> tuple[dict[str, int], str]:
    runner = RUNNER.read_text().replace(
        "ROOT = Path(__file__).resolve().parent.parent", "ROOT = Path()"
    )
    pytester.makeconftest(runner.replace("path=str(ROOT)", "path='.'"))
    (pytester.path / "page.md").write_text(text)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "page.md", *more)
    return result.parseoutcomes(), result.stdout.str()


def test_commands_with_output_and_continuation() -> None:
    assert commands("$ echo a\na\n$ echo \\\n  b\n") == [
        Command("echo a", "a\n"),
        Command("echo \\\n  b", ""),
    ]


def test_console_blocks_begin_with_a_command() -> None:
    with pytest.raises(ValueError, match=r"begins with '\$ command', not with 'make'"):
        commands("make\n")


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a b\n", "a b\n\n", True),
        ("loss ...\ndone", "loss 0.3 (1.2 s)\nmore\ndone\n", True),
        ("loss ... s", "loss 0.3 min", False),
        ("a.c", "abc", False),
    ],
)
def test_shown_output_is_compared(shown: str, printed: str, same: bool) -> None:
    assert matches(shown, printed) is same


def test_unknown_options_are_refused() -> None:
    text = "<!-- test: files=a -->\n```python\n"
    with pytest.raises(ValueError, match="valid: file, exit, output, once"):
        options_before(text, text.index("```"))


@pytest.mark.long
def test_blocks_share_names_and_a_folder(pytester: pytest.Pytester) -> None:
    page = """
```python
from pathlib import Path
name = "world"
```
<!-- test: file=check.py -->
```python
print("ready")
raise SystemExit(3)
```
<!-- test: exit=3 output -->
```console
$ echo a...c
a...c
$ python check.py
rea...
```
```python
assert name == "world" and Path("check.py").exists()
```
"""
    found, told = run(pytester, page)
    assert found == {"passed": 4}, told


def test_what_documents_begin_with_alike_is_run_once(pytester: pytest.Pytester) -> None:
    begin = """
<!-- test: once -->
```console
$ echo made; mkdir made; ls made; echo x >> "$COUNTED"
made
$ ls | tee found
```
<!-- test: output -->
```console
$ ls
found
made
```
"""
    for name in ("page.md", "second.md"):
        (pytester.path / name).write_text(begin.replace("$COUNTED", str(pytester.path / "counted")))
    found, told = run(pytester, (pytester.path / "page.md").read_text(), "second.md")
    assert found == {"passed": 4}, told
    assert (pytester.path / "counted").read_text() == "x\n"


WRONG = (
    ("```python\nassert 1 == 2\n```", "assert 1 == 2"),
    ("```console\n$ echo first\n$ false\n```", "exit code 1 instead of 0"),
    ("<!-- test: exit=2 -->\n```console\n$ true\n```", "exit code 0 instead of 2"),
    ("<!-- test: output -->\n```console\n$ echo a\nb\n```", "the document shows otherwise"),
    ("```toml\n[layout]\ndata = 0\n```", "PlanError"),
    ("<!-- test: once -->\n```console\n$ false\n```", "exit code 1 instead of 0"),
)


def test_wrong_blocks_fail(pytester: pytest.Pytester) -> None:
    found, told = run(pytester, "\n\n".join(block for block, _ in WRONG))
    assert found == {"failed": len(WRONG)}
    assert [message for _, message in WRONG if message not in told] == []


def test_a_skipped_block_tells_why(pytester: pytest.Pytester) -> None:
    page = '<!-- skip: next "needs a cluster" -->\n```console\n$ false\n```\n'
    found, told = run(pytester, page)
    assert found == {"passed": 1, "skipped": 1}, told
