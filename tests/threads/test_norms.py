"""Batch norm over several ranks against torch's own on the whole batch, forward, backward and buffers."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.mesh import Mesh
from fivefold.parallel.norms import global_batch_norm
from ranks import run_ranks

CUTS = [[5], [2, 3], [1, 4, 3], [0, 5], [3, 0, 2, 1]]
SHAPES = {"1d": (), "1d+length": (4,), "2d": (3, 5), "3d": (2, 3, 2)}


def one_process(x: Tensor, w: Tensor | None, b: Tensor | None, dy: Tensor, m: float) -> list[Any]:
    x = x.clone().requires_grad_()
    mean, var = torch.zeros(4, dtype=x.dtype), torch.ones(4, dtype=x.dtype)
    y = F.batch_norm(x, mean, var, w, b, True, m)
    wanted = [t for t in (x, w, b) if t is not None]
    return [y.detach(), mean, var, *torch.autograd.grad(y, wanted, dy)]


@pytest.mark.long(every=8)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dims", SHAPES)
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_many_ranks_compute_what_one_computes(cut: list[int], dims: str, affine: bool) -> None:
    torch.manual_seed(3)
    x = torch.randn(sum(cut), 4, *SHAPES[dims], dtype=torch.float64) * 3 + 100
    dy = torch.randn_like(x)
    w = torch.rand(4, dtype=x.dtype).requires_grad_() if affine else None
    b = torch.rand(4, dtype=x.dtype).requires_grad_() if affine else None
    expected = one_process(x, w, b, dy, 0.3)

    def check(mesh: Mesh) -> list[Any]:
        rows, counted = x.split(cut)[mesh.rank], cut[mesh.rank] > 0
        mine = (rows if counted else torch.zeros_like(x[:1])).clone().requires_grad_()
        dmine = dy.split(cut)[mesh.rank] if counted else torch.zeros_like(mine)
        own = [None if p is None else p.detach().clone().requires_grad_() for p in (w, b)]
        mean, var = torch.zeros(4, dtype=x.dtype), torch.ones(4, dtype=x.dtype)
        y = global_batch_norm(
            mine, mean, var, *own, momentum=0.3, eps=1e-5, group=mesh.group("data"), counted=counted
        )
        wanted = [t for t in (mine, *own) if t is not None]
        grads = torch.autograd.grad(y, wanted, dmine)
        n = cut[mesh.rank]
        return [y[:n].detach(), mean, var, grads[0][:n], *grads[1:]]

    results = run_ranks(len(cut), check)
    whole = [torch.cat([r[0] for r in results]), None, None, torch.cat([r[3] for r in results])]
    whole += [sum(r[4 + i] for r in results) for i in range(2 if affine else 0)]
    for i, value in enumerate(expected):
        for got in [r[i] for r in results] if i in (1, 2) else [whole[i]]:
            assert torch.allclose(got, value, rtol=1e-9, atol=1e-9 * value.abs().max().item()), i
    assert all(
        torch.equal(r[1], results[0][1]) and torch.equal(r[2], results[0][2]) for r in results
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_as_close_to_float64_as_one_process_is(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    x = (torch.randn(8, 4, 6, 6) * 2 + 5).to(dtype)
    x = x.contiguous(memory_format=torch.channels_last)
    dy = torch.randn_like(x)
    w, b = torch.rand(4).requires_grad_(), torch.rand(4).requires_grad_()
    exact = one_process(x.double(), w.double(), b.double(), dy.double(), 0.1)

    def run(group: Any, rows: Tensor, drows: Tensor) -> list[Tensor]:
        mine = rows.clone().requires_grad_()
        mean, var = torch.zeros(4), torch.ones(4)
        if group is None:
            y = F.batch_norm(mine, mean, var, w, b, True, 0.1)
        else:
            y = global_batch_norm(mine, mean, var, w, b, momentum=0.1, eps=1e-5, group=group)
        assert y.dtype == dtype
        assert y.is_contiguous(memory_format=torch.channels_last)
        return [y.detach(), mean, var, *torch.autograd.grad(y, (mine,), drows)]

    one = run(None, x, dy)
    parts = run_ranks(
        2, lambda mesh: run(mesh.group("data"), x.chunk(2)[mesh.rank], dy.chunk(2)[mesh.rank])
    )
    joined = [
        torch.cat([p[0] for p in parts]),
        parts[0][1],
        parts[0][2],
        torch.cat([p[3] for p in parts]),
    ]
    for i in range(4):
        error = (joined[i].double() - exact[i]).norm()
        allowed = 2 * (one[i].double() - exact[i]).norm() + 1e-6 * exact[i].norm()
        assert error <= allowed, (i, error, allowed)


def test_one_value_per_channel_over_all_ranks_is_refused_as_torch_does() -> None:
    def check(mesh: Mesh) -> None:
        x = torch.randn(1, 4)
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            global_batch_norm(
                x, None, None, None, None,
                momentum=0.1, eps=1e-5, group=mesh.group("data"), counted=mesh.rank == 0,
            )  # fmt: skip

    run_ranks(2, check)


def test_one_value_on_each_rank_is_enough_where_there_are_two_ranks() -> None:
    rows = torch.tensor([[1.0], [3.0]])

    def check(mesh: Mesh) -> float:
        y = global_batch_norm(
            rows[mesh.rank : mesh.rank + 1], None, None, None, None,
            momentum=0.1, eps=0.0, group=mesh.group("data"),
        )  # fmt: skip
        return y.item()

    assert run_ranks(2, check) == [-1.0, 1.0]
