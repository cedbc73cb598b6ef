"""A classifier of images, every batch divided over processes, evaluated after every epoch.

    python data_parallel.py
    fivefold run -n 2 data_parallel.py

Both print the same. Replace `Stripes` by your data set and `Net` by your net.
"""

import torch
from torch import nn
from torch.utils.data import Dataset

import fivefold as ff


class Stripes(Dataset):
    """Upright or lying stripes under noise, which is new in every epoch."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        label = index % 2
        wave = torch.sin(1.2 * torch.arange(16) + 6.28 * torch.rand(1)).expand(16, 16)
        return ((wave if label else wave.T) + 1.5 * torch.randn(16, 16))[None], label


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 16, 3, stride=2),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.1),
            nn.Linear(32 * 9, 2),
        )


def score(outputs, targets):
    """Sums over samples: how many are right, and how many there are."""
    right = (outputs.argmax(1) == targets).sum()
    return torch.stack([right, right.new_tensor(len(targets))]).double()


def main():
    torch.manual_seed(0)
    with ff.start() as mesh:
        model = ff.parallelize(Net(), mesh, loss=nn.CrossEntropyLoss())
        # Batch sizes and the learning rate are those of one process, for any number of them.
        train = ff.loader(Stripes(320), mesh, batch_size=64, seed=0)
        test = ff.loader(Stripes(120), mesh, batch_size=64, seed=1, shuffle=False)
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optim, T_max=3)
        for epoch in range(3):
            for images, labels in train:
                loss = model.step(images, labels)
                ff.clip_grad_norm_(model, max_norm=1.0)
                optim.step()
                optim.zero_grad()
            schedule.step()
            right, samples = sum(model.evaluate(x, y, score) for x, y in test)
            if mesh.rank == 0:
                print(f"epoch {epoch + 1}  loss {loss.item():.4f}  accuracy {right / samples:.3f}")
        if mesh.rank == 0:
            torch.save(model.state_dict(), "weights.pt")  # the keys of Net, for torch alone


if __name__ == "__main__":
    main()
