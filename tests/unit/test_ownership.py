import torch
from hypothesis import given
from hypothesis import strategies as st

from fivefold.mesh import Part, attach, owned, part_of


@given(st.integers(0, 500), st.integers(1, 64))
def test_parts_cover_everything_once_and_differ_by_at_most_one(n: int, parts: int) -> None:
    ranges = [owned(n, parts, index) for index in range(parts)]
    assert [i for r in ranges for i in r] == list(range(n))
    lengths = [len(r) for r in ranges]
    assert max(lengths) - min(lengths) <= 1


def test_the_rule_as_written_in_the_design() -> None:
    assert [tuple(owned(8, 3, i)) for i in range(3)] == [(0, 1), (2, 3, 4), (5, 6, 7)]
    assert [len(owned(2, 5, i)) for i in range(5)] == [0, 0, 1, 0, 1]


def test_a_part_is_noted_on_the_very_tensor() -> None:
    x = torch.zeros(3, 2)
    part = Part((8, 2), (2, 0))
    assert attach(x, part) is x
    assert part_of(x) == part
    assert part_of(x + 1) is None
    assert part_of(torch.zeros(3, 2)) is None
