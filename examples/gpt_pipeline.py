"""A small GPT, its layers divided over processes; the embedding is the head as well.

    python gpt_pipeline.py
    fivefold run --layout pipe=2 gpt_pipeline.py
    fivefold run --layout pipe=2 --set pipeline.schedule=zero-bubble gpt_pipeline.py

All print the same losses. Both stages hold the tied weights, and their gradients are summed.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fivefold as ff

LETTERS, LENGTH, WIDTH, HEADS = 32, 24, 64, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.behind = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        q, k, v = self.mix(self.before(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.behind(x))


class GPT(nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.letters = nn.Embedding(LETTERS, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, LETTERS, bias=False)
        self.head.weight = self.letters.weight
        nn.init.normal_(self.letters.weight, std=0.02)

    def forward(self, text):
        x = self.blocks(self.letters(text) + self.places)
        return self.head(self.norm(x)).transpose(
            1, 2
        )  # letters on dim 1, as cross entropy wants them


def counting(count):
    """Texts that count on from anywhere, by 1, 2 or 3: all but the first two letters can be known."""
    draw = torch.Generator().manual_seed(0)
    start = torch.randint(LETTERS, (count, 1), generator=draw)
    by = torch.randint(1, 4, (count, 1), generator=draw)
    texts = (start + by * torch.arange(LENGTH + 1)) % LETTERS
    return TensorDataset(texts[:, :-1], texts[:, 1:])


def main():
    torch.manual_seed(0)
    with ff.start() as mesh:
        data = ff.loader(counting(128), mesh, batch_size=32, seed=0)
        example = torch.empty(
            32, LENGTH, dtype=torch.long, device="meta"
        )  # what stages are cut for
        model = ff.parallelize(GPT(), mesh, example=example, loss=nn.CrossEntropyLoss())
        optim = torch.optim.AdamW(model.parameters(), lr=0.005)  # of this process's stage
        for epoch in range(3):
            for text, following in data:
                loss = model.step(text, following)
                ff.clip_grad_norm_(model, max_norm=1.0)
                optim.step()
                optim.zero_grad()
            if mesh.rank == 0:
                print(f"epoch {epoch + 1}  loss {loss.item():.4f}")
        held, tied = (
            sum(p.numel() for p in model.parameters()),
            "letters.weight" in model.state_dict(),
        )
        print(f"rank {mesh.rank} trains {held} numbers{', the tied ones too' if tied else ''}")


if __name__ == "__main__":
    main()
