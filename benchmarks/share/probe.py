"""What there is for ranks that share a GPU: the device, NCCL, MPS, and memory that two processes see.

NCCL refuses two ranks on a GPU. From 2.30 on it has a switch that allows them, as an experiment: it is tried.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LIMIT_S = 30.0
CONTROL = "nvidia-cuda-mps-control"
NOBODY = 65534
SUM = "import torch; print(torch.ones(7, device='cuda').sum().item())"
SWITCHED = (2, 30)
"""the first NCCL that has NCCL_MULTI_RANK_GPU_ENABLE"""


def plus_one(given: Any, done: Any) -> None:
    """In another process: change a tensor of the first one where it lies."""
    tensor = given.get(timeout=60)
    tensor += 1
    torch.cuda.synchronize()
    done.put(True)
    given.get(timeout=60)  # the owner keeps it until then


def shared() -> str:
    """Whether another process can write to a tensor here, by CUDA's inter-process handles."""
    context = torch.multiprocessing.get_context("spawn")
    given, done = context.Queue(), context.Queue()
    other = context.Process(target=plus_one, args=(given, done), daemon=True)
    other.start()
    tensor = torch.zeros(1 << 20, device="cuda")
    given.put(tensor)
    try:
        done.get(timeout=60)
    except Exception as problem:  # noqa: BLE001 - the queue's own, or of the child
        return f"no: {type(problem).__name__}"
    torch.cuda.synchronize()
    equal = bool((tensor == 1).all())
    given.put(None)
    other.join(30)
    return "yes" if equal else "no: what it wrote is not there"


def all_reduced(backend: str, rank: int, file: str) -> None:
    """What each of two ranks does."""
    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    dist.init_process_group(
        backend,
        store=dist.FileStore(file, 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=20),
    )
    tensor = torch.full((1 << 20,), rank + 1.0, device=device)
    dist.all_reduce(tensor)
    assert bool((tensor == 3).all()), f"1 + 2 is {tensor[0].item()}"
    print("3", flush=True)
    os._exit(0)  # ends of groups may hang, which is not the question


def pair(backend: str) -> str:
    """Whether two ranks on one device sum a tensor by a backend."""
    environ = {**os.environ, "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_DEBUG": "WARN"}
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, __file__, "rank", backend]
        log = Path(folder, "said")
        with log.open("wb") as out:
            ranks = [
                subprocess.Popen([*words, str(rank), f"{folder}/store"], env=environ, stdout=out, stderr=out)
                for rank in range(2)
            ]  # fmt: skip
            ends = time.monotonic() + LIMIT_S
            try:
                codes = [rank.wait(max(0.0, ends - time.monotonic())) for rank in ranks]
            except subprocess.TimeoutExpired:
                return f"no: not done after {LIMIT_S:.0f} s"
            finally:
                for rank in ranks:
                    rank.kill()
                    rank.wait()
        if not any(codes):
            return "yes"
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return f"no: {codes}, {' | '.join(lines[-3:])}"


def served(gpus: int) -> str:
    """Whether MPS starts for a user who is not root, in folders of its own, and serves; it is ended again."""
    if (control := shutil.which(CONTROL)) is None:
        return f"no {CONTROL}"
    as_user: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # which others may enter
        if os.geteuid() == 0:
            as_user = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
            os.chown(folder, NOBODY, NOBODY)
        environ = {
            **os.environ,
            "CUDA_MPS_PIPE_DIRECTORY": folder,
            "CUDA_MPS_LOG_DIRECTORY": folder,
        }
        environ.setdefault("CUDA_VISIBLE_DEVICES", "0")

        def asked(words: list[str], given: str = "") -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                words, input=given, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False,
                cwd="/", **as_user,
            )  # fmt: skip

        servers: list[str] = []
        log = Path(folder, "said")
        with log.open("wb") as out:
            try:
                daemon = subprocess.Popen(
                    [control, "-f"], env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                    start_new_session=True, cwd="/", **as_user,
                )  # fmt: skip
            except OSError as problem:
                return f"no: {problem}"
        try:
            ends = time.monotonic() + 10
            while asked([control], "get_server_list\n").returncode:
                if daemon.poll() is not None or time.monotonic() > ends:
                    return f"no: {' '.join(log.read_text(errors='replace').split())[:300]}"
                time.sleep(0.2)
            client = asked([sys.executable, "-c", SUM]) if gpus else None
            servers = asked([control], "get_server_list\n").stdout.split()
            asked([control], "quit\n")
            daemon.wait(10)
        except (OSError, subprocess.TimeoutExpired) as problem:
            return f"no: {problem}"
        finally:
            daemon.kill()
            daemon.wait()
            for server in servers:
                with contextlib.suppress(ProcessLookupError, ValueError):
                    os.kill(int(server), signal.SIGKILL)
    summed = "none tried" if client is None else client.stdout.strip() or client.stderr[-200:]
    return f"yes: client {summed!r}, servers {servers or 'none'}, ended by quit"


def said(*words: str) -> str:
    """What a command prints, or why it does not."""
    if shutil.which(words[0]) is None:
        return f"no {words[0]}"
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    return (done.stdout or done.stderr).strip()


def main() -> int:
    """Print it as JSON."""
    if sys.argv[1:2] == ["rank"]:
        all_reduced(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "mps": {
            name: shutil.which(name) or ""
            for name in ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server")
        },
    }
    found["mps"]["started"] = served(found["gpus"])
    if found["gpus"]:
        query = "name,uuid,driver_version,compute_mode,mig.mode.current,memory.total,clocks.sm"
        found["devices"] = said("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")
        found["cuda"] = torch.version.cuda
        version = torch.cuda.nccl.version() if dist.is_nccl_available() else ()
        found["nccl"] = ".".join(map(str, version))
        found["shared memory"] = shared()
        switch = pair("nccl") if version >= SWITCHED else "not tried: no switch"
        found["two ranks of NCCL on a GPU"] = switch
    else:
        found["two ranks of gloo"] = pair("gloo")
    print(json.dumps(found, indent=1))
    switched = found.get("two ranks of NCCL on a GPU", "no GPU")
    print(f"two ranks of NCCL on a GPU: {switched}; MPS started: {found['mps']['started']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
