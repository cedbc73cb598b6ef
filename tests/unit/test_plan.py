import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.errors import PlanError
from fivefold.plan import AXES, Layout, Loader, Plan, Provenance, Train, parse_setting

sizes = st.integers(1, 9)
layouts = st.builds(Layout, data=sizes, pipe=sizes, depth=sizes, height=sizes, width=sizes)


def test_axes_are_the_five_and_their_order_is_the_rank_order() -> None:
    assert AXES == ("data", "pipe", "depth", "height", "width")
    assert [field.name for field in dataclasses.fields(Layout)] == list(AXES)


@given(layouts)
def test_a_layout_prints_as_what_it_parses_from(layout: Layout) -> None:
    assert Layout.parse(str(layout)) == layout
    assert layout.size == layout.data * layout.pipe * layout.tiles


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dat=2", "did you mean 'data'"),
        ("rows=2", "Valid: data, pipe, depth, height, width".lower()),
        ("data=0", "at least 1"),
        ("data=-1", "AXIS=NUMBER"),
        ("data=two", "AXIS=NUMBER"),
        ("data", "AXIS=NUMBER"),
        ("data=2,data=3", "named twice"),
    ],
)
def test_a_wrong_layout_says_what_is_valid(text: str, says: str) -> None:
    with pytest.raises(PlanError) as error:
        Layout.parse(text)
    assert says.lower() in str(error.value).lower()


@pytest.mark.parametrize("size", [0, -1, 1.5, "2", True, None])
def test_an_axis_has_a_whole_positive_size(size: object) -> None:
    with pytest.raises(PlanError, match=r"layout\.data"):
        Layout(data=size)  # type: ignore[arg-type]


@settings(max_examples=25)
@given(layouts, st.integers(1, 99), st.floats(0, 10), st.sampled_from(["global", "replica"]))
def test_toml_keeps_values_and_where_they_came_from(
    layout: Layout, epochs: int, rate: float, norm: str
) -> None:
    plan = Plan(layout=layout).replace(
        {"train.epochs": epochs, "train.learning_rate": rate, "parallel.batch_norm": norm},
        Provenance("tuned", "3 trials: 812 images/s against 640"),
    )
    again = Plan.parse(plan.to_toml(), "copy.toml")
    assert again == plan
    for section in ("layout", "parallel", "train", "loader", "numerics", "comm"):
        for key in dataclasses.asdict(getattr(plan, section)):
            name = f"{section}.{key}"
            assert again.origin(name).kind == plan.origin(name).kind, name
    assert again.origin("train.epochs").reason.startswith("3 trials")


def test_a_file_written_by_hand_is_the_users(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text("[train]\nepochs = 1\n")
    plan = Plan.load(path)
    assert plan.origin("train.epochs") == Provenance("user", str(path))
    assert plan.origin("train.batch_size") == Provenance("default")


def test_an_edited_file_of_ours_shows_the_edit_as_the_users(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    Plan(layout=Layout(data=2)).save(path)
    path.write_text(path.read_text().replace("workers = 0", "workers = 3"))
    plan = Plan.load(path)
    assert plan.loader == Loader(workers=3)
    assert plan.origin("loader.workers").kind == "user"
    assert plan.origin("loader.prefetch").kind == "default"


def test_values_set_in_python_are_the_users() -> None:
    assert Plan(train=Train(epochs=7)).origin("train.epochs").kind == "user"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[layuot]\ndata = 2", "did you mean 'layout'"),
        ("[layout]\ndta = 2", "did you mean 'data'"),
        ("[layout]\ndata = 2.0", "expected a whole number"),
        ("[layout]\ndata = true", "expected a whole number"),
        ('[train]\nepochs = "3"', "expected a whole number"),
        ("[memory]\nrecompute = 1.5", "expected a whole number or a string"),
        ('[memory]\nrecompute = "some"', 'none of "none", "auto", "all", or a number'),
        ("[memory]\nrecompute = -1", "must be at least 0"),
        ('[pipeline]\nschedule = "1f2b"', "did you mean '1f1b'"),
        ("[train]\nepochs = 0", "at least 1"),
        ("[train]\nlearning_rate = nan", "finite number"),
        ("[train]\nlearning_rate = -1.0", "at least 0"),
        ('[parallel]\nbatch_norm = "local"', "global, replica"),
        ("[comm]\ntimeout_s = inf", "finite number"),
        ('[comm]\nports = "20100-20000"', "the first and the last of 1024 to 65535"),
        ('[comm]\nports = "any"', "the first and the last of 1024 to 65535"),
        ('[comm]\nports = "80"', "the first and the last of 1024 to 65535"),
        ('[comm]\ninterfaces = "ib0,ib0"', 'each one once, such as "ib0,ib1"'),
        ('[comm]\ninterfaces = "ib0,"', 'each one once, such as "ib0,ib1"'),
        (
            '[comm]\ninterfaces = "ib0,ib1,ib2"\nstreams = 3',
            "on each of 3 interfaces make 9 connections",
        ),
        ("[comm]\nstreams = 0", "comm.streams"),
        ("[loader]\nworkers = -1", "at least 0"),
        ("data = 2", "outside a section"),
        ("[layout", "not valid TOML"),
    ],
)
def test_a_wrong_plan_is_one_line_that_names_file_and_key(text: str, says: str) -> None:
    with pytest.raises(PlanError) as error:
        Plan.parse(text, "plan.toml")
    message = str(error.value)
    assert says in message
    assert "\n" not in message


def test_a_missing_plan_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"nowhere\.toml: No such file"):
        Plan.load(tmp_path / "nowhere.toml")
    with pytest.raises(PlanError, match="Is a directory"):
        Plan.load(tmp_path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("train.epochs=3", ("train.epochs", 3)),
        ("train.learning_rate = 0.1", ("train.learning_rate", 0.1)),
        ("parallel.batch_norm=replica", ("parallel.batch_norm", "replica")),
        ('parallel.batch_norm="replica"', ("parallel.batch_norm", "replica")),
    ],
)
def test_a_setting_is_toml_or_a_bare_word(text: str, value: tuple[str, object]) -> None:
    assert parse_setting(text) == value


def test_a_setting_needs_an_equals_sign() -> None:
    with pytest.raises(PlanError, match="KEY=VALUE"):
        parse_setting("train.epochs")
