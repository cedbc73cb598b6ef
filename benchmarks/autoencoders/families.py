"""Autoencoders of every known family: as published, or with fewer channels; weights at random."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

__all__ = [
    "FAMILIES",
    "PUBLISHED",
    "UNTILED",
    "Family",
    "Published",
    "decoder",
    "enable_tiling",
    "made",
]

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


class Published(NamedTuple):
    """A configuration that weights are published for: what differs from the defaults of its class."""

    family: str
    latent: tuple[int, ...]
    image: str
    """what the latent is decoded to"""
    options: dict[str, Any]


_KL: dict[str, Any] = FAMILIES["AutoencoderKL"].options | {
    "block_out_channels": (128, 256, 512, 512)
}
_CLIPS = {
    "down_block_types": ("CogVideoXDownBlock3D",) * 4,
    "up_block_types": ("CogVideoXUpBlock3D",) * 4,
}
PUBLISHED = {
    "SDXL": Published("AutoencoderKL", (1, 4, 128, 128), "1024 x 1024", _KL),
    "Flux": Published(
        "AutoencoderKL", (1, 16, 128, 128), "1024 x 1024",
        _KL | {"latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False},
    ),
    "Sana": Published(
        "AutoencoderDC", (1, 32, 32, 32), "1024 x 1024",
        {"downsample_block_type": "conv", "upsample_block_type": "interpolate"},
    ),
    "Wan": Published("AutoencoderKLWan", (1, 16, 21, 60, 104), "81 x 480 x 832", {}),
    "HunyuanVideo": Published(
        "AutoencoderKLHunyuanVideo", (1, 16, 33, 68, 120), "129 x 544 x 960", {}
    ),
    "CogVideoX": Published("AutoencoderKLCogVideoX", (1, 16, 13, 60, 90), "49 x 480 x 720", _CLIPS),
    "LTX-Video": Published("AutoencoderKLLTXVideo", (1, 128, 21, 16, 24), "161 x 512 x 768", {}),
    "Mochi": Published("AutoencoderKLMochi", (1, 12, 28, 60, 106), "163 x 480 x 848", {}),
    "Cosmos": Published("AutoencoderKLCosmos", (1, 16, 16, 88, 160), "121 x 704 x 1280", {}),
}  # fmt: skip


def decoder(name: str) -> Any:
    """Of a published configuration: decodes when it is called. It wants diffusers."""
    import diffusers

    published = PUBLISHED[name]
    kind = getattr(diffusers, published.family)

    class Decoder(kind):
        def forward(self, latent: torch.Tensor) -> torch.Tensor:
            return self.decode(latent, return_dict=False)[0]

    return Decoder(**published.options).eval()


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
