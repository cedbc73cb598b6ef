"""What every Python that a test starts runs first: it looks for garbage less often.

The objects that `import torch` makes stay. Looking through them time and again while they are made takes a
sixth of what a short run takes, and there are hundreds of those.
"""

from __future__ import annotations

import gc

__all__: list[str] = []

gc.set_threshold(50_000)
