"""`fivefold checkpoint`: on real directories of two nodes, a persistent one, and one of plain DCP."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from commands import python
from fivefold.checkpoint.files import FileOps
from fivefold.checkpoint.inspect import can_lose, copies_at, rows
from fivefold.checkpoint.manifest import MANIFEST, State
from fivefold.checkpoint.note import Note, SavingCosts, write_note
from fivefold.checkpoint.run import LOCAL, RunHistory
from fivefold.checkpoint.store import PersistentStore
from fivefold.cli import main
from saves import RUN_ID, bytes_of, manifest_of, save_flushed, save_local, write_local

NAME = "step-00000120-epoch-1"


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """node0 and node1 with two saves each, and `far` with one of them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for me in (0, 1):
        save_local(tmp_path / f"node{me}", 100, me=me, redundancy=False)
        save_local(tmp_path / f"node{me}", 120, me=me, redundancy=False)
    assert main(["checkpoint", "repair", "node0", "node1"]) == 0
    assert main(["checkpoint", "flush", "node0", "node1", "--to", "far"]) == 0
    return tmp_path


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    capsys.readouterr()
    assert main(["checkpoint", *words]) == code
    captured = capsys.readouterr()
    return captured.err if code == 2 else captured.out


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


# ---- list and show


def test_list_tells_what_lies_where(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, "list", "node0", "far").splitlines()
    assert lines[0].split()[:6] == ["generation", "level", "state", "node", "size", "age"]
    assert [line.split()[:5] for line in lines[1:]] == [
        ["step-00000100-epoch-1", "node", "protected", "0", "(node0)"],
        [NAME, "node", "protected", "0", "(node0)"],
        [NAME, "persistent", "flushed", "all", "550"],
    ]
    assert "1 of 2 nodes" in lines[2] and "all nodes" in lines[3]


def test_list_tells_what_is_no_checkpoint(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (places / "far" / NAME / MANIFEST).unlink()
    assert "no manifest: the save did not end" in told(capsys, "list", "far")


def test_ages_are_those_that_the_save_tells(places: Path) -> None:
    (copy,) = copies_at(str(places / "far" / NAME))
    now = time.time()
    assert rows([copy], now + 7200 + 30)[0][5] == "2 h"


def test_one_checkpoint_one_run_or_all_of_a_node_can_be_named(places: Path) -> None:
    paths = (f"node0/{RUN_ID}/{NAME}", f"node0/{RUN_ID}", "node0")
    assert [len(copies_at(path)) for path in paths] == [1, 2, 2]


def test_show_tells_everything(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "show", f"node1/{RUN_ID}/{NAME}")
    for part in ("was saved after step 120, by start 1 of run run-1",
                 "by 2 ranks on 2 nodes, with the layout data=2, as ",
                 "is protected, with the scheme xor, and can lose 1 of 2 nodes",
                 "those of node 1 (node1)", "redundancy-1.bin", "__1_0.distcp  200 bytes  xxh3",
                 "node 0 (node0) saved 300 B, of rank 0:"):  # fmt: skip
        assert part in text
    several = told(capsys, "show", "node0", code=2)
    assert f"/node0/{RUN_ID}/step-00000100-epoch-1, " in several
    assert "was saved after step" in told(capsys, "show", several.split()[-1].rstrip("."))
    (places / "far" / NAME / MANIFEST).write_text("{}")
    assert "is no checkpoint: the manifest in" in told(capsys, "show", f"far/{NAME}", code=1)


def record(places: Path, local: Path) -> None:
    """Write down, as a start does, that the run of `far` saves to `local` on its nodes."""
    run = RunHistory(RUN_ID, (), {LOCAL: str(local)}).started(None)
    PersistentStore(places / "far").write_run(run)


def test_list_and_show_know_where_the_run_saves_on_this_node(
    places: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(places, places / "node0")
    lines = told(capsys, "list", "far", "node0").splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        [NAME, "persistent"], ["step-00000100-epoch-1", "node"], [NAME, "node"],
    ]  # fmt: skip
    text = told(capsys, "show", "far/step-00000100-epoch-1")
    assert text.startswith(f"{places}/node0/{RUN_ID}/step-00000100-epoch-1\n")
    assert told(capsys, "show", f"far/{NAME}").startswith(f"{places}/far/{NAME}\n")
    assert "holds 2 checkpoints; name one of them" in told(capsys, "show", "far", code=2)
    assert "there is no directory far/step-1" in told(capsys, "show", "far/step-1", code=2)
    shutil.rmtree(places / "far" / NAME)
    assert len(told(capsys, "list", "far").splitlines()) == 3
    told(capsys, "verify", "far")


def test_list_says_on_which_nodes_saves_are_that_cannot_be_seen_here(
    places: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(places, places / "elsewhere")
    write_note(PersistentStore("far").place, Note(RUN_ID, 1, 120, ("n1", "n2"), "xor"))
    line = told(capsys, "list", "far").splitlines()[0]
    assert line == (
        f"far: saves on nodes lie in {places}/elsewhere/{RUN_ID} on n1, n2; there are none on "
        f"{socket.gethostname()}"
    )
    for name in ("run.json", "run-copy.json"):
        flip(places / "far" / name)
    assert "saves on this node were not looked for: the record of the run" in told(
        capsys, "list", "far"
    )


def test_how_much_may_be_lost_depends_on_state_scheme_and_sets() -> None:
    def of(scheme: str, nodes: int, *sets: tuple[int, ...], state: State = "protected") -> str:
        from dataclasses import replace

        made = manifest_of(1, me=0, lengths=[10] * nodes, scheme=scheme)
        return can_lose(replace(made, sets=sets, state=state))

    assert of("xor", 4, (0, 1, 2, 3)) == "1 of 4 nodes"
    assert of("rs", 4, (0, 1, 2, 3)) == "2 of 4 nodes"
    assert of("rs", 8, (0, 2, 4, 6), (1, 3, 5, 7)) == "2 of each set of 4"
    assert of("xor", 4, (0, 1, 2, 3), state="local") == "no node"
    assert of("xor", 4, (0, 1, 2, 3), state="flushed") == "all nodes"
    assert of("partner", 4, (0, 2), (1, 3)) == "1 of each set of 2"
    assert of("xor", 5, (0, 2, 4), (1, 3)) == "1 of each set of 2/3"
    assert of("single", 2) == of("single", 2, (0,), (1,)) == of("unheard", 2, (0, 1)) == "no node"


# ---- verify


def test_verify_finds_a_flipped_bit(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "verify", "node0", "node1", "far")
    assert text.count(" is whole: 3 files looked at\n") == 5 and "damaged" not in text
    flip(places / "far" / NAME / "__1_0.distcp")
    assert "3 files looked at, 3 by length only\n" in told(capsys, "verify", "far", "--quick")
    text = told(capsys, "verify", "far", code=1)
    assert f"{NAME} is damaged:" in text and "  __1_0.distcp: its xxh3 is" in text


def test_what_is_under_way_is_no_damage(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (places / "far" / "step-00000130-epoch-1").mkdir()
    assert "step-00000130-epoch-1 is no checkpoint: its save is" in told(capsys, "verify", "far")
    told(capsys, "verify", "far/step-00000130-epoch-1", code=1)
    (places / "far" / NAME / MANIFEST).write_text("")
    assert "damaged" in told(capsys, "verify", "far", code=1)


def test_a_manifest_that_is_gone_is_damage(
    places: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All files are there but the one that makes them a checkpoint: no save that did not end."""
    (places / "far" / "step-00000130-epoch-1").mkdir()
    for place in ("far", "node0"):
        (next(places.glob(f"{place}/**/{NAME}")) / MANIFEST).unlink()
        text = told(capsys, "verify", place, code=1)
        assert f"{NAME} is damaged:\n  manifest.json: it is not there, and" in text


@pytest.mark.parametrize("name", ["run.json", "run-copy.json", "saved-epoch-1.json"])
def test_records_of_the_run_are_verified(
    name: str, places: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = PersistentStore(places / "far")
    store.write_run(RunHistory(RUN_ID, ()).started(None))
    write_note(store.place, Note(RUN_ID, 1, 120, ("node0",), "xor"))
    told(capsys, "verify", "far")
    flip(places / "far" / name)
    text = told(capsys, "verify", "far", code=1)
    assert f"{places}/far/{name} is damaged" in text
    (places / "far" / name).unlink()
    told(capsys, "verify", "far", code=0 if name.startswith("saved") else 1)


def test_verify_reads_directories_of_plain_dcp(tmp_path: Path) -> None:
    """In a process of its own: it must do without torch, and say what was wrong in one line each."""
    script = (
        "import sys, warnings\nwarnings.simplefilter('ignore')\nimport torch\n"
        "import torch.distributed.checkpoint as dcp\n"
        "dcp.save({'w': torch.arange(1000.0)}, checkpoint_id=sys.argv[1], no_dist=True)"
    )
    subprocess.run([python(), "-c", script, str(tmp_path / "dcp")], check=True, timeout=100)
    checking = (
        "import sys\nfrom fivefold.cli import main\ncode = main(sys.argv[1:])\n"
        "assert 'torch' not in sys.modules\nsys.exit(code)"
    )

    def check(*words: str) -> tuple[int, str]:
        done = subprocess.run(
            [python(), "-c", checking, "checkpoint", *words, str(tmp_path / "dcp")],
            capture_output=True, text=True, check=False, timeout=60, env={**os.environ, "COLUMNS": "200"},
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    assert check("verify") == (0, f"{tmp_path}/dcp is whole: 1 part looked at\n")
    assert "written by torch.distributed.checkpoint" in check("list")[1]
    assert "w: float32, 1000" in check("show", "--contents")[1]
    flip(tmp_path / "dcp" / "__0_0.distcp")
    code, text = check("verify")
    assert code == 1 and "__0_0.distcp: w: the checksum of archive/data/0 does not match" in text


# ---- repair, flush, fetch, drop


def test_repair_rebuilds_a_lost_node(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(places / "node1")
    (places / "node1").mkdir()
    text = told(capsys, "repair", "node0", "node1", "--only", NAME)
    assert f"wrote {places}/node1/{RUN_ID}/{NAME}/__1_0.distcp" in text and f"{NAME}: whole" in text
    assert (places / "node1" / RUN_ID / NAME / "__1_0.distcp").read_bytes() == bytes_of(
        120, "__1_0.distcp", 200
    )
    told(capsys, "verify", "node1")


def test_repair_says_what_is_lost(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(places / "node1")
    flip(places / "node0" / RUN_ID / NAME / "redundancy-0.bin")
    (places / "node1").mkdir()
    text = told(capsys, "repair", "node0", "node1", code=1)
    assert f"{NAME}: not whole:" in text and "step-00000100-epoch-1: whole" in text
    text = told(capsys, "repair", "node0", "node1", "far")
    assert f"{NAME}: whole" in text and "left alone" not in text


def test_repair_bears_two_lost_nodes_of_rs_and_refuses_three(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [tmp_path / f"node{me}" for me in range(5)]
    lengths = [300 + me for me in range(5)]
    for me, node in enumerate(nodes):
        saved = manifest_of(120, me=me, lengths=lengths, redundancy=False, scheme="rs")
        write_local(node, saved)
    paths = [str(node) for node in nodes]
    told(capsys, "repair", *paths)
    assert "with the scheme rs, and can lose 2 of 5 nodes" in told(
        capsys, "show", f"{nodes[4]}/{RUN_ID}/{NAME}"
    )

    def lose(*lost: int) -> None:
        for me in lost:
            shutil.rmtree(nodes[me])
            nodes[me].mkdir()

    lose(1, 3)
    assert f"{NAME}: whole" in told(capsys, "repair", *paths)
    for me in (1, 3):
        made = nodes[me] / RUN_ID / NAME / f"__{me}_0.distcp"
        assert made.read_bytes() == bytes_of(120, made.name, 300 + me)
    assert told(capsys, "verify", *paths).count("is whole: 3 files") == 5
    lose(0, 1, 3)
    assert told(capsys, "repair", *paths, code=1) == (
        f"{NAME}: not whole: members 0, 1, 3 of the set are lost or damaged: rs rebuilds two at most\n"
    )


def test_repair_leaves_alone_what_it_does_not_know(
    places: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (places / "far" / "step-00000130-epoch-1").mkdir()
    (places / "far" / "step-00000130-epoch-1" / "__0_0.distcp").write_bytes(b"torn")
    text = told(capsys, "repair", "node0", "far")
    assert f"{places}/far/step-00000130-epoch-1: left alone" in text


def test_fetch_brings_a_checkpoint_to_a_node(
    places: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = told(capsys, "fetch", "far", "--to", "new", "--member", "1")
    assert f"wrote {places}/new/{RUN_ID}/{NAME}/__1_0.distcp" in text
    assert "persistent" not in told(capsys, "list", "new")
    assert "has members 0 to 1" in told(
        capsys, "fetch", "far", "--to", "x", "--member", "7", code=2
    )


def test_object_stores_are_places_too(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"memory:/{places}/bucket"
    told(capsys, "flush", "node0", "node1", "--to", url)
    assert "is whole: 3 files looked at" in told(capsys, "verify", url)
    told(capsys, "fetch", url, "--to", "new")
    assert "removed memory:" in told(capsys, "drop", f"{url}/{NAME}", "--last")
    assert told(capsys, "list", url) == f"there are no checkpoints in {url}\n"


def test_drop_keeps_the_last_one(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (f"node0/{RUN_ID}/{name}" for name in ("step-00000100-epoch-1", NAME))
    assert "is the last checkpoint" in told(capsys, "drop", one, two, code=2)
    assert FileOps().list(places / "node0" / RUN_ID) == ["step-00000100-epoch-1", NAME]
    assert told(capsys, "drop", one) == f"removed {places}/{one}\n"
    assert "is the last checkpoint" in told(capsys, "drop", two, code=2)
    told(capsys, "drop", two, "--last")
    assert FileOps().list(places / "node0" / RUN_ID) == []


# ---- interval


def test_what_a_run_has_measured_is_listed_and_used(
    places: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "costs" not in told(capsys, "list", "far", "node0")
    costs = SavingCosts(save_s=0.5, flush_s=5.0, every_s=60.0, mtbf_s=3600.0, flush_every=10)
    write_note(PersistentStore("far").place, Note(RUN_ID, 2, 120, ("a",), "single", costs))
    text = told(capsys, "list", "far", "node0")
    assert text.endswith(
        "far: a save costs 0.5 s of training, and a flush 5 s more; start 2 measured that, and saved every "
        "60 s\n"
    )
    text = told(capsys, "interval", "far")
    assert text.startswith(
        "a save costs 0.5 s of training, a flush 5 s more\nsave every 84.9 s\nflush one save in 10,"
    )
    assert "save every 10 min" in told(
        capsys, "interval", "far", "--mtbf", "50h"
    )  # sqrt(2 x 1 s x 50 h)
    assert "save every 30 s" in told(
        capsys, "interval", "far", "--flush", "0s", "--save", "0.125s", "--max-overhead", "0"
    )


def test_interval_tells_when_to_save(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "interval", "--save", "6s", "--mtbf", "1h", "--step", "2s")
    assert text.startswith("save every 3.5 min, every 104 steps\nsaving adds 2.89%")
    text = told(capsys, "interval", "--save", "0.5s", "--mtbf", "1d", "--flush", "20s", "--flush-mtbf",
                "14d")  # fmt: skip
    assert "flush one save in 24, every 117 min" in text
    assert "save every 12 min" in told(capsys, "interval", "--save", "36s", "--mtbf", "1h", "--max-overhead",
                                       "0.05")  # fmt: skip


# ---- mistakes


@pytest.mark.long(every=8)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["lst"], "unknown action 'lst'; did you mean 'list'?"),
        (["list"], "PATH is missing"),
        (["list", "nowhere"], "there is no directory nowhere"),
        (["list", "empty"], "there are no checkpoints in empty: expected a directory that a run"),
        (["list", "nosuch://a"], "nosuch"),
        (["repair", "empty"], "these directories hold no checkpoints"),
        (["repair", "node0", "nowhere"], "there is no directory nowhere"),
        (["repair", "node0", "--only", "step-00000120-epoch-2"], "did you mean 'step-00000120-epoch-1'?"),
        (["repair", "far", "far2"], "several persistent directories"),
        (["flush", "node0"], "--to is missing"),
        (["fetch", "empty", "--to", "new"], "these directories hold no checkpoints"),
        (["drop", "node0"], "node0 holds 2 checkpoints; name one of them"),
        (["interval", "--save", "x", "--mtbf", "1h"], "--save 'x' is no time; write 0.5s, 10min"),
        (["interval", "--save", "1s", "--mtbf", "0s"], "expected more than 0"),
        (["interval", "--save", "1s"], "--mtbf is missing: give a time"),
        (["interval", "--mtbf", "1h"], "--save is missing: give a time"),
        (["interval", "empty"], "no run has measured in empty what its saves cost"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_in_one_line(
    words: list[str], expected: str, places: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (places / "empty").mkdir()
    save_flushed(places / "far2", 120)
    PersistentStore(places / "far2").write_run(RunHistory(RUN_ID, ()).started(None))
    text = told(capsys, *words, code=2)
    assert text.startswith("error: ") and text.count("\n") == 1 and expected in text


def test_a_directory_that_cannot_be_read_is_told_in_one_line(
    places: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> list[str]:
        raise PermissionError(13, "Permission denied", "far")

    monkeypatch.setattr(FileOps, "list", refuse)
    capsys.readouterr()
    assert main(["checkpoint", "list", "far"]) == 1
    assert capsys.readouterr().err == "error: far: Permission denied\n"


def test_no_action_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint"]) == 2
    assert main(["checkpoint", "--help"]) == 0
    captured = capsys.readouterr()
    assert captured.out == captured.err and "usage: fivefold checkpoint ACTION" in captured.out
