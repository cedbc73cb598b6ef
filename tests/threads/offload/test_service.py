"""What a helper does for trainers: it opens, computes, refuses and fails, each trainer in its turn."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.data.remote.serving import LoaderServing, identity_of
from fivefold.data.source import BatchId, Source
from fivefold.data.tiling import TileCollate, TiledSamples
from fivefold.data.windows import Windowed
from fivefold.helpers import service, serving_loop
from fivefold.helpers.encode import encode
from fivefold.helpers.messages import Kind
from fivefold.helpers.service import offer
from served import TIMEOUT_S, Helper, Numbers, OnDisk, Pictures, source_of


@pytest.fixture(autouse=True)
def nothing_offered_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_offered", defaultdict(list))
    monkeypatch.setattr(
        serving_loop, "_TURN_S", 0.05
    )  # else tests would wait for the end of helpers
    monkeypatch.setattr(serving_loop, "_LATE_S", 0.2)


@pytest.fixture
def helper() -> Iterator[Callable[..., Helper]]:
    made: list[Helper] = []

    def make(*sources: Source, patience_s: float = TIMEOUT_S) -> Helper:
        for source in sources:
            offer("loader", LoaderServing(source))
        made.append(Helper(patience_s))
        return made[-1]

    yield make
    for one in made:
        if one.thread.is_alive():
            one.end()


Make = Callable[..., Helper]


def same(one: Any, other: Any) -> bool:
    return encode(one).digest() == encode(other).digest()


def test_batches_are_those_that_the_trainer_would_make(helper: Make) -> None:
    source = source_of(Numbers())
    trainer = helper(source).trainer()
    trainer.open(source)
    for epoch in (0, 1):
        for batch in (0, 3, 1):
            trainer.lease(batch, 1, 4, epoch)
            assert same(trainer.batch(), source.produce(BatchId(epoch, batch), range(1, 4)))
    trainer.lease(0, 0, 0)
    assert same(trainer.batch(), source.produce(BatchId(0, 0), range(0)))


def test_it_tells_how_long_it_worked_and_waited(helper: Make) -> None:
    source = source_of(Numbers(slow_s=0.02))
    trainer = helper(source).trainer()
    trainer.open(source)
    time.sleep(0.1)
    trainer.lease()
    trainer.lease(1)
    first, second = trainer.answer(Kind.DONE).fields, trainer.answer(Kind.DONE).fields
    assert first["busy_s"] >= 0.08 and first["waited_s"] >= 0.1 > second["waited_s"]
    assert (first["lease"], first["service"], first["number"]) == (1, "loader", 0)


def test_it_waits_for_nobody_until_a_trainer_is_there(helper: Make) -> None:
    source = source_of(Numbers())
    running = helper(source)
    time.sleep(0.3)
    begun = time.monotonic()
    trainer = running.trainer()
    trainer.open(source)
    trainer.lease()
    assert trainer.answer(Kind.DONE).fields["waited_s"] <= time.monotonic() - begun


def test_several_loaders_have_numbers(helper: Make) -> None:
    train, test = source_of(Numbers()), source_of(Numbers(8), shuffle=False)
    trainer = helper(train, test).trainer()
    trainer.open(train)
    trainer.send(Kind.OPEN, number=1, identity=identity_of(test))
    assert trainer.answer(Kind.READY).fields["number"] == 1
    why = trainer.refused(number=2, identity=identity_of(test))
    assert "had made no loader 2" in why and "2 x loader" in why


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"seed": 6}, "seed is 5 here and 6 in the trainer"),
        ({"batch_size": 5}, "batch_size is 4 here and 5"),
        ({"shuffle": False}, "shuffle is 1 here and 0"),
        ({"collate": list}, "collate is 'fivefold.data.collate.stack' here"),
        ({"dataset": Numbers(21)}, "dataset_length is 20 here and 21"),
        ({"dataset": [torch.zeros(1)] * 20}, "dataset is '"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_stream_is_refused(helper: Make, changed: dict[str, Any], says: str) -> None:
    other = source_of(changed.pop("dataset", Numbers()), **changed)
    trainer = helper(source_of(Numbers())).trainer()
    why = trainer.refused(identity=identity_of(other))
    assert says in why and "run the same script" in why


def test_tiles_are_those_of_the_trainer(helper: Make) -> None:
    whole = source_of(Pictures(), batch_size=2)
    running = helper(whole)
    for rank, tile in enumerate([(2, 0), (2, 1)]):
        windows: Windowed = Pictures()
        axes = {"height": tile}
        own = source_of(TiledSamples(windows, axes), batch_size=2, collate=TileCollate(None))
        trainer = running.trainer(rank)
        trainer.open(own, axes=axes)
        trainer.lease(1, 0, 2)
        mine = own.produce(BatchId(0, 1), range(2))
        batch, boxes = trainer.batch(like=own.produce(BatchId(0, 0))[1])
        assert same(batch, mine[0]) and boxes == mine[1]
        assert batch[0].shape[-2] == (3, 4)[rank]


@pytest.mark.parametrize(
    ("axes", "says"),
    [
        ({"heightt": [2, 0]}, "tiles along 'heightt'"),
        ({"height": [2, 2]}, "tile 2 of 2 along height"),
        ({"height": 2}, "tiles along 'height': 2"),
        ({"height": ["a", 0]}, "tile 0 of 'a' along height"),
    ],
)
def test_axes_that_make_no_sense_are_refused(helper: Make, axes: dict[str, Any], says: str) -> None:
    source = source_of(Pictures())
    assert says in helper(source).trainer().refused(identity=identity_of(source), axes=axes)


def test_tiles_of_a_data_set_without_windows_are_refused(helper: Make) -> None:
    source = source_of(Numbers())
    why = helper(source).trainer().refused(identity=identity_of(source), axes={"height": [2, 0]})
    assert "offers no windows" in why


def test_a_sample_that_cannot_be_made_is_told(helper: Make) -> None:
    source = source_of(Numbers(bad=2), shuffle=False)
    trainer = helper(source).trainer()
    trainer.open(source)
    trainer.lease()
    failed = trainer.answer(Kind.FAILED).fields
    assert failed["kind"] == "LoadError" and failed["lease"] == 1
    assert "sample 2 (batch 0 of epoch 0)" in failed["message"]
    assert "ArithmeticError: no such number" in failed["message"]
    assert "__getitem__" in failed["traceback"]
    trainer.lease(1)
    assert same(trainer.batch(), source.produce(BatchId(0, 1)))


@pytest.mark.parametrize(
    ("lease", "says"),
    [
        ({"epoch": 0, "batch": 99, "start": 0, "stop": 4}, "there is no batch 99"),
        ({"epoch": 0, "batch": 0, "start": 0, "stop": 9}, "has 4 samples"),
        ({"epoch": 0, "batch": 0}, "does not say which samples"),
        ({"epoch": "x", "batch": 0, "start": 0, "stop": 4}, "does not say which samples"),
    ],
)
def test_a_lease_on_nothing_fails(helper: Make, lease: dict[str, Any], says: str) -> None:
    source = source_of(Numbers())
    trainer = helper(source).trainer()
    trainer.open(source)
    trainer.send(Kind.LEASE, lease=1, **lease)
    failed = trainer.answer(Kind.FAILED).fields
    assert failed["kind"] == "UsageError" and says in failed["message"]


def test_a_lease_on_what_was_not_opened_fails(helper: Make) -> None:
    trainer = helper(source_of(Numbers())).trainer()
    trainer.lease()
    assert "has not opened" in trainer.answer(Kind.FAILED).fields["message"]
    trainer.send(Kind.LEASE, number="x", lease=[1])
    assert trainer.answer(Kind.FAILED).fields["lease"] == [1]


def test_a_cancelled_lease_is_answered_but_not_made(helper: Make) -> None:
    source = source_of(Numbers(slow_s=0.05))
    trainer = helper(source).trainer()
    trainer.open(source)
    for batch in (0, 1, 2):
        trainer.lease(batch)
    trainer.send(Kind.CANCEL, lease=3)
    trainer.send(Kind.CANCEL, lease=77)
    answers = [trainer.receive() for _ in range(3)]
    fields = {m.fields["lease"]: (m.kind, m.fields.get("kind")) for m in answers if m is not None}
    assert fields == {1: (Kind.DONE, None), 2: (Kind.DONE, None), 3: (Kind.FAILED, "Cancelled")}


def test_trainers_take_turns(helper: Make) -> None:
    source = source_of(Numbers(slow_s=0.02))
    running = helper(source)
    greedy, modest = running.trainer(0), running.trainer(1)
    for trainer in (greedy, modest):
        trainer.open(source)
    for _ in range(10):
        greedy.lease()
    greedy.answer(Kind.DONE)
    modest.lease()
    modest.answer(Kind.DONE)
    left = 0
    while greedy.receive(1.0) is not None:
        left += 1
    assert left >= 6, "the modest one waited for more than its turn"


# ---- data sets that cannot be read


def files(folder: Path) -> Path:
    for index in range(7):
        (folder / f"{index}.bin").write_bytes(bytes([index] * 4))
    return folder


def test_samples_are_sent_where_files_are_missing(helper: Make, tmp_path: Path) -> None:
    readable = source_of(OnDisk(files(tmp_path)))
    trainer = helper(source_of(OnDisk(tmp_path / "elsewhere"))).trainer()
    assert trainer.open(readable).fields["samples"] is True
    indices = readable.indices(BatchId(0, 1))
    trainer.lease(1, 0, 3)
    assert trainer.receive(0.2) is None, "it cannot have made that"
    raws = tuple(OnDisk(tmp_path).raw(index) for index in indices)
    trainer.send(Kind.SAMPLES, raws, lease=1, lengths=[len(raw) for raw in raws])
    assert same(trainer.batch(), readable.produce(BatchId(0, 1)))


def test_a_lease_without_samples_holds_up_nobody(helper: Make, tmp_path: Path) -> None:
    away, near = source_of(OnDisk(tmp_path / "elsewhere")), source_of(Numbers())
    running = helper(away, near)
    first, second = running.trainer(0), running.trainer(1)
    assert first.open(source_of(OnDisk(files(tmp_path)))).fields["samples"]
    first.lease(0)
    second.send(Kind.OPEN, number=1, identity=identity_of(near))
    second.answer(Kind.READY)
    second.send(Kind.LEASE, number=1, lease=1, epoch=0, batch=0, start=0, stop=4)
    assert same(second.batch(), near.produce(BatchId(0, 0)))


def test_wrong_samples_fail_the_lease(helper: Make, tmp_path: Path) -> None:
    trainer = helper(source_of(OnDisk(tmp_path / "elsewhere"))).trainer()
    trainer.open(source_of(OnDisk(files(tmp_path))))
    trainer.send(Kind.SAMPLES, (b"abcd",), lease=1, lengths=[4])
    trainer.lease(0)
    assert "1 samples came for a lease on 4" in trainer.answer(Kind.FAILED).fields["message"]
    trainer.send(Kind.SAMPLES, (b"abcd",), lease=2, lengths=["many"])
    trainer.send(Kind.SAMPLES, (b"abcd",), lease=2, lengths=7)
    trainer.lease(0)
    assert "0 samples came" in trainer.answer(Kind.FAILED).fields["message"]


def test_a_data_set_that_cannot_be_read_is_refused(helper: Make, tmp_path: Path) -> None:
    class Closed(OnDisk):
        decode = None  # type: ignore[assignment]

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor(list(self.raw(index)))

    source = source_of(Closed(tmp_path / "elsewhere"))
    why = helper(source).trainer().refused(identity=identity_of(source))
    assert "it cannot read the data set" in why and "0.bin" not in why.partition(":")[0]


def test_a_transform_that_fails_is_no_missing_file(helper: Make) -> None:
    source = source_of(Numbers(bad=0), shuffle=False)
    trainer = helper(source).trainer()
    trainer.open(source)


# ---- the end


def test_it_ends_when_all_trainers_have_said_goodbye(helper: Make) -> None:
    source = source_of(Numbers())
    running = helper(source)
    first, second = running.trainer(0), running.trainer(1)
    second.open(source)
    first.send(Kind.BYE, why="done")
    second.lease()
    second.batch()
    assert running.thread.is_alive()
    second.send(Kind.BYE, why="done")
    assert running.ended() == ""


def test_a_goodbye_is_heard_though_nobody_waits_for_the_answer(helper: Make) -> None:
    source = source_of(Numbers(slow_s=0.05))
    running = helper(source)
    trainer = running.trainer()
    trainer.open(source)
    trainer.lease()
    trainer.lease(1)
    trainer.send(Kind.BYE, why="done")
    trainer.link.close()
    assert running.ended() == ""


def test_a_trainer_that_was_lost_may_come_again(helper: Make) -> None:
    source = source_of(Numbers())
    running = helper(source)
    first, second = running.trainer(0), running.trainer(1)
    first.open(source)
    first.lease()
    first.link.close()
    second.send(Kind.BYE, why="done")
    time.sleep(0.5)
    assert running.thread.is_alive(), "it should wait for trainer 0"
    again = running.trainer(0)
    again.open(source)
    again.lease()
    assert same(again.batch(), source.produce(BatchId(0, 0)))
    again.send(Kind.BYE, why="done")
    assert running.ended() == ""


def test_it_does_not_wait_for_ever(helper: Make) -> None:
    source = source_of(Numbers())
    running = helper(source, patience_s=0.3)
    running.trainer(3).link.close()
    assert running.ended() == (
        "trainer 3 (here) did not come back within 0.3 s (FIVEFOLD_TIMEOUT_S), so this helper ends"
    )
    nobody = helper(source, patience_s=0.2)
    assert nobody.ended().startswith("no trainer came within 0.2 s")
