"""Parameters that several stages use: on all of them, with gradients summed over them."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fivefold as ff
from fivefold.mesh import Mesh
from fivefold.plan import Layout, Memory, Pipeline, Plan
from ranks import run_ranks

WORDS, WIDTH = 11, 6


class Language(nn.Module):
    """Embedding and head share their weight, every layer a scale, and all of them a mask."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(2, 2)
        self.register_buffer("mask", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = x + layer(x * self.mask).tanh() * self.scale
        return self.head(self.norm(x))


torch.manual_seed(6)
NET = Language().double()
X = torch.randint(0, WORDS, (7, 5))
Y = torch.randint(0, WORDS, (7, 5))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.transpose(1, 2), targets)


class Loss(nn.CrossEntropyLoss):
    def share(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        each = nn.functional.cross_entropy(outputs.transpose(1, 2), targets, reduction="sum")
        return each, outputs.new_tensor(targets.numel())

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return loss(outputs, targets)


def train(
    step: Callable[[], object], parameters: list[nn.Parameter], clip: Callable[[], object]
) -> None:
    """Three steps: two batches before the first update, and one that clips."""
    optimizer = torch.optim.SGD(parameters, lr=0.3, momentum=0.9)
    for number in range(3):
        step()
        if number == 0:
            step()
        if number == 2:
            clip()
        optimizer.step()
        optimizer.zero_grad(set_to_none=number == 1)


def expected() -> dict[str, Tensor]:
    net = copy.deepcopy(NET)
    parameters = list(net.parameters())
    train(
        lambda: loss(net(X), Y).backward(),
        parameters,
        lambda: nn.utils.clip_grad_norm_(parameters, 0.05),
    )
    return net.state_dict()


def check(mesh: Mesh) -> tuple[dict[str, Tensor], bool, set[str]]:
    model = ff.parallelize(copy.deepcopy(NET), mesh, example=X, loss=Loss())
    x, y = model.shard(X, Y)
    parameters = list(model.parameters())
    train(lambda: model.step(x, y), parameters, lambda: ff.clip_grad_norm_(model, 0.05))
    held = set(model.state_dict())
    same = "head.weight" not in held or model.module.head.weight is model.module.embedding.weight
    return model.full_state_dict(), same, held


@pytest.mark.long(every=8)
@pytest.mark.parametrize(
    ("layout", "pipeline"),
    [
        (Layout(pipe=2), Pipeline(schedule="1f1b", micro_batches=3)),
        (Layout(pipe=3), Pipeline(schedule="gpipe", micro_batches=2)),
        (Layout(pipe=2), Pipeline(schedule="layer")),
        (Layout(pipe=3), Pipeline(schedule="zero-bubble", micro_batches=4)),
        (Layout(pipe=2), Pipeline(schedule="interleaved", stages_per_rank=2, micro_batches=2)),
        (Layout(data=2, pipe=2), Pipeline(schedule="1f1b", micro_batches=2)),
        (Layout(pipe=2), Pipeline(schedule="gems", micro_batches=2)),
        (Layout(pipe=4), Pipeline(schedule="chimera", micro_batches=4)),
    ],
    ids=lambda value: getattr(value, "schedule", str(value)),
)
def test_tied_weights_are_trained_as_in_one_process(layout: Layout, pipeline: Pipeline) -> None:
    plan, truth = Plan(layout=layout, pipeline=pipeline), expected()
    ranks = run_ranks(layout.size, check, plan=plan)
    for state, same, _ in ranks:
        assert same
        assert state.keys() == truth.keys()
        for name, value in truth.items():
            torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-13)
    with_head = [held for *_, held in ranks if "head.bias" in held]
    assert all({"head.weight", "embedding.weight"} <= held for held in with_head)
    # The net is divided, not held whole by one; `gems` has every stage on two ranks, here all of them.
    assert all((len(held) < len(truth)) == (pipeline.schedule != "gems") for *_, held in ranks)


def test_replicas_that_divide_parameters_keep_what_is_tied_together() -> None:
    plan = Plan(
        layout=Layout(data=2, pipe=2),
        pipeline=Pipeline(schedule="1f1b", micro_batches=2),
        memory=Memory(shard="optimizer"),
    )

    def refused(mesh: Mesh) -> None:
        with pytest.raises(
            ff.errors.PlanError, match=r"embedding\.weight is used in several places"
        ):
            ff.parallelize(copy.deepcopy(NET), mesh, example=X, loss=Loss())

    run_ranks(4, refused, plan=plan)
