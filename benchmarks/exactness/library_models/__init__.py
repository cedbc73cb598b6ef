"""Small models of other people's libraries. What torchvision lacks is declared before anything imports it."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "tests"))

from real_torchvision import declare_missing

__all__: list[str] = []

declare_missing()
