"""Autoencoders of diffusers with the structure of the published ones, and few channels; weights at random.

They cast to float32 in some norms. Within `in_double` they cast to float64 there, so that tiles can be
compared closely with one process.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from real_torchvision import declare_missing

__all__ = ["FAMILIES", "Decoder", "Encoder", "encoded", "in_double", "made"]


class Family(NamedTuple):
    """An autoencoder, and sizes for which no tile is as large as another."""

    options: dict[str, Any]
    latent: tuple[int, ...]
    image: tuple[int, ...]


_BLOCKS = {"layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 4}
FAMILIES = {
    "AutoencoderKL": Family(
        _BLOCKS
        | {
            "block_out_channels": (8, 16),
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
        },
        (2, 4, 7, 9),
        (2, 3, 18, 22),
    ),
    "AutoencoderDC": Family(
        {
            "latent_channels": 4,
            "attention_head_dim": 4,
            "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "encoder_block_out_channels": (8, 8),
            "decoder_block_out_channels": (8, 8),
            "encoder_layers_per_block": (1, 1),
            "decoder_layers_per_block": (1, 1),
            "encoder_qkv_multiscales": ((), (5,)),
            "decoder_qkv_multiscales": ((), (5,)),
        },
        (1, 4, 7, 9),
        (1, 3, 20, 28),
    ),
    "AutoencoderKLWan": Family(
        {
            "base_dim": 4,
            "z_dim": 4,
            "dim_mult": [1, 2],
            "num_res_blocks": 1,
            "temperal_downsample": [True],
            "latents_mean": [0.0] * 4,
            "latents_std": [1.0] * 4,
        },
        (1, 4, 3, 7, 9),
        (1, 3, 5, 18, 22),
    ),
    "AutoencoderKLHunyuanVideo": Family(
        _BLOCKS
        | {
            "block_out_channels": (8,) * 4,
            "down_block_types": ("HunyuanVideoDownBlock3D",) * 4,
            "up_block_types": ("HunyuanVideoUpBlock3D",) * 4,
        },
        (1, 4, 2, 5, 7),
        (1, 3, 5, 40, 56),
    ),
    "AutoencoderKLCogVideoX": Family(
        _BLOCKS
        | {
            "block_out_channels": (8, 8),
            "down_block_types": ("CogVideoXDownBlock3D",) * 2,
            "up_block_types": ("CogVideoXUpBlock3D",) * 2,
            "temporal_compression_ratio": 2,
        },
        (1, 4, 3, 7, 9),
        (1, 3, 5, 18, 22),
    ),
    "AutoencoderKLLTXVideo": Family(
        {
            "latent_channels": 8,
            "block_out_channels": (8,) * 4,
            "decoder_block_out_channels": (8,) * 4,
            "layers_per_block": (1,) * 5,
            "decoder_layers_per_block": (1,) * 5,
            "spatio_temporal_scaling": (True, True, False, False),
            "decoder_spatio_temporal_scaling": (True, True, False, False),
            "patch_size": 2,
        },
        (1, 8, 3, 7, 9),
        (1, 3, 5, 24, 40),
    ),
    "AutoencoderKLMochi": Family(
        {
            "encoder_block_out_channels": (32,) * 4,
            "decoder_block_out_channels": (32,) * 4,
            "latent_channels": 4,
            "layers_per_block": (1,) * 5,
            "temporal_expansions": (1, 2, 1),
            "spatial_expansions": (2, 2, 1),
            "latents_mean": [0.0] * 4,
            "latents_std": [1.0] * 4,
        },
        (1, 4, 3, 7, 9),
        (1, 3, 6, 28, 36),
    ),
    "AutoencoderKLCosmos": Family(
        {
            "latent_channels": 4,
            "encoder_block_out_channels": (8,) * 3,
            "decode_block_out_channels": (8,) * 3,
            "attention_resolutions": (8,),
            "resolution": 32,
            "num_layers": 1,
            "patch_size": 2,
            "spatial_compression_ratio": 4,
            "temporal_compression_ratio": 4,
            "latents_mean": None,
            "latents_std": None,
        },
        (1, 4, 2, 7, 9),
        (1, 3, 9, 24, 40),
    ),
}


def diffusers() -> ModuleType:
    """The package; skips the calling test, with the reason, where it is not installed."""
    pytest.importorskip("diffusers", reason="diffusers is not installed (extra diffusers)")
    declare_missing()  # it imports torchvision where that is installed
    import diffusers

    return diffusers


def made(name: str) -> nn.Module:
    """An autoencoder of a family, in float64 and evaluation mode."""
    torch.manual_seed(0)
    return getattr(diffusers(), name)(**FAMILIES[name].options).double().eval()


def encoded(found: Any) -> Tensor:
    """What an encoder has returned: the latent, or the parameters of its distribution."""
    return found.latent_dist.parameters if hasattr(found, "latent_dist") else found.latent


class Decoder(nn.Module):
    """An autoencoder's decoder, as a net."""

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.vae = vae

    def forward(self, z: Tensor) -> Tensor:
        return self.vae.decode(z, return_dict=False)[0]


class Encoder(Decoder):
    """An autoencoder's encoder, as a net."""

    def forward(self, z: Tensor) -> Tensor:
        return encoded(self.vae.encode(z))


class _Doubles:
    """torch for a module that asks for float32, and gets float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def in_double() -> Generator[None]:
    """Within the block, diffusers casts to float64 where it casts to float32."""
    diffusers()
    names = ("normalization", "attention_processor")
    modules: list[Any] = [importlib.import_module(f"diffusers.models.{name}") for name in names]
    for module in modules:
        module.torch = _Doubles()
    try:
        yield
    finally:
        for module in modules:
            module.torch = torch
