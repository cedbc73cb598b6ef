from __future__ import annotations

import pytest
import torch

from fivefold.errors import UsageError
from fivefold.recipes import models
from real_torchvision import torchvision_models

LIKE_TORCHVISION = ("resnet18", "resnet50", "shufflenet_v2_x1_0", "mobilenet_v2")


def seeded(name: str, classes: int = 10, channels: int = 3) -> torch.nn.Module:
    torch.manual_seed(0)
    return models.build(name, classes, channels)


def parameters(net: torch.nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize(
    ("name", "classes", "count"),
    [
        ("resnet20", 10, 269_722),
        ("resnet56", 10, 853_018),
        ("resnet18", 1000, 11_689_512),
        ("resnet50", 1000, 25_557_032),
        ("shufflenet_v2_x1_0", 1000, 2_278_604),
        ("mobilenet_v2", 1000, 3_504_872),
    ],
)
def test_has_the_published_number_of_parameters(name: str, classes: int, count: int):
    with torch.device("meta"):
        assert parameters(models.build(name, classes)) == count


@pytest.mark.parametrize("name", models.names())
@pytest.mark.parametrize("channels", [1, 4])
def test_maps_images_of_any_shape_and_channels_to_logits(name: str, channels: int):
    smallest = 8 if name in ("resnet20", "resnet56") else 32
    net = seeded(name, 7, channels).eval()
    for height, width in [(smallest, smallest), (smallest + 1, smallest + 6)]:
        assert net(torch.randn(2, channels, height, width)).shape == (2, 7)


@pytest.mark.parametrize("name", models.names())
def test_the_seed_decides_every_weight(name: str):
    first, second = seeded(name).state_dict(), seeded(name).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_the_cifar_shortcut_keeps_every_second_pixel_and_adds_zero_channels():
    block = models.build("resnet20").get_submodule("stage2.0")
    for weight in (block.get_parameter("conv2.weight"), block.get_parameter("bn2.weight")):
        torch.nn.init.zeros_(weight)  # what remains is the shortcut
    x = torch.rand(2, 16, 9, 8)
    y = block.eval()(x)
    assert torch.equal(y[:, :16], x[:, :, ::2, ::2])
    assert y.shape == (2, 32, 5, 4)
    assert not y[:, 16:].any()


@pytest.mark.parametrize("name", LIKE_TORCHVISION)
def test_equals_torchvision(name: str):
    reference = getattr(torchvision_models(), name)(weights=None, num_classes=11)
    ours = models.build(name, 11)
    theirs = reference.state_dict()
    assert {k: v.shape for k, v in ours.state_dict().items()} == {
        k: v.shape for k, v in theirs.items()
    }
    ours.load_state_dict(theirs)
    x = torch.randn(2, 3, 70, 65)
    for net in (ours.eval(), reference.eval()):
        net.requires_grad_(requires_grad=False)
    assert torch.equal(ours(x), reference(x))
    for net in (ours.train(), reference.train()):  # the same statistics, and the same dropout
        torch.manual_seed(1)
        net(x)
    assert all(torch.equal(ours.state_dict()[k], v) for k, v in reference.state_dict().items())


def test_an_unknown_model_is_answered_with_the_nearest_name():
    with pytest.raises(UsageError, match="unknown model 'resnet-20'; did you mean 'resnet20'"):
        models.build("resnet-20")
