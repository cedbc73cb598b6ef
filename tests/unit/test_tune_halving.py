"""Which of several ways is the fastest, from trials."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.errors import FivefoldError
from fivefold.plan import Plan, Provenance
from fivefold.tune.halving import Trial, compared, halved
from fivefold.tune.instances import CHANGES, Choice, Found, Row, choices, told
from fivefold.tune.kept import Kept


def trial(name: str, *rates: float) -> Trial:
    """Whose rates come round again."""
    asked = iter(range(1000))
    return Trial(name, lambda: rates[next(asked) % len(rates)])


def failing() -> float:
    raise FivefoldError("no memory\nkilled")


def test_the_fastest_is_found_though_single_trials_mislead() -> None:
    trials = [trial("a", 9, 1, 1), trial("b", 5, 6, 5), trial("c", 4, 4, 8), trial("d", 3)]
    gone: list[str] = []
    assert halved(trials, 60, lambda one: gone.append(one.name)).name == "b"
    assert sorted(gone) == ["a", "c", "d"]
    assert len(trials[1].rates) == 6 and len(trials[3].rates) == 3  # the slower half has gone


def test_who_fails_is_out_and_says_why() -> None:
    trials = [Trial("broken", failing), trial("slow", 1)]
    assert halved(trials, 60).name == "slow"
    assert (trials[0].problem, trials[0].rate) == ("killed", 0.0)


def test_it_ends_when_time_is_over() -> None:
    trials = [trial(str(number), number) for number in range(1, 9)]
    assert halved(trials, -1).name == "8"
    assert {len(one.rates) for one in trials} == {3}


def test_what_is_compared_was_measured_in_turn() -> None:
    assert compared(trial("a", 2, 4), trial("b", 1, 2), 4) == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("cores", "batch", "counts"), [(1, 9, {1}), (6, 99, {1, 2, 4, 6}), (8, 3, {1, 2})]
)
def test_choices_use_no_more_cores_than_there_are(cores: int, batch: int, counts: set[int]) -> None:
    every = list(choices(cores, batch))
    assert str(every[0]) == f"1 x {cores}"
    assert {choice.processes for choice in every} == counts
    assert all(choice.processes * choice.threads <= cores for choice in every)
    assert len(set(every)) == len(every)


@pytest.mark.parametrize("changes", [(), *((change,) for change in CHANGES), (*CHANGES,)])
def test_a_choice_becomes_a_plan_that_says_why(tmp_path: Path, changes: tuple[str, ...]) -> None:
    choice = Choice(4, 2, True, 1, changes)
    choice.plan(Plan(), Provenance("tuned", "9 samples/s")).save(tmp_path / "plan.toml")
    plan = Plan.load(tmp_path / "plan.toml")
    assert (plan.layout.data, plan.instances.per_device, plan.instances.threads) == (4, 4, 2)
    assert plan.origin("instances.threads").reason == "9 samples/s"
    assert plan.train.batch_size == (256 if "batch" in changes else 128)
    assert (plan.parallel.batch_norm == "replica") == ("replica" in changes)
    assert (plan.numerics.precision == "bfloat16") == ("bfloat16" in changes)
    assert (plan.numerics.memory_format == "channels_last") == ("channels_last" in changes)
    assert plan.parallel.compile == ("compile" in changes)


def test_results_are_kept_for_the_same_question_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    best = Choice(2, 1, True, changes=("batch",))
    found = Found(best, [Row(best, 3.0, 6), Row(Choice(), 2.0, 6, "late")], 1.5, [1.4, 1.6])
    kept = Kept(model="a", batch=3)
    assert kept.read() is None
    kept.write(found.record())
    assert Found.of(Kept(batch=3, model="a").read()) == found
    assert Kept(model="a", batch=4).read() is None
    assert told(found) == [
        "chosen: 2 x 1, bound, twice the batch: 3.0 samples/s",
        "gain over one process: predicted 1.50, measured again 1.50 (1.40 to 1.60)",
    ]
    kept.path.write_text("{")
    assert kept.read() is None
