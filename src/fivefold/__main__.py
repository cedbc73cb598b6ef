"""`python -m fivefold` is the `fivefold` command."""

from __future__ import annotations

import sys

from fivefold.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
