"""Volumes of which no process ever holds a whole one: each reads and computes slices of its own.

    python volume.py
    fivefold run --layout depth=2 volume.py

The losses are the same. `Balls` stands for files that are read in part, such as zarr or TIFF, for which there
are data sets in fivefold.data.
"""

import torch
from torch import nn
from torch.utils.data import Dataset

import fivefold as ff
from fivefold.data.windows import Box

SIZE = (24, 20, 20)  # depth, height, width


class Balls(Dataset):
    """A volume with a ball in it, and which voxels are in the ball."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        box = Box.whole(SIZE)
        return self.window(index, (box, box))

    def sizes(self, index):  # noqa: ARG002 - all volumes are of one size
        return SIZE, SIZE

    def window(self, index, boxes):
        box, _ = boxes  # the mask is cut as the volume is
        z, y, x = torch.meshgrid(*(torch.tensor(r) for r in box.ranges), indexing="ij")
        apart = (z - 4 - index) ** 2 + (y - 10) ** 2 + (x - 5 - index % 10) ** 2
        ball = apart < 25
        texture = torch.sin(1.3 * z + index) * torch.cos(0.9 * y) * torch.sin(1.1 * x)
        return (ball + texture)[None], ball.float()[None]


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv3d(1, 8, 3, padding=1),
            nn.InstanceNorm3d(8, affine=True),  # over the whole volume, as in one process
            nn.ReLU(),
            nn.Conv3d(8, 8, 3, padding=1),
            nn.ReLU(),
            nn.Conv3d(8, 1, 1),
        )


def main():
    torch.manual_seed(0)
    with ff.start() as mesh:
        data = ff.loader(Balls(), mesh, batch_size=2, seed=0)
        model = ff.parallelize(Net(), mesh, loss=nn.BCEWithLogitsLoss())
        optim = torch.optim.Adam(model.parameters(), lr=0.02)
        for epoch in range(3):
            for volumes, masks in data:
                loss = model.step(volumes, masks)
                optim.step()
                optim.zero_grad()
            if mesh.rank == 0:
                print(f"epoch {epoch + 1}  loss {loss.item():.4f}")
        print(f"rank {mesh.rank} read {volumes.shape[2]} of {SIZE[0]} slices")


if __name__ == "__main__":
    main()
