"""Ranks that are given, or do, different things: all of them are told who differs in what, and none hangs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fivefold as ff
from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.mesh.agreement import Line, differences
from fivefold.plan import Layout, Parallel, Plan
from fivefold.trace import Tag, recording
from ranks import run_ranks

NET = nn.Sequential(
    nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.0),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
)  # fmt: skip
EXAMPLE = torch.empty(8, 2, 6, 6)
LAYOUTS = [
    (Layout(data=2), "auto"),
    (Layout(data=2), "apart"),
    (Layout(height=2), "auto"),
    (Layout(pipe=3), "auto"),
]
SAME = "give every rank the same"


class Images:
    def __init__(self, length: int = 32) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(2, 6, 6), index % 3


def told(
    layout: Layout | int, check: Callable[[Mesh], object], plan: Plan | None = None
) -> list[str]:
    """What each rank's `UsageError` says."""

    def run(mesh: Mesh) -> str:
        with pytest.raises(UsageError) as raised:
            check(mesh)
        return str(raised.value)

    return run_ranks(layout, run, plan=plan, timeout_s=40.0)


def alike(texts: list[str]) -> str:
    assert len(set(texts)) == 1, texts
    return texts[0]


def started(mesh: Mesh, net: nn.Module = NET) -> ff.ParallelModel:
    return ff.parallelize(copy.deepcopy(net), mesh, example=EXAMPLE, loss=nn.CrossEntropyLoss())


def loaded(mesh: Mesh, **changed: Any) -> Iterator[tuple[Tensor, Tensor]]:
    length = changed.pop("length", 32)
    return iter(ff.loader(Images(length), mesh, **{"batch_size": 8, **changed}))


# ---- the loader


@pytest.mark.parametrize(("layout", "rows"), LAYOUTS, ids=str)
@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"seed": 1}, "seed is 0 on {0}, 1 on {1}"),
        ({"batch_size": 10}, "batch_size is 8 on {0}, 10 on {1}"),
    ],
    ids=["seed", "batch_size"],
)
def test_arguments_of_the_loader_under_every_layout(
    layout: Layout, rows: Any, changed: dict[str, Any], says: str
) -> None:
    last = layout.size - 1

    def check(mesh: Mesh) -> None:
        model = started(mesh)
        x, y = next(loaded(mesh, **(changed if mesh.rank == last else {})))
        stage = mesh.coordinate(
            "pipe"
        )  # one in the middle takes nothing of a batch, so it cannot tell
        model.step(None if stage else x, y if stage == layout.pipe - 1 else None)

    plan = Plan(layout=layout, parallel=Parallel(rows=rows))
    expected = says.format("rank 0", f"rank {last}")
    assert alike(told(layout, check, plan)) == (
        f"ranks differ in the arguments of ff.loader: {expected}; {SAME}"
    )


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"shuffle": False}, "shuffle is 1 on ranks 0, 1, 0 on rank 2"),
        ({"drop_last": True}, "drop_last is 0 on ranks 0, 1, 1 on rank 2"),
        ({"length": 40}, "dataset_length is 32 on ranks 0, 1, 40 on rank 2"),
        (
            {"seed": 5, "batch_size": 9},
            "seed is 0 on ranks 0, 1, 5 on rank 2; batch_size is 8 on ranks 0, 1, 9 on rank 2",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_every_argument_of_the_loader_that_decides_what_a_batch_is(
    changed: dict[str, Any], says: str
) -> None:
    def check(mesh: Mesh) -> None:
        started(mesh).step(*next(loaded(mesh, **(changed if mesh.rank == 2 else {}))))

    assert f": {says}; {SAME}" in alike(told(3, check))


def test_a_rank_that_is_a_batch_ahead() -> None:
    def check(mesh: Mesh) -> None:
        model, batches = started(mesh), loaded(mesh)
        model.step(*next(batches))
        if mesh.rank == 1:
            next(batches)
        model.step(*next(batches))

    assert alike(told(2, check)) == (
        "ranks differ in the batches that they compute together: the one is batch 1 of epoch 0 on rank 0, "
        "batch 2 of epoch 0 on rank 1; let every rank take all batches of a loader, in their order"
    )


def test_inputs_that_were_changed_are_known_by_their_targets() -> None:
    def check(mesh: Mesh) -> None:
        x, y = next(loaded(mesh, seed=mesh.rank))
        started(mesh).step(x + 0, y)

    assert "seed is 0 on rank 0, 1 on rank 1" in alike(told(2, check))


def test_evaluation_compares_batches_as_well() -> None:
    def check(mesh: Mesh) -> None:
        x, y = next(loaded(mesh, seed=mesh.rank))
        started(mesh).evaluate(x, y, lambda a, _: a.sum().double().view(1))

    assert "seed is 0 on rank 0, 1 on rank 1" in alike(told(2, check))


def test_making_a_loader_and_iterating_over_it_waits_for_nobody() -> None:
    def check(mesh: Mesh) -> int:
        return len(list(loaded(mesh))) if mesh.rank == 1 else 0

    assert run_ranks(2, check, timeout_s=20.0) == [0, 4]


@pytest.mark.parametrize("rows", ["auto", "apart"])
def test_equal_arguments_cost_no_message(rows: Any) -> None:
    """As many comparisons as for batches of which nothing is known; none where there was none."""

    def check(mesh: Mesh) -> tuple[int, int]:
        model, batches, counts = started(mesh), loaded(mesh), list[int]()
        for _ in range(2):  # before the second, ranks compare parameters
            model.step(*next(batches))
        x, y = model.shard(torch.randn(8, 2, 6, 6), torch.randint(0, 3, (8,)))
        for batch in ((x, y), next(batches)):
            with recording() as recorder:
                model.step(*batch)
            found = recorder.stats.get(Tag.CONTROL)
            counts.append(0 if found is None else found.count)
        return counts[0], counts[1]

    plan = Plan(layout=Layout(data=2), parallel=Parallel(rows=rows))
    expected = (1, 1) if rows == "auto" else (0, 0)
    assert run_ranks(2, check, plan=plan) == [expected] * 2


# ---- parallelize


def frozen(net: nn.Sequential) -> None:
    net[0].weight.requires_grad_(False)


def wider(net: nn.Sequential) -> None:
    net[6] = nn.Linear(4, 5)


def longer(net: nn.Sequential) -> None:
    net.append(nn.ReLU())


def dropping(net: nn.Sequential) -> None:
    net[3].p = 0.5


def evaluating(net: nn.Sequential) -> None:
    net[1].eval()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (frozen, ("a parameter of the net is 0.weight, torch.float32 (4, 2, 3, 3) on rank 0, "
                 "0.weight, torch.float32 (4, 2, 3, 3) without gradient on rank 1")),
        (wider, ("a module of the net is 6, Linear(in_features=4, out_features=3, bias=True) on rank 0, "
                "6, Linear(in_features=4, out_features=5, bias=True) on rank 1")),
        (longer, "7, ReLU()"),
        (dropping, ("a module of the net is 3, Dropout(p=0.0, inplace=False) on rank 0, "
                   "3, Dropout(p=0.5, inplace=False) on rank 1")),
        (evaluating, "in evaluation mode on rank 1"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_the_net(change: Callable[[nn.Sequential], None], says: str) -> None:
    def check(mesh: Mesh) -> None:
        net = copy.deepcopy(NET)
        if mesh.rank == 1:
            change(net)
        ff.parallelize(net, mesh, loss=nn.CrossEntropyLoss())

    text = alike(told(2, check))
    assert text.startswith("ranks differ in the arguments of parallelize: ")
    assert says in text and text.endswith(SAME)


@pytest.mark.parametrize(
    ("losses", "says"),
    [
        ((nn.CrossEntropyLoss(), nn.MSELoss()), "the loss is CrossEntropyLoss on rank 0, MSELoss"),
        ((nn.CrossEntropyLoss(), None), "the loss is CrossEntropyLoss on rank 0, None on rank 1"),
        (
            (nn.CrossEntropyLoss(label_smoothing=0.1), nn.CrossEntropyLoss()),
            "label_smoothing of the loss is 0.1 on rank 0, 0.0 on rank 1",
        ),
        (
            (nn.CrossEntropyLoss(torch.ones(3)), nn.CrossEntropyLoss(torch.arange(1.0, 4.0))),
            "weight of the loss is (3,) torch.float32",
        ),
    ],
    ids=["class", "none", "option", "weights"],
)
def test_the_loss(losses: tuple[Any, Any], says: str) -> None:
    def check(mesh: Mesh) -> None:
        ff.parallelize(copy.deepcopy(NET), mesh, loss=losses[mesh.rank])

    assert says in alike(told(2, check))


def test_the_example_where_it_counts() -> None:
    def check(mesh: Mesh) -> None:
        ff.parallelize(copy.deepcopy(NET), mesh, example=torch.empty(8 + mesh.rank, 2, 6, 6))

    assert "a tensor of the example is torch.float32 (8, 2, 6, 6) on rank 0, torch.float32 (9," in (
        alike(told(Layout(height=2), check))
    )
    run_ranks(2, check)  # replicas have no use for it


def test_the_plan() -> None:
    def check(mesh: Mesh) -> None:
        mesh.plan = Plan(
            layout=Layout(data=2), parallel=Parallel(rows=("auto", "apart")[mesh.rank])
        )
        started(mesh)

    assert "parallel.rows of the plan is auto on rank 0, apart on rank 1" in alike(told(2, check))


class Scaling(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale, self.linear = scale, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x * self.scale if self.scale < 2 else x


@pytest.mark.parametrize("other", [0.5, 2.0], ids=["number", "branch"])
def test_what_replicas_compute(other: float) -> None:
    """Attributes of the user's own modules are compared by what the net does with them."""

    def check(mesh: Mesh) -> None:
        net = Scaling(other if mesh.rank else 1.0)
        model = ff.parallelize(net, mesh, loss=nn.CrossEntropyLoss())
        model.step(*model.shard(torch.randn(8, 4), torch.randint(0, 3, (8,))))

    text = alike(told(2, check))
    assert text.startswith("ranks differ in what they do: ") and "mul" in text
    assert "draw the same random numbers" in text and 'parallel.rows = "apart"' in text


# ---- the Checkpointer


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"directory": "b"}, "directory is {path}/a on rank 0, {path}/b on rank 1"),
        ({"every": 3}, "every_steps is 0 on rank 0, 3 on rank 1"),
        ({"scheme": "single"}, "scheme is auto on rank 0, single on rank 1"),
        ({"more": {}}, "objects is model on rank 0, model, more on rank 1"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_the_checkpointer(changed: dict[str, Any], says: str, tmp_path: Path) -> None:
    def check(mesh: Mesh) -> None:
        given: dict[str, Any] = {"directory": "a", **(changed if mesh.rank else {})}
        local = tmp_path / f"node-{mesh.rank}"  # which each node may have for itself
        given["directory"] = tmp_path / given["directory"]
        Checkpointer(
            mesh=mesh,
            model=copy.deepcopy(NET),
            local=local,
            node=str(mesh.rank),
            signals=False,
            **given,
        )

    assert alike(told(2, check)) == (
        f"ranks differ in the arguments of ff.Checkpointer: {says.format(path=tmp_path)}; {SAME}"
    )


# ---- the sentence


def test_of_many_ranks_a_few_values_are_told() -> None:
    every: list[list[Line]] = [[(str(rank), "seed")] for rank in range(9)]
    assert differences(every, "it", SAME) == (
        "ranks differ in it: seed is 0 on rank 0, 1 on rank 1, 2 on rank 2, 3 on rank 3 and 5 more; "
        + SAME
    )


def test_after_a_line_that_one_rank_has_more_nothing_is_compared() -> None:
    one: list[Line] = [("a", "part 1"), ("b", "part 2"), ("c", "part 3")]
    assert differences([one, one[1:]], "it", SAME) == (
        f"ranks differ in it: part 1 (a) on rank 0, part 2 (b) on rank 1; {SAME}"
    )
    assert differences([one, one, []], "it", SAME) == ""
