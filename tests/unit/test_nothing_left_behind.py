"""The fixture that fails leaking tests catches every kind of leak, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"

LEAKS = {
    "threads": "threading.Thread(target=time.sleep, args=(2,), name='forgotten').start()",
    "child processes": "KEEP.append(subprocess.Popen(['sleep', '2']))",
    "open temporary files": "KEEP.append(open(tmp_path / 'forgotten', 'w'))",
    "environment variables": "os.environ['FIVEFOLD_FORGOTTEN'] = '1'",
}

TIDY = """
    thread = threading.Thread(target=time.sleep, args=(0.1,))
    thread.start()
    subprocess.Popen(['sleep', '0.1']).wait()
    (tmp_path / 'kept').write_text('closed')
    monkeypatch.setenv('FIVEFOLD_FORGOTTEN', '1')
"""

HEAD = """
import os, subprocess, threading, time
KEEP = []
def test_body(tmp_path, monkeypatch):
"""


def outcomes(pytester: pytest.Pytester, body: str) -> tuple[dict[str, int], str]:
    pytester.makeconftest(CONFTEST.read_text().replace("GRACE_S = 2.0", "GRACE_S = 0.3"))
    pytester.makepyfile(HEAD + "    " + body.strip())
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    return result.parseoutcomes(), result.stdout.str()


@pytest.mark.long
@pytest.mark.parametrize("kind", LEAKS)
def test_a_leak_fails_the_test_and_is_named(pytester: pytest.Pytester, kind: str) -> None:
    found, told = outcomes(pytester, LEAKS[kind])
    assert found == {"passed": 1, "errors": 1}
    assert f"left behind by this test: {kind}: " in told


def test_what_a_module_holds_is_its_own_even_while_it_starts(pytester: pytest.Pytester) -> None:
    body = """
import os
import pytest

READ, WRITE = os.pipe()

@pytest.fixture(scope="module", autouse=True)
def held():
    # Its command line becomes another during the test, as that of any new process does.
    pid = os.fork()
    if pid == 0:
        os.read(READ, 1)
        os.execvp("sleep", ["sleep", "60"])
    yield
    os.kill(pid, 9)
    os.waitpid(pid, 0)

def test_body():
    os.write(WRITE, b"!")
"""
    pytester.makeconftest(CONFTEST.read_text().replace("GRACE_S = 2.0", "GRACE_S = 0.3"))
    pytester.makepyfile(body)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    assert result.parseoutcomes() == {"passed": 1}, result.stdout.str()


def test_a_tidy_test_passes(pytester: pytest.Pytester) -> None:
    found, told = outcomes(pytester, TIDY)
    assert found == {"passed": 1}, told
