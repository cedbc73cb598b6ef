"""A rank of the start-up benchmark: it starts, tells when it has, and ends.

python started.py ours|torch FOLDER
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

way, folder = sys.argv[1], Path(sys.argv[2])
if way == "ours":
    import fivefold as ff

    ff.start()
else:
    import torch.distributed as dist

    # What mpirun tells, for who asks torch's env://.
    for ours, theirs in (("RANK", "RANK"), ("WORLD_SIZE", "SIZE")):
        if ours not in os.environ:
            os.environ[ours] = os.environ[f"OMPI_COMM_WORLD_{theirs}"]
    dist.init_process_group("gloo")
now = time.time()
told = folder / f"{os.environ['RANK']}.tmp"
told.write_text(str(now))
told.rename(told.with_suffix(".started"))
# Rank 0 holds the store in which others may still be meeting.
while len([*folder.glob("*.started")]) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.02)
