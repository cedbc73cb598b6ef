"""The stragglers of TraceML's own demonstrations, and one in backward, as TraceML and a report name them.

    pip install --no-deps traceml-ai==0.5.0 nvidia-ml-py msgspec pyyaml
    python benchmarks/faults/traceml.py

The scripts come with TraceML's wheel; they run as they are, with a smaller net and fewer samples, on two
ranks, once under each. What each says first is printed as a table.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, files, version
from pathlib import Path

_VERSION = "0.5.0"
_SMALL = {
    "NUM_SAMPLES": 2560, "INPUT_DIM": 256, "HIDDEN_DIM": 512, "BATCH_SIZE": 64, "STRAGGLER_RANK": 1,
    "EXTRA_OPTIMIZER_DIM": 512,
}  # fmt: skip
_CASES = ("healthy_baseline", "input_bound", "input_straggler", "compute_straggler")
_UPDATE = "        if self.rank == STRAGGLER_RANK:\n            self._extra_optimizer_compute()\n"
_BEFORE = "    model.train()\n"
_SLEEPS = """\
    if rank == STRAGGLER_RANK:
        import time
        model.module.net[2].register_full_backward_hook(lambda *_: time.sleep(0.1))
"""
_TRACEML = re.compile(r"^\|\s+(?:Verdict|Why): (.*?)\s*\|$", re.MULTILINE)
_LIMIT_S = 120


def main() -> int:
    """Run all, print a table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    try:
        installed = version("traceml-ai")
    except PackageNotFoundError:
        installed = "none"
    if installed != _VERSION:
        print(
            f"error: traceml-ai {_VERSION} is needed, whose scripts these are; installed: {installed}",
            file=sys.stderr,
        )
        return 2
    found = {path.name: path for path in files("traceml-ai") or ()}
    scripts = {case: _smaller(found[f"mlp_ddp_{case}.py"].read_text()) for case in _CASES}
    scripts["backward_straggler"] = _in_backward(scripts["compute_straggler"])
    print("| what is wrong | TraceML | a report |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for case, text in scripts.items():
            script = Path(folder, f"{case}.py")
            script.write_text(text)
            print(
                f"| {case.replace('_', ' ')} | {_traceml(script)} | {_report(script)} |", flush=True
            )
    return 0


def _smaller(text: str) -> str:
    for name, value in _SMALL.items():
        text = re.sub(rf"^{name} = .*", f"{name} = {value}", text, flags=re.MULTILINE)
    return text


def _in_backward(text: str) -> str:
    """The rank sleeps in backward, and not in its update."""
    assert text.count(_UPDATE) == text.count(_BEFORE) == 1
    return text.replace(_UPDATE, "").replace(_BEFORE, _SLEEPS + _BEFORE)


def _traceml(script: Path) -> str:
    words = ["run", "--nproc-per-node", "2", "--logs-dir", f"{script}.traceml", str(script)]
    return " ".join(_TRACEML.findall(_printed(["traceml_ai.launcher.cli", *words], script)))


def _report(script: Path) -> str:
    logs = f"{script}.logs"
    _printed(["fivefold", "run", "-n", "2", "--trace", "--log-dir", logs, str(script)], script)
    return _printed(["fivefold", "report", logs], script).splitlines()[1]


def _printed(words: list[str], script: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=script.parent, env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=_LIMIT_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
