"""How `fivefold train` makes its plan: which of several wishes wins, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold import recipes
from fivefold.cli.train import Train, resolve
from fivefold.errors import PlanError, UsageError
from fivefold.plan import Layout, Plan
from fivefold.recipes import models

DIGITS = recipes.get("digits")
RANK = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


def resolved(*words: str, **environ: str) -> Plan:
    return resolve(Train.parse(["digits", *words]), DIGITS, environ)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text("[train]\nepochs = 7\nmomentum = 0.5\n[comm]\ntimeout_s = 70\n")
    return path


def told(plan: Plan, key: str) -> tuple[object, str]:
    section, _, name = key.partition(".")
    return getattr(getattr(plan, section), name), str(plan.origin(key))


def test_the_recipe_comes_before_the_default():
    assert told(resolved(), "train.epochs") == (15, "recipe: digits")
    assert told(resolved(), "train.momentum") == (0.9, "default")


def test_the_plan_file_comes_before_the_recipe(file):
    plan = resolved("--plan", str(file))
    assert told(plan, "train.epochs") == (7, f"user: {file}")
    assert told(plan, "train.batch_size") == (128, "recipe: digits")
    assert resolved(FIVEFOLD_PLAN=str(file)) == plan


def test_the_environment_comes_before_the_plan_file(file):
    plan = resolved("--plan", str(file), FIVEFOLD_TIMEOUT_S="30")
    assert told(plan, "comm.timeout_s") == (30.0, "user: FIVEFOLD_TIMEOUT_S")
    assert told(plan, "train.momentum") == (0.5, f"user: {file}")


def test_arguments_come_before_everything(file):
    plan = resolved(
        "--plan", str(file), "--epochs", "3", "--model", "resnet56", "--batch-size", "64",
        "--set", "comm.timeout_s=5", "--set", "numerics.seed=4", FIVEFOLD_TIMEOUT_S="30",
    )  # fmt: skip
    assert told(plan, "train.epochs") == (3, "user: --epochs")
    assert told(plan, "train.model") == ("resnet56", "user: --model")
    assert told(plan, "train.batch_size") == (64, "user: --batch-size")
    assert told(plan, "comm.timeout_s") == (5.0, "user: --set")
    assert told(plan, "numerics.seed") == (4, "user: --set")


def test_the_plan_of_an_earlier_run_repeats_it(tmp_path):
    first = resolved("-n", "3", "--set", "train.momentum=0.8")
    first.save(tmp_path / "plan.toml")
    again = resolved("--plan", str(tmp_path / "plan.toml"))
    assert again == first
    assert again.origin("train.momentum") == first.origin("train.momentum")


def test_processes_fill_the_data_axis():
    assert told(resolved(), "layout.data") == (1, "default")
    assert told(resolved("-n", "3"), "layout.data") == (3, "user: -n")
    assert told(resolved(**RANK), "layout.data") == (2, "user: processes started by torchrun")
    assert told(resolved("-n", "2", **RANK), "layout.data") == (2, "user: -n")


def test_photos_are_computed_in_tiles_unless_a_layout_is_chosen():
    photos = recipes.get("photos")
    plan = resolve(Train.parse(["photos", "-n", "2"]), photos, {})
    assert (plan.layout, str(plan.origin("layout.width"))) == (Layout(width=2), "user: -n")
    chosen = ["photos", "-n", "2", "--set", "layout.data=2"]
    assert resolve(Train.parse(chosen), photos, {}).layout == Layout(data=2)
    assert resolve(Train.parse(["photos"]), photos, {}).layout == Layout()


def test_a_chosen_layout_says_how_many_processes(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text("[layout]\ndata = 2\nheight = 2\n")
    assert resolved("--plan", str(path)).layout.size == 4
    with pytest.raises(PlanError, match=r"data=2,height=2 \(user: .*\) needs 4 processes, not 3"):
        resolved("--plan", str(path), "-n", "3")


@pytest.mark.parametrize(
    ("words", "environ", "message"),
    [
        (["-n", "0"], {}, "-n 0: at least 1 process is needed"),
        (["-n", "4"], RANK, "-n 4, but torchrun started 2 processes; leave -n out"),
        (["--epochs", "0"], {}, "train.epochs = 0: must be at least 1"),
        (["--set", "train.epoch=3"], {}, "unknown key 'epoch'.* did you mean 'epochs'"),
        (["--set", "numerics.precision=fp8"], {}, "'fp8' is not a choice"),
        (["--set", "epochs"], {}, "'epochs' is not KEY=VALUE"),
        (["--plan", "nowhere.toml"], {}, "cannot read the plan nowhere.toml"),
        ([], {"FIVEFOLD_TIMEOUT_S": "soon"}, "FIVEFOLD_TIMEOUT_S=soon"),
    ],
)
def test_what_cannot_be_is_refused(words, environ, message):
    with pytest.raises(UsageError, match=message):
        resolved(*words, **environ)


def test_help_names_every_recipe_and_model(capsys):
    with pytest.raises(SystemExit):
        Train.parse(["--help"])
    text = capsys.readouterr().out
    assert "fivefold train digits -n 2" in text
    assert [name for name in (*recipes.names(), *models.names()) if name not in text] == []
