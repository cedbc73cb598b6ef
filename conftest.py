"""Every code block of the documentation is run as a test; how is told in tests/documents.py."""

from __future__ import annotations

from documents import pytest_collect_file

__all__ = ["pytest_collect_file"]

# Sphinx runs this file itself; it is no module of ours.
collect_ignore = ["docs/conf.py"]
