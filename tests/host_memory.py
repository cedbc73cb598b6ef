"""Memory of the host in the place of a GPU's: what ranks do that share a device runs without one."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from fivefold.arena import Segment
from fivefold.comm.device_memory import DeviceMemory, NoDeviceMemory

__all__ = ["HostMemory"]


class HostMemory(DeviceMemory):
    """What is told is done at once, so marks are passed when they are set.

    `fails`: the step that does not work here.
    """

    kind, name = "cpu", "this host"

    def __init__(self, fails: str = "") -> None:
        self._fails = fails
        self._set, self._segments = [0, 0], list[Segment]()
        if fails == "name":
            self.name = "another"

    def allocate(self, size_bytes: int) -> tuple[Tensor, bytes]:
        self._must("allocate")
        segment = Segment.create("window", size_bytes)
        self._segments.append(segment)
        return self._tensor(segment), f"/proc/{os.getpid()}/fd/{segment.fd}".encode()

    def open(self, handle: bytes, size_bytes: int) -> Tensor:
        self._must("open")
        segment = Segment.attach(os.open(handle, os.O_RDWR))
        assert segment.size_bytes == size_bytes
        self._segments.append(segment)
        return self._tensor(segment)

    def again(self, memory: Tensor) -> Tensor:
        (segment,) = (one for one in self._segments if one.address == memory.data_ptr())
        return self._tensor(segment)

    def marks(self) -> bytes:
        self._must("marks")
        return b"marks"

    def open_marks(self, handles: list[bytes]) -> None:
        self._must("open_marks")
        assert set(handles) <= {b"marks"}

    def mark(self, number: int) -> None:
        self._set[number] += 1
        assert self._set[0] - self._set[1] in (0, 1), "they take turns"

    def wait(self, number: int) -> None:
        assert self._set[number]

    def _must(self, step: str) -> None:
        if step == self._fails:
            raise NoDeviceMemory(f"no {step}")

    @staticmethod
    def _tensor(segment: Segment) -> Tensor:
        return torch.frombuffer(segment.view(0, segment.size_bytes), dtype=torch.uint8)
