"""What every Python that a test starts runs first, so that hundreds of short runs take less.

The garbage collector looks less often: the objects that `import torch` makes stay, and looking through them
time and again while they are made takes a sixth of a short run.
"""

from __future__ import annotations

import gc

__all__: list[str] = []

gc.set_threshold(50_000)
