"""Seventy families of timm: a small model of each, its widths and depths turned down where it takes them."""

from __future__ import annotations

import sys
from typing import Any

import timm
from timm import models
from timm.layers import GatedMlp, GroupNorm1
from torch import nn

from library_models.model import CLASSES, Model, image

__all__ = ["MODELS"]


def _model(name: str, height: int, width: int, *, rows: int = 4, **options: Any) -> Model:
    def make() -> nn.Module:
        return timm.create_model(name, num_classes=CLASSES, **options)

    return image(make, height, width, rows=rows)


def _made(module: str, kind: str, height: int, width: int, **options: Any) -> Model:
    """From the class, where functions that make a model of a name set all sizes themselves."""

    def make() -> nn.Module:
        return getattr(sys.modules[f"timm.models.{module}"], kind)(num_classes=CLASSES, **options)

    return image(make, height, width)


MODELS: dict[str, Model] = {
    "beit": _model(
        "beit_base_patch16_224",
        32,
        32,
        img_size=32,
        patch_size=8,
        embed_dim=24,
        depth=2,
        num_heads=2,
        drop_path_rate=0.1,
    ),
    "botnet": _model("botnet26t_256", 64, 64, img_size=64),
    "byobnet": _model("test_byobnet", 65, 49),
    "caformer": _made(
        "metaformer",
        "MetaFormer",
        64,
        64,
        depths=(1, 1, 1, 1),
        dims=(16, 32, 32, 64),
        norm_layers=[models.metaformer.LayerNorm2dNoBias] * 2
        + [models.metaformer.LayerNormNoBias] * 2,
        token_mixers=[models.metaformer.SepConv] * 2 + [models.metaformer.Attention] * 2,
    ),
    "cait": _model(
        "cait_xxs24_224", 32, 32, img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=2
    ),
    "coat": _model(
        "coat_lite_tiny",
        64,
        64,
        img_size=64,
        embed_dims=[16, 16, 24, 32],
        serial_depths=[1, 1, 1, 1],
    ),
    "coatnet": _model("test_coatnet", 64, 64, img_size=64),
    "convit": _model(
        "convit_tiny",
        32,
        32,
        img_size=32,
        patch_size=8,
        embed_dim=24,
        depth=3,
        local_up_to_layer=2,
        num_heads=2,
    ),
    "convmixer": _made(
        "convmixer", "ConvMixer", 49, 33, dim=24, depth=3, kernel_size=5, patch_size=5
    ),
    "convnext": _model("test_convnext", 64, 64),
    "crossvit": _model(
        "crossvit_9_240",
        48,
        48,
        img_size=48,
        img_scale=(1.0, 2 / 3),
        patch_size=(12, 8),
        embed_dim=(16, 24),
        depth=((1, 1, 0),),
        num_heads=(2, 2),
    ),
    "cspnet": _model("darknet17", 65, 49),
    "davit": _model(
        "davit_tiny",
        64,
        64,
        depths=(1, 1, 1, 1),
        embed_dims=(8, 16, 24, 32),
        num_heads=(1, 2, 2, 4),
    ),
    "deit": _model(
        "deit_tiny_distilled_patch16_224",
        32,
        32,
        img_size=32,
        patch_size=8,
        embed_dim=24,
        depth=2,
        num_heads=2,
    ),
    "densenet": _model("densenet121", 65, 49, growth_rate=8, block_config=(2, 2, 2, 2)),
    "dla": _model("dla46_c", 64, 64),
    "dpn": _model("dpn48b", 65, 49, k_sec=(1, 1, 1, 1)),
    "edgenext": _model("edgenext_xx_small", 64, 64),
    "efficientformer_v2": _model("efficientformerv2_s0", 64, 64, img_size=64, depths=(1, 1, 2, 2)),
    "efficientnet": _model("test_efficientnet", 65, 49),
    "efficientvit_mit": _model("efficientvit_b0", 64, 64),
    "efficientvit_msra": _model("efficientvit_m0", 64, 64, rows=8, img_size=64),
    "eva": _model(
        "eva02_tiny_patch14_336",
        28,
        28,
        img_size=28,
        patch_size=7,
        embed_dim=24,
        depth=2,
        num_heads=2,
    ),
    "fasternet": _model("fasternet_t0", 64, 64, embed_dim=16),
    "fastvit": _model("fastvit_t8", 64, 64, layers=(1, 1, 1, 1), embed_dims=(16, 32, 32, 64)),
    "focalnet": _made("focalnet", "FocalNet", 64, 64, depths=(1, 1, 1, 1), embed_dim=12),
    "gcvit": _made(
        "gcvit",
        "GlobalContextVit",
        64,
        64,
        img_size=64,
        depths=(1, 1, 1, 1),
        embed_dim=16,
        num_heads=(2, 2, 4, 4),
    ),
    "ghostnet": _model("ghostnet_050", 65, 49),
    "gmlp": _made(
        "mlp_mixer",
        "MlpMixer",
        32,
        32,
        img_size=32,
        patch_size=8,
        num_blocks=2,
        embed_dim=24,
        mlp_ratio=6,
        block_layer=models.mlp_mixer.SpatialGatingBlock,
        mlp_layer=GatedMlp,
    ),
    "hardcorenas": _model("hardcorenas_a", 65, 49),
    "hgnet": _model("hgnetv2_b0", 65, 49),
    "hiera": _model("hiera_tiny_224", 64, 64, img_size=64, stages=(1, 1, 2, 1), embed_dim=16),
    "hrnet": _model("hrnet_w18_small", 64, 64),
    "inception_next": _model(
        "inception_next_atto", 64, 64, depths=(1, 1, 1, 1), dims=(8, 16, 24, 32)
    ),
    "lcnet": _model("lcnet_050", 65, 49),
    "levit": _model("levit_128s", 64, 64, img_size=64),
    "mambaout": _model("test_mambaout", 64, 64),
    "maxvit": _model("test_maxvit", 64, 64, img_size=64),
    "mixer": _made(
        "mlp_mixer", "MlpMixer", 32, 32, img_size=32, patch_size=8, num_blocks=2, embed_dim=24
    ),
    "mobilenet_v3": _model("mobilenetv3_small_050", 65, 49),
    "mobilevit": _model("mobilevit_xxs", 64, 64),
    "mobilevit_v2": _model("mobilevitv2_050", 64, 64),
    "mvit_v2": _made(
        "mvitv2",
        "MultiScaleVit",
        64,
        64,
        img_size=64,
        cfg=models.mvitv2.MultiScaleVitCfg(depths=(1, 1, 1, 1), embed_dim=16),
    ),
    "nest": _made(
        "nest",
        "Nest",
        64,
        64,
        img_size=64,
        depths=(1, 1, 2),
        embed_dims=(8, 16, 32),
        num_heads=(1, 2, 2),
    ),
    "nextvit": _model("nextvit_small", 64, 64, depths=(1, 1, 5, 1)),
    "nfnet": _model("test_nfnet", 65, 49),
    "pit": _model("pit_ti_224", 64, 64, img_size=64, base_dims=(8, 8, 8), depth=(1, 1, 1)),
    "poolformer": _made(
        "metaformer",
        "MetaFormer",
        64,
        64,
        depths=(1, 1, 1, 1),
        dims=(8, 16, 24, 32),
        downsample_norm=None,
        mlp_act=nn.GELU,
        mlp_bias=True,
        norm_layers=GroupNorm1,
        layer_scale_init_values=1e-5,
        res_scale_init_values=None,
        use_mlp_head=False,
    ),
    "pvt_v2": _model(
        "pvt_v2_b0", 64, 64, depths=(1, 1, 1, 1), embed_dims=(8, 16, 24, 32), num_heads=(1, 2, 3, 4)
    ),
    "rdnet": _model(
        "rdnet_tiny", 64, 64, num_init_features=16, growth_rates=[8] * 7, num_blocks_list=[1] * 7
    ),
    "regnet": _model("regnety_002", 65, 49),
    "repghost": _model("repghostnet_050", 65, 49),
    "repvgg": _model("repvgg_a0", 65, 49),
    "repvit": _model("repvit_m0_9", 64, 64, depth=(1, 1, 2, 1), embed_dim=(8, 16, 24, 32)),
    "res2net": _model("res2net50_48w_2s", 65, 49, layers=(1, 1, 1, 1), base_width=8),
    "resmlp": _made(
        "mlp_mixer",
        "MlpMixer",
        32,
        32,
        img_size=32,
        patch_size=8,
        num_blocks=2,
        embed_dim=24,
        mlp_ratio=4,
        block_layer=models.mlp_mixer.ResBlock,
        norm_layer=models.mlp_mixer.Affine,
    ),
    "resnest": _model("resnest14d", 65, 49, stem_width=16, base_width=16),
    "resnet": _model("test_resnet", 65, 49),
    "resnetv2": _model("resnetv2_18", 65, 49, channels=(16, 24, 32, 48)),
    "rexnet": _model("rexnet_100", 65, 49, rows=8, width_mult=0.5),
    "samvit": _model(
        "samvit_base_patch16",
        64,
        64,
        img_size=64,
        patch_size=8,
        embed_dim=24,
        depth=2,
        num_heads=2,
        global_attn_indexes=(1,),
        window_size=4,
        neck_chans=16,
    ),
    "senet": _model("legacy_seresnet18", 65, 49, layers=[1, 1, 1, 1]),
    "sequencer": _model(
        "sequencer2d_s",
        56,
        56,
        img_size=56,
        layers=(1, 1, 1, 1),
        embed_dims=(16, 24, 24, 24),
        hidden_sizes=(8, 12, 12, 12),
    ),
    "shvit": _model("shvit_s1", 64, 64, rows=8, depth=(1, 1, 1)),
    "sknet": _model("skresnet18", 65, 49, layers=[1, 1, 1, 1]),
    "starnet": _model("starnet_s050", 64, 64, rows=8),
    "swiftformer": _model("swiftformer_xs", 64, 64),
    "swin": _model(
        "swin_tiny_patch4_window7_224",
        56,
        56,
        img_size=56,
        embed_dim=12,
        depths=(2, 2),
        num_heads=(2, 3),
    ),
    "swin_v2": _model(
        "swinv2_tiny_window8_256",
        64,
        64,
        img_size=64,
        embed_dim=12,
        depths=(2, 2),
        num_heads=(2, 3),
    ),
    "tiny_vit": _model(
        "tiny_vit_5m_224",
        64,
        64,
        embed_dims=(16, 16, 24, 32),
        depths=(1, 1, 2, 1),
        num_heads=(2, 2, 2, 4),
    ),
    "tnt": _model(
        "tnt_s_patch16_224",
        32,
        32,
        img_size=32,
        embed_dim=24,
        inner_dim=8,
        depth=2,
        num_heads_inner=2,
        num_heads_outer=2,
    ),
    "tresnet": _model("tresnet_m", 64, 64, layers=(1, 1, 2, 1), width_factor=0.25),
    "twins": _model(
        "twins_svt_small",
        64,
        64,
        img_size=64,
        embed_dims=(8, 16, 24, 32),
        depths=(1, 1, 2, 2),
        num_heads=(1, 2, 2, 4),
    ),
    "vgg": _made(
        "vgg",
        "VGG",
        49,
        33,
        cfg=[8, "M", 16, "M", 32, 32, "M"],
        mlp_ratio=0.01,
        norm_layer=nn.BatchNorm2d,
    ),
    "visformer": _model(
        "visformer_tiny", 64, 64, img_size=64, embed_dim=24, depth=(1, 1, 1), num_heads=2
    ),
    "vit": _model("test_vit", 48, 48, img_size=48),
    "vit_hybrid": _model(
        "vit_tiny_r_s16_p8_224", 64, 64, img_size=64, embed_dim=24, depth=2, num_heads=2
    ),
    "vit_relpos": _model("test_vit_relpos", 48, 48, img_size=48),
    "volo": _made(
        "volo",
        "VOLO",
        64,
        64,
        img_size=64,
        layers=(1, 1, 1, 1),
        embed_dims=(16, 24, 24, 24),
        num_heads=(2, 2, 2, 2),
    ),
    "vovnet": _model("ese_vovnet19b_slim_dw", 65, 49),
    "xception": _model(
        "xception41",
        65,
        49,
        block_cfg=[
            {"in_chs": 64, "out_chs": 32, "stride": 2},
            {"in_chs": 32, "out_chs": 48, "stride": 2},
            {"in_chs": 48, "out_chs": 48, "stride": 1},
        ],
    ),
    "xcit": _model("xcit_nano_12_p16_224", 64, 64, img_size=64, embed_dim=24, depth=2, num_heads=2),
}
