"""On a GPU: two processes equal one, whether they share it (over gloo) or have one each (NCCL).

    make test PYTEST_FLAGS="tests/gpu"

The references run on the same GPU, so that an error is the layout's and not the processor's.
"""

import json
import subprocess
from pathlib import Path

import pytest

from gpu_runs import FIVEFOLD, GPUS, found_by, needs_gpu, run

pytestmark = [pytest.mark.gpu, needs_gpu]


@pytest.mark.parametrize(
    "case", ["conv_net", "no_affine", "resnet20", "float32", "empty_share", "mixed_precision"]
)
def test_two_ranks_compute_what_one_process_does(case: str, tmp_path: Path) -> None:
    found_by(case, tmp_path)


def test_forked_ranks_have_the_gpu(tmp_path: Path) -> None:
    """The process that ranks are forked from must not have touched CUDA, which no fork survives."""
    found_by("conv_net", tmp_path, "--fork", "-n", "2")


@pytest.mark.parametrize("backend", ["auto", "fivefold"])
def test_a_stage_without_parameters(backend: str, tmp_path: Path) -> None:
    """It gave others tensors of the host, where they gave it those of a GPU."""
    found_by("bare_stage", tmp_path, "--layout", "pipe=2", "--set", f"comm.backend={backend}")


def test_every_operation_takes_tensors_of_a_gpu(tmp_path: Path) -> None:
    """That ranks share, through memory of the host; with one each NCCL does."""
    found_by("operations", tmp_path, "-n", "2", "--set", "comm.backend=fivefold")


@pytest.mark.skipif(GPUS == 0, reason="memory is measured as CUDA counts it")
def test_budgets_keep_bits_and_are_kept(tmp_path: Path) -> None:
    found_by("under_budgets", tmp_path, "-n", "1")


def test_the_command_verifies_on_the_gpu(tmp_path: Path) -> None:
    told = tmp_path / "report.json"
    command = ["verify", "resnet20", "--layout", "data=2", "--batch", "7", "--steps", "2", "--json"]
    run(tmp_path, *command, told)
    assert json.loads(told.read_text())["passed"]


@pytest.mark.parametrize(
    ("model", "layout", "more"),
    [
        ("resnet20", "width=2", []),
        ("resnet20", "data=1", ["--set", "parallel.compile=true"]),
        ("unet", "height=2,width=2", ["--loss", "mse"]),
        ("edsr_small", "height=2", ["--loss", "l1"]),
        ("resnet20", "pipe=2", ["--set", "pipeline.schedule=gems"]),
        ("resnet20", "pipe=2,height=2", ["--set", "pipeline.schedule=zero-bubble"]),
        ("unet", "data=2,pipe=2", ["--loss", "mse"]),
        ("resnet20", "pipe=2,width=2", ["--set", "comm.backend=fivefold"]),
    ],
)
def test_tiles_and_stages_verify_on_the_gpu(
    model: str, layout: str, more: list[str], tmp_path: Path
) -> None:
    told = tmp_path / "report.json"
    command = ["verify", model, "--layout", layout, "--batch", "5", "--steps", "2", *more, "--json"]
    run(tmp_path, *command, told)
    assert json.loads(told.read_text())["passed"]


@pytest.mark.skipif(GPUS != 1, reason="for two ranks on one GPU")
@pytest.mark.parametrize("backend", ["auto", "fivefold"])
def test_ranks_that_share_a_gpu_do_not_divide_parameters(backend: str, tmp_path: Path) -> None:
    """gloo ended with a segmentation fault."""
    options = ["--set", "memory.shard=optimizer", "--set", f"comm.backend={backend}"]
    command = [*FIVEFOLD, "verify", "resnet20", "--layout", "data=2", "--batch", "4", *options]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("needs a GPU for every rank")) == (2, 1), done.stderr


@pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, for NCCL; there are {GPUS}")
def test_ranks_with_a_gpu_each_talk_over_nccl(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch.distributed as dist\n"
        "import fivefold as ff\n"
        "with ff.start() as mesh:\n"
        "    print(mesh.device, dist.get_backend(mesh.group('data')), flush=True)\n"
    )
    said = run(tmp_path, "run", "-n", "2", script).stdout
    assert "cuda:0" in said and "cuda:1" in said
    assert said.count("nccl") == 2
