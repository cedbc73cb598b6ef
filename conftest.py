"""Every code block of the documentation is run as a test; how is told in tests/documents.py."""

from __future__ import annotations

import os
import zlib
from collections import Counter
from pathlib import Path

import pytest

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


@pytest.hookimpl(tryfirst=True)  # pytest's own looks at the markers afterwards
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep some cases of a long test in the default suite, and of the pages README's blocks only."""
    seen: Counter[str] = Counter()
    for item in items:
        if item.nodeid.startswith("docs/"):
            item.add_marker(pytest.mark.long)
        for mark in [m for m in item.own_markers if m.name == "long" and m.kwargs]:
            test = item.nodeid.partition("[")[0]
            if seen[test] % mark.kwargs["every"] == 0:
                item.own_markers.remove(mark)
            seen[test] += 1
    _leave_parts_out(config, items)


def _leave_parts_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With LONG_PART=1/2 in the environment, only the second of two halves of the long tests is left."""
    number, _, parts = os.environ.get("LONG_PART", "0/1").partition("/")

    def part(item: pytest.Item) -> int:
        # The blocks of a page go on from each other.
        page, _, _ = item.nodeid.partition("::")
        name = page if page.endswith(".md") else item.nodeid
        return zlib.crc32(name.encode()) % int(parts)

    out = [item for item in items if item.get_closest_marker("long") and part(item) != int(number)]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in set(out)]
