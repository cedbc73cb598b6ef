"""A shared file system of a given speed that counts: throttle.c, built and described to its programs."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

from contender import BenchmarkError

__all__ = ["Throttle"]

_STATE = struct.Struct("=QQQQ")
_SOURCE = Path(__file__).resolve().parent / "throttle.c"


class Throttle:
    """What passes to and from `folder` passes at `bytes_per_s`, all processes together."""

    def __init__(self, build: Path, bytes_per_s: float) -> None:
        self._library = build / "throttle.so"
        self._state = build / "throttle.state"
        self.reset()
        self._bytes_per_s = bytes_per_s
        command = ["cc", "-O2", "-shared", "-fPIC", "-o", str(self._library), str(_SOURCE), "-ldl"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise BenchmarkError("no C compiler `cc`: install one to build throttle.c") from None
        if done.returncode:
            raise BenchmarkError(f"throttle.c was not built:\n{done.stderr}")

    def reset(self) -> None:
        """Count from 0."""
        self._state.write_bytes(bytes(_STATE.size))

    def variables(self, folder: Path) -> Mapping[str, str]:
        """For the environment of a program."""
        return {
            "LD_PRELOAD": str(self._library),
            "THROTTLE_FOLDER": str(folder),
            "THROTTLE_STATE": str(self._state),
            "THROTTLE_BYTES_PER_S": str(self._bytes_per_s),
        }

    @property
    def passed(self) -> tuple[int, int]:
        """Bytes written and read so far."""
        _, written, read, _ = _STATE.unpack(self._state.read_bytes())
        return written, read

    @property
    def operations(self) -> int:
        """How often a path below the folder was opened, listed, looked up or read as a link so far."""
        return int(_STATE.unpack(self._state.read_bytes())[3])
