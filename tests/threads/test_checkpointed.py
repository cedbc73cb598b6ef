"""Running statistics within checkpointed parts: counted again only where one process runs the norm again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from fivefold.errors import UsageError
from fivefold.plan import Layout
from joined import CHECKED, DATA, PIPE, WIDTH, Images, Net, expect_exact

pytestmark = CHECKED


def held(kind: type[Net]) -> dict[str, Any]:
    if kind is Images:
        norm = nn.InstanceNorm2d(4, track_running_stats=True)
        return {"plain": nn.BatchNorm2d(4, affine=False), "norm": norm, "layer": nn.Conv2d(4, 4, 1)}
    norm = nn.BatchNorm1d(6)
    return {"plain": nn.BatchNorm1d(6, affine=False), "norm": norm, "layer": nn.Linear(6, 6)}


def trained(net: Any, x: Tensor) -> Tensor:
    return torch.tanh(net.norm(x))


def nothing_saved(net: Any, x: Tensor) -> Tensor:
    return torch.tanh(net.plain(x.detach())) + x


def saved_before(net: Any, x: Tensor) -> Tensor:
    return net.layer(x) + net.plain(x.detach())


def saved_behind(net: Any, x: Tensor) -> Tensor:
    return net.layer(net.plain(x.detach()))


def views_behind(net: Any, x: Tensor) -> Tensor:
    return net.norm(x * 2).transpose(-1, -2).transpose(-1, -2) + 1


def without_gradients(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = net.plain(x)
    return net.layer(x) * y


def in_both(net: Any, x: Tensor) -> Tensor:
    y = torch.tanh(net.norm(x))
    return y + net.plain(x.detach())


def part(inner: Callable[[Any, Tensor], Tensor], how: str) -> Callable[[Any, Tensor], Tensor]:
    def middle(net: Any, h: Tensor) -> Tensor:
        def called(x: Tensor) -> Tensor:
            return inner(net, x)

        with set_checkpoint_early_stop(how != "all"):
            y = checkpoint(called, h, use_reentrant=how == "reentrant")
        assert isinstance(y, Tensor)
        return h + y

    return middle


INNER = [
    trained, nothing_saved, saved_before, saved_behind, views_behind, without_gradients, in_both,
]  # fmt: skip


@pytest.mark.long(every=8)
@pytest.mark.parametrize(
    ("layout", "kind"),
    [(DATA, Net), (DATA, Images), (PIPE, Net), (WIDTH, Images)],
    ids=["data", "images", "pipe", "width"],
)
@pytest.mark.parametrize("how", ["early", "all", "reentrant"])
@pytest.mark.parametrize("inner", INNER)
def test_a_norm_counts_as_often_as_one_process_runs_it(
    inner: Callable[[Any, Tensor], Tensor], how: str, layout: Layout, kind: type[Net]
) -> None:
    expect_exact(layout, part(inner, how), lambda: held(kind), kind)


def clamped(gradient: Tensor) -> Tensor:
    return gradient.clamp(-1e-2, 1e-2)


def clamp(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-1e-2, 1e-2)


def hooked(how: str) -> dict[str, Any]:
    layer = nn.Conv2d(4, 4, 1)
    if how == "gradient":
        layer.weight.register_hook(clamped)
    else:
        layer.weight.register_post_accumulate_grad_hook(clamp)
    return {"layer": layer}


def reentrant(net: Any, x: Tensor) -> Tensor:
    y = checkpoint(net.layer, x, use_reentrant=True)
    assert isinstance(y, Tensor)
    return y


@pytest.mark.long(every=8)
@pytest.mark.parametrize("how", ["gradient", "afterwards"])
@pytest.mark.parametrize("layout", [DATA, WIDTH, PIPE])
def test_hooks_of_what_a_reentrant_checkpoint_reads(layout: Layout, how: str) -> None:
    expect_exact(layout, reentrant, lambda: hooked(how), Images)

    def twice(net: Any, x: Tensor) -> Tensor:
        return net.layer(reentrant(net, x))  # which goes backward, and calls the hooks, by itself

    with pytest.raises(UsageError, match="use_reentrant=False"):
        expect_exact(layout, twice, lambda: hooked(how), Images)
