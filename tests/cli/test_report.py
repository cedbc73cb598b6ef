"""`fivefold report` as people call it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from commands import python
from fivefold.introspect import shape, tables
from fivefold.introspect.document import document
from fivefold.introspect.run import TracedRun
from traces import MS, Story

ROOT = Path(__file__).resolve().parents[2]


def report(*words: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [python(), "-m", "fivefold", "report", *map(str, words)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    plan = {"loader.workers": {"value": 1, "origin": "user: --set"}}
    return Story(meta={"plan": plan}).slow_loader(3).write(tmp_path / "slow")


@pytest.fixture
def quick(tmp_path: Path) -> Path:
    plan = {"loader.workers": {"value": 4, "origin": "tuned: faster"}}
    meta = {"plan": plan, "environment": {"OMP_NUM_THREADS": "2"}}
    return Story(meta=meta, transfer_ns=2 * MS).write(tmp_path / "quick")


def test_the_summary_and_the_page(slow: Path) -> None:
    done = report(slow)
    first, second, *rest = done.stdout.splitlines()
    assert first.startswith("slow: 4 ranks on node0; ended after 40 steps; a step takes 69 ms")
    assert "rank 3 arrives 12 ms late in 100 % of steps because its loader is empty" in second
    assert any(line.startswith("1. rank 3 arrives") and "per step]" in line for line in rest)
    assert done.stderr == f"page: {slow / 'report.html'}\n"
    page = (slow / "report.html").read_text()
    assert "rank 3 arrives 12 ms late" in page


def test_json_is_the_document(slow: Path) -> None:
    made = json.loads(report(slow, "--json", "--html", "none").stdout)
    expected = json.loads(json.dumps(document(TracedRun.load(slow))))
    for name in made.keys() - {"made"}:
        assert made[name] == expected[name], name
    assert not (slow / "report.html").exists()


def keys(kind: type) -> set[str]:
    return set(kind.__annotations__)


def test_the_document_has_the_fields_that_its_types_say(slow: Path) -> None:
    made = document(TracedRun.load(slow))
    assert made.keys() == keys(shape.Document)
    for name, kind in (
        ("run", shape.RunFacts), ("verdict", shape.Verdict), ("steady", shape.Steady),
        ("timeline", tables.Timeline), ("heat", tables.Heat), ("ranks", tables.RankTable),
        ("arrivals", tables.Arrivals), ("series", tables.Series), ("throughput", shape.Throughput),
        ("calibration", shape.Calibration), ("configuration", shape.Configuration),
    ):  # fmt: skip
        assert made[name].keys() == keys(kind), name  # type: ignore[literal-required]
    for name, kind in (
        ("findings", shape.FindingData), ("breakdown", tables.Breakdown), ("operations", tables.Operation),
    ):  # fmt: skip
        assert all(row.keys() == keys(kind) for row in made[name]), name  # type: ignore[literal-required]
    assert made["arrivals"]["late"][0].keys() == keys(tables.LateOperation)
    assert next(iter(made["timeline"]["ranks"].values())).keys() == keys(tables.RankSeries)


def test_the_reference_lists_all_fields() -> None:
    text = (ROOT / "docs" / "reference" / "report-json.md").read_text()
    sections = {part.splitlines()[0]: part for part in text.split("\n## ")[1:]}
    renamed = {"RunFacts": "Run", "FindingData": "Finding", "RankTable": "Ranks"}
    for module in (shape, tables):
        for name in module.__all__:
            kind = getattr(module, name)
            if not (isinstance(kind, type) and hasattr(kind, "__total__")):
                continue
            listed = [
                line.split("`")[1]
                for line in sections[renamed.get(str(name), str(name))].splitlines()
                if line.startswith("| `")
            ]
            assert listed == list(kind.__annotations__), name


def test_two_runs_are_compared(slow: Path, quick: Path) -> None:
    done = report(slow, quick)
    first = done.stdout.splitlines()[0]
    assert first.startswith("Steps of quick take 20 % less: 56 ms instead of 69 ms, most of it in")
    assert "Configured otherwise: loader.workers, OMP_NUM_THREADS" in first
    assert (quick / "compare.html").exists()
    made = json.loads(report(slow, quick, "--json", "--html", "none").stdout)
    assert made.keys() == keys(shape.Comparison)
    assert "Only in slow: rank 3 arrives 12 ms late in 100 % of steps because its loader" in first
    assert [f["id"] for f in made["only_a"]] == ["straggler", "exposed"]
    assert made["only_b"] == []
    step = made["figures"][0]
    assert (step["name"], step["a"]) == ("step", 0.06917)
    assert step["b"] == pytest.approx(0.0555, rel=0.01)
    assert step["change"] == pytest.approx(step["b"] - step["a"], rel=0.01)
    plan = next(row for row in made["differences"] if row["section"] == "plan")
    assert (plan["key"], plan["a"], plan["b"]) == ("loader.workers", 1, 4)
    assert (plan["origin_a"], plan["origin_b"]) == ("user: --set", "tuned: faster")
    assert made["phases"][0]["name"] == "load", "largest change first"
    report(slow, slow)  # nothing differs


def test_throughput_beside_a_run_of_one_process(slow: Path, tmp_path: Path) -> None:
    assert "1,850 samples/s, at most 81 % of 4 times one process (estimated)" in report(slow).stdout
    alone = Story(ranks=1, transfer_ns=0).write(tmp_path / "alone")
    done = report(slow, "--one-process", alone)
    assert "1,850 samples/s, 77 % of 4 times one process\n" in done.stdout
    assert (
        f"note: the one process of {alone} was configured otherwise: loader.workers\n"
        in done.stdout
    )
    assert str(alone) in (slow / "report.html").read_text()


@pytest.mark.long(every=8)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no runs given: name one to look at, or two to compare"),
        (["a", "b", "c"], "3 runs given"),
        (["nothing"], "there is no directory nothing"),
        (["."], "holds no trace files"),
        (
            ["slow", "--one-process", "slow"],
            "slow has 4 ranks: what one process does is measured in a run of",
        ),
        (
            ["slow", "--one-process", "slow", "--serve"],
            "--one-process is for reports: it goes with neither",
        ),
        (
            ["slow", "--html", "missing/page.html"],
            "cannot write the page missing/page.html: No such file",
        ),
    ],
)
def test_mistakes_are_one_line(words: list[str], said: str, slow: Path) -> None:
    done = subprocess.run(
        [python(), "-m", "fivefold", "report", *words],
        capture_output=True, text=True, timeout=60, check=False, cwd=slow.parent,
    )  # fmt: skip
    if words == ["."]:
        assert "the latest run there is" in done.stderr
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_of_ranks_that_were_started_again_the_last_start_is_told(
    slow: Path, tmp_path: Path
) -> None:
    for folder in ("trace", "restart-1/trace", "restart-2/trace", "restart-10/trace"):
        shutil.copytree(slow / "trace", tmp_path / folder)
    (tmp_path / "restart-11").mkdir()  # it ended before any rank began
    done = report(tmp_path)
    others = ", ".join(str(tmp_path / name) for name in ("trace", "restart-1", "restart-2"))
    others += f", {tmp_path / 'restart-11'} (no trace)"
    assert f"started 5 times, and this is restart-10; others are in {others}" in done.stdout


def test_a_page_that_cannot_be_written_is_no_error_unless_asked_for(slow: Path) -> None:
    (slow / "report.html").mkdir()
    done = report(slow)
    assert "note: cannot write the page" in done.stderr
    assert "rank 3 arrives" in done.stdout
    assert {path.name for path in slow.iterdir()} == {"report.html", "trace"}, (
        "nothing half-written"
    )
    report(slow, "--html", slow / "report.html", code=2)


def test_what_traces_say_is_printed_as_it_is(tmp_path: Path) -> None:
    story = Story(meta={"host": "[bold]node[/bold]", "command": ["[red]"]})
    story.notes.append({"kind": "failure", "at_ns": 1, "text": "[link=x]boom[/link] <script>"})
    done = report(story.write(tmp_path / "[odd]"))
    assert "[link=x]boom[/link] <script>" in done.stdout
    assert done.stdout.startswith("[odd]: 4 ranks on [bold]node[/bold]")


def test_no_terminal_obeys_what_traces_say(tmp_path: Path) -> None:
    evil = "\x1b[2J\x1b]0;title\x07\x9b31m\u202eabc\r"
    story = Story(meta={"host": f"node{evil}"})
    story.notes.append({"kind": "failure", "at_ns": 1, "text": f"boom{evil}"})
    done = report(story.write(tmp_path / "run"))
    shown = r"\x1b[2J\x1b]0;title\x07\x9b31m\u202eabc\r"
    assert f"node{shown}" in done.stdout and f"boom{shown}" in done.stdout
    assert not set(evil) - set("[2J]0;title31mabc") & set(done.stdout + done.stderr)


@pytest.mark.long
@pytest.mark.parametrize("name", [".report.html.partial", "report.html", "csv/steps.csv"])
def test_links_are_replaced_and_not_followed(name: str, slow: Path) -> None:
    """The directory of a run may be one that others write to."""
    precious = slow.parent / "precious"
    precious.write_text("mine")
    (slow / "csv").mkdir()
    (slow / name).symlink_to(precious)
    report(slow)
    report(slow, "--export", "csv")
    assert precious.read_text() == "mine"
    assert "<html" in (slow / "report.html").read_text()
    assert (slow / "csv" / "steps.csv").read_text().startswith("rank,")
    assert not (slow / "report.html").is_symlink()


def test_a_linked_folder_is_no_place_to_export_to(slow: Path) -> None:
    (others := slow.parent / "others").mkdir()
    (slow / "csv").symlink_to(others)
    refused = report(slow, "--export", "csv", code=2)
    assert "csv is a link, maybe of somebody else" in refused.stderr
    assert not list(others.iterdir())
    assert report(slow, "--export", "csv", "--out", slow / "csv").returncode == 0
    assert (others / "steps.csv").exists()


def test_the_page_carries_the_licence_of_what_it_embeds(slow: Path) -> None:
    report(slow)
    page = (slow / "report.html").read_text()
    assert "Copyright (c) 2022 Leon Sorokin" in page
    assert "The above copyright notice and this permission notice shall be included" in page


@pytest.mark.long
def test_a_script_that_was_traced_gets_a_report(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python(), "-m", "fivefold", "run", "-n", "2", "--log-dir", "logs", "--trace", "train.py"],
        cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads(report(tmp_path / "logs", "--json").stdout)
    assert made["run"]["size"] == 2
    # Warm-up is at most the first half: as long as steps take far longer than those of the second.
    assert made["run"]["steps"] == 20 and made["steady"]["steps"] >= 10
    late = next(f for f in made["findings"] if f["id"] == "straggler")
    assert late["ranks"] == [1]
    assert late["figures"]["cause"] == "waits"
    assert "train.py" in made["verdict"]["text"]


_SCRIPT = """
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(256, 256)

    def forward(self, x):
        if dist.get_rank() == 1:
            time.sleep(0.15)
        return self.layer(x)


model = DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.DataLoader(torch.randn(20 * 32, 256), batch_size=32)
for x in data:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""
