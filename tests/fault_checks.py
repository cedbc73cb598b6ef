"""What fault tests do with the run of fault_run.py: start it, break it, and compare its end."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from fivefold.checkpoint.files import CRASH_POINTS
from nodes import Job, Nodes, refusal
from template import Template

__all__ = [
    "BEFORE", "CRASH_POINTS", "KIND", "STEPS", "Told", "apart", "broken", "cluster", "crash_of", "ended",
    "remove_flushed", "run", "same", "says", "two_die",
]  # fmt: skip

SCRIPT = str(Path(__file__).resolve().parent / "fault_run.py")
STEPS, EVERY = 12, 3
KIND = "namespaces" if not refusal() else "directories-only"
"""what nodes are here, in the names of tests: the second is weaker, see tests/nodes.py"""
apart = pytest.mark.skipif(bool(refusal()), reason=f"no nodes of their own: {refusal()}")
BEFORE = CRASH_POINTS[:7]
"""moments of a save; the last two are of a recovery"""
AT = {
    "staged": 2, "writing": 6, "before-fsync": 6, "before-rename": 6, "after-rename": 6, "encoding": 4,
}  # fmt: skip
"""which passing of a point is in the second save, of which each commits four files and more, and encodes
twice; flushing is passed the second time after the first save is protected"""


def crash_of(point: str) -> str:
    """In the second save, or at the first chance of a recovery; the node goes with the process."""
    return f"{point}:{AT.get(point, 2) if point in BEFORE else 1}@pid1"


@dataclass(frozen=True)
class Told:
    """What a rank printed."""

    text: str

    @property
    def start(self) -> int:
        """The step that it went on from; 0 from the beginning."""
        return int(self._found(r"^from (\d+)").group(1))

    @property
    def loaded(self) -> str:
        """Digest of the state that it began with."""
        return self._found(r"^from \d+ (\w+)").group(1)

    @property
    def steps(self) -> dict[int, str]:
        """Samples and digest after every step."""
        return {
            int(n): rest for n, rest in re.findall(r"^step (\d+) (.*)$", self.text, re.MULTILINE)
        }

    @property
    def final(self) -> str:
        """Digests of all that training depends on."""
        return self._found(r"^final (.*)$").group(1)

    def _found(self, pattern: str) -> re.Match[str]:
        found = re.search(pattern, self.text, re.MULTILINE)
        assert found, self.text
        return found


def cluster(count: int, template: Template, disk_bytes: int = 64 << 20) -> Nodes:
    return Nodes(count, disk_bytes, apart=not refusal(), template=template)


def run(
    nodes: Nodes,
    *options: str,
    on: Sequence[int] | None = None,
    crash: str = "",
    victim: int | Collection[int] = (),
    steps: int = STEPS,
    before: Mapping[int, Sequence[str]] | None = None,
) -> Job:
    """Start the run; with `crash`, the node of `victim` dies there, or several do."""
    victims = _several(victim)
    argv = [sys.executable, SCRIPT, f"--steps={steps}", f"--every={EVERY}", *options]

    def extra(node: int) -> dict[str, str]:
        names = {} if nodes.apart else {"FAULT_NODE": nodes.host(node)}
        return names | ({"FIVEFOLD_CRASH_AT": crash} if node in victims else {})

    return nodes.job(argv, on=on, env=extra, before=before)


def ended(job: Job, limit_s: float = 90.0) -> list[Told]:
    return [Told(text) for text in job.succeed(limit_s)]


def broken(job: Job, victim: int | Collection[int], nodes: Nodes) -> None:
    """Wait until the run has failed because of a node, which is then replaced by an empty one.

    Of several, the run may end by the first, before the others die where they should: they are lost then.
    """
    victims = _several(victim)
    job.fail(90.0)
    if nodes.apart:
        assert not all(map(nodes.alive, victims)), job.told()
    for node in victims:
        nodes.replace(node)


def _several(victim: int | Collection[int]) -> Collection[int]:
    return (victim,) if isinstance(victim, int) else victim


def same(found: Sequence[Told], oracle: Sequence[Told]) -> None:
    """All bits of the end, and every step on the way to it."""
    for one, without in zip(found, oracle, strict=True):
        for step, told in one.steps.items():
            assert told == without.steps[step], f"step {step}"
        assert one.final == without.final


def two_die(point: str, pair: Sequence[int], nodes: Nodes, oracle: Sequence[Told]) -> None:
    """Two nodes die at a moment of a save, or of the recovery after it; the others have what is needed."""
    options = ("--scheme=rs", "--flush-every=1")
    if point not in BEFORE:
        broken(run(nodes, *options, crash="staged:3@pid1", victim=pair), pair, nodes)
        remove_flushed(nodes)
    broken(run(nodes, *options, crash=crash_of(point), victim=pair), pair, nodes)
    remove_flushed(nodes)
    found = ended(run(nodes, *options))
    assert {one.start for one in found} <= ({3, 6} if point in BEFORE else {6})
    same(found, oracle)


def remove_flushed(nodes: Nodes) -> None:
    """Leave only what is on the nodes."""
    for path in (nodes.shared / "run").glob("step-*"):
        shutil.rmtree(path)


def says(job: Job, word: str, limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not all(word in rank.text for rank in job.ranks):
        assert time.monotonic() < end, job.told()
        assert not any(rank.code for rank in job.ranks), job.told()
        time.sleep(0.01)
