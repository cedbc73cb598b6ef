"""Steps that are put off: the batch is the same byte for byte, strides included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from fivefold.data import BatchId
from fivefold.data.collate import stack
from fivefold.data.finishing import Later, put_off
from fivefold.data.images import ImageArrays, Transformed
from fivefold.data.source import LoadError
from fivefold.data.transforms import Compose, Normalise, RandomCrop, RandomFlip, ToFloat
from streams import Numbers, Seat, fingerprint, make

FIGURES = {n: Normalise((0.1, 0.5, 0.7)[:n], (0.3, 0.2, 0.9)[:n]) for n in (1, 3)}
DTYPES = [torch.uint8, torch.int32, torch.float16, torch.float32, torch.float64, torch.bool]


def as_before(steps: Sequence[Any], samples: list[Any]) -> Any:
    """What workers made until steps could be put off."""
    return stack([(Compose(*steps)(image), *rest) for image, *rest in samples])


@dataclass(frozen=True)
class Layout:
    """How the numbers of an image lie in memory."""

    order: tuple[int, ...]
    every: int

    def __call__(self, image: Tensor) -> Tensor:
        laid = image.permute(self.order).contiguous()
        back = laid.permute([self.order.index(dim) for dim in range(image.dim())])
        return back[..., :: self.every]


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Any], list[Any]]:
    channels = draw(st.sampled_from([1, 2, 3]))
    spatial = draw(st.lists(st.integers(0, 5), min_size=0, max_size=3))
    shape = [channels, *spatial]
    layout = Layout(draw(st.permutations(range(len(shape)))), draw(st.sampled_from([1, 2])))  # type: ignore[arg-type]
    dtypes = draw(st.sampled_from([[dtype] for dtype in DTYPES] + [[torch.uint8, torch.float32]]))
    count, seed = draw(st.integers(1, 4)), draw(st.integers(0, 1000))
    generator = torch.Generator().manual_seed(seed)
    images = [
        layout(torch.randint(0, 256, shape, generator=generator).to(dtypes[i % len(dtypes)]))
        for i in range(count)
    ]
    steps = draw(
        st.sampled_from(
            [[ToFloat()], [FIGURES[3]], [ToFloat(), FIGURES[3]], [ToFloat(), FIGURES[1]]]
        )
    )
    return steps, [(image, number) for number, image in enumerate(images)]


@given(drawn=batches())
def test_a_batch_is_the_same_byte_for_byte(drawn: tuple[list[Any], list[Any]]) -> None:
    steps, samples = drawn
    later = Later(steps)
    try:
        expected: Any = as_before(steps, samples)
    except RuntimeError as error:
        with pytest.raises(type(error)):
            later.finish(later(samples))
        return
    found = later.finish(later(samples))
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
    for mine, theirs in pairs:
        assert mine.dtype == theirs.dtype
        assert (mine.shape, mine.stride()) == (theirs.shape, theirs.stride())
        assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())
    assert fingerprint([found]) == fingerprint([expected])


def arrays(transform: Any, dtype: torch.dtype = torch.uint8) -> ImageArrays:
    images = torch.randint(0, 256, (11, 3, 6, 6), generator=torch.Generator().manual_seed(1))
    return ImageArrays(images.to(dtype), range(11), [str(n) for n in range(11)], transform)


class Own(ImageArrays):
    """A user's: what it does to the image afterwards is unknown."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = super().__getitem__(index)
        return image.sqrt(), label


AUGMENTED = Compose(RandomCrop(6, 1), RandomFlip(), ToFloat(), FIGURES[3])


@pytest.mark.parametrize(
    "dataset",
    [arrays(AUGMENTED), Transformed(arrays(None), AUGMENTED), arrays(Compose(ToFloat()))],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_puts_off_the_last_steps_and_nobody_sees_it(dataset: Any, workers: int) -> None:
    shorter, later = put_off(dataset)
    assert later is not None
    assert shorter[0][0].dtype == torch.uint8
    assert len(later.steps) == sum(type(s) in (ToFloat, Normalise) for s in dataset.transform.steps)
    with make(dataset, batch_size=4, workers=workers) as data:
        found = list(data)
        ids = [BatchId(0, batch) for batch in range(len(data))]
        assert fingerprint(found) == fingerprint(data.produce(one) for one in ids)
    plain = make(dataset, batch_size=4, collate=stack)
    assert fingerprint(found) == fingerprint(plain)
    assert found[0][0].dtype == torch.float32


def test_ranks_without_samples_get_what_they_always_got() -> None:
    dataset = arrays(AUGMENTED)
    for rank in range(5):
        seat = Seat(rank, 5)
        found, expected = (
            make(dataset, seat, batch_size=4),
            make(dataset, seat, batch_size=4, collate=stack),
        )
        assert fingerprint(found) == fingerprint(expected)


@pytest.mark.parametrize(
    "dataset",
    [
        Own(torch.zeros(4, 3, 2, 2), range(4), ["a"] * 4, AUGMENTED),
        arrays(lambda image: image.float()),
        arrays(Compose(ToFloat(), RandomFlip())),
        arrays(None),
        Numbers(4),
    ],
)
def test_what_cannot_be_put_off_stays(dataset: Any) -> None:
    assert put_off(dataset) == (dataset, None)


def test_the_user_finishes_batches_where_they_arrive() -> None:
    def finish(batch: Any) -> Any:
        image, label = batch
        return image.half() * 2, label

    dataset = arrays(AUGMENTED)
    expected = [finish(batch) for batch in make(dataset, batch_size=4)]
    for workers in (0, 1):
        with make(dataset, batch_size=4, workers=workers, finish=finish) as data:
            assert fingerprint(data) == fingerprint(expected)


def test_an_error_in_finish_names_the_batch() -> None:
    data = make(Numbers(4), batch_size=2, shuffle=False, finish=lambda batch: batch["x"])
    with pytest.raises(LoadError, match="finish failed on batch 0 of epoch 0: TypeError"):
        next(iter(data))


def test_an_image_of_other_channels_is_named_as_before() -> None:
    dataset = ImageArrays(
        torch.zeros(2, 2, 3, 3), range(2), ["a", "b"], Compose(ToFloat(), FIGURES[3])
    )
    with pytest.raises(LoadError, match="must match the size"):
        next(iter(make(dataset, batch_size=2)))
