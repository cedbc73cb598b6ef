"""Nodes that fault tests run on, and what the run without faults ends with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fault_checks import KIND, Told, cluster, ended, run
from nodes import Nodes
from template import Template


@pytest.fixture(params=[KIND])
def nodes(template: Template) -> Iterator[Nodes]:
    """Four of them."""
    with cluster(4, template) as found:
        yield found


@pytest.fixture(scope="session")
def oracle(template: Template) -> list[Told]:
    """What every rank of four has without faults."""
    with cluster(4, template) as nodes:
        return ended(run(nodes))
