"""The contenders of compare.py: eight convolutions on images in columns, their halos handled differently.

All return the outputs of the whole image and the gradients of all parameters, in float64.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor

import fivefold as ff
from fivefold.mesh import Mesh, part_of
from fivefold.plan import Layout
from ranks import run_ranks

TILES = 4
CHANNELS, LAYERS, SAMPLES = 8, 8, 2
Halo = Literal["followed", "detached", "none"]


class Made(NamedTuple):
    """What a contender computes."""

    outputs: Tensor
    gradients: list[Tensor] | None
    """of every parameter, in order; None if there are none"""
    problem: str = ""
    """why there are none"""


class Case(NamedTuple):
    """A network and a batch: images (SAMPLES, 3, size, size), targets (SAMPLES, CHANNELS, size, size)."""

    net: nn.Sequential
    images: Tensor
    targets: Tensor

    @classmethod
    def of(cls, seed: int, size: int) -> Case:
        """With torch's initialisation, and normally distributed numbers."""
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for number in range(LAYERS):
            layers += [nn.Conv2d(CHANNELS if number else 3, CHANNELS, 3, padding=1), nn.ReLU()]
        net = nn.Sequential(*layers[:-1]).double()
        images = torch.randn(SAMPLES, 3, size, size, dtype=torch.float64)
        return cls(net, images, torch.randn(SAMPLES, CHANNELS, size, size, dtype=torch.float64))


def alone(case: Case) -> Made:
    """One process: what is right."""
    net = copy.deepcopy(case.net)
    outputs = net(case.images)
    return _trained(net, outputs, case)


def emulated(case: Case, halo: Halo) -> Made:
    """Columns in one process: before every convolution, each takes a strip of its neighbours.

    `followed`: autograd sees the strip as part of the neighbour. `detached`: it sees numbers, as when a
    strip is sent and received without an adjoint. `none`: zeros, as at the border of the image.
    """
    net = copy.deepcopy(case.net)
    tiles = list(case.images.chunk(TILES, 3))
    for layer in net:
        if isinstance(layer, nn.Conv2d):
            tiles = [_convolved(layer, tiles, number, halo) for number in range(TILES)]
        else:
            tiles = [layer(tile) for tile in tiles]
    return _trained(net, torch.cat(tiles, 3), case)


def _convolved(layer: nn.Conv2d, tiles: Sequence[Tensor], number: int, halo: Halo) -> Tensor:
    def strip(neighbour: int, column: slice) -> Tensor:
        if not 0 <= neighbour < len(tiles) or halo == "none":
            return torch.zeros_like(tiles[number][..., :1])
        found = tiles[neighbour][..., column]
        return found.detach() if halo == "detached" else found

    left, right = strip(number - 1, slice(-1, None)), strip(number + 1, slice(0, 1))
    wide = torch.cat((left, tiles[number], right), 3)
    return nn.functional.conv2d(wide, layer.weight, layer.bias, padding=(1, 0))


def _trained(net: nn.Module, outputs: Tensor, case: Case) -> Made:
    nn.functional.mse_loss(outputs, case.targets).backward()
    return Made(outputs.detach(), _gradients(net))


def _gradients(net: nn.Module) -> list[Tensor]:
    found = [parameter.grad for parameter in net.parameters()]
    return [gradient.clone() for gradient in found if gradient is not None]


def fivefold(case: Case) -> Made:
    """`parallelize` and one step, on ranks that are threads."""

    def train(mesh: Mesh) -> tuple[tuple[int, ...], Tensor, list[Tensor]]:
        net, seen = copy.deepcopy(case.net), list[Tensor]()
        model = ff.parallelize(net, mesh, loss=nn.MSELoss())
        model.on_outputs = seen.append
        model.step(*model.shard(case.images, case.targets))
        part = part_of(seen[0])
        assert part is not None
        return part.origin, seen[0].detach(), _gradients(net)

    outputs = torch.full_like(case.targets, torch.nan)
    ranks = run_ranks(Layout(width=TILES), train)
    for origin, tile, _ in ranks:
        outputs[..., origin[3] : origin[3] + tile.shape[3]] = tile
    return Made(outputs, ranks[0][2])


def dtensor(cases: Sequence[Case]) -> list[Made]:
    """DTensor of torch with the images as `Shard(3)`, in four processes."""
    with tempfile.TemporaryDirectory(prefix="fivefold-bench-") as folder:
        mp.spawn(_dtensor_rank, (list(cases), folder), nprocs=TILES)
        ranks = [torch.load(Path(folder) / str(rank)) for rank in range(TILES)]
    return [
        Made(torch.cat([piece for piece, _, _ in pieces], 3), *pieces[0][1:])
        for pieces in zip(*ranks, strict=True)
    ]


def _dtensor_rank(rank: int, cases: Sequence[Case], folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=TILES)
    torch.save([_dtensor_step(case) for case in cases], Path(folder) / str(rank))
    dist.destroy_process_group()


def _dtensor_step(case: Case) -> tuple[Tensor, list[Tensor] | None, str]:
    """This rank's piece of the outputs, the gradients, and why there are none."""
    mesh = init_device_mesh("cpu", (TILES,))
    net = distribute_module(copy.deepcopy(case.net), mesh)
    outputs = net(distribute_tensor(case.images, mesh, [Shard(3)]))
    assert isinstance(outputs, DTensor)
    piece = outputs.to_local()
    mine = case.targets.chunk(TILES, 3)[mesh.get_local_rank()]
    try:
        ((piece - mine).square().sum() / case.targets.numel()).backward()
    except RuntimeError as problem:
        return piece.detach(), None, str(problem).splitlines()[0]
    found = [parameter.grad for parameter in net.parameters()]
    return piece.detach(), [g.full_tensor() for g in found if isinstance(g, DTensor)], ""
