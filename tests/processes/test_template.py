"""What a template forks is, for whoever starts it, what Python would have been."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from commands import python

SCRIPT = """
import atexit, os, sys, tempfile, threading
import torch
IMPORTED = ("TORCHINDUCTOR_CACHE_DIR",)  # set where the compiler is imported, as it has been
print(sys.argv[1:], __name__, __file__, sys.path[0], tempfile.gettempdir())
print(sorted({*os.environ} - {*IMPORTED}), torch.get_num_threads(), "tyro" in sys.modules)
print(len(os.listdir("/proc/self/fd")), sys.stdin.read())
threading.Thread(target=print, args=("from a thread",)).start()
atexit.register(print, "at its end")
kept = open("kept", "w")
kept.write("written, if late")
"""

CASES = {
    "script": ["script.py", "a", "b"],
    "module": ["-m", "json.tool", "numbers.json"],
    "no module": ["-m", "nowhere"],
    "code": ["-c", "import sys; print(sys.argv, repr(sys.path[0])); sys.exit(300)", "a"],
    "words": ["-c", "raise SystemExit('these words')"],
    "error": ["-c", "import sys; print('out'); 1 / 0"],
    "flags": ["-W", "ignore", "-c", "import warnings; warnings.warn('unseen'); print(1)"],
    "hook": ["-c", "import sys; sys.excepthook = lambda *_: sys.exit(5); 1 / 0"],
    "signal": ["-c", "import os; os.kill(os.getpid(), 9)"],
    "interrupt": ["-c", "raise KeyboardInterrupt"],
    "signals": ["-c", "import signal; print([signal.getsignal(n) for n in (2, 10, 13, 15)])"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "numbers.json").write_text("[1, 2]")
    return tmp_path


def ran(program: str, words: list[str], folder: Path) -> tuple[int, str, str]:
    done = subprocess.run(
        [program, *words], cwd=folder, input="given", capture_output=True, text=True, check=False,
        timeout=60, env=os.environ | {"TMPDIR": str(folder), "OMP_NUM_THREADS": "2"},
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.long(every=8)
@pytest.mark.parametrize("words", CASES.values(), ids=CASES)
def test_it_does_what_python_does(words: list[str], folder: Path) -> None:
    expected = ran(sys.executable, words, folder)
    (folder / "kept").unlink(missing_ok=True)
    assert ran(python(), words, folder) == expected
    assert words[0] != "script.py" or (folder / "kept").read_text() == "written, if late"


PARENT = """
import os, subprocess, sys, tempfile
with tempfile.TemporaryDirectory(dir=".") as folder:
    code = "import os, sys; print(os.getppid(), *(n in sys.modules for n in ('become', 'torch')))"
    code += "; import torch; print(os.environ['A'])"
    environment = os.environ | {"A": "B"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == f"{os.getpid()} True False\\nB\\n", done
    command = [sys.executable, "-c", "1 / 0"]
    failing = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
    assert os.getpgid(failing.pid) == failing.pid
    assert b"ZeroDivisionError" in failing.communicate()[1] and failing.returncode == 1
    assert os.path.isdir(folder), "a child takes nothing along"
"""


def test_what_it_starts_is_its_own_child(folder: Path) -> None:
    (folder / "parent.py").write_text(PARENT)
    assert ran(python(), ["parent.py"], folder) == (0, "", "")


def test_signals_reach_it_and_it_ends_with_who_stands_in_for_it(folder: Path) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    for signum in (signal.SIGTERM, signal.SIGKILL):
        with subprocess.Popen([python(), "-c", code], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            ended = os.pidfd_open(int(process.stdout.readline()))
            process.send_signal(signum)
            assert process.wait(30) == -signum
        assert select.select([ended], [], [], 30)[0], "it went on"
        os.close(ended)


@pytest.mark.parametrize("name", ["KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR", "OMP_WAIT_POLICY"])
def test_a_new_interpreter_comes_only_for_variables_that_matter_to_one(name: str) -> None:
    """Libraries set some in every process that imports them, such as one that runs tests."""
    done = subprocess.run(
        [python(), "-c", "import sys; print('become' in sys.modules)"],
        env=os.environ | {name: "1"}, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == f"{name != 'OMP_WAIT_POLICY'}\n"
