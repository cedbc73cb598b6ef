"""The training loop on ranks: the same run, whatever the number of processes."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fivefold as ff
from fivefold.data.seeding import permutation
from fivefold.errors import FivefoldError, UsageError
from fivefold.mesh import Mesh
from fivefold.recipes import models
from fivefold.train import Arithmetic, RunDirectory, Summary, fit, warmup_cosine
from fivefold.train.validation import validate
from ranks import run_ranks

CLASSES, TRAIN, TEST, BATCH, EPOCHS = 3, 22, 7, 8, 2


def data(n: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (n,), generator=generator)
    images = torch.randn(n, 1, 8, 8, generator=generator) + labels.view(-1, 1, 1, 1)
    return TensorDataset(images, labels)


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    return models.build("resnet20", CLASSES, 1)


def train(mesh: Mesh, net: nn.Module, out: Path | None = None) -> tuple[Summary, dict]:
    model = ff.parallelize(copy.deepcopy(net), mesh, loss=nn.CrossEntropyLoss())
    batches = ff.loader(data(TRAIN, 1), mesh, batch_size=BATCH)
    tests = ff.loader(data(TEST, 2), mesh, batch_size=2, shuffle=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    schedule = warmup_cosine(optimizer, steps=EPOCHS * len(batches), warmup=1)
    run = RunDirectory.create(out, "small", mesh) if out else None
    summary = fit(
        model, optimizer, schedule, batches, tests, mesh=mesh, epochs=EPOCHS, run=run
    )  # fmt: skip
    with pytest.raises(UsageError, match="nothing left to train: batch 0 of epoch 2 comes next"):
        fit(model, optimizer, schedule, batches, tests, mesh=mesh, epochs=EPOCHS)
    return summary, model.module.state_dict()


@pytest.fixture(scope="module")
def plain(net) -> tuple[float, dict]:
    """Accuracy and weights after the same epochs, written as anyone would without Fivefold."""
    net, train_data, test_data = copy.deepcopy(net), data(TRAIN, 1), data(TEST, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    schedule = warmup_cosine(optimizer, steps=EPOCHS * 3, warmup=1)
    net.train()
    for epoch in range(EPOCHS):
        order = torch.from_numpy(permutation(0, epoch, TRAIN))
        for indices in order.split(BATCH):
            images, labels = (column[indices] for column in train_data.tensors)
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images), labels).backward()
            optimizer.step()
            schedule.step()
    net.eval()
    with torch.no_grad():
        correct = net(test_data.tensors[0]).argmax(1) == test_data.tensors[1]
    return correct.double().mean().item(), net.state_dict()


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_train_what_plain_torch_trains(ranks: int, net, plain):
    accuracy, weights = plain
    for found, state in run_ranks(ranks, train, net):
        assert found.accuracy == accuracy
        assert found.images == EPOCHS * TRAIN
        # Six steps apart, in float32: rounding, not another run.
        for key, value in weights.items():
            assert torch.allclose(state[key].double(), value.double(), rtol=1e-3, atol=1e-4), key


def test_a_run_directory_tells_the_whole_run(tmp_path, net):
    (summary, weights), _ = run_ranks(2, train, net, tmp_path)
    folder = tmp_path / "small-001"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2], "written by one rank"
    assert [line["step"] for line in lines] == [3, 6]
    last = lines[-1]
    assert last["accuracy"] == summary.accuracy
    assert last["images_per_s"] > 0
    assert {"load", "forward", "backward", "update", "validate"} <= set(last["phases_s"])
    assert sum(last["phases_s"].values()) <= last["epoch_s"]
    fresh = models.build("resnet20", CLASSES, 1)
    fresh.load_state_dict(torch.load(folder / "weights.pt", weights_only=True))
    assert (folder / "weights.pt").stat().st_mode & 0o777 == 0o600
    assert all(torch.equal(fresh.state_dict()[key], weights[key]) for key in weights)
    assert sorted(p.name for p in folder.iterdir()) == ["metrics.jsonl", "weights.pt"]


def test_a_run_that_diverges_ends_with_an_error(net):
    def diverge(mesh: Mesh) -> str:
        model = ff.parallelize(copy.deepcopy(net), mesh, loss=nn.CrossEntropyLoss())
        batches = ff.loader(data(TRAIN, 1), mesh, batch_size=BATCH)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e30)
        schedule = warmup_cosine(optimizer, steps=6, warmup=0)
        with pytest.raises(FivefoldError) as error:
            fit(model, optimizer, schedule, batches, batches, mesh=mesh, epochs=2)
        return str(error.value)

    for message in run_ranks(2, diverge):
        assert message.startswith("training diverged: in epoch 1 the mean loss was nan")


def directory(mesh: Mesh, parent: Path) -> str:
    return RunDirectory.create(parent, "small", mesh).path.name


def test_a_run_gets_the_next_free_number_and_all_ranks_hear_of_it(tmp_path):
    assert run_ranks(2, directory, tmp_path) == ["small-001"] * 2
    (tmp_path / "small-041").mkdir()
    (tmp_path / "smaller-099").mkdir()
    (tmp_path / "small-050.txt").touch()
    assert run_ranks(2, directory, tmp_path) == ["small-042"] * 2


def test_a_place_that_cannot_be_written_is_an_error_on_every_rank(tmp_path):
    (tmp_path / "file").touch()

    def refused(mesh: Mesh) -> str:
        with pytest.raises(UsageError) as error:
            RunDirectory.create(tmp_path / "file", "small", mesh)
        return str(error.value)

    messages = run_ranks(2, refused)
    assert messages == [messages[0]] * 2
    assert f"cannot write runs to {tmp_path}/file" in messages[0]
    assert "--out" in messages[0]


def test_validation_counts_every_sample_once_however_it_is_shared(net):
    dataset = data(TEST, 2)
    plain = copy.deepcopy(net).eval()
    with torch.no_grad():
        logits = plain(dataset.tensors[0])
    loss = nn.functional.cross_entropy(logits, dataset.tensors[1]).item()
    accuracy = (logits.argmax(1) == dataset.tensors[1]).double().mean().item()

    def check(mesh: Mesh) -> tuple[float, float]:
        model = ff.parallelize(copy.deepcopy(net), mesh)
        # Batches of 2 on 3 ranks: some share is empty in each, and the last batch has one sample.
        tests = ff.loader(dataset, mesh, batch_size=2, shuffle=False)
        return validate(model, tests, mesh, Arithmetic(mesh.plan.numerics, mesh.device))

    for found in run_ranks(3, check):
        assert found == (pytest.approx(loss, rel=1e-5), accuracy)
