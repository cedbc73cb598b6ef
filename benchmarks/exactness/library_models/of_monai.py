"""Models of MONAI, most of them for volumes."""

from __future__ import annotations

from monai.networks import nets

from library_models.model import CLASSES, Model, image, image_map, volume_map

__all__ = ["MODELS"]

_VOLUME = {"spatial_dims": 3, "in_channels": 1, "out_channels": CLASSES}

MODELS: dict[str, Model] = {
    "attention_unet": volume_map(
        lambda: nets.AttentionUnet(**_VOLUME, channels=(4, 8, 12), strides=(2, 2)), 16, 16, 12
    ),
    "autoencoder": volume_map(
        lambda: nets.AutoEncoder(**_VOLUME, channels=(4, 8), strides=(2, 2)), 8, 12, 16
    ),
    "basic_unet": volume_map(
        lambda: nets.BasicUNet(3, 1, CLASSES, features=(4, 4, 8, 8, 12, 4)), 16, 32, 32
    ),
    "densenet": image(
        lambda: nets.DenseNet(3, 1, CLASSES, 8, 4, (2, 2, 2)), 16, 33, 25, channels=1
    ),
    "dynunet": volume_map(
        lambda: nets.DynUNet(
            **_VOLUME,
            kernel_size=[3, 3, 3],
            strides=[1, 2, 2],
            upsample_kernel_size=[2, 2],
            filters=[4, 8, 12],
        ),
        8,
        16,
        12,
    ),
    "efficientnet": image(
        lambda: nets.EfficientNetBN(
            "efficientnet-b0",
            pretrained=False,
            spatial_dims=2,
            in_channels=1,
            num_classes=CLASSES,
        ),
        65,
        49,
        rows=8,
        channels=1,
    ),
    "flexible_unet": image_map(
        lambda: nets.FlexibleUNet(3, CLASSES, "resnet10", decoder_channels=(32, 24, 16, 12, 8)),
        64,
        64,
    ),
    "highresnet": volume_map(lambda: nets.HighResNet(3, 1, CLASSES), 8, 11, 9),
    "mednext": volume_map(
        lambda: nets.MedNeXt(
            spatial_dims=3,
            init_filters=4,
            in_channels=1,
            out_channels=CLASSES,
            blocks_down=(1, 1),
            blocks_bottleneck=1,
            blocks_up=(1, 1),
        ),
        8,
        16,
        16,
    ),
    "resnet": image(
        lambda: nets.ResNet(
            "basic", [1, 1, 1, 1], [4, 8, 12, 16], n_input_channels=1, num_classes=CLASSES
        ),
        16,
        33,
        25,
        channels=1,
    ),
    "segresnet": volume_map(
        lambda: nets.SegResNet(
            **_VOLUME, init_filters=8, blocks_down=(1, 1, 1), blocks_up=(1, 1), dropout_prob=0.1
        ),
        8,
        16,
        16,
    ),
    "swin_unetr": volume_map(
        lambda: nets.SwinUNETR(
            1, CLASSES, feature_size=12, depths=(1, 1, 1, 1), num_heads=(2, 2, 2, 2), spatial_dims=2
        ),
        64,
        64,
    ),
    "unet": volume_map(
        lambda: nets.UNet(**_VOLUME, channels=(4, 8, 12), strides=(2, 2), num_res_units=2),
        8,
        16,
        12,
    ),
    "unetr": volume_map(
        lambda: nets.UNETR(
            1, CLASSES, (16, 32, 32), feature_size=4, hidden_size=24, mlp_dim=32, num_heads=2
        ),
        16,
        32,
        32,
    ),
    "vit": image(
        lambda: nets.ViT(
            1,
            (8, 16, 16),
            (4, 8, 8),
            hidden_size=24,
            mlp_dim=32,
            num_layers=2,
            num_heads=2,
            classification=True,
            num_classes=CLASSES,
        ),
        8,
        16,
        16,
        channels=1,
        plain=False,
    ),
    "vnet": volume_map(
        lambda: nets.VNet(spatial_dims=2, in_channels=1, out_channels=CLASSES), 32, 48, rows=3
    ),
}
