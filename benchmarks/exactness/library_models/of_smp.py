"""The decoders of segmentation-models-pytorch, on a small ResNet of timm's."""

from __future__ import annotations

from typing import Any

import segmentation_models_pytorch as smp
from torch import nn

from library_models.model import CLASSES, Model, image_map

__all__ = ["MODELS"]


def _model(name: str, *, encoder: str = "tu-test_resnet", size: int = 64, **options: Any) -> Model:
    def make() -> nn.Module:
        return smp.create_model(name, encoder, encoder_weights=None, classes=CLASSES, **options)

    return image_map(make, size, size)


_CHANNELS = (48, 32, 32, 16, 16)
MODELS: dict[str, Model] = {
    "deeplabv3": _model("deeplabv3", decoder_channels=16),
    "deeplabv3plus": _model("deeplabv3plus", decoder_channels=16),
    "dpt": _model(
        "dpt",
        size=160,
        encoder="tu-test_vit",
        decoder_intermediate_channels=(16, 16, 16, 16),
        decoder_fusion_channels=16,
    ),
    "fpn": _model("fpn", decoder_pyramid_channels=24, decoder_segmentation_channels=32),
    "linknet": _model("linknet"),
    "manet": _model("manet", decoder_channels=_CHANNELS, decoder_pab_channels=8),
    "pan": _model("pan", size=128, decoder_channels=16),
    "pspnet": _model("pspnet", psp_out_channels=32),
    "segformer": _model("segformer", decoder_segmentation_channels=16),
    "unet": _model("unet", decoder_channels=_CHANNELS, decoder_attention_type="scse"),
    "unetplusplus": _model("unetplusplus", decoder_channels=_CHANNELS),
    "upernet": _model("upernet", decoder_channels=16),
}
