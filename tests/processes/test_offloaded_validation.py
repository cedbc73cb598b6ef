"""Validation on helpers: the same bits as without them, whatever becomes of them."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helping import Helpers, Nursery, is_running, unix_addresses
from waiting import awaited

TRAIN = "validation_run:train"


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    started = Nursery("validation_run", "torch._dynamo", "fivefold.helpers.arena_link")
    yield started
    started.close()


class Job:
    """A run of `validation_run.train` with helpers."""

    def __init__(self, nursery: Nursery, folder: Path, helpers: int, **options: Any) -> None:
        self.out, self._nursery = folder / "out", nursery
        self.options = {"out": str(self.out), **options}
        addresses = unix_addresses(folder, helpers)
        self.helpers = Helpers(nursery, addresses, TRAIN, **self.options)
        self.pids: list[int] = []

    def start(self, *, wait: int | None = None) -> Job:
        """Start the trainers; every epoch may begin unless `hold` says otherwise."""
        wait = len(self.helpers.addresses) if wait is None else wait
        environ = self.helpers.environ if self.helpers.addresses else {}
        for rank in range(self.options.get("ranks", 1)):
            more = {**self.options, "rank": rank, "wait": wait}
            self.pids.append(self._nursery.start(TRAIN, environ, **more))
        return self

    def let(self, *epochs: int) -> Job:
        """Let epochs begin."""
        for epoch in epochs:
            Path(f"{self.out}.{epoch}").touch()
        return self

    def begun(self) -> None:
        """Wait until training begins."""
        awaited(Path(f"{self.out}.begun").exists, "the beginning")

    def fields(self) -> dict[str, Any]:
        """What the run told, when it is over."""
        awaited(lambda: not any(map(is_running, self.pids)), "the end of the trainers", 60)
        fields = json.loads(self.out.read_text())
        self._nursery.end_all()
        return fields


def sums(fields: dict[str, Any]) -> list[Any]:
    return [(r["epoch"], r["step"], r["sums"]) for r in fields["results"]]


def check(fields: dict[str, Any], *, epochs: int = 3, delay: int = 1) -> None:
    """Every result, once, in order, when it was due, with the bits of plain PyTorch."""
    results = fields["results"]
    assert [r["epoch"] for r in results] == list(range(epochs))
    assert [r["at"] for r in results] == [min(e + delay, epochs) for e in range(epochs)]
    for result in results:
        assert result["sums"] == result["plain"]


@pytest.fixture(scope="module")
def blocking(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run without helpers."""
    job = Job(nursery, tmp_path_factory.mktemp("blocking"), 0).start().let(0, 1, 2)
    fields = job.fields()
    check(fields)
    return fields


@pytest.mark.long
@pytest.mark.parametrize(("helpers", "delay"), [(1, 0), (2, 1), (1, 2)])
def test_results_and_decisions_are_those_of_a_run_without_helpers(
    nursery: Nursery, tmp_path: Path, helpers: int, delay: int
) -> None:
    (tmp_path / "alone").mkdir()
    alone = Job(nursery, tmp_path / "alone", 0, delay=delay).start().let(0, 1, 2).fields()
    fields = Job(nursery, tmp_path, helpers, delay=delay).start().let(0, 1, 2).fields()
    check(alone, delay=delay)
    check(fields, delay=delay)
    assert sums(fields) == sums(alone)
    assert [r["decided"] for r in fields["results"]] == [r["decided"] for r in alone["results"]]
    assert fields["final"] == alone["final"], "learning rates were lowered at the same moments"
    assert sum(r["by_helpers"] for r in fields["results"]) > 0
    assert fields["warnings"] == []


def test_a_helper_computes_with_the_threads_of_the_trainer(
    nursery: Nursery, tmp_path: Path
) -> None:
    fields = Job(nursery, tmp_path, 1, threads=3).start().let(0, 1, 2).fields()
    check(fields)
    assert sum(r["by_helpers"] for r in fields["results"]) > 0


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_helpers_may_die_and_come_back_at_any_moment(
    nursery: Nursery, tmp_path: Path, blocking: dict[str, Any], seed: int
) -> None:
    moments = random.Random(seed)
    job = Job(nursery, tmp_path, 2, slow_s=0.005).start().let(0, 1, 2)
    job.begun()
    while is_running(job.pids[0]):
        time.sleep(moments.uniform(0.0, 0.5))
        job.helpers.restart(moments.randrange(2))
    fields = job.fields()
    check(fields)
    assert sums(fields) == sums(blocking)


@pytest.mark.long
def test_when_all_have_died_the_trainer_evaluates_what_was_the_net_then(
    nursery: Nursery, tmp_path: Path, blocking: dict[str, Any]
) -> None:
    """The snapshot of the first epoch waits until the second is trained; nobody is left then."""
    job = Job(nursery, tmp_path, 2, slow_s=0.02).start().let(0)
    job.begun()
    time.sleep(0.3)  # 61 samples of 20 ms take two helpers longer
    for number in range(2):
        job.helpers.signal(number, signal.SIGKILL)
    fields = job.let(1, 2).fields()
    check(fields)
    assert sums(fields) == sums(blocking)
    assert [r["by_helpers"] for r in fields["results"]][1:] == [0, 0]
    assert fields["final"] == blocking["final"], "it went on training with its own weights"
    assert all("is lost" in text for text in fields["warnings"])


def test_a_helper_that_comes_late_gets_the_weights_then(
    nursery: Nursery, tmp_path: Path, blocking: dict[str, Any]
) -> None:
    job = Job(nursery, tmp_path, 2, evaluated_before=2).start(wait=0)
    for number in range(2):
        job.helpers.signal(number, signal.SIGKILL)
    job.let(0, 1)
    job.helpers.restart(1)
    fields = job.let(2).fields()
    assert sums(fields) == sums(blocking)
    assert fields["results"][1]["by_helpers"] == 8, "while the third epoch waited"


def test_a_helper_that_stalls_delays_nothing_for_long(nursery: Nursery, tmp_path: Path) -> None:
    job = Job(nursery, tmp_path, 2, delay=0).start()
    job.begun()
    job.helpers.signal(0, signal.SIGSTOP)
    check(job.let(0, 1, 2).fields(), delay=0)


def test_what_helpers_fail_at_the_trainer_evaluates(
    nursery: Nursery, tmp_path: Path, blocking: dict[str, Any]
) -> None:
    fields = Job(nursery, tmp_path, 1, bad=20).start().let(0, 1, 2).fields()
    assert sums(fields) == sums(blocking)
    assert any("could not evaluate test batches" in text for text in fields["warnings"])
    assert any("no such image here" in text for text in fields["warnings"])


def test_another_net_is_refused(nursery: Nursery, tmp_path: Path, blocking: dict[str, Any]) -> None:
    job = Job(nursery, tmp_path, 1, width=256)
    job.options.update(width=512, warned="cannot help")
    fields = job.start(wait=0).let(0, 1, 2).fields()
    assert sums(fields) == sums(blocking)
    assert [r["by_helpers"] for r in fields["results"]] == [0, 0, 0]
    assert any("validator is another one: tensors is" in text for text in fields["warnings"])


@pytest.mark.long(every=8)
@pytest.mark.parametrize("layout", [{"data": 2}, {"pipe": 2}, {"height": 2}], ids=str)
@pytest.mark.parametrize("die", [False, True])
def test_helpers_of_several_ranks(
    nursery: Nursery, tmp_path: Path, layout: dict[str, int], *, die: bool
) -> None:
    """A helper evaluates whole batches, and so do replicas; stages and tiles round otherwise."""
    options: dict[str, Any] = {"layout": json.dumps(layout), "ranks": 2, "slow_s": 0.01}
    job = Job(nursery, tmp_path, 1, **options).start().let(0)
    job.begun()
    if die:
        time.sleep(0.4)
        job.helpers.signal(0, signal.SIGKILL)
    fields = job.let(1, 2).fields()
    exact = not die or "data" in layout
    if exact:
        check(fields)
    for result in fields["results"]:
        found, plain = ([float.fromhex(x) for x in result[k]] for k in ("sums", "plain"))
        assert found == pytest.approx(plain, rel=1e-5)
    if not die and "data" not in layout:  # replicas may take all of them while they wait
        assert all(r["by_helpers"] == 8 for r in fields["results"])


def fitted(nursery: Nursery, folder: Path, helpers: int, **options: Any) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of the newest run of `fit` in a folder."""
    folder.mkdir(exist_ok=True)
    function, fields = "validation_run:fit_until_stopped", {"out": str(folder / "out"), **options}
    there = Helpers(nursery, unix_addresses(folder, helpers), function, **fields)
    environ = there.environ if helpers else {}
    pid = nursery.start(function, environ, **fields, wait=helpers)
    awaited(lambda: not is_running(pid), "the end of the trainer", 60)
    nursery.end_all()
    metrics = max((folder / "out").iterdir()) / "metrics.jsonl"
    return (
        [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    )


@pytest.mark.long
def test_fit_reports_the_same_with_helpers(nursery: Nursery, tmp_path: Path) -> None:
    timed = {"images_per_s", "epoch_s", "phases_s"}
    plain, helped = (
        [{k: v for k, v in line.items() if k not in timed} for line in lines]
        for lines in (fitted(nursery, tmp_path / str(n), n, after=99) for n in (0, 1))
    )
    assert [line["epoch"] for line in plain] == [1, 2, 3]
    assert helped == plain


def test_a_run_that_is_stopped_reports_the_epochs_that_are_trained(
    nursery: Nursery, tmp_path: Path
) -> None:
    """The result of the first epoch would have been due at the end of the second."""
    fields = fitted(nursery, tmp_path / "run", 1, after=6)
    assert (tmp_path / "run" / "out.code").read_text() == "75"
    assert [(line["epoch"], line["step"]) for line in fields] == [(1, 4)]
    assert 0.0 <= fields[0]["accuracy"] <= 1.0


VALIDATED = ("epoch", "step", "test_loss", "accuracy")


@pytest.fixture(scope="module")
def through(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What a run reports that nobody kills."""
    return fitted(nursery, tmp_path_factory.mktemp("through") / "run", 0, after=99)


@pytest.mark.long
@pytest.mark.parametrize(("first", "then", "after"), [(0, 0, 4), (1, 1, 6), (1, 0, 8), (1, 1, 12)])
def test_a_run_that_was_killed_and_goes_on_lacks_no_validation(
    nursery: Nursery, tmp_path: Path, through: list[Any], *, first: int, then: int, after: int
) -> None:
    """After steps 4, 8 and 12 a save holds an epoch that is trained and was not submitted; with helpers, the
    one before is under way.
    """
    folder = tmp_path / "run"
    kill = {"after": after, "what": signal.SIGKILL, "every": 1}
    fields = fitted(nursery, folder, first, **kill)
    fields += fitted(nursery, folder, then, after=99)
    found, wanted = (
        [[line[name] for name in VALIDATED] for line in lines] for lines in (fields, through)
    )
    assert found == wanted
