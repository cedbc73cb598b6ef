"""A U-Net that segments images, each of which is divided over processes.

    python unet_in_tiles.py
    fivefold run --layout height=2 unet_in_tiles.py
    fivefold run --layout height=2,width=2 unet_in_tiles.py

All print the same. Every process computes its tile of every layer, down and up again, and exchanges the
borders; nothing in the script says how images are divided.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fivefold as ff


def block(channels, more):
    return nn.Sequential(
        nn.Conv2d(channels, more, 3, padding=1, bias=False), nn.BatchNorm2d(more), nn.ReLU()
    )


class UNet(nn.Module):
    def __init__(self, classes, width=8):
        super().__init__()
        self.first = block(1, width)
        self.down = block(width, 2 * width)
        self.bottom = block(2 * width, 2 * width)
        self.up = block(4 * width, width)
        self.last = nn.Conv2d(2 * width, classes, 1)

    def forward(self, x):
        first = self.first(x)
        down = self.down(F.max_pool2d(first, 2))
        bottom = self.bottom(F.max_pool2d(down, 2))
        up = self.up(torch.cat([F.interpolate(bottom, size=down.shape[2:]), down], 1))
        return self.last(torch.cat([F.interpolate(up, size=first.shape[2:]), first], 1))


def discs(count, height=66, width=50):
    """Discs on a noisy ground, and a mask of which pixels belong to one."""
    draw = torch.Generator().manual_seed(0)
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    middle = (
        torch.rand(count, 2, 1, 1, generator=draw) * torch.tensor([height, width])[:, None, None]
    )
    masks = (rows - middle[:, 0]) ** 2 + (columns - middle[:, 1]) ** 2 < 15**2
    noise = torch.randn(count, height, width, generator=draw)
    return TensorDataset((masks + 0.7 * noise)[:, None], masks.long())


def score(outputs, masks):
    """Pixels of discs that were found, were found or drawn: sums, from which follows a mean at the end."""
    found, drawn = outputs.argmax(1) == 1, masks == 1
    return torch.stack([(found & drawn).sum(), found.sum() + drawn.sum()]).double()


def main():
    torch.manual_seed(0)
    with ff.start() as mesh:
        data = ff.loader(discs(32), mesh, batch_size=4, seed=0)
        model = ff.parallelize(UNet(classes=2), mesh, loss=nn.CrossEntropyLoss())
        optim = torch.optim.Adam(model.parameters(), lr=0.01)
        for epoch in range(2):
            for images, masks in data:
                loss = model.step(images, masks)
                optim.step()
                optim.zero_grad()
            # Every pixel of every image counts once, wherever it was computed.
            both, either = sum(model.evaluate(x, y, score) for x, y in data)
            if mesh.rank == 0:
                print(f"epoch {epoch + 1}  loss {loss.item():.4f}  Dice {2 * both / either:.3f}")


if __name__ == "__main__":
    main()
