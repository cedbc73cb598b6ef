"""Figures of two real ranks, as TensorBoard, W&B and MLflow read them from what their own writers wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from commands import CLEAN, fivefold
from fivefold.introspect.exports import read
from fivefold.introspect.exports.tensorboard import scalars

SCRIPT = """
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import fivefold as ff
from fivefold.integrations import MLflow, TensorBoard, Wandb


def writer(name):
    if name == "tensorboard":
        return TensorBoard("tensorboard")
    if name == "wandb":
        return Wandb(project="stripes", mode="offline")
    return MLflow("stripes", tracking_uri=Path("mlruns").absolute().as_uri(), run_name="first")


def main(name, epochs):
    torch.manual_seed(0)
    with ff.start() as mesh:
        lines = Path(f"{name}-{mesh.rank}.jsonl")
        net = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
        model = ff.parallelize(net, mesh, loss=nn.CrossEntropyLoss())
        samples = TensorDataset(torch.randn(20, 1, 6, 6), torch.randint(3, (20,)))
        data = ff.loader(samples, mesh, batch_size=4)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        things = {"model": model, "optim": optim, "data": data}
        with ff.Checkpointer(f"saved-{name}", mesh, local="local", every=3, **things) as ckpt:
            steps = ff.progress(ckpt.resume(data, epochs), mesh)
            keep = lambda figures: lines.open("a").write(json.dumps(figures.scalars()) + "\\n")
            with ff.Logger(model, writer(name), steps, keep, every=4) as logger:
                for step, (x, y) in steps:
                    loss = model.step(x, y)
                    optim.step()
                    optim.zero_grad()
                    logger.step(step, loss, lr=0.1)
                    ckpt.maybe_save(step)


main(sys.argv[1], int(sys.argv[2]))
"""


def run(folder: Path, name: str, epochs: int, *options: str) -> list[str]:
    """Lines that two ranks printed; the first rank's alone are expected."""
    (folder / "script.py").write_text(SCRIPT)
    done = fivefold("run", *options, "-n", 2, "script.py", name, epochs, cwd=folder,
                    OMP_NUM_THREADS="1", FIVEFOLD_LEASE_S="3", WANDB_SILENT="true",
                    MLFLOW_ALLOW_FILE_STORE="true")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (done.stdout + done.stderr).splitlines()
    assert not [line for line in lines if line.startswith("[1]")], "nothing from the other rank"
    assert not (folder / f"{name}-1.jsonl").exists()
    return lines


def kept(folder: Path, name: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / f"{name}-0.jsonl").read_text().splitlines()]


def read_by(folder: Path, code: str) -> dict[str, dict[str, float]]:
    """Scalars by step, as a program prints them that knows the package and not Fivefold."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=folder,
        env=CLEAN | {"MLFLOW_ALLOW_FILE_STORE": "true"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
def test_a_run_is_followed_in_tensorboard_from_start_to_finish(tmp_path: Path) -> None:
    """Recorded as well: the export of the trace has the same charts."""
    lines = run(tmp_path, "tensorboard", 2, "--trace")
    assert any(line.startswith("[0] step 10/10  ") for line in lines)
    assert not any("goes on" in line for line in lines)
    found = kept(tmp_path, "tensorboard")
    assert len(found) == 3
    for one in found:
        assert 0 < one["step/exposed_share"] < 1 and one["step/late_rank"] in (0, 1)
        assert one["exposed/parameters and gradients"] < one["step/seconds"]
        assert one["phase/update"] > 0, "as only a trace tells of scripts"
    (folder,) = (tmp_path / "fivefold-logs").iterdir()
    names = {name for _, _, row in scalars(read(folder)[0]) for name in row}
    live = set[str]().union(*found)
    assert {name for name in live if name.startswith("exposed/")} < names
    assert {"step/seconds", "phase/backward", "memory/bytes"} < names & live

    lines = run(tmp_path, "tensorboard", 3)
    where = f"{tmp_path}/local/"
    (said,) = (line for line in lines if "the run in" in line)
    assert said.startswith(
        f"[0] fivefold: the run in {tmp_path}/saved-tensorboard goes on after step 10, from {where}"
    )
    assert "/step-00000010-epoch-1 on " in said
    assert any(line.startswith("[0] step 15/15  ") for line in lines)

    lines = run(tmp_path, "tensorboard", 3)
    assert (
        f"[0] fivefold: the run in {tmp_path}/saved-tensorboard is finished: step 15 was the last of epoch 3"
        in lines
    )
    reader = """
import json
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = {}
events = EventAccumulator("tensorboard").Reload()
for name in events.Tags()["scalars"]:
    for one in events.Scalars(name):
        found.setdefault(one.step, {})[name] = one.value
print(json.dumps(found))
"""
    shown = read_by(tmp_path, reader)
    assert [*shown] == ["4", "8", "10", "12", "15"]
    for figures, row in zip(kept(tmp_path, "tensorboard"), shown.values(), strict=True):
        assert row == pytest.approx(figures, rel=1e-6)  # event files hold float32


@pytest.mark.long
def test_steps_that_are_made_again_replace_those_of_the_start_before(tmp_path: Path) -> None:
    code = """
import json
from fivefold.integrations import TensorBoard
from fivefold.trace import StepFigures
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
for start, steps in enumerate([(4, 8, 12), (8, 12)]):
    writer = TensorBoard("events")
    writer.open()
    for step in steps:
        writer(StepFigures(step, steps=4, loss=float(start)))
    writer.close()
print(json.dumps({e.step: e.value for e in EventAccumulator("events").Reload().Scalars("loss")}
                 | {"count": len(EventAccumulator("events").Reload().Scalars("loss"))}))
"""
    assert read_by(tmp_path, code) == {"4": 0.0, "8": 1.0, "12": 1.0, "count": 3}


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed (extra wandb)")
def test_a_run_is_followed_in_wandb_without_internet(tmp_path: Path) -> None:
    run(tmp_path, "wandb", 2)
    reader = """
import json
import struct
from glob import glob
from wandb.proto import wandb_internal_pb2
(path,) = glob("wandb/offline-run-*/run-*.wandb")
data, found, parts, at = open(path, "rb").read(), {}, b"", 7
while at + 7 < len(data):  # the log format of LevelDB, behind seven bytes of W&B's
    if 32768 - at % 32768 < 7:
        at += 32768 - at % 32768
        continue
    _, length, kind = struct.unpack_from("<IHB", data, at)
    parts, at = parts + data[at + 7 : at + 7 + length], at + 7 + length
    if kind not in (1, 4):  # whole, or the last part
        continue
    record, parts = wandb_internal_pb2.Record.FromString(parts), b""
    row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
    if row:
        found[row["step"]] = {n: v for n, v in row.items() if n[0] != "_" and n != "step"}
print(json.dumps(found))
"""
    shown = read_by(tmp_path, reader)
    assert [*shown] == ["4", "8", "10"]
    for figures, row in zip(kept(tmp_path, "wandb"), shown.values(), strict=True):
        assert row == pytest.approx(figures)


@pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed (extra mlflow)")
def test_a_run_is_followed_in_mlflow(tmp_path: Path) -> None:
    run(tmp_path, "mlflow", 2)
    reader = """
import json
from pathlib import Path
from mlflow import MlflowClient
client = MlflowClient(tracking_uri=Path("mlruns").absolute().as_uri())
(run,) = client.search_runs([client.get_experiment_by_name("stripes").experiment_id])
assert run.info.status == "FINISHED" and run.info.run_name == "first", run.info
found = {}
for name in run.data.metrics:
    for one in client.get_metric_history(run.info.run_id, name):
        found.setdefault(one.step, {})[name] = one.value
print(json.dumps(dict(sorted(found.items()))))
"""
    shown = read_by(tmp_path, reader)
    assert [*shown] == ["4", "8", "10"]
    for figures, row in zip(kept(tmp_path, "mlflow"), shown.values(), strict=True):
        assert row == pytest.approx(figures)


def test_a_package_that_is_missing_is_named_with_its_extra(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import fivefold as ff\n"
        "from fivefold.integrations import needs\n"
        "with ff.start():\n    needs('no_such_package')\n"
    )
    done = fivefold("run", "-n", 2, "script.py", cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert (
        "no_such_package is not installed: pip install 'fivefold[no_such_package]'" in done.stderr
    )
