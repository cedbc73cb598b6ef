"""On a GPU: buffers are pinned, and are not free while a copy to the GPU still reads them."""

from __future__ import annotations

import pytest
import torch

from fivefold.helpers.receive_buffers import BufferPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.cuda.is_available() is False"),
]

BYTES = 64 << 20


def test_a_tray_is_pinned_and_free_only_when_the_copy_from_it_is_done() -> None:
    with BufferPool(BYTES, 1, pin=True) as pool:
        buffer = pool.take()
        assert buffer is not None
        buffer.memory[:] = b"a" * BYTES
        tensor = torch.frombuffer(buffer.memory, dtype=torch.uint8)
        assert tensor.is_pinned()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1 << 30)  # about half a second of the GPU
            there = tensor.to("cuda", non_blocking=True)
            del tensor, buffer
        assert pool.take() is None
        stream.synchronize()
        buffer = pool.take()
        assert buffer is not None
        buffer.memory[:] = b"b" * BYTES
        assert int(there.min()) == int(there.max()) == ord("a")
