"""Runs as they lie on disk: what is missing is told in words, and the rest is read."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from fivefold.cluster.processes import process_stat
from fivefold.errors import UsageError
from fivefold.introspect.document import document
from fivefold.introspect.run import TracedRun, listed
from fivefold.trace.file import TraceFile, name_of
from fivefold.trace.reader import RankTrace
from fivefold.trace.schema import ProcessState
from traces import Story


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Story(ranks=3, steps=8).write(tmp_path / "job")


def test_the_run_its_folder_of_traces_and_one_file_are_read(run: Path) -> None:
    assert [t.rank for t in TracedRun.load(run).ranks] == [0, 1, 2]
    assert [t.rank for t in TracedRun.load(run / "trace").ranks] == [0, 1, 2]
    one = TracedRun.load(run / "trace" / name_of(1))
    assert [t.rank for t in one.ranks] == [1]
    assert "ranks 0, 2 of 3 are missing" in one.problems[0]


def test_the_log_folder_leads_to_its_run(run: Path, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "run").symlink_to(run)
    assert len(TracedRun.load(logs).ranks) == 3


def test_what_is_no_run_is_said(run: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"there is no directory .*nothing; the latest run there is .*job"
    ):
        TracedRun.load(tmp_path / "nothing")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UsageError, match="holds no trace files: it is no run, or was made without"):
        TracedRun.load(empty)
    with pytest.raises(UsageError, match="the latest run there is"):
        TracedRun.load(tmp_path)
    (tmp_path / "file.txt").write_text("x")
    with pytest.raises(UsageError, match="is no run: name its directory"):
        TracedRun.load(tmp_path / "file.txt")


def spoiled(run: Path, rank: int, data: bytes | None = None, cut: int | None = None) -> None:
    path = run / "trace" / name_of(rank)
    before = path.read_bytes()
    path.write_bytes(data + before[len(data) :] if data is not None else before[:cut])


@pytest.mark.parametrize(
    ("data", "cut", "said"),
    [
        (b"something else..", None, "is no trace of Fivefold"),
        (b"fivefold trace\n\0\x63\0\0\0", None, "has version 99 of the format"),
        (None, 5000, "is cut off"),
        (None, 0, "is empty: its rank ended before it recorded anything"),
        (b"fivefold trace\n\0\x01\0\0\0\xff\xff\xff\0", None, "is damaged"),
    ],
)
def test_a_file_that_cannot_be_read_is_told_and_left_out(
    data: bytes | None, cut: int | None, said: str, run: Path
) -> None:
    spoiled(run, 1, data, cut)
    found = TracedRun.load(run)
    assert [t.rank for t in found.ranks] == [0, 2]
    assert any(said in problem for problem in found.problems)
    assert any("rank 1 of 3 is missing" in problem for problem in found.problems)
    made = document(found)
    assert made["run"]["read"] == 2
    assert made["problems"] == list(found.problems)
    for rank in (0, 2):
        spoiled(run, rank, data, cut)
    with pytest.raises(UsageError, match=said):
        TracedRun.load(run)


def test_two_files_of_a_rank(run: Path) -> None:
    shutil.copy(run / "trace" / name_of(1), run / "trace" / name_of(7))
    found = TracedRun.load(run)
    assert len(found.ranks) == 3
    assert any("are of the same rank" in problem for problem in found.problems)


def test_states_of_ranks(tmp_path: Path) -> None:
    ended = TracedRun.load(Story(ranks=2).write(tmp_path / "a"))
    assert (ended.state, ended.problems) == ("ended", ())
    failed = TracedRun.load(Story(ranks=2, state=ProcessState.FAILED).write(tmp_path / "b"))
    assert failed.state == "failed"
    gone = TracedRun.load(Story(ranks=2, state=ProcessState.RUNNING, host="").write(tmp_path / "c"))
    assert gone.state == "killed"
    assert gone.problems == ("the run was killed, or ended without a word: figures go up to then",)
    far = TracedRun.load(Story(ranks=2, state=ProcessState.RUNNING).write(tmp_path / "d"))
    assert far.state == "killed"  # its heart last beat in 2023


def _began() -> str:
    found = process_stat(os.getpid())
    assert found is not None
    return found.began


@pytest.mark.parametrize(
    ("began", "state"),
    [("", "running"), (_began(), "running"), ("1", "killed")],
    ids=["unknown", "this process", "an earlier one"],
)
def test_a_process_counts_as_running_unless_it_is_a_later_one(
    began: str, state: str, tmp_path: Path
) -> None:
    Story(ranks=2, state=ProcessState.RUNNING, host="", meta={"began": began}).write(tmp_path)
    path = tmp_path / "trace" / name_of(1)
    with path.open("r+b") as file:
        section = TraceFile.open(path).sections["live"]
        file.seek(section["offset"] + 4)
        file.write(os.getpid().to_bytes(4, "little"))
    mixed = TracedRun.load(tmp_path)
    assert mixed.states == {0: "killed", 1: state}
    if state == "running":
        assert mixed.problems[0] == "rank 1 is still running: figures go up to now"


def test_a_rank_without_steps(run: Path) -> None:
    for rank in range(3):
        path = run / "trace" / name_of(rank)
        section = TraceFile.open(path).sections["live"]
        offset = RankTrace.load(path).live.dtype.fields["windows"][1]  # type: ignore[index]
        with path.open("r+b") as file:
            file.seek(section["offset"] + offset)
            file.write(bytes(8))
        made = document(TracedRun.load(run))  # rank after rank loses its steps
    assert made["steady"] is None
    assert made["verdict"]["text"].startswith("No step has ended yet")
    assert "no step has ended yet: there are no figures per step" in made["problems"]
    json.dumps(made, allow_nan=False)


def test_what_lies_beside_the_traces(run: Path) -> None:
    (run / "plan.toml").write_text(
        '[train]\nepochs = 3\n[provenance]\n"train.epochs" = "user: --epochs"\n'
    )
    (run / "metrics.jsonl").write_text('{"epoch": 1, "loss": 2.0}\nnonsense\n{"epoch": 2}\n{"epo')
    (run / "placement.json").write_text('{"engine": "local"}')
    found = TracedRun.load(run)
    assert [row["epoch"] for row in found.epochs] == [1, 2]
    assert any("line 2 cannot be read" in problem for problem in found.problems)
    made = document(found)["configuration"]
    assert made["plan"] == [{"key": "train.epochs", "value": 3, "origin": "user: --epochs"}]
    assert made["placement"] == {"engine": "local"}
    (run / "plan.toml").write_text("[train")
    assert any("plan.toml cannot be read" in problem for problem in TracedRun.load(run).problems)


@pytest.mark.parametrize("ranks", [1, 64, 65, 300])
def test_documents_of_any_size_are_json(ranks: int, tmp_path: Path) -> None:
    story = Story(ranks=ranks, steps=12, per_node=8).slow_loader(ranks - 1)
    made = document(TracedRun.load(story.write(tmp_path)))
    json.dumps(made, allow_nan=False)
    assert len(made["ranks"]["rank"]) == ranks
    assert len(made["timeline"]["ranks"]) == (ranks if ranks <= 64 else 16)
    assert len(made["heat"]["ranks"]) <= 256
    assert made["heat"]["ranks"][-1][1] == ranks - 1
    assert str(ranks - 1) in made["timeline"]["ranks"], "the slow one is shown in full"
    if ranks > 1:
        assert made["findings"][0]["ranks"] == [ranks - 1]


def test_ranks_in_words() -> None:
    assert listed([7]) == "rank 7"
    assert listed({3, 1, 2, 9}) == "ranks 1-3, 9"
