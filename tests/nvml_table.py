"""A stand-in for pynvml that answers from a table, `nvml_mig.json`.

The table was written by NVML's documentation and by the signatures of nvidia-ml-py 13. It is not recorded:
there was no GPU to record. A call that the table has no answer to raises NVMLError, as NVML does for what it
does not support, or what there is none of.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

__all__ = ["TABLE", "NvmlTable"]

TABLE = Path(__file__).parent / "nvml_mig.json"
# What is no plain number or text in the library.
_STRUCTS: Mapping[str, Callable[[Any], object]] = {
    "nvmlDeviceGetPciInfo": lambda told: SimpleNamespace(busId=told),
    "nvmlDeviceGetMemoryInfo": lambda told: SimpleNamespace(total=told),
    "nvmlDeviceGetComputeRunningProcesses": lambda told: [SimpleNamespace(pid=p) for p in told],
}


class NvmlTable(ModuleType):
    """Handles are keys of the table's `devices`."""

    NVML_DEVICE_MIG_ENABLE = 1

    class NVMLError(Exception):
        """What the library raises."""

    def __init__(self, told: Mapping[str, Any] | None = None) -> None:
        super().__init__("pynvml")
        self._told = told or json.loads(TABLE.read_text())
        self.open = 0

    def nvmlInit(self) -> None:  # noqa: N802
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self._told["gpus"])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return self._told["gpus"][index]

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:  # noqa: N802
        found = self._told["devices"][handle].get("slices", {}).get(str(index))
        if found is None:
            raise self.NVMLError("Not Found")
        return found

    def __getattr__(self, name: str) -> Callable[[str], object]:
        if not name.startswith("nvmlDeviceGet"):
            raise AttributeError(name)

        def answer(handle: str) -> object:
            told = self._told["devices"][handle]
            if name not in told:
                raise self.NVMLError("Not Supported")
            return _STRUCTS.get(name, lambda value: value)(told[name])

        return answer
