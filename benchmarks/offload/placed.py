"""Runs a script on one core, and in a control group if one is named.

placed.py CORE [--group DIR] [--python PATH] script.py words...
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from places import enter

if __name__ == "__main__":
    core, *words = sys.argv[1:]
    told = {"--group": "", "--python": sys.executable}
    while words[0] in told:
        told[words[0]], words = words[1], words[2:]
    enter(int(core), Path(told["--group"]) if told["--group"] else None)
    os.execv(told["--python"], [told["--python"], *words])
