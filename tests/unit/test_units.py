"""Which modules gather their parameters together."""

import pytest
import torch
from torch import nn

from fivefold.parallel import gathering
from fivefold.parallel.gathering import units_of
from fivefold.recipes import models


def names(net: nn.Module) -> list[str]:
    by_module = {id(module): name for name, module in net.named_modules()}
    return [by_module[id(unit)] for unit in units_of(net)]


def size(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def test_a_small_net_is_one_piece() -> None:
    assert names(nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9))) == []


@pytest.mark.parametrize("model", ["resnet50", "vgg16_bn", "unet", "densenet121"])
def test_units_do_not_overlap_and_hold_an_eighth_or_cannot_be_divided(model: str) -> None:
    with torch.device("meta"):
        net = models.build(model)
    found, total = units_of(net), size(net)
    inside = [id(p) for unit in found for p in unit.parameters()]
    assert len(inside) == len(set(inside))
    assert sum(map(size, found)) >= 0.97 * total
    for unit in found:
        assert size(unit) <= total // gathering.PARTS or not list(unit.children())


def test_resnet50_is_divided_by_its_stages_and_blocks() -> None:
    with torch.device("meta"):
        net = models.build("resnet50")
    found = names(net)
    assert found[:3] == ["layer1", "layer2", "layer3.0"]
    assert found[-1] == "fc"


def test_modules_of_torch_are_taken_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "LEAST_BYTES", 1)
    net = nn.Sequential(nn.Linear(2, 2), nn.MultiheadAttention(64, 2))
    assert names(net) == ["0", "1"]


def test_lists_are_no_units_and_what_is_shared_stays_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gathering, "LEAST_BYTES", 1)
    net = nn.Module()
    net.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    net.embedding, net.head = nn.Embedding(8, 8), nn.Linear(8, 8)
    net.again = net.blocks[1]
    assert names(net) == ["blocks.0", "blocks.1", "blocks.2", "embedding", "head"]
    net.head.weight = net.embedding.weight
    assert names(net) == ["blocks.0", "blocks.1", "blocks.2"]
