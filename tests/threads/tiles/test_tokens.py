"""What is gathered because it looks at everything: attention and recurrence over pixels."""

import pytest
from torch import Tensor, nn

from fivefold.plan import Layout
from tiles import expect_tiles

LAYOUTS = [Layout(height=2, width=2), Layout(width=3)]


class Attends(nn.Module):
    """A transformer layer among pixels, and one of its parts by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        tokens = self.layer(x.flatten(2).transpose(1, 2))
        there = tokens.transpose(0, 1)
        tokens = tokens + self.attention(there, there, there, need_weights=False)[0].transpose(0, 1)
        weights = self.attention(there, there, there)[1]
        return x + tokens.transpose(1, 2).reshape(n, c, h, w) * weights.mean()


class Reads(nn.Module):
    """Rows of pixels read one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(4, 5, batch_first=True), nn.GRU(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.mean(3).transpose(1, 2)
        found, (last, _) = self.lstm(rows)
        return x + self.gru(found)[0].transpose(1, 2)[..., None] + last.mean()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("net", [Attends(), Reads()], ids=lambda net: type(net).__name__)
def test_what_looks_at_everything_is_gathered(net: nn.Module, layout: Layout) -> None:
    expect_tiles(net, (2, 4, 5, 4), layout)
