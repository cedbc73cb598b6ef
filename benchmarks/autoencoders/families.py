"""Autoencoders of every known family: published structures with fewer channels, weights at random."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

__all__ = ["FAMILIES", "UNTILED", "Family", "enable_tiling", "made"]

UNTILED = ("AutoencoderKLCosmos",)
"""of which diffusers' `enable_tiling` changes nothing"""


class Family(NamedTuple):
    """What differs from the published defaults, and what is decoded and encoded."""

    options: dict[str, Any]
    latent: tuple[int, ...]
    image: tuple[int, ...]


_NARROW = (32, 64, 128, 128)
_CLIP = (1, 3, 9, 128, 128)
FAMILIES = {
    "AutoencoderKL": Family(
        {
            "block_out_channels": (64, 128, 256, 256),
            "down_block_types": ("DownEncoderBlock2D",) * 4,
            "up_block_types": ("UpDecoderBlock2D",) * 4,
            "layers_per_block": 2,
        },
        (1, 4, 32, 32),
        (1, 3, 256, 256),
    ),
    "AutoencoderDC": Family(
        {
            "encoder_block_types": ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
            "decoder_block_types": ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3,
            "encoder_block_out_channels": (64, 128, 256, 256, 512, 512),
            "decoder_block_out_channels": (64, 128, 256, 256, 512, 512),
        },
        (1, 32, 8, 8),
        (1, 3, 256, 256),
    ),
    "AutoencoderKLWan": Family({"base_dim": 32}, (1, 16, 3, 16, 16), _CLIP),
    "AutoencoderKLHunyuanVideo": Family({"block_out_channels": _NARROW}, (1, 16, 3, 16, 16), _CLIP),
    "AutoencoderKLCogVideoX": Family(
        {
            "block_out_channels": (32, 64, 64, 128),
            "down_block_types": ("CogVideoXDownBlock3D",) * 4,
            "up_block_types": ("CogVideoXUpBlock3D",) * 4,
        },
        (1, 16, 3, 16, 16),
        _CLIP,
    ),
    "AutoencoderKLLTXVideo": Family(
        {"block_out_channels": _NARROW, "decoder_block_out_channels": _NARROW},
        (1, 128, 3, 8, 8),
        (1, 3, 17, 256, 256),
    ),
    "AutoencoderKLMochi": Family(
        {
            "encoder_block_out_channels": (32, 64, 96, 128),
            "decoder_block_out_channels": (32, 64, 128, 192),
        },
        (1, 12, 2, 16, 16),
        (1, 3, 7, 128, 128),
    ),
    "AutoencoderKLCosmos": Family(
        {
            "encoder_block_out_channels": (64, 128, 256, 256),
            "decode_block_out_channels": (128, 256, 256, 256),
        },
        (1, 16, 2, 32, 32),
        (1, 3, 9, 256, 256),
    ),
}


def made(name: str) -> Any:
    """An autoencoder of a family, in evaluation mode. It wants diffusers."""
    import diffusers

    torch.manual_seed(0)
    return getattr(diffusers, name)(**FAMILIES[name].options).eval()


def enable_tiling(name: str, vae: Any) -> None:
    """Let diffusers blend tiles of half the image's edge, which overlap by a quarter of theirs."""
    edge = FAMILIES[name].image[-1] // 2
    vae.enable_tiling()
    if name == "AutoencoderKL":
        vae.tile_sample_min_size, vae.tile_latent_min_size = edge, edge // 8
    elif name == "AutoencoderKLCogVideoX":
        vae.enable_tiling(edge, edge, 0.25, 0.25)
    else:
        step = edge * 3 // 4
        vae.enable_tiling(
            tile_sample_min_height=edge,
            tile_sample_min_width=edge,
            tile_sample_stride_height=step,
            tile_sample_stride_width=step,
        )
