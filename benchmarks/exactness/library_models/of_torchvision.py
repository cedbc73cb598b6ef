"""torchvision's families: classification, segmentation and video."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torchvision import models
from torchvision.models import segmentation, video
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.densenet import DenseNet
from torchvision.models.efficientnet import EfficientNet, FusedMBConvConfig, MBConvConfig
from torchvision.models.mnasnet import MNASNet
from torchvision.models.regnet import BlockParams, RegNet
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.models.swin_transformer import (
    PatchMergingV2,
    SwinTransformer,
    SwinTransformerBlockV2,
)
from torchvision.models.video.mvit import MSBlockConfig, MViT
from torchvision.models.video.resnet import (
    BasicBlock as _Block,
)
from torchvision.models.video.resnet import (
    BasicStem,
    Conv2Plus1D,
    Conv3DNoTemporal,
    Conv3DSimple,
    R2Plus1dStem,
)

from library_models.model import CLASSES, Model, image, image_map

__all__ = ["MODELS"]


def _narrow(make: Callable[..., nn.Module], inputs: int) -> Callable[[], nn.Module]:
    """AlexNet and VGG have a hundred million weights behind their convolutions; here those are few."""

    def made() -> nn.Module:
        net = make(num_classes=CLASSES)
        net.avgpool = nn.AdaptiveAvgPool2d(2)
        net.classifier = nn.Sequential(
            nn.Linear(inputs * 4, 32), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(32, CLASSES)
        )
        return net

    return made


def _with_few(make: Callable[..., nn.Module], **options: Any) -> Callable[[], nn.Module]:
    return lambda: make(num_classes=CLASSES, **options)


def _vgg() -> nn.Module:
    def made(num_classes: int) -> nn.Module:
        net = models.vgg11(num_classes=num_classes)
        net.features = models.vgg.make_layers([8, "M", 16, "M", 32, 32, "M", 32, "M"])
        return net

    return _narrow(made, 32)()


def _efficientnet() -> nn.Module:
    stages = [
        MBConvConfig(1, 3, 1, 16, 8, 1),
        MBConvConfig(6, 3, 2, 8, 16, 2),
        MBConvConfig(6, 5, 2, 16, 24, 2),
    ]
    return EfficientNet(stages, dropout=0.2, num_classes=CLASSES)


def _efficientnet_v2() -> nn.Module:
    stages = [
        FusedMBConvConfig(1, 3, 1, 16, 16, 1),
        FusedMBConvConfig(4, 3, 2, 16, 24, 2),
        MBConvConfig(4, 3, 2, 24, 32, 2),
    ]
    return EfficientNet(stages, dropout=0.2, num_classes=CLASSES, last_channel=64)


def _regnet(ratio: float | None) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        told = BlockParams.from_init_params(
            depth=6, w_0=24, w_a=24.0, w_m=2.5, group_width=8, se_ratio=ratio
        )
        return RegNet(told, num_classes=CLASSES)

    return made


def _mvit(second: bool) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        blocks = [
            MSBlockConfig(1, 8, 8, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 4, 4]),
            MSBlockConfig(2, 8, 16, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 2, 2]),
            MSBlockConfig(2, 16, 16, [3, 3, 3], [3, 3, 3], [1, 1, 1], [1, 2, 2]),
        ]
        return MViT(
            spatial_size=(32, 32),
            temporal_size=4,
            block_setting=blocks,
            residual_pool=second,
            residual_with_cls_embed=False,
            num_classes=CLASSES,
            stochastic_depth_prob=0.2,
            rel_pos_embed=second,
            proj_after_attn=second,
        )

    return made


def _swin(**options: Any) -> Callable[[], nn.Module]:
    return lambda: SwinTransformer(
        patch_size=[4, 4],
        embed_dim=12,
        depths=[2, 2],
        num_heads=[2, 3],
        window_size=[4, 4],
        stochastic_depth_prob=0.2,
        num_classes=CLASSES,
        **options,
    )


def _video(block: Any, convolution: Any, stem: Any) -> Callable[[], nn.Module]:
    return lambda: video.VideoResNet(
        block, [convolution] * 4, [1, 1, 1, 1], stem, num_classes=CLASSES
    )


def _fcn() -> nn.Module:
    backbone = ResNet(Bottleneck, [1, 1, 1, 1], width_per_group=16)
    taken = IntermediateLayerGetter(backbone, {"layer3": "out", "layer2": "aux"})
    head = segmentation.fcn.FCNHead
    return segmentation.FCN(taken, head(1024, CLASSES), head(512, CLASSES))


def _s3d() -> nn.Module:
    net = video.s3d(weights=None, num_classes=CLASSES)
    net.avgpool = nn.AvgPool3d((1, 2, 2), stride=1)  # made for videos of 224 pixels
    return net


MODELS: dict[str, Model] = {
    "alexnet": image(_narrow(models.alexnet, 256), 67, 71),
    "convnext": image(
        _with_few(
            models.ConvNeXt,
            block_setting=[
                models.convnext.CNBlockConfig(12, 24, 2),
                models.convnext.CNBlockConfig(24, None, 2),
            ],
            stochastic_depth_prob=0.2,
        ),
        40,
        32,
    ),
    "densenet": image(lambda: DenseNet(8, (2, 2, 2, 2), 16, num_classes=CLASSES), 65, 49),
    "efficientnet": image(_efficientnet, 49, 33),
    "efficientnet_v2": image(_efficientnet_v2, 49, 33),
    "googlenet": image(
        lambda: models.googlenet(
            weights=None, num_classes=CLASSES, aux_logits=True, init_weights=False
        ),
        65,
        65,
        plain=False,
    ),
    "inception_v3": image(
        lambda: models.inception_v3(
            weights=None, num_classes=CLASSES, aux_logits=False, init_weights=False
        ),
        107,
        107,
    ),
    "maxvit": image(
        lambda: models.MaxVit(
            input_size=(32, 32),
            stem_channels=8,
            partition_size=4,
            block_channels=[8, 16],
            block_layers=[1, 1],
            head_dim=4,
            stochastic_depth_prob=0.2,
            num_classes=CLASSES,
        ),
        32,
        32,
    ),
    "mnasnet": image(lambda: MNASNet(0.35, CLASSES), 65, 49),
    "mobilenet_v2": image(_with_few(models.mobilenet_v2, width_mult=0.35), 65, 49),
    "mobilenet_v3": image(_with_few(models.mobilenet_v3_small, width_mult=0.5), 65, 49),
    "regnet_x": image(_regnet(None), 65, 49),
    "regnet_y": image(_regnet(0.25), 65, 49),
    "resnet": image(lambda: ResNet(BasicBlock, [1, 1, 1, 1], CLASSES), 65, 49),
    "resnext": image(
        lambda: ResNet(Bottleneck, [1, 1, 1, 1], CLASSES, groups=8, width_per_group=4), 65, 49
    ),
    "shufflenet_v2": image(
        lambda: models.ShuffleNetV2([2, 2, 2], [8, 16, 32, 64, 64], CLASSES), 65, 49
    ),
    "squeezenet": image(_with_few(models.squeezenet1_1), 65, 49),
    "swin": image(_swin(), 32, 32),
    "swin_v2": image(_swin(block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2), 32, 32),
    "vgg": image(_vgg, 49, 33),
    "vit": image(
        lambda: models.VisionTransformer(
            image_size=32,
            patch_size=8,
            num_layers=3,
            num_heads=2,
            hidden_dim=24,
            mlp_dim=32,
            dropout=0.1,
            num_classes=CLASSES,
        ),
        32,
        32,
    ),
    "wide_resnet": image(
        lambda: ResNet(Bottleneck, [1, 1, 1, 1], CLASSES, width_per_group=96), 65, 49
    ),
    "deeplabv3": image_map(
        lambda: segmentation.deeplabv3_mobilenet_v3_large(
            weights=None, weights_backbone=None, num_classes=CLASSES, aux_loss=True
        ),
        65,
        49,
        plain=False,
    ),
    "fcn": image_map(_fcn, 33, 41, plain=False),
    "lraspp": image_map(
        lambda: segmentation.lraspp_mobilenet_v3_large(
            weights=None, weights_backbone=None, num_classes=CLASSES
        ),
        65,
        49,
        plain=False,
    ),
    "mc3": image(
        lambda: video.VideoResNet(
            _Block, [Conv3DSimple] + [Conv3DNoTemporal] * 3, [1, 1, 1, 1], BasicStem, CLASSES
        ),
        4,
        33,
        25,
    ),
    "r2plus1d": image(_video(_Block, Conv2Plus1D, R2Plus1dStem), 4, 33, 25),
    "r3d": image(_video(_Block, Conv3DSimple, BasicStem), 4, 33, 25),
    "mvit_v1": image(_mvit(second=False), 4, 32, 32),
    "mvit_v2": image(_mvit(second=True), 4, 32, 32),
    "s3d": image(_s3d, 14, 64, 64, rows=6),
    "swin3d": image(
        lambda: video.SwinTransformer3d(
            patch_size=[2, 4, 4],
            embed_dim=12,
            depths=[2, 2],
            num_heads=[2, 3],
            window_size=[2, 4, 4],
            stochastic_depth_prob=0.2,
            num_classes=CLASSES,
        ),
        4,
        32,
        32,
    ),
}
