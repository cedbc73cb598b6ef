"""Helpers of a trainer that is the test itself; torch is imported only by tests that ask for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helping import Helpers, Nursery
from template import Template


@pytest.fixture(scope="session")
def template() -> Iterator[Template]:
    """What ranks of any test are forked from; it imports torch when the first needs it."""
    with Template() as made:
        yield made


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    started = Nursery()
    yield started
    started.close()


@pytest.fixture
def start(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Helpers]]:
    """Start helpers of a stream and name them to the trainer, which is this process."""
    from offloading import starting

    with starting(nursery, tmp_path, monkeypatch) as started:
        yield started
