"""What the kernel says of processes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from fivefold.cluster.processes import ProcessStat, process_stat


def test_a_process_and_its_child() -> None:
    with subprocess.Popen(["sleep", "60"], process_group=0) as child:
        found, mine = process_stat(child.pid), process_stat(os.getpid())
        assert found and mine
        assert (found.parent, found.group, found.ended) == (os.getpid(), child.pid, False)
        assert int(found.began) >= int(mine.began)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        dead = process_stat(child.pid)
        assert dead and dead.ended and dead.began == found.began
    assert process_stat(child.pid) is None


def test_names_may_hold_anything(tmp_path: Path) -> None:
    stat = tmp_path / "proc/7/stat"
    stat.parent.mkdir(parents=True)
    stat.write_text("7 (a) R (b) S 3 5 5 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 123 0 0\n")
    assert process_stat(7, tmp_path) == ProcessStat("S", 3, 5, "123")
    stat.write_text("7 (cut")
    assert process_stat(7, tmp_path) is None
