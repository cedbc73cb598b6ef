"""Autoencoders of diffusers in tiles and by turns, against themselves in one process."""

from __future__ import annotations

import copy
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoencoders import FAMILIES, Decoder, Encoder, encoded, in_double, made
from fivefold.errors import UsageError
from fivefold.integrations.diffusers import FAMILIES as KNOWN
from fivefold.integrations.diffusers import tiled
from fivefold.mesh import Mesh
from fivefold.plan import Layout, Plan, Tiles
from ranks import run_ranks
from tiles import expect_tiles

NAMES = list(FAMILIES)
TURNS = Plan(tiles=Tiles(strict=True, turns="height=2,width=2"))


@pytest.fixture(autouse=True)
def _double() -> Generator[None]:
    with in_double():
        yield


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def expect_tiled(name: str, plan: Plan) -> None:
    """Encode and decode, two sizes after each other."""
    vae: Any = made(name)
    z = torch.randn(FAMILIES[name].latent, dtype=torch.float64)
    x = torch.randn(FAMILIES[name].image, dtype=torch.float64)
    with torch.no_grad():
        images = [vae.decode(z).sample, vae.decode(z[..., 1:, 2:]).sample]
        latent = encoded(vae.encode(x))

    def check(mesh: Mesh) -> None:
        own = tiled(copy.deepcopy(vae), mesh)
        assert apart(own.decode(z, return_dict=False)[0], images[0]) < 1e-10
        assert apart(own.decode(z[..., 1:, 2:]).sample, images[1]) < 1e-10
        assert apart(encoded(own.encode(x)), latent) < 1e-10

    run_ranks(plan.layout, check, plan=plan, timeout_s=200)


@pytest.mark.long(every=2)
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", NAMES)
def test_by_turns(name: str) -> None:
    expect_tiled(name, TURNS)


@pytest.mark.long(every=8)
@pytest.mark.timeout(240)
@pytest.mark.parametrize("layout", [Layout(width=2), Layout(height=2, width=2)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_in_tiles(name: str, layout: Layout) -> None:
    expect_tiled(name, Plan(layout=layout, tiles=Tiles(strict=True)))


@pytest.mark.long(every=16)
@pytest.mark.timeout(240)
@pytest.mark.parametrize("part", [Decoder, Encoder])
@pytest.mark.parametrize("layout", [Layout(width=2), Layout(height=2, width=2)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_too(name: str, layout: Layout, part: type[nn.Module]) -> None:
    family = FAMILIES[name]
    net = part(made(name))
    expect_tiles(net, family.latent if part is Decoder else family.image, layout, tolerance=1e-10)


def test_a_pipeline() -> None:
    vae: Any = made("AutoencoderKL")
    z = torch.randn(FAMILIES["AutoencoderKL"].latent, dtype=torch.float64)
    pipe = SimpleNamespace(vae=copy.deepcopy(vae))
    with torch.no_grad():
        wanted = vae.decode(z).sample
        mode = vae.encode(wanted).latent_dist.mode()
    pipe.vae.enable_tiling()

    def check(mesh: Mesh) -> None:
        with pytest.warns(UserWarning, match="blend borders, are switched off"):
            assert tiled(pipe, mesh) is pipe
        found = pipe.vae.decode(z, generator=torch.Generator(), return_dict=False)[0]
        assert apart(found, wanted) < 1e-12
        assert type(pipe.vae).__name__ == "AutoencoderKL"
        assert isinstance(pipe.vae, type(made("AutoencoderKL")))
        assert pipe.vae.config.latent_channels == 4
        assert apart(pipe.vae.encode(wanted).latent_dist.mode(), mode) < 1e-12
        with pytest.raises(UsageError, match="in tiles already: call tiled once"):
            tiled(pipe, mesh)

    run_ranks(1, check, plan=TURNS)


def test_every_known_family_is_tested() -> None:
    assert sorted(KNOWN) == sorted(NAMES)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (SimpleNamespace(), "SimpleNamespace with no vae: known are AutoencoderDC"),
        (SimpleNamespace(vae=nn.Linear(2, 2)), "with a Linear: known are AutoencoderDC"),
        (nn.Conv2d(1, 1, 1), r"with a Conv2d: .*model\.run"),
    ],
)
def test_what_is_no_autoencoder(given: Any, said: str) -> None:
    def check(mesh: Mesh) -> None:
        with pytest.raises(UsageError, match=said):
            tiled(given, mesh)

    run_ranks(1, check, plan=TURNS)


def test_other_axes_and_parameters_elsewhere_are_refused() -> None:
    vae: Any = made("AutoencoderKL")

    def check(mesh: Mesh) -> None:
        with pytest.raises(UsageError, match="mesh of tile axes alone, not data=2"):
            tiled(vae, mesh)

    run_ranks(2, check, plan=Plan(layout=Layout(data=2)))
    vae._hf_hook = object()

    def moved(mesh: Mesh) -> None:
        with pytest.raises(UsageError, match="moved as they are used"):
            tiled(vae, mesh)

    run_ranks(1, moved, plan=TURNS)


def test_a_latent_with_fewer_pixels_than_turns() -> None:
    def check(mesh: Mesh) -> None:
        own: Any = tiled(made("AutoencoderKL"), mesh)
        with pytest.raises(UsageError, match="too few for width=2"):
            own.decode(torch.randn(1, 4, 7, 1, dtype=torch.float64))

    run_ranks(1, check, plan=TURNS)
