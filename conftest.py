"""Every code block of the documentation is run as a test; how is told in tests/documents.py."""

from __future__ import annotations

from documents import pytest_collect_file

__all__ = ["pytest_collect_file"]

# Runs pytest inside a test: tests/unit/test_nothing_left_behind.py. Must be named here, at the root.
pytest_plugins = ("pytester",)

# Sphinx runs this file itself; it is no module of ours.
collect_ignore = ["docs/conf.py"]
