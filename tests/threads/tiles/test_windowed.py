import pytest
from torch import nn

from fivefold.plan import Layout
from tiles import expect_tiles

LAYOUTS = [Layout(height=2, width=2), Layout(height=3), Layout(width=2)]


@pytest.mark.long(every=8)
@pytest.mark.filterwarnings(
    "ignore:Using padding='same' with even kernel"
)  # torch's, in one process
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    "net",
    [
        nn.Conv2d(3, 4, 7, stride=2, padding=3),
        nn.Conv2d(3, 4, 3),
        nn.Conv2d(3, 6, (3, 2), stride=(2, 3), padding=(2, 0), dilation=(2, 1), groups=3),
        nn.Conv2d(3, 4, 1, stride=2),
        nn.Conv2d(3, 4, 4, padding="same"),
        nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(True)),
        nn.MaxPool2d(3, 2, 1),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.AvgPool2d(3, 2, 1),
        nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False),
        nn.AvgPool2d(2, 3, ceil_mode=True, divisor_override=5),
    ],
    ids=repr,
)
def test_a_window_over_tiles_is_one_over_the_image(net: nn.Module, layout: Layout) -> None:
    expect_tiles(net, (2, 3, 17, 13), layout)
