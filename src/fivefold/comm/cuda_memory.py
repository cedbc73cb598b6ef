"""Memory of an NVIDIA GPU that processes share by CUDA's inter-process handles.

It comes from cudaMalloc, not from torch's allocator: handles of expandable segments cannot be opened in many
containers, and a handle of a cached block would show others whatever else lies in it.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fivefold.comm.device_memory import DeviceMemory, NoDeviceMemory
from fivefold.errors import UsageError

__all__ = ["CudaMemory", "uuid_of"]

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t."""

    _fields_ = [("reserved", ctypes.c_char * _HANDLE_BYTES)]


class CudaMemory(DeviceMemory):
    """Of one GPU. Marks are events on the stream that is current."""

    kind = "cuda"

    def __init__(self, device: torch.device) -> None:
        self.name = uuid_of(device)
        self._device = device
        self._own = list[torch.cuda.Event]()
        self._others = list[list[Any]]()
        self._stream: torch.cuda.Stream | None = None

    def allocate(self, size_bytes: int) -> tuple[Tensor, bytes]:
        """See `DeviceMemory.allocate`."""
        address, handle = ctypes.c_void_p(), _Handle()
        with torch.cuda.device(self._device):
            self._call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(size_bytes))
            self._call("cudaIpcGetMemHandle", ctypes.byref(handle), address)
        assert address.value is not None
        return self._tensor(address.value, size_bytes), bytes(handle)

    def open(self, handle: bytes, size_bytes: int) -> Tensor:
        """See `DeviceMemory.open`."""
        address = ctypes.c_void_p()
        told = _Handle.from_buffer_copy(handle[:_HANDLE_BYTES])
        with torch.cuda.device(self._device):
            flags = ctypes.c_uint(_LAZY_PEER_ACCESS)
            self._call("cudaIpcOpenMemHandle", ctypes.byref(address), told, flags)
        assert address.value is not None
        return self._tensor(address.value, size_bytes)

    def again(self, memory: Tensor) -> Tensor:
        """See `DeviceMemory.again`."""
        return self._tensor(memory.data_ptr(), memory.nbytes)

    def marks(self) -> bytes:
        """See `DeviceMemory.marks`."""
        try:
            with torch.cuda.device(self._device):
                self._own = [torch.cuda.Event(interprocess=True) for _ in range(2)]
                return b"".join(bytes(event.ipc_handle()) for event in self._own)
        except RuntimeError as problem:
            raise NoDeviceMemory(f"CUDA shares no events: {problem}") from problem

    def open_marks(self, handles: list[bytes]) -> None:
        """See `DeviceMemory.open_marks`."""
        size = _HANDLE_BYTES
        try:
            self._others = [
                [
                    torch.cuda.Event.from_ipc_handle(self._device, told[n * size : (n + 1) * size])
                    for n in range(2)
                ]
                for told in handles
            ]
        except RuntimeError as problem:
            raise NoDeviceMemory(f"CUDA opens no events of others: {problem}") from problem

    def mark(self, number: int) -> None:
        """See `DeviceMemory.mark`."""
        if torch.cuda.is_current_stream_capturing():
            raise UsageError(
                "ranks that share a GPU meet on the host in each collective, which a CUDA graph cannot "
                "record: leave collectives out of what is captured"
            )
        stream = torch.cuda.current_stream(self._device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)  # it may still read what others write next
        self._stream = stream
        self._own[number].record(stream)

    def wait(self, number: int) -> None:
        """See `DeviceMemory.wait`."""
        stream = torch.cuda.current_stream(self._device)
        for events in self._others:
            stream.wait_event(events[number])

    def _call(self, name: str, *given: Any) -> None:
        runtime = _runtime()
        status = getattr(runtime, name)(*given)
        if status:
            runtime.cudaGetLastError()  # or torch would take it for its own
            runtime.cudaGetErrorString.restype = ctypes.c_char_p
            told = runtime.cudaGetErrorString(status)
            raise NoDeviceMemory(f"{name} failed: {(told or b'unknown').decode()}")

    def _tensor(self, address: int, size_bytes: int) -> Tensor:
        try:
            return torch.as_tensor(_Array(address, size_bytes), device=self._device)
        except RuntimeError as problem:
            raise NoDeviceMemory(f"torch takes no memory of others: {problem}") from problem


def uuid_of(gpu: torch.device) -> str:
    """By which its processes tell GPUs apart, however each of them counts."""
    return str(torch.cuda.get_device_properties(gpu).uuid)  # pyright: ignore[reportUnknownMemberType]


class _Array:
    """Memory as other libraries describe it to torch, which does not own it."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


@functools.cache
def _runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded: another copy would have contexts of its own."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if "/libcudart" in path:
            return ctypes.CDLL(path)
    raise NoDeviceMemory("this torch has no CUDA runtime of its own that can be called")
