"""An autoencoder and its discriminator, trained as their page does, against one process without Fivefold."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoencoders import diffusers, in_double
from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.parallel import parallelize
from fivefold.plan import Layout, Plan, Tiles
from ranks import run_ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "train-an-autoencoder.md"
STEPS = 3
TILES = Tiles(strict=True, fuse="2")
CASES = [
    (Plan(layout=Layout(data=2)), 3),
    (Plan(layout=Layout(width=2), tiles=TILES), 1),
    (Plan(layout=Layout(width=2), tiles=TILES), 3),  # tiles become samples
    (Plan(layout=Layout(data=2, width=2), tiles=TILES), 2),
    (Plan(tiles=Tiles(strict=True, turns="height=2,width=2")), 1),
    (Plan(layout=Layout(width=2), tiles=Tiles(strict=True, fuse="never", turns="height=2")), 1),
]
"""plans, and numbers of images"""
EVERY = pytest.mark.parametrize(
    ("plan", "samples"), CASES, ids=[f"{p.layout}-{p.tiles.turns}-{n}" for p, n in CASES]
)


def written(number: int) -> dict[str, Any]:
    """What a block of Python of the page defines."""
    names: dict[str, Any] = {"__name__": "page"}
    exec(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[number], names)
    return names


PAGES = written(0)
Nets = tuple[nn.Module, nn.Module]
Batches = list[tuple[Tensor, Tensor]]


def own_nets() -> Nets:
    torch.manual_seed(0)
    return PAGES["Autoencoder"]().double(), PAGES["patches"]().double()


def published_nets() -> Nets:
    diffusers()
    torch.manual_seed(0)
    made = written(1)["Published"](
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
    )
    return made.double(), PAGES["patches"]().double()


def batches(samples: int) -> Batches:
    """Latents of 11 x 13 pixels, whose tiles become tiles of images that divide otherwise."""
    torch.manual_seed(1)
    return [
        (torch.randn(samples, 3, 22, 26).double(), torch.randn(samples, 4, 11, 13).double())
        for _ in range(STEPS)
    ]


def trained(
    nets: Nets, seen: Batches, step: Callable[..., list[Tensor]]
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of both models in every step, and what both are at the end."""
    optims = [torch.optim.Adam(net.parameters(), lr=2e-3) for net in nets]
    losses = [loss.item() for batch in seen for loss in step(optims, *batch)]
    state = {f"{n}.{key}": v for n, net in enumerate(nets) for key, v in net.state_dict().items()}
    return losses, state


def alone(nets: Nets, seen: Batches) -> tuple[list[float], dict[str, Tensor]]:
    """In plain PyTorch."""
    generator, discriminator = PAGES["Generator"](*nets), PAGES["Discriminator"](nets[1])

    def step(optims: list[Any], images: Tensor, noise: Tensor) -> list[Tensor]:
        first = generator(images, noise).mean()
        gradients = torch.autograd.grad(first, [*nets[0].parameters()])
        for parameter, gradient in zip(nets[0].parameters(), gradients, strict=True):
            parameter.grad = gradient
        optims[0].step()
        made = generator.reconstruct(images, noise).detach()
        second = discriminator(images, made).mean()
        optims[1].zero_grad()
        second.backward()
        optims[1].step()
        return [first, second]

    return trained(nets, seen, step)


def expect_trained(nets: Nets, plan: Plan, samples: int) -> None:
    seen = batches(samples)  # before there are threads, which share torch's generator
    losses, state = alone(copy.deepcopy(nets), seen)
    copies = [copy.deepcopy(nets) for _ in range(plan.layout.size)]

    def check(mesh: Mesh) -> None:
        mine, mean = copies[mesh.rank], PAGES["Mean"]()
        generator = parallelize(PAGES["Generator"](*mine), mesh, loss=mean)
        discriminator = parallelize(PAGES["Discriminator"](mine[1]), mesh, loss=mean)

        def step(optims: list[Any], *batch: Tensor) -> list[Tensor]:
            return PAGES["step"](generator, discriminator, optims, *generator.shard(batch))

        found, now = trained(mine, seen, step)
        assert found == pytest.approx(losses, rel=1e-11)
        for key, wanted in state.items():
            torch.testing.assert_close(now[key], wanted, rtol=1e-8, atol=1e-10, msg=key)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is gathered
        run_ranks(plan.layout, check, plan=plan, timeout_s=200)


@EVERY
def test_both_are_trained_as_in_one_process(plan: Plan, samples: int) -> None:
    expect_trained(own_nets(), plan, samples)


@pytest.mark.long(every=8)
@pytest.mark.timeout(240)
@EVERY
def test_one_of_diffusers(plan: Plan, samples: int) -> None:
    with in_double():
        expect_trained(published_nets(), plan, samples)


class Returned(nn.Module):
    """A generator that returns what its loss is a function of, several tensors."""

    def __init__(self, vae: Any, judge: nn.Module) -> None:
        super().__init__()
        self.vae, self.judge = vae, judge

    def forward(self, images: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        mean, logvar = self.vae.encode(images)
        made = self.vae.decode(mean + (logvar / 2).exp() * noise)
        return made, mean, logvar, self.judge(made)


def of_outputs(outputs: tuple[Tensor, ...], images: Tensor) -> Tensor:
    made, mean, logvar, judged = outputs
    normal = (mean.square() + logvar.exp() - 1 - logvar).mean() / 2
    return (made - images).abs().mean() + 1e-3 * normal - 0.1 * judged.mean()


@pytest.mark.filterwarnings("ignore:the loss")
@EVERY
def test_a_loss_of_several_outputs(plan: Plan, samples: int) -> None:
    nets, (batch, *_) = own_nets(), batches(samples)
    wanted = copy.deepcopy(nets)
    loss = of_outputs(Returned(*wanted)(*batch), batch[0])
    loss.backward()
    copies = [copy.deepcopy(nets) for _ in range(plan.layout.size)]

    def check(mesh: Mesh) -> None:
        model = parallelize(Returned(*copies[mesh.rank]), mesh, loss=of_outputs)
        inputs, targets = model.shard(batch, batch[0])
        torch.testing.assert_close(model.step(inputs, targets), loss.detach(), rtol=1e-11, atol=0)
        for ours, theirs in zip(copies[mesh.rank], wanted, strict=True):
            for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-8, atol=1e-10)

    run_ranks(plan.layout, check, plan=plan, timeout_s=200)


def test_tiles_of_outputs_are_put_together_for_another_model() -> None:
    nets, (batch, *_) = own_nets(), batches(1)
    copies = [copy.deepcopy(nets) for _ in range(2)]

    def check(mesh: Mesh) -> None:
        vae, judge = (parallelize(net, mesh) for net in copies[mesh.rank])
        made = vae.run("decode", vae.shard(batch[1]))
        with pytest.raises(UsageError, match=r"to another one by model\.whole\(outputs\)"):
            judge(made)
        whole = vae.whole(made)
        assert whole.shape == batch[0].shape and judge(whole).shape[0] == 1
        with pytest.raises(UsageError, match="is this rank's part of"):
            vae.shard(made)

    run_ranks(2, check, plan=Plan(layout=Layout(width=2), tiles=Tiles(fuse="never")))
