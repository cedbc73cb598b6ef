"""What was measured before on such a machine for such a net, so that asking again costs nothing."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any

__all__ = ["Kept"]


class Kept:
    """A result by what it depends on: plain data, in the user's folder of caches."""

    def __init__(self, **depends: Any) -> None:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        told = json.dumps(depends, sort_keys=True)
        self.path = home / "fivefold" / "tune" / f"{hashlib.sha256(told.encode()).hexdigest()}.json"
        self._depends = json.loads(told)

    def read(self) -> Any:
        """The result; None if there is none that can be read."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads(self.path.read_text())
            if found["depends"] == self._depends:
                return found["result"]
        return None

    def write(self, result: Any) -> None:
        """Keep a result, if the folder can be written to."""
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new = self.path.with_suffix(f".{os.getpid()}")
            new.write_text(json.dumps({"depends": self._depends, "result": result}, indent=1))
            new.replace(self.path)
