"""Every exchange is the linear operation it says, and its backward is the adjoint."""

import pytest
import torch
from torch import Tensor

from fivefold.mesh import Mesh
from fivefold.parallel.exchange import gather_rows
from fivefold.trace import Tag
from ranks import run_ranks

COUNTS = [[3], [2, 3], [0, 4], [1, 0, 5], [2, 2, 2, 1]]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_gather_rows_is_concatenation(counts: list[int]) -> None:
    parts = list(torch.randn(sum(counts), 2, 3, dtype=torch.float64).split(counts))

    def check(mesh: Mesh) -> Tensor:
        return gather_rows(parts[mesh.rank], counts, mesh.group("data"), Tag.LOSS)

    for gathered in run_ranks(len(counts), check):
        assert torch.equal(gathered, torch.cat(parts))


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_gather_rows_has_its_adjoint(counts: list[int]) -> None:
    torch.manual_seed(2)
    ranks = len(counts)
    xs = [torch.randn(n, 4, dtype=torch.float64) for n in counts]
    ys = [torch.randn(sum(counts), 4, dtype=torch.float64) for _ in counts]

    def check(mesh: Mesh) -> tuple[float, float]:
        x = xs[mesh.rank].clone().requires_grad_()
        fx = gather_rows(x, counts, mesh.group("data"), Tag.LOSS)
        (adjoint,) = torch.autograd.grad(fx, x, ys[mesh.rank])
        return (fx * ys[mesh.rank]).sum().item(), (x * adjoint).sum().item()

    results = run_ranks(ranks, check)
    left, right = (sum(r[side] for r in results) for side in (0, 1))
    assert left == pytest.approx(right, rel=1e-12)
