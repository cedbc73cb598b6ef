from __future__ import annotations

import operator
from typing import Any

import pytest
import torch

from fivefold.errors import UsageError
from fivefold.recipes import models
from real_torchvision import torchvision_models

# Ours, torchvision's, and how that is built without a download of weights.
LIKE_TORCHVISION = [
    ("resnet18", "resnet18", {}),
    ("resnet34", "resnet34", {}),
    ("resnet50", "resnet50", {}),
    ("shufflenet_v2_x1_0", "shufflenet_v2_x1_0", {}),
    ("mobilenet_v2", "mobilenet_v2", {}),
    ("densenet121", "densenet121", {}),
    ("deeplabv3", "segmentation.deeplabv3_resnet50", {"weights_backbone": None}),
]
TINY: dict[str, dict[str, object]] = {
    "vgg16_bn": {"width": 4, "hidden": 16, "pool": 1},
    "densenet121": {"growth": 4, "blocks": (2, 2)},
    "amoebanet_d": {"layers": 3, "filters": 16},
    "unet": {"width": 4, "depth": 2},
    "unet_bilinear": {"width": 4, "depth": 2},
    "unet3d": {"width": 4, "depth": 2},
    "deeplabv3": {"blocks": (1, 1, 1, 1), "width": 4, "features": 8, "rates": (1, 2, 3)},
    "edsr": {"blocks": 2, "features": 8},
}


def seeded(name: str, classes: int = 10, channels: int = 3) -> torch.nn.Module:
    torch.manual_seed(0)
    return models.build(name, classes, channels, **TINY.get(name, {}))


def parameters(net: torch.nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize(
    ("name", "classes", "count"),
    [
        ("resnet20", 10, 269_722),
        ("resnet56", 10, 853_018),
        ("resnet18", 1000, 11_689_512),
        ("resnet34", 1000, 21_797_672),
        ("resnet50", 1000, 25_557_032),
        ("shufflenet_v2_x1_0", 1000, 2_278_604),
        ("mobilenet_v2", 1000, 3_504_872),
        ("vgg16_bn", 1000, 138_365_992),
        ("densenet121", 1000, 7_978_856),
        ("unet3d", 3, 19_069_955 + 4_672),  # the paper does not count batch norm
        ("edsr", 10, 1_369_859),
    ],
)
def test_has_the_published_number_of_parameters(name: str, classes: int, count: int):
    with torch.device("meta"):
        assert parameters(models.build(name, classes)) == count


@pytest.mark.parametrize(
    ("layers", "filters", "millions"),
    [(18, 208, 82), (18, 416, 318), (18, 544, 542), (36, 544, 1_050), (72, 512, 1_840)],
)
def test_amoebanet_has_the_sizes_of_the_gpipe_paper(layers: int, filters: int, millions: int):
    with torch.device("meta"):
        net = models.build("amoebanet_d", 1000, layers=layers, filters=filters)
    assert parameters(net) / 1e6 == pytest.approx(millions, rel=0.007)


def expected(name: str, batch: int, classes: int, channels: int, size: tuple[int, ...]):
    """Shape of what the model returns for images or volumes of this size."""
    returned = models.returns(name)
    if returned == "picture":
        return (batch, channels, *(2 * n for n in size))
    return (batch, classes, *(size if returned == "class map" else ()))


@pytest.mark.parametrize("name", models.names())
@pytest.mark.parametrize("channels", [1, 4])
def test_takes_images_of_any_shape_and_channels(name: str, channels: int):
    smallest = 8 if name in ("resnet20", "resnet56") or models.dims(name) == 3 else 32
    net = seeded(name, 7, channels).eval()
    for odd in ((0, 0, 0), (5, 6, 1), (3, 5, 9)):
        size = tuple(smallest + more for more in odd[-models.dims(name) :])
        found = net(torch.randn(2, channels, *size))
        assert found.shape == expected(name, 2, 7, channels, size)


@pytest.mark.parametrize("name", TINY)
def test_a_step_of_training_reaches_every_parameter(name: str):
    net = seeded(name)
    net(torch.randn(3, 3, *(37, 41, 9)[: models.dims(name)])).square().sum().backward()
    for key, parameter in net.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key


@pytest.mark.parametrize("name", models.names())
def test_the_seed_decides_every_weight(name: str):
    first, second = seeded(name).state_dict(), seeded(name).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_names_are_told_by_what_models_return():
    assert models.names("picture") == ("edsr", "edsr_small")
    assert {"unet", "unet_bilinear", "unet3d", "deeplabv3"} == set(models.names("class map"))
    assert set(models.names("classes")) < set(models.names())


@pytest.mark.parametrize("name", ["unet", "unet_bilinear"])
def test_the_unet_keeps_the_skips_whole_at_odd_sizes(name: str):
    torch.manual_seed(0)
    net = models.build(name, width=16, depth=2).eval()  # so wide that some neuron is always alive
    x = torch.randn(1, 3, 13, 17, requires_grad=True)
    net(x)[:, :, -1, -1].sum().backward()
    assert x.grad is not None
    assert x.grad[0, :, -1, -1].abs().min() > 0, "the last pixel sees itself"


def test_edsr_scales_its_residuals_around_a_path_without_them():
    net = models.build("edsr", channels=1, blocks=2, features=4, scaling=0.1)
    block = net.get_submodule("body.0")
    x = torch.randn(1, 4, 5, 7)
    full = block(x) - x
    block.scaling = 0.2
    assert torch.allclose(block(x) - x, 2 * full, atol=1e-6)
    for parameter in net.get_submodule("body").parameters():
        torch.nn.init.zeros_(parameter)
    image = torch.randn(1, 1, 5, 7)
    head, up, tail = (net.get_submodule(part) for part in ("head", "up", "tail"))
    assert torch.equal(net(image), tail(up(head(image))))


def test_amoebanet_rounds_odd_sizes_up_everywhere():
    net = seeded("amoebanet_d").eval()
    sizes: list[tuple[int, ...]] = []
    for cell in net.get_submodule("cells").children():
        cell.register_forward_hook(lambda _cell, _x, y: sizes.append(tuple(y.shape[2:])))
    net(torch.randn(1, 3, 67, 45))
    assert sizes == [(17, 12), (9, 6), (9, 6), (5, 3), (5, 3), (3, 2), (3, 2)]


def test_the_cifar_shortcut_keeps_every_second_pixel_and_adds_zero_channels():
    block = models.build("resnet20").get_submodule("stage2.0")
    for weight in (block.get_parameter("conv2.weight"), block.get_parameter("bn2.weight")):
        torch.nn.init.zeros_(weight)  # what remains is the shortcut
    x = torch.rand(2, 16, 9, 8)
    y = block.eval()(x)
    assert torch.equal(y[:, :16], x[:, :, ::2, ::2])
    assert y.shape == (2, 32, 5, 4)
    assert not y[:, 16:].any()


def outcome(found: Any) -> torch.Tensor:
    return found["out"] if isinstance(found, dict) else found  # of torchvision's segmentation


@pytest.mark.long(every=8)
@pytest.mark.parametrize(("name", "theirs", "options"), LIKE_TORCHVISION, ids=str)
def test_equals_torchvision(name: str, theirs: str, options: dict[str, Any]):
    build = operator.attrgetter(theirs)(torchvision_models())
    compare(models.build(name, 11), build(weights=None, num_classes=11, **options))


def test_vgg_equals_torchvision():
    theirs = torchvision_models().vgg
    with torch.device("meta"):  # half a gigabyte otherwise
        assert shapes(models.build("vgg16_bn", 11)) == shapes(theirs.vgg16_bn(num_classes=11))
    ours = models.build("vgg16_bn", hidden=1, pool=1)
    compare(ours.get_submodule("features"), theirs.make_layers(theirs.cfgs["D"], batch_norm=True))


def compare(ours: torch.nn.Module, reference: torch.nn.Module) -> None:
    """The same outputs, running statistics and dropout, with the reference's weights."""
    assert shapes(ours) == shapes(reference)
    ours.load_state_dict(reference.state_dict())
    x = torch.randn(2, 3, 70, 65)
    for net in (ours.eval(), reference.eval()):
        net.requires_grad_(requires_grad=False)
    assert torch.equal(ours(x), outcome(reference(x)))
    for net in (ours.train(), reference.train()):
        torch.manual_seed(1)
        net(x)
    assert all(torch.equal(ours.state_dict()[k], v) for k, v in reference.state_dict().items())


def shapes(net: torch.nn.Module) -> dict[str, torch.Size]:
    return {key: value.shape for key, value in net.state_dict().items()}


def test_an_unknown_model_is_answered_with_the_nearest_name():
    with pytest.raises(UsageError, match="unknown model 'resnet-20'; did you mean 'resnet20'"):
        models.build("resnet-20")
