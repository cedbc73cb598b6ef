"""Memory of a device that several processes share, and marks in what each has it do."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from fivefold.errors import FivefoldError

__all__ = ["HANDLE_BYTES", "DeviceMemory", "NoDeviceMemory"]

HANDLE_BYTES = 192
"""the most that a handle takes"""


class NoDeviceMemory(FivefoldError):
    """Processes cannot share memory of the device; the message says why."""


class DeviceMemory(ABC):
    """What ranks of one device need to read and write each other's memory there.

    A rank has two marks, which its device passes when it has done what it was told before. They are set
    anew over and over. Whoever waits for a mark has to know that it has been set: waiting for one that has
    not is no error, and no wait.
    """

    kind: str
    """of device, as torch calls it"""
    name: str
    """of this one, on its node"""

    @abstractmethod
    def allocate(self, size_bytes: int) -> tuple[Tensor, bytes]:
        """New memory (size_bytes,) of uint8, and what others open it by.

        It stays until the process ends: others may still read it when this one has no use for it. Raises
        `NoDeviceMemory`.
        """

    @abstractmethod
    def open(self, handle: bytes, size_bytes: int) -> Tensor:
        """The memory that another process has allocated. Raises `NoDeviceMemory`."""

    @abstractmethod
    def again(self, memory: Tensor) -> Tensor:
        """What was allocated, as a tensor of its own: it is seen to go while the memory stays."""

    @abstractmethod
    def marks(self) -> bytes:
        """What others open the marks of this process by."""

    @abstractmethod
    def open_marks(self, handles: list[bytes]) -> None:
        """Know the marks of others, which are then waited for."""

    @abstractmethod
    def mark(self, number: int) -> None:
        """Set mark 0 or 1 behind what the device was told so far. Raises `UsageError` where it cannot be."""

    @abstractmethod
    def wait(self, number: int) -> None:
        """Let what the device is told next come after this mark of all others, which they have set."""
