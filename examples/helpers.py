"""A core beside the trainers makes the batches and evaluates the model while training goes on.

    python helpers.py
    fivefold run --helpers local:1 helpers.py
    fivefold run -n 2 --helpers local:1 --set offload.share_cores=true helpers.py

All print the same; the last is for machines where every core has a trainer. It pays where loading or
validation takes long: `fivefold run --trace`, then `fivefold report`, tells.
"""

import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import fivefold as ff


class Blobs(Dataset):
    """Images with a bright spot, left or right: shifted, mirrored and blurred at random."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        label = index % 2
        image = 0.3 * torch.randn(1, 16, 16)
        row, column = random.randint(2, 12), random.randint(2, 5) + 7 * label
        image[0, row : row + 2, column : column + 2] += 2.0
        if random.random() < 0.5:
            image = image.flip(1)
        return F.avg_pool2d(image, 3, stride=1, padding=1), label


def score(outputs, targets):
    """Sums over samples: the loss, how many are right, how many there are."""
    loss = F.cross_entropy(outputs.double(), targets, reduction="sum")
    right = (outputs.argmax(1) == targets).sum().double()
    return torch.stack([loss, right, torch.tensor(len(targets)).double()])


def figures(sums):
    loss, right, samples = sums
    return {"loss": loss / samples, "accuracy": right / samples}


def show(results):
    for result in results:
        found = result.figures
        print(f"epoch {result.epoch}  loss {found['loss']:.4f}  accuracy {found['accuracy']:.3f}")


def main():
    torch.manual_seed(0)
    with ff.start() as mesh:
        net = nn.Sequential(nn.Conv2d(1, 8, 5), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 144, 2))
        model = ff.parallelize(net, mesh, loss=nn.CrossEntropyLoss())
        data = ff.loader(Blobs(1024), mesh, batch_size=32, seed=0)
        tests = ff.loader(Blobs(256), mesh, batch_size=32, shuffle=False)
        # Of epoch 1 the result comes while epoch 2 ends: nobody waits for it.
        validator = ff.Validator(model, tests, score=score, figures=figures, delay=1)
        optim = torch.optim.SGD(model.parameters(), lr=0.05)
        for epoch in range(3):  # helpers stay here, and serve
            for images, labels in data:
                model.step(images, labels)
                optim.step()
                optim.zero_grad()
            results = validator.submit(epoch + 1, data.cursor.step)
            show(results if mesh.rank == 0 else [])
        results = validator.finish()
        show(results if mesh.rank == 0 else [])
        data.close()
        validator.close()


if __name__ == "__main__":
    main()
