"""The pool of slower memory: what comes back is what went out, and no more is held than the window."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fivefold.errors import UsageError
from fivefold.parallel.memory.file import FileStore
from fivefold.parallel.memory.saving import LEAST_BYTES, Saving
from fivefold.parallel.memory.spill import Pool, WeightlessStore, flat_of

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]
KEYS = frozenset([*(("value", n, 0) for n in range(9)), *(("within", 0, n) for n in range(9))])


def on_disk(folder: Path) -> Path:
    """A folder that is not in main memory, whatever the machine's temporary folder is."""
    return Path.cwd() if str(folder).startswith("/dev/shm") else folder


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_comes_back(dtype: torch.dtype, tmp_path: Path) -> None:
    pool = Pool(FileStore(on_disk(tmp_path)), 1 << 12)
    made = [torch.randint(0, 2, (n,)).to(dtype) for n in (1, 7, 1000, 70001)]
    before = [bits(one) for one in made]
    items = [pool.put(flat_of(one)) for one in made]
    del made
    pool.settle()
    assert not any(item.is_here for item in items)
    assert [bits(item.get()) for item in reversed(items)] == before[::-1]
    pool.close()


@pytest.mark.parametrize("sector", [1, 512, 4096])
def test_where_a_tensor_begins_does_not_matter(
    sector: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(on_disk(tmp_path))
    if sector > 1:
        monkeypatch.setattr(store, "_sector", sector)
    pool = Pool(store, 1 << 20)
    for size in (1, 63, 511, 512, 513, 4095, 4096, 9000, 70001):
        for first in (0, 1, 64, 448, 512, 2048):
            whole = torch.randint(0, 256, (first + size,), dtype=torch.uint8)
            # A memory that torch did not make, and that begins anywhere.
            own = torch.from_numpy(whole.numpy()[first:])
            before = bits(own)
            item = pool.put(flat_of(own))
            pool.settle()
            own.fill_(0)
            assert bits(item.get()) == before
    pool.close()


def test_what_waits_to_be_written_is_kept(tmp_path: Path) -> None:
    pool, size = Pool(FileStore(on_disk(tmp_path)), 1 << 26), 1 << 20
    wholes = [torch.full((size + 1,), one, dtype=torch.uint8) for one in range(40)]
    # They begin where torch's own never do, so that the store writes copies, which only it knows of.
    items = [pool.put(flat_of(torch.from_numpy(whole.numpy()[1:]))) for whole in wholes]
    others = [torch.full((size,), 99, dtype=torch.uint8) for _ in items]
    pool.settle()
    del others
    assert [item.get().unique().tolist() for item in items] == [[one] for one in range(40)]
    pool.close()


def test_a_nan_and_a_negative_zero_too(tmp_path: Path) -> None:
    pool = Pool(FileStore(on_disk(tmp_path)))
    made = torch.tensor([float("nan"), -0.0, float("inf"), 5e-324])
    item = pool.put(flat_of(made))
    pool.settle()
    assert bits(item.get()) == bits(made)


def test_no_file_is_left_and_room_is_used_again(tmp_path: Path) -> None:
    folder = on_disk(tmp_path)
    names, store = sorted(folder.iterdir()), FileStore(folder, limit_bytes=3 << 20)
    pool = Pool(store, 1 << 20)
    for _ in range(20):
        items = [pool.put(torch.zeros(1 << 20, dtype=torch.uint8)) for _ in range(3)]
        assert sorted(folder.iterdir()) == names
        pool.settle()
        del items
        gc.collect()
    held = [pool.put(torch.zeros(1 << 20, dtype=torch.uint8)) for _ in range(3)]
    with pytest.raises(UsageError, match=r"memory\.host = 3,145,728 bytes is full"):
        held.append(pool.put(torch.zeros(1 << 20, dtype=torch.uint8)))
    pool.close()
    assert not [one for one in threading.enumerate() if one.name.startswith("fivefold-")]


def test_room_that_is_free_again_serves_other_sizes(tmp_path: Path) -> None:
    store = FileStore(on_disk(tmp_path), limit_bytes=6 << 20)
    pool, sizes = Pool(store, 8 << 20), ([1, 2, 3], [3, 3], [6], [1] * 6)
    for some in sizes:
        items = [pool.put(torch.full((size << 20,), size, dtype=torch.uint8)) for size in some]
        pool.settle()
        assert all(int(item.get().max()) == size for item, size in zip(items, some, strict=True))
        del items
        gc.collect()
    pool.close()


def test_a_full_disk_is_told_in_one_line(tmp_path: Path) -> None:
    store = FileStore(on_disk(tmp_path))
    with pytest.raises(UsageError, match=r"^cannot spill [\d,]+ bytes to .*: (No space|File too)"):
        store.take(1 << 60)
    store.close()


def test_a_folder_in_main_memory_is_refused() -> None:
    with pytest.raises(UsageError, match=r"is in main memory \(tmpfs\)"):
        FileStore(Path("/dev/shm"))


def test_what_is_taken_while_it_is_copied_out_is_let_go_with_its_last_user() -> None:
    pool, made = Pool(WeightlessStore(), 1 << 20), torch.zeros(8)
    alive = weakref.ref(made)
    spilled = pool.put(made)
    assert spilled.get() is made
    del made, spilled
    assert alive() is None, "it does not wait for its copy, however slow that is"


def test_no_more_than_the_window_is_held() -> None:
    pool = Pool(WeightlessStore(), 250)
    items = [pool.put(torch.zeros(100, dtype=torch.uint8)) for _ in range(10)]
    assert sum(item.is_here for item in items) == 2
    pool.settle()
    pool.ahead(reversed(items))
    assert [item.is_here for item in items] == [False] * 8 + [True] * 2


@pytest.mark.parametrize("when", ["on its way", "after"])
def test_what_is_changed_on_its_way_out_is_an_error(when: str) -> None:
    pool, made = Pool(WeightlessStore(), 1 << 20), torch.zeros(8)
    item = pool.put(flat_of(made))
    if when == "after":
        pool.settle()
    made.add_(1)
    if when == "after":
        item.get()
        return
    with pytest.raises(RuntimeError, match="changed in place while it was spilled"):
        item.get()
    pool.settle()
    with pytest.raises(RuntimeError, match="changed in place while it was spilled"):
        item.get()


def saved(net: torch.nn.Module, x: Tensor, pool: Pool) -> Tensor:
    saving = Saving(pool, KEYS, [x, *net.parameters()])
    with saving.hooks():
        return net(x)


def test_each_memory_is_spilled_once_and_parameters_never(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
    x, store = torch.randn(300, 256), FileStore(on_disk(tmp_path))
    pool = Pool(store, 1 << 20)
    net(x).sum().backward()
    expected = [p.grad for p in net.parameters()]
    net.zero_grad()
    made = saved(net, x, pool)
    pool.settle()
    # What ReLU returns is saved by it, and by the layer after it.
    assert 300 * 256 * 4 >= store.rates.bytes[0] > 300 * 256 * 4 - 4096 >= LEAST_BYTES
    made.sum().backward()
    for parameter, grad in zip(net.parameters(), expected, strict=True):
        assert grad is not None and parameter.grad is not None
        assert torch.equal(parameter.grad, grad)
    assert store.rates.bytes[1] == store.rates.bytes[0]
    pool.close()


def test_a_graph_may_be_run_through_twice(tmp_path: Path) -> None:
    net, pool = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Tanh()), None
    pool = Pool(FileStore(on_disk(tmp_path)))
    x = torch.randn(200, 200, requires_grad=True)
    made = saved(net, x, pool)
    pool.settle()
    one = torch.autograd.grad(made.sum(), x, retain_graph=True)
    other = torch.autograd.grad(made.sum(), x)
    assert torch.equal(one[0], other[0])
    pool.close()
