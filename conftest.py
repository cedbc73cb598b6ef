"""Every code block of the documentation is run as a test; how is told in tests/documents.py."""

from __future__ import annotations

from pathlib import Path

from documents import pytest_collect_file

__all__ = ["pytest_collect_file"]

# Runs pytest inside a test: tests/unit/test_nothing_left_behind.py. Must be named here, at the root.
pytest_plugins = ("pytester",)

# Sphinx runs its configuration itself. Helpers of the tests are imported by the tests: collected as
# well (for doctests), they would be loaded a second time under another name.
_HERE = Path(__file__).parent
collect_ignore = [
    "docs/conf.py",
    *(
        str(path.relative_to(_HERE))
        for path in (_HERE / "tests").rglob("*.py")
        if not path.name.startswith(("test_", "conftest"))
    ),
]
