"""Layer parallelism over two ranks, as one writes it with plain torch.distributed.

    rank 0   forward of the first half  ──activations──►  ...                          gradients──►  backward
    rank 1                                 forward of the second half, loss, backward  ──gradients──┘

With one image per step there is nothing to fill the pipeline with: one rank computes while the other waits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import cycle

import torch
import torch.distributed as dist
from torch import Tensor, nn
from workload import Workload

from fivefold.recipes.models.edsr import Edsr
from fivefold.recipes.models.resnet import ResNet


class _First(nn.Module):
    """Of EDSR: what is sent is the long shortcut and the body's activations."""

    def __init__(self, net: Edsr, blocks: int) -> None:
        super().__init__()
        self.head, self.body = net.head, net.body[:blocks]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.head(x)
        return x, self.body(x)


class _Second(nn.Module):
    def __init__(self, net: Edsr, blocks: int) -> None:
        super().__init__()
        self.body, self.up, self.tail = net.body[blocks:], net.up, net.tail

    def forward(self, shortcut: Tensor, x: Tensor) -> Tensor:
        return self.tail(self.up(shortcut + self.body(x)))


class _Trunk(nn.Module):
    """Of ResNets, whose shortcuts are short."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.layers(x),)


def halves(net: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Two halves that take about the same time. Raises `ValueError` for models that have no such cut here."""
    if isinstance(net, ResNet):
        first = (net.conv1, net.bn1, net.relu, net.maxpool, net.layer1, net.layer2)
        second = (net.layer3, net.layer4, net.avgpool, nn.Flatten(), net.fc)
        return _Trunk(*first), nn.Sequential(*second)
    if isinstance(net, Edsr):
        blocks = (len(net.body) - 1) // 2 + 1  # what enlarges costs as much as two blocks
        return _First(net, blocks), _Second(net, blocks)
    raise ValueError(
        f"no halves are known of {type(net).__name__}: leave out the contender `layers`, or measure a "
        "ResNet-18, ResNet-50 or EDSR"
    )


def layers(work: Workload) -> Callable[[], None]:
    """One step of this rank, started by torchrun."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    both = halves(work.net())
    nothing = torch.empty(work.shape, device="meta")
    shapes = [y.shape for y in copy.deepcopy(both[0]).to("meta")(nothing)]
    half, source = both[rank], cycle(work.batches())
    optimiser, criterion = work.optimiser(half), work.loss()

    def first() -> None:
        images, _ = next(source)
        optimiser.zero_grad()
        sent = half(images)
        for y in sent:
            dist.send(y.detach(), 1)
        grads = [torch.empty_like(y) for y in sent]
        for grad in grads:
            dist.recv(grad, 1)
        torch.autograd.backward(sent, grads)
        optimiser.step()

    def second() -> None:
        _, targets = next(source)
        optimiser.zero_grad()
        received = [torch.empty(shape) for shape in shapes]
        for x in received:
            dist.recv(x, 0)
            x.requires_grad_()
        criterion(half(*received), targets).backward()
        for x in received:
            assert x.grad is not None
            dist.send(x.grad, 0)
        optimiser.step()

    return second if rank else first
