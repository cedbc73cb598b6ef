"""Arithmetic of steps, arrivals and operations against plain loops."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fivefold.introspect.analysis import Analysis
from fivefold.introspect.document import breakdown
from fivefold.introspect.merging import merged
from fivefold.introspect.numbers import column, plain
from fivefold.introspect.operations import Calibrated, quantile
from fivefold.introspect.run import TracedRun
from fivefold.introspect.steps import Steps, behind_others
from fivefold.trace.fold import bit_lengths
from fivefold.trace.schema import WINDOW
from traces import MS, Story

figures = st.floats(-1e6, 1e6, allow_nan=False)


@given(
    arrays.arrays(float, arrays.array_shapes(min_dims=1, max_dims=3, max_side=6), elements=figures)
)
def test_behind_others_is_the_median_of_the_others(values: np.ndarray) -> None:
    found = behind_others(values)
    for rank in range(len(values)):
        others = np.delete(values, rank, axis=0)
        expected = values[rank] - np.median(others, axis=0) if len(others) else 0.0 * values[rank]
        np.testing.assert_allclose(found[rank], expected, rtol=1e-12, atol=1e-9)


@given(st.lists(st.floats(1e-12, 1e15) | st.floats(-1e9, -1e-9), min_size=1, max_size=20))
def test_columns_keep_four_digits(values: list[float]) -> None:
    for value, kept in zip(values, column(np.array(values)), strict=True):
        assert kept == pytest.approx(value, rel=5.1e-4)
        assert kept == float(f"{kept:.4g}"), "no digits beyond the fourth"


def test_unknown_numbers_are_none() -> None:
    assert column(np.array([np.nan, np.inf, 1.0])) == [None, None, 1]
    assert plain({"a": np.float32("nan"), 1: [np.int64(3), True, (2.0,)]}) == {
        "a": None, "1": [3, True, [2]],
    }  # fmt: skip


@given(st.lists(st.integers(1, 2**38), min_size=1, max_size=50), st.floats(0.01, 1))
def test_quantiles_of_histograms_are_within_the_root_of_two(times: list[int], share: float) -> None:
    histogram = np.bincount(bit_lengths(np.array(times)), minlength=40)
    exact = sorted(times)[max(0, int(np.ceil(share * len(times))) - 1)] / 1e9
    assert 0.7 <= quantile(histogram, share) / exact <= 1.4143


@given(st.integers(1, 200), st.integers(1, 40))
def test_merged_windows_keep_their_sums(rows: int, most: int) -> None:
    windows = np.zeros(rows, WINDOW)
    windows["steps"], windows["first_step"] = 1, np.arange(rows)
    windows["begin_ns"], windows["end_ns"] = 100 * np.arange(rows), 100 * np.arange(rows) + 90
    windows["phase_ns"], windows["rss_bytes"] = np.arange(rows)[:, None], np.arange(rows)
    windows["sent_bytes"], windows["ready"], windows["energy_j"] = -1, np.nan, 2.0
    found = merged(windows, most)
    assert len(found) <= most
    for name in ("steps", "phase_ns", "energy_j"):
        assert found[name].sum() == windows[name].sum()
    assert (found["begin_ns"][0], found["end_ns"][-1]) == (0, 100 * rows - 10)
    assert found["rss_bytes"].max() == rows - 1
    assert set(found["sent_bytes"]) == {-1}
    assert np.isnan(found["ready"]).all()


def steps_of(story: Story, folder: Path, rows: int = 500) -> Steps:
    found = Steps.of(TracedRun.load(story.write(folder)), rows)
    assert found is not None
    return found


def test_parts_of_a_step_add_up(tmp_path: Path) -> None:
    story = Story(tiny=4, tiny_blocked_ns=MS).slow_loader(2)
    run = TracedRun.load(story.write(tmp_path))
    analysis = Analysis(run)
    rows = breakdown(run, analysis.steps)
    assert sum(row["seconds"] for row in rows) == pytest.approx(
        analysis.sure_steps.step_s, rel=2e-3
    )
    assert sum(row["share"] for row in rows) == pytest.approx(1, rel=2e-3)
    parts = {row["part"]: row for row in rows}
    late = story.work[:, 1:, :4].sum(2) / 1e9
    waited = np.mean(late.max(0) - late) + 8e-3
    assert parts["parameters and gradients"]["seconds"] == pytest.approx(waited, rel=0.05)
    assert parts["parameters and gradients"]["calls"] == pytest.approx(6)
    assert parts["load"]["most_rank"] == 2
    assert parts["forward"]["seconds"] == pytest.approx(20e-3, rel=0.01), "without what it waits"


def test_parts_add_up_where_a_tag_blocks_in_other_phases_than_usual(tmp_path: Path) -> None:
    def in_no_phase(_rank: int, windows: np.ndarray) -> np.ndarray:
        windows["phase_ns"][::2] = 0
        return windows

    story = Story()
    story.edits.append(in_no_phase)
    run = TracedRun.load(story.write(tmp_path))
    rows = breakdown(run, Analysis(run).steps)
    assert sum(row["share"] for row in rows) == pytest.approx(1, rel=2e-3)


@pytest.mark.parametrize("rows", [500, 37, 10, 1])
def test_rows_of_several_steps_tell_the_same(rows: int, tmp_path: Path) -> None:
    one, several = Story(steps=40), steps_of(Story(steps=40), tmp_path, rows)
    assert len(several.first_step) <= rows
    assert several.count.sum() == one.steps * one.ranks
    total = np.nansum(several.phase[..., 2] * several.count, axis=1)
    np.testing.assert_allclose(total, one.work[..., 2].sum(1) / 1e9, rtol=1e-9)


def test_ranks_whose_rows_are_of_different_length_meet_on_one_axis(tmp_path: Path) -> None:
    def halved(rank: int, windows: np.ndarray) -> np.ndarray:
        # Rank 1 has put its rows together already, others have not.
        return merged(windows, len(windows) // 2) if rank == 1 else windows

    story = Story(ranks=3, steps=20)
    story.edits.append(halved)
    found = steps_of(story, tmp_path)
    assert found.per_row == 2
    np.testing.assert_allclose(found.wall[1], found.wall[0], rtol=0.2)


def test_means_weigh_rows_by_their_steps_and_leave_out_the_unknown(tmp_path: Path) -> None:
    found = steps_of(Story(ranks=2, steps=10), tmp_path, 4)  # rows of 3, 3, 3 and 1 steps
    assert found.count[0].tolist() == [3, 3, 3, 1]
    values = np.array([[9.0, 1.0, 2.0, 5.0], [9.0, 1.0, np.nan, 5.0]])
    np.testing.assert_allclose(found.mean(values), [(3 + 6 + 5) / 7, (3 + 5) / 4])
    np.testing.assert_allclose(found.mean(values[:1].repeat(2, 0)), [2, 2])


def test_warm_up_is_apart(tmp_path: Path) -> None:
    story = Story(steps=30)
    story.work[:, :4, 2] *= 5
    found = steps_of(story, tmp_path)
    assert np.flatnonzero(found.steady).tolist() == list(range(4, 30))
    assert found.step_s == pytest.approx(58e-3, rel=0.02)


def test_steps_that_are_done_again_are_no_trouble(tmp_path: Path) -> None:
    def again(rank: int, windows: np.ndarray) -> np.ndarray:
        windows["first_step"][10:] -= 5
        return windows

    story = Story(steps=20)
    story.edits.append(again)
    found = steps_of(story, tmp_path)
    assert found.count[0].tolist() == [1] * 5 + [2] * 5 + [1] * 5
    assert found.wall[0, 7] == pytest.approx(58e-3, rel=0.05)
    assert (np.diff(found.begin_s) >= 0).all()


def test_arrivals_name_who_is_waited_for(tmp_path: Path) -> None:
    story = Story(ranks=3, steps=30).slow_loader(1)
    met = Analysis(TracedRun.load(story.write(tmp_path))).met
    before = story.work[:, 1:, :4].sum(2) / 1e9
    assert met.compared == 2 * 29
    assert met.last_share.tolist() == [0, 1, 0]
    np.testing.assert_allclose(met.late_s, behind_others(before).mean(1), rtol=1e-9)
    waited = met.waited_s / met.steps
    np.testing.assert_allclose(waited[:, 1], (before[1] - before).mean(1), rtol=1e-9)
    assert waited[:, [0, 2]].sum() == 0


def test_an_end_that_was_seen_late_does_not_hide_other_operations(tmp_path: Path) -> None:
    # The hidden operation begins before the one that is waited for, and ends long after it.
    story = Story(ranks=2, steps=20, hidden_ns=50 * MS, size_bytes=4 << 20, tiny=1)
    large, small = Analysis(TracedRun.load(story.write(tmp_path))).operations
    assert small["transfer_s"] == pytest.approx(500e-9)
    assert large["transfer_s"] == pytest.approx(27e-3, rel=0.2), "between 4 and 50 ms, half of each"


def test_clocks_of_nodes_are_made_one(tmp_path: Path) -> None:
    def shifted(rank: int, windows: np.ndarray) -> np.ndarray:
        for name in ("begin_ns", "end_ns"):
            windows[name] -= story.offsets.get(rank, 0)
        return windows

    story = Story(ranks=2, steps=10, offsets={1: 5 * 10**11})
    story.edits.append(shifted)
    analysis = Analysis(TracedRun.load(story.write(tmp_path)))
    assert analysis.sure_steps.seconds == pytest.approx(0.58, rel=0.05)
    assert np.abs(analysis.met.late_s).max() < 2e-3


def test_operations_are_told_by_size(tmp_path: Path) -> None:
    calibration = [
        {"op": "all_reduce", "group": 0, "size_bytes": 4 << 20, "seconds": 2e-3},
        {"op": "all_reduce", "group": 0, "size_bytes": "nonsense", "seconds": 1},
    ]
    story = Story(ranks=4, steps=20, tiny=2, meta={"calibration": calibration}, hidden_ns=4 * MS)
    large, small = Analysis(TracedRun.load(story.write(tmp_path))).operations
    assert (large["count"], large["bytes"]) == (160, 160 * (4 << 20))
    assert (large["size_from_bytes"], large["size_to_bytes"]) == (4 << 20, (8 << 20) - 1)
    assert large["transfer_s"] == pytest.approx(4e-3)
    assert large["algorithm_bytes_per_s"] == pytest.approx((4 << 20) / 4e-3)
    assert large["bus_bytes_per_s"] == pytest.approx(1.5 * (4 << 20) / 4e-3)
    assert large["expected_ratio"] == pytest.approx(0.5)
    assert large["exposed_s"] + large["hidden_s"] == pytest.approx(large["total_s"])
    assert (small["count"], small["group"], small["group_size"]) == (160, "data", 4)


def test_no_speed_is_told_where_the_last_rank_found_everything_there(tmp_path: Path) -> None:
    calibration = [{"op": "all_reduce", "group": 0, "size_bytes": 4 << 20, "seconds": 20e-3}]
    story = Story(ranks=4, steps=20, meta={"calibration": calibration})
    large, *_ = Analysis(TracedRun.load(story.write(tmp_path))).operations
    assert large["expected_s"] == pytest.approx(20e-3)
    assert 0 < (large["transfer_s"] or 0) < 5e-3, "more than twice as fast as calibrated"
    assert (
        large["expected_ratio"]
        is large["algorithm_bytes_per_s"]
        is large["bus_bytes_per_s"]
        is None
    )


@given(st.floats(1, 1e9))
def test_calibrations_are_monotone(size: float) -> None:
    curve = Calibrated("all_reduce", 0, (8, 1024, 1 << 20), (1e-5, 2e-5, 1e-3))
    found, more = curve.expected_s(size), curve.expected_s(2 * size)
    assert found is not None and more is not None
    assert found <= more
