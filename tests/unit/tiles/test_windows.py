"""Which inputs a window needs, against torch's own convolution of ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fivefold.parallel.program.spread import Division
from fivefold.parallel.program.windows import Window


@st.composite
def cases(draw: st.DrawFn) -> tuple[Window, int, int]:
    """A window, a number of inputs, and the number of outputs."""
    window = Window(
        kernel=draw(st.integers(1, 7)), stride=draw(st.integers(1, 4)),
        padding=draw(st.integers(0, 3)), dilation=draw(st.integers(1, 3)),
    )  # fmt: skip
    n = draw(st.integers(max(window.extent - 2 * window.padding, 1), 60))
    return window, n, (n + 2 * window.padding - window.extent) // window.stride + 1


@given(cases(), st.data())
def test_a_range_needs_what_its_outputs_look_at(
    case: tuple[Window, int, int], data: st.DataObject
) -> None:
    window, _, outputs = case
    start = data.draw(st.integers(0, outputs))
    stop = data.draw(st.integers(start, outputs))
    looks = [
        j * window.stride - window.padding + tap * window.dilation
        for j in range(start, stop)
        for tap in range(window.kernel)
    ]
    a, b = window.needs((start, stop))
    assert (a, b) == (min(looks), max(looks) + 1) if looks else a == b


@given(cases(), st.integers(1, 6), st.data())
def test_outputs_are_divided_once_and_in_order(
    case: tuple[Window, int, int], parts: int, data: st.DataObject
) -> None:
    window, n, outputs = case
    inner = sorted(data.draw(st.lists(st.integers(0, n), min_size=parts - 1, max_size=parts - 1)))
    cut = window.cut(Division.at((0,), (0, *inner, n)), outputs)
    assert cut.bounds[0] == 0
    assert cut.bounds[-1] == outputs
    assert list(cut.bounds) == sorted(cut.bounds)
    for part, (start, stop) in enumerate(cut.owned):
        for j in range(start, stop):
            centre = 2 * (j * window.stride - window.padding) + window.extent - 1  # doubled
            assert part == 0 or centre >= 2 * inner[part - 1]
            assert part == parts - 1 or centre < 2 * inner[part]
