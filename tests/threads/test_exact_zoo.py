"""A zoo of nets under layouts that divide the batch badly. A bug that is found gets its case here."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.parallel import parallelize
from ranks import run_ranks
from zoo import CLASSES, IMAGE, LAYOUTS, VECTOR, Call, Case, Then, expect_exact, flat

pytestmark = pytest.mark.filterwarnings(
    "ignore:whether the samples of a batch depend on each other in the net was not checked"
)


def frozen(net: nn.Module, *names: str) -> nn.Module:
    for name, parameter in net.named_parameters():
        if name.startswith(names):
            parameter.requires_grad_(False)
    return net


def twice() -> nn.Module:
    block = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Dropout(0.3))
    return Then(Call(lambda self, x: self.block(F.relu(self.block(x))), block=block))


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 5), nn.Linear(5, CLASSES))
    net[2].weight = net[0].weight
    return net


class FrozenNorm(Then):
    """The usual way to keep pretrained statistics: eval mode survives train()."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm2d(6))
        self.second = nn.BatchNorm2d(6)

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.middle.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.second(self.middle(self.conv(x))))
        return self.head(x.mean((2, 3)))


class Experts(nn.Module):
    """Samples choose their expert; on some ranks nobody chooses one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(5, CLASSES) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        choice = (x[:, 0].abs() * 7).long() % 3
        y = x.new_zeros(x.shape[0], CLASSES)
        for number, expert in enumerate(self.experts):
            chosen = choice == number
            if chosen.any():
                y[chosen] = expert(x[chosen])
        return y


def checkpointed(inner: nn.Module) -> nn.Module:
    return Then(Call(lambda self, x: checkpoint(self.inner, x, use_reentrant=False), inner=inner))


def functional_drops(self: Call, x: Tensor) -> Tensor:
    x = F.dropout(self.conv(x), 0.3, self.training)
    return F.dropout2d(self.drop(F.relu(self.drop(x))), 0.3, self.training)


def checkpoints_within(self: Call, x: Tensor) -> Tensor:
    """Two checkpointed blocks share a dropout that draws between them as well; one block nests another."""
    x = checkpoint(self.first, x, use_reentrant=False)
    return checkpoint(self.second, self.drop(x), use_reentrant=False)


def nest() -> nn.Module:
    drop = nn.Dropout(0.3)
    first = nn.Sequential(nn.Conv2d(6, 6, 1), drop, nn.BatchNorm2d(6), drop)
    inner = Call(lambda self, x: checkpoint(self.block, x, use_reentrant=False),
                 block=nn.Sequential(nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6), drop))  # fmt: skip
    return Call(checkpoints_within, first=first, drop=drop, second=nn.Sequential(drop, inner, drop))


def stochastic_depth(self: Call, x: Tensor) -> Tensor:
    keep = torch.empty(x.shape[0], 1, 1, 1, dtype=x.dtype, device=x.device).bernoulli_(0.7)
    return x + self.block(x) * keep / 0.7


def sampled_depth(self: Call, x: Tensor) -> Tensor:
    """As others write it, with masks in two ways."""
    keep = 0.7 + torch.rand((x.shape[0],) + (1,) * (x.ndim - 1), dtype=x.dtype, device=x.device)
    return x + self.block(x) * keep.floor_() / 0.7 * torch.rand_like(x)


def mask_without_samples(self: Call, x: Tensor) -> Tensor:
    """Rows as many as a rank may have samples, but of something else; a mask for every place."""
    places = F.dropout(self.places.weight * 2.0, 0.4) * torch.rand(self.places.weight.shape)
    return self.head(x + places.sum(0) + torch.rand(1, 5, dtype=x.dtype) + torch.rand([]))


def standardised(_self: Call, x: Tensor) -> Tensor:
    """Every sample by itself; a sample of zeros would divide zero by zero."""
    return (x - x.mean((1, 2, 3), keepdim=True)) / x.std((1, 2, 3), keepdim=True)


def in_place(self: Call, x: Tensor) -> Tensor:
    x += 1.0
    x = F.relu_(self.bn(x)) + 0.1
    return F.dropout(x, 0.2, self.training, inplace=True)


def without_bias(norm: nn.BatchNorm2d) -> nn.Module:
    """As torch 2.12 and later make it with bias=False."""
    norm.bias = None
    return norm


def functional_norm(self: Call, x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, training=True) * self.scale.weight.view(1, -1, 1, 1)


def lstm(self: Call, x: Tensor) -> Tensor:
    return self.head(self.lstm(x)[0][:, -1])


class NormThenRelu(nn.BatchNorm2d):
    """As model collections write it."""

    def forward(self, x: Tensor) -> Tensor:
        average, spread = self.running_mean, self.running_var
        y = F.batch_norm(x, average, spread, self.weight, self.bias, self.training, 0.2, self.eps)
        return F.relu(y)


class Teacher(nn.Module):
    """A second net that does not learn, without dropout; and a pass of the first without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Then(nn.Sequential(nn.BatchNorm2d(6), nn.Dropout(0.3)))
        self.teacher = Then(nn.BatchNorm2d(6)).requires_grad_(False)

    def train(self, mode: bool = True) -> Teacher:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            guide = self.teacher(x) + self.net(x + 1)
        return self.net(x) + 0.1 * guide


def hooked() -> nn.Module:
    net = Then(nn.BatchNorm2d(6))
    net.conv.register_forward_hook(lambda _module, _inputs, output: output * 2)
    net.head.register_forward_pre_hook(lambda _module, inputs: (inputs[0] + 1,))
    return net


def slope(self: Call, x: Tensor) -> Tensor:
    """Differentiates inside the forward pass, as energy models do; dropout between."""
    x = x.clone().requires_grad_()
    y = self.head(self.drop(torch.tanh(self.body(x))))
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return y + self.drop(gradient).norm(dim=1, keepdim=True)


def drops_weights(self: Call, x: Tensor) -> Tensor:
    return F.linear(x, F.dropout(self.head.weight, 0.3, self.training), self.head.bias)


def drops_layer(self: Call, x: Tensor) -> Tensor:
    return x + self.block(x) * torch.empty((), dtype=x.dtype).bernoulli_(0.5)


def norm_of_two_views(self: Call, x: Tensor) -> Tensor:
    return self.head(self.norm(torch.cat([x, x.square()]))[: len(x)])


def steps_as_samples(self: Call, x: Tensor) -> Tensor:
    return self.head(self.drop(self.norm(x.flatten(0, 1))).view(x.shape).mean(1))


NORMS = {
    "batch norm": lambda: nn.BatchNorm2d(6),
    "batch norm, not affine": lambda: nn.BatchNorm2d(6, affine=False),
    "batch norm without buffers": lambda: nn.BatchNorm2d(6, track_running_stats=False),
    "batch norm, cumulative average": lambda: nn.BatchNorm2d(6, momentum=None),
    "batch norm, weight alone": lambda: without_bias(nn.BatchNorm2d(6)),
    "batch norm, large eps": lambda: nn.BatchNorm2d(6, eps=0.1, momentum=0.5),
    "functional batch norm": lambda: Call(functional_norm, scale=nn.Conv2d(6, 6, 1, groups=6)),
    "group norm": lambda: nn.GroupNorm(2, 6),
    "layer norm": lambda: nn.LayerNorm((6, 3, 3)),
    "instance norm": lambda: nn.InstanceNorm2d(6, affine=True),
    "instance norm with buffers": lambda: nn.InstanceNorm2d(6, track_running_stats=True),
    "a norm that does more": lambda: NormThenRelu(6),
    "no norm": nn.Identity,
}

RANDOM = {
    "dropout": lambda: nn.Dropout(0.4),
    "dropout of everything": lambda: nn.Dropout(1.0),
    "dropout of nothing": lambda: nn.Dropout(0.0),
    "dropout 2d": lambda: nn.Dropout2d(0.4),
    "dropout in place": lambda: nn.Dropout(0.4, inplace=True),
    "alpha dropout": lambda: nn.AlphaDropout(0.4),
    "feature alpha dropout": lambda: nn.FeatureAlphaDropout(0.4),
    "functional dropout": lambda: Call(lambda self, x: F.dropout(x, 0.4, self.training)),
    "functional dropout 2d": lambda: Call(lambda self, x: F.dropout2d(x, 0.4, self.training)),
    "two dropouts and a norm": lambda: nn.Sequential(
        nn.Dropout(0.2), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout2d(0.2)
    ),
    "stochastic depth": lambda: Call(stochastic_depth, block=nn.Conv2d(6, 6, 3, padding=1)),
    "stochastic depth, sampled": lambda: Call(sampled_depth, block=nn.Conv2d(6, 6, 3, padding=1)),
}


CASES: dict[str, Case] = {
    **{name: Case(functools.partial(lambda m: Then(m()), middle)) for name, middle in NORMS.items()},
    **{name: Case(functools.partial(lambda m: Then(m()), middle)) for name, middle in RANDOM.items()},
    "batch norm 1d": Case(lambda: flat(8, nn.BatchNorm1d(8), nn.ReLU()), **VECTOR),
    "batch norm 1d with length": Case(
        lambda: nn.Sequential(nn.Conv1d(5, 6, 3), nn.BatchNorm1d(6), nn.Dropout1d(0.3), nn.Flatten(),
                              nn.Linear(24, CLASSES)),
        inputs=lambda n: torch.randn(n, 5, 6),
    ),
    "volumes": Case(
        lambda: nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.MaxPool3d(2),
                              nn.Dropout3d(0.2), nn.AdaptiveAvgPool3d(1), nn.Flatten(),
                              nn.Linear(4, CLASSES)),
        inputs=lambda n: torch.randn(n, 2, 4, 5, 4),
    ),
    "channels last": Case(
        lambda: Then(nn.BatchNorm2d(6)).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        inputs=lambda n: torch.randn(n, *IMAGE).contiguous(memory_format=torch.channels_last),
    ),
    **{f"masks of {rows} rows without samples": Case(
        functools.partial(lambda n: Call(mask_without_samples, places=nn.Linear(5, n),
                                         head=nn.Linear(5, CLASSES)), rows),
        inputs=lambda n: torch.randn(n, 5)) for rows in (1, 2, 3, 4, 6)},
    "one module twice": Case(twice),
    "tied weights": Case(tied, **VECTOR),
    "frozen start": Case(lambda: frozen(Then(nn.BatchNorm2d(6)), "conv")),
    "frozen norm weights": Case(lambda: frozen(Then(nn.BatchNorm2d(6)), "middle")),
    "only the head trains": Case(lambda: frozen(Then(nn.BatchNorm2d(6)), "conv", "middle")),
    "frozen norm statistics": Case(FrozenNorm),
    "experts": Case(Experts, **VECTOR),
    "checkpointed": Case(
        lambda: checkpointed(nn.Sequential(nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6), nn.Dropout(0.4)))
    ),
    "checkpointed calls of functions": Case(
        lambda: checkpointed(Call(functional_drops, conv=nn.Conv2d(6, 6, 1), drop=nn.Dropout(0.2)))
    ),
    "checkpointed stochastic depth": Case(
        lambda: checkpointed(Call(stochastic_depth, block=nn.Conv2d(6, 6, 1)))
    ),
    "checkpoints within checkpoints": Case(lambda: Then(nest())),
    "standardised samples": Case(lambda: nn.Sequential(Call(standardised), Then(nn.BatchNorm2d(6)))),
    "norms after standardised samples": Case(
        lambda: nn.Sequential(Call(standardised), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1), Call(standardised),
                              nn.InstanceNorm2d(3, track_running_stats=True), Then(nn.BatchNorm2d(6)))
    ),
    "in place": Case(
        lambda: nn.Sequential(Call(in_place, bn=nn.BatchNorm2d(3)), Then(nn.Identity()))
    ),
    "recurrent": Case(
        lambda: Call(lstm, lstm=nn.LSTM(5, 7, batch_first=True), head=nn.Linear(7, CLASSES)),
        inputs=lambda n: torch.randn(n, 4, 5),
    ),
    "attention": Case(
        lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
                              nn.Dropout(0.1), nn.Flatten(), nn.Linear(24, CLASSES)),
        inputs=lambda n: torch.randn(n, 3, 8),
    ),
    "embedding": Case(
        lambda: nn.Sequential(nn.Embedding(9, 6), nn.Dropout(0.2), nn.Flatten(), nn.Linear(24, CLASSES)),
        inputs=lambda n: torch.randint(0, 9, (n, 4)),
    ),
    "spectral norm": Case(
        lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 8)), nn.ReLU(),
                              nn.Linear(8, CLASSES)),
        **VECTOR,
    ),
    "fourier": Case(
        lambda: nn.Sequential(Call(lambda _, x: torch.fft.rfft2(x).abs()), nn.Conv2d(3, 6, 3),
                              nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(24, CLASSES)),
    ),
    "hooks": Case(hooked),
    "teacher": Case(Teacher),
    "slopes": Case(
        lambda: Call(slope, body=nn.Linear(5, 6), drop=nn.Dropout(0.3), head=nn.Linear(6, CLASSES)),
        **VECTOR,
    ),
    "dropped weights": Case(lambda: Call(drops_weights, head=nn.Linear(5, CLASSES)), **VECTOR),
    "dropped layers": Case(lambda: Then(Call(drops_layer, block=nn.Conv2d(6, 6, 1)))),
    "norm of two views": Case(
        lambda: Call(norm_of_two_views, norm=nn.BatchNorm1d(5), head=nn.Linear(5, CLASSES)), **VECTOR
    ),
    "time steps as samples": Case(
        lambda: Call(steps_as_samples, norm=nn.BatchNorm1d(5), drop=nn.Dropout(0.3),
                     head=nn.Linear(5, CLASSES)),
        inputs=lambda n: torch.randn(n, 3, 5),
    ),
    "up and down": Case(
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 4, 3),
                              nn.Upsample(scale_factor=2), nn.PixelShuffle(2), nn.AdaptiveMaxPool2d(2),
                              nn.Flatten(), nn.Linear(4, CLASSES)),
    ),
    "complex numbers": Case(
        lambda: Call(lambda self, x: self.head(self.body(torch.complex(x, 1 - x)).abs()),
                     body=nn.Linear(5, 6, dtype=torch.complex64), head=nn.Linear(6, CLASSES)),
        **VECTOR,
    ),
    # ---- what goes in and comes out
    "two inputs": Case(
        lambda: Call(lambda self, a, b: self.head(a * b.mean(1, keepdim=True)), head=nn.Linear(5, CLASSES)),
        inputs=lambda n: (torch.randn(n, 5), torch.randn(n, 2)),
    ),
    "named inputs and a flag": Case(
        lambda: Call(lambda self, *, x, nested, flip: self.head(x + nested[0]) * (-1 if flip else 1),
                     head=nn.Linear(5, CLASSES)),
        inputs=lambda n: {"x": torch.randn(n, 5), "nested": [torch.randn(n, 5)], "flip": True},
    ),
}  # fmt: skip


@pytest.mark.long(every=8)
@pytest.mark.parametrize(("ranks", "samples"), LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_nets(case: str, ranks: int, samples: int) -> None:
    expect_exact(CASES[case], ranks, samples)


# ---- what cannot be exact is refused


def repeats(self: Call, x: Tensor) -> Tensor:
    for _ in range(2):
        x = checkpoint(self.block, x, use_reentrant=False)
    return x


def reenters_twice(self: Call, x: Tensor) -> Tensor:
    x = checkpoint(self.block, x, use_reentrant=True)
    return checkpoint(self.block, x, use_reentrant=True)


REFUSED = {
    "ran 2 times": lambda: Call(repeats, block=nn.Sequential(nn.Conv2d(6, 6, 1), nn.Dropout(0.4))),
    "use_reentrant=False": lambda: Call(reenters_twice, block=nn.Conv2d(6, 6, 1)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_checkpoints_that_cannot_be_followed_are_refused(message: str) -> None:
    def check(mesh: Mesh) -> None:
        model = parallelize(Then(REFUSED[message]()), mesh, loss=nn.CrossEntropyLoss())
        with pytest.raises(UsageError, match=message):
            model.step(*model.shard(torch.randn(4, *IMAGE), torch.tensor([0, 1, 2, 3])))

    run_ranks(2, check)


def test_an_embedding_that_changes_what_it_looks_up_is_refused_for_replicas() -> None:
    def check(mesh: Mesh) -> None:
        net = nn.Sequential(nn.Embedding(9, 3, max_norm=0.5))
        if mesh.size == 1:
            parallelize(net, mesh)
        else:
            with pytest.raises(UsageError, match="the module '0' is an embedding with max_norm"):
                parallelize(net, mesh)

    run_ranks(1, check)
    run_ranks(2, check)
