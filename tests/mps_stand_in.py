"""Programs that behave as NVIDIA documents nvidia-cuda-mps-control, for machines without it and without GPUs.

With -f it stays in the foreground and starts a server that lives on, in a session of its own. Without, it
passes on the commands at its standard input, and ends with 0 if a daemon at CUDA_MPS_PIPE_DIRECTORY took
them. A real daemon starts its server when a client comes, and does much else.
"""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["install"]

_CONTROL = """#!{python} -IS
import os, signal, socket, subprocess, sys, time
from pathlib import Path
trouble, here = {trouble!r}, Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
line = socket.socket(socket.AF_UNIX)
if sys.argv[1:] != ["-f"]:
    try:
        line.connect(str(here / "control"))
    except OSError:
        print("Cannot find MPS control daemon process")
        sys.exit(1)
    line.sendall(sys.stdin.buffer.read())
    line.shutdown(socket.SHUT_WR)
    while said := line.recv(4096):
        sys.stdout.buffer.write(said)
    sys.exit(0)
if trouble == "fails":
    print("An instance of this daemon is already running")
    sys.exit(1)
if trouble == "silent":
    time.sleep(300)
path = Path(os.environ["CUDA_MPS_LOG_DIRECTORY"]) / "control.log"
path.write_text("CUDA_VISIBLE_DEVICES=" + os.environ["CUDA_VISIBLE_DEVICES"])
server = subprocess.Popen([str(Path(sys.argv[0]).parent / "nvidia-cuda-mps-server")], start_new_session=True)
line.bind(str(here / "control"))
line.listen()
while True:
    caller = line.accept()[0]
    command = b""
    while piece := caller.recv(4096):
        command += piece
    if command == b"get_server_list\\n":
        caller.sendall(b"%d\\n" % server.pid)
    if command == b"quit\\n" and trouble != "stays":
        server.kill()
        server.wait()
        sys.exit(0)
    caller.close()
"""
_SERVER = """#!{python} -IS
import time
time.sleep(300)
"""


def install(folder: Path, trouble: str = "") -> Path:
    """Put both programs into a folder; `trouble`: "fails", "silent", or "stays" in spite of quit."""
    for name, text in (("control", _CONTROL), ("server", _SERVER)):
        path = folder / f"nvidia-cuda-mps-{name}"
        path.write_text(text.format(python=sys.executable, trouble=trouble))
        path.chmod(0o700)
    return folder
