"""What there is for ranks that share a GPU: the device, NCCL, MPS, and memory that two processes see."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist


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


def said(*words: str) -> str:
    """What a command prints, or why it does not."""
    if shutil.which(words[0]) is None:
        return f"no {words[0]}"
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    return (done.stdout or done.stderr).strip()


def main() -> int:
    """Print it as JSON."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "mps": {
            name: shutil.which(name) or ""
            for name in ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server")
        },
    }
    if found["gpus"]:
        query = "name,uuid,driver_version,compute_mode,mig.mode.current,memory.total,clocks.sm"
        found["devices"] = said("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")
        found["cuda"] = torch.version.cuda
        found["nccl"] = (
            ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else ""
        )
        found["shared memory"] = shared()
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
