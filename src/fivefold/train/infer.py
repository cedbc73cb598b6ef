"""Inference on images of any size, window by window.

    read a window and its surroundings ──► compute it ──► write it into a zarr array, and mark it as done
    (the next one meanwhile)                              (while the next one is computed)

What is written is what the net returns for the whole image. A run that was killed goes on where it was.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import itertools
import json
import shutil
import types
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fivefold import comm
from fivefold.data.rasters import imported_zarr
from fivefold.data.windows import Box, Windowed, windows_of
from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.parallel import ParallelModel
from fivefold.parallel.graph.fingerprint import in_words
from fivefold.parallel.modes import evaluating
from fivefold.parallel.program.alone import AloneNet, AloneWindow
from fivefold.plan import AXES
from fivefold.torch_private import is_dtensor
from fivefold.trace import Tag
from fivefold.train.shown import progress

__all__ = ["infer"]

_T = TypeVar("_T")
_Then = Callable[[Any], Any] | None
_Ranges = tuple[tuple[int, int], ...]
"""of pixels"""
_ABOUT = "fivefold.json"
_MARKS = ".done"
_LOCK = ".lock"
_KEPT = 256
"""windows of an image up to which their plans are kept for the next one of its size"""


def infer(
    model: ParallelModel,
    dataset: Any,
    to: str | Path,
    *,
    tile: int = 1024,
    then: Callable[[Any], Any] | None = None,
) -> None:
    """Write what a net returns for each image of a data set, which need not fit in memory. Collective.

    Images are computed in windows, each from its surroundings alone, which are read with it; ranks of the
    mesh take windows in turn. The result is that of whole images in evaluation mode.

    Args:
        model: what `parallelize` returned, under any layout whose ranks hold the whole net.
        dataset: images of which windows can be read: `TiffImages`, `ZarrImages`, or a class of your own that
            is `fivefold.data.windows.Windowed`. Of a sample the image is taken: channels, then pixels.
        to: folder of a zarr group to write: for each image an array "0", "1" ..., channels first, or a
            group of such arrays where the net returns several tensors. What an interrupted run of the same
            weights, sizes, windows and code of `then` has left is gone on with.
        tile: pixels of an edge of a window; the last one's are up to half as many more. Best a multiple of
            what the net strides over, since chunks are as large as the first window's outputs, and those that
            windows share are written one by one.
        then: what is written instead, given what the net returns for a window of one sample. It may
            change channels and dtype, such as `lambda y: y.argmax(1).byte()`, and sees one pixel at a time.

    Raises:
        UsageError: the net looks at whole images (norms or attention over them), draws random numbers or
            leaves something behind; the data set has no windows; or `to` holds something else.
        DataError: zarr is not installed (extra images).
    """
    mesh, net = model.mesh, model.module
    windows = windows_of(dataset)
    if windows is None:
        raise UsageError(
            f"infer reads windows of images, which {type(dataset).__name__} does not offer: use TiffImages "
            "or ZarrImages, or give it the methods sizes and window (fivefold.data.windows.Windowed)"
        )
    if tile < 1:
        raise UsageError(f"tile={tile}: windows have at least one pixel along each edge")
    if any(p.is_meta or is_dtensor(p) for p in net.parameters()):
        raise UsageError(
            "ranks divide the parameters of the net among them (a pipe axis, or memory.shard), and each has "
            "to compute whole windows: use a layout without"
        )
    with evaluating(model), torch.no_grad():
        store = _Store(Path(to), mesh, _job(net, windows, tile, then))
        plan: _Plan | None = None
        for index in range(0 if store.complete else len(windows)):
            size = _size_of(windows, index)
            pixel = _read(windows, index, size, [(0, 1)] * len(size)).to(mesh.device)
            if plan is None or not plan.suits(pixel, size):
                plan = _Plan(net, pixel, size, tile, then)
            _infer_one(plan, windows, index, store)
    store.finish()


@dataclass(frozen=True)
class _Array:
    """What is written of an image, or a part of it."""

    name: str
    shape: tuple[int, ...]
    """of all of it: what stands before pixels, and pixels"""
    chunk: tuple[int, ...]
    dtype: torch.dtype
    output: int
    """which of the net's outputs has these pixels"""
    shared: bool
    """whether windows share chunks, which one rank at a time may write then"""


_Part = tuple[_Array, _Ranges, Tensor]
"""what is written of an array, and where"""


class _Plan:
    """For images of one size, of which one pixel is given. Raises `UsageError` where windows do not do."""

    def __init__(
        self, net: nn.Module, pixel: Tensor, size: tuple[int, ...], tile: int, then: _Then
    ) -> None:
        self.size, self._then, self._like = size, then, (pixel.shape, pixel.dtype)
        self._alone = AloneNet(net, pixel, size)
        self._edges = [_divided(n, tile) for n in size]
        self.places = [*itertools.product(*map(range, map(len, self._edges)))]
        """of the windows: which along each dim"""
        self._windows: dict[tuple[int, ...], AloneWindow] = {}
        self._bounds = self._bounds_of_outputs()
        self.arrays = self._arrays()

    def suits(self, pixel: Tensor, size: tuple[int, ...]) -> bool:
        """Whether an image is like those."""
        return size == self.size and (pixel.shape, pixel.dtype) == self._like

    def _bounds_of_outputs(self) -> list[list[tuple[int, ...]]]:
        """By tensor that the net returns, and by dim: where its windows begin, and the last one ends."""
        found: list[list[tuple[int, ...]]] = [[] for _ in self._alone.returned]
        for dim, edges in enumerate(self._edges):
            others = [range(n) for n in self.size]
            boxes = [
                self._alone.window([*others[:dim], edge, *others[dim + 1 :]]).outputs()
                for edge in edges
            ]
            for number, every in enumerate(zip(*boxes, strict=True)):
                shape = every[0][0]
                if len(shape) < 1 + len(self.size) or shape[0] != 1:
                    raise UsageError(
                        f"the net returns a tensor {shape} for an image, which has no pixels: infer writes "
                        "images; for others, evaluate the model on whole ones"
                    )
                at = len(shape) - len(self.size) + dim
                ranges = [box[at] for _, box in every]
                bounds = (*(a for a, _ in ranges), shape[at])
                if [*itertools.pairwise(bounds)] != ranges or bounds[0]:
                    raise UsageError(
                        f"windows of {len(edges[0])} pixels do not fill the output: larger ones"
                    )
                found[number].append(bounds)
        return found

    def _arrays(self) -> list[_Array]:
        """What is to be written."""
        shapes = [self._alone.tape.shapes[ref.index] for ref in self._alone.returned]
        dims = len(self.size)
        # Images of a size each, by which `then` is seen to use the one or the other.
        edges = [1 + self._bounds.index(bounds) for bounds in self._bounds]
        blank = self._alone.blank(
            [(*shape[:-dims], *(edge,) * dims) for shape, edge in zip(shapes, edges, strict=True)]
        )
        made: list[_Array] = []
        for name, leaf in _named(blank if self._then is None else self._then(blank)):
            number = leaf.shape[-1] - 1 if leaf.dim() > dims else -1
            if number not in range(len(shapes)) or leaf.shape[-dims:] != (number + 1,) * dims:
                raise UsageError(
                    f"then returned {tuple(leaf.shape)} for images of {edges[0]} pixels: it has to treat "
                    "pixel by pixel, and may change channels and dtype"
                )
            bounds, lead = self._bounds[number], tuple(leaf.shape[1:-dims])
            chunk = tuple(max(every[1], 1) for every in bounds)
            shared = any(a % n for n, every in zip(chunk, bounds, strict=True) for a in every[:-1])
            whole = tuple(every[-1] for every in bounds)
            made.append(_Array(name, (*lead, *whole), (*lead, *chunk), leaf.dtype, number, shared))
        return made

    def window(self, place: tuple[int, ...]) -> AloneWindow:
        """What is to be done at a place."""
        found = self._windows.get(place)
        if found is None:
            found = self._alone.window([e[n] for e, n in zip(self._edges, place, strict=True)])
            if len(self.places) <= _KEPT:
                self._windows[place] = found
            for bounds, (_, box) in zip(self._bounds, found.outputs(), strict=True):
                due = [(b[n], b[n + 1]) for b, n in zip(bounds, place, strict=True)]
                assert [*box[-len(due) :]] == due, "as those of whole rows and columns of windows"
        return found

    def compute(self, place: tuple[int, ...], image: Tensor) -> list[_Part]:
        """What is to be written at a place, given what is read of the image."""
        found, made = self.window(place).compute(image), list[_Part]()
        written = _named(found if self._then is None else self._then(found))
        for array, (name, leaf) in zip(self.arrays, written, strict=True):
            bounds = self._bounds[array.output]
            ranges = tuple((b[n], b[n + 1]) for b, n in zip(bounds, place, strict=True))
            due = (1, *array.shape[: -len(self.size)], *(b - a for a, b in ranges))
            if name != array.name or tuple(leaf.shape) != due or leaf.dtype != array.dtype:
                raise UsageError(
                    f"then returned {name or 'a tensor'} {tuple(leaf.shape)} {leaf.dtype} for a window where "
                    f"{due} {array.dtype} was due: it has to treat pixel by pixel, and each alike"
                )
            made.append((array, ranges, leaf[0].cpu()))
        return made


def _infer_one(plan: _Plan, windows: Windowed, index: int, store: _Store) -> None:
    """Compute what is missing of an image, and write it. Collective."""
    mesh, size = store.mesh, plan.size
    store.begin(index, plan.arrays)
    mine = [
        (number, plan.places[number])
        for number in range(mesh.rank, len(plan.places), mesh.size)
        if not store.has(index, number)
    ]
    with (
        ThreadPoolExecutor(1, "fivefold-read") as reader,
        ThreadPoolExecutor(1, "fivefold-write") as writer,
    ):
        writing: Future[None] | None = None
        jobs = (
            (number, place, reader.submit(_read, windows, index, size, reads))
            for number, place in mine
            for reads in [plan.window(place).reads[-len(size) :]]
        )
        for number, place, image in progress(_one_ahead(jobs), mesh, total=len(mine)):
            parts = plan.compute(place, image.result().to(mesh.device))
            if writing is not None:
                writing.result()
            writing = writer.submit(store.write, index, number, parts)
        if writing is not None:
            writing.result()


def _read(
    windows: Windowed, index: int, size: tuple[int, ...], ranges: Sequence[tuple[int, int]]
) -> Tensor:
    """A window of an image, one sample."""
    box = Box(size, tuple(range(*one) for one in ranges))
    sizes = windows.sizes(index)
    if isinstance(sizes[0], int):
        image = windows.window(index, box)
    else:
        image = windows.window(index, (box, *(None for _ in sizes[1:])))[0]
    return torch.as_tensor(image)[None]


class _Store:
    """A zarr group, and which windows of it have been written. Creating it is collective.

    A window is marked by a file of its own, made after it: a kill may leave chunks half written.
    """

    def __init__(self, folder: Path, mesh: Mesh, job: str) -> None:
        self._zarr, self.mesh = imported_zarr("to write outputs"), mesh
        self._folder, self._everyone = folder, mesh.group(*AXES)
        about = self._told()
        if about is None and folder.exists() and (folder.is_file() or any(folder.iterdir())):
            raise UsageError(f"{folder} is there already: name another folder, or remove it")
        if about is not None and about["job"] != job:
            raise UsageError(
                f"{folder} holds outputs of other weights, images or windows: name another folder, or "
                "remove it"
            )
        self.complete = about is not None and bool(about["complete"])
        self._meet()  # all have looked
        if mesh.rank == 0 and not self.complete:
            folder.mkdir(parents=True, exist_ok=True)
            self._tell(job, complete=False)
            (folder / _MARKS).mkdir(exist_ok=True)
            self._zarr.open_group(folder, mode="a")
        self._job = job
        self._meet()

    def _told(self) -> dict[str, Any] | None:
        try:
            return json.loads((self._folder / _ABOUT).read_text())
        except (OSError, ValueError):
            return None

    def _tell(self, job: str, *, complete: bool) -> None:
        new = self._folder / f"{_ABOUT}.new"
        new.write_text(json.dumps({"job": job, "complete": complete}))
        new.replace(self._folder / _ABOUT)

    def _meet(self) -> None:
        comm.all_reduce(torch.zeros(1, device=self.mesh.device), self._everyone, Tag.CONTROL)

    def begin(self, index: int, arrays: Iterable[_Array]) -> None:
        """Make the arrays of an image, unless they are there. Collective."""
        group = self._zarr.open_group(self._folder, mode="r+")
        for array in arrays if self.mesh.rank == 0 else ():
            if _path(index, array) not in group:
                like = _numpy_dtype(array.dtype)
                group.create_array(
                    _path(index, array), shape=array.shape, chunks=array.chunk, dtype=like
                )
        self._meet()

    def has(self, index: int, number: int) -> bool:
        """Whether a window has been written."""
        return (self._folder / _MARKS / f"{index}-{number}").exists()

    def write(self, index: int, number: int, parts: Sequence[_Part]) -> None:
        """Write a window, and mark it."""
        group = self._zarr.open_group(self._folder, mode="r+")
        for array, ranges, values in parts:
            where = (..., *(slice(a, b) for a, b in ranges))
            with self._alone() if array.shared else nullcontext():
                group[_path(index, array)][where] = values.numpy()
        (self._folder / _MARKS / f"{index}-{number}").touch()

    @contextmanager
    def _alone(self) -> Generator[None]:
        """Within the block no other rank is."""
        with (self._folder / _LOCK).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # let go as the file is closed
            yield

    def finish(self) -> None:
        """All has been written. Collective."""
        self._meet()
        if self.mesh.rank == 0 and not self.complete:
            self._tell(self._job, complete=True)
            shutil.rmtree(self._folder / _MARKS)
            (self._folder / _LOCK).unlink(missing_ok=True)
        self._meet()


def _divided(n: int, tile: int) -> list[range]:
    """Pixels in windows of `tile`; the last has up to half as many more, since nets lose what is too thin."""
    starts = [*range(0, max(n - tile // 2, 1), tile)]
    return [range(a, b) for a, b in itertools.pairwise([*starts, n])]


def _numpy_dtype(dtype: torch.dtype) -> Any:
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:
        raise UsageError(
            f"arrays cannot hold {dtype}: choose another one, such as then=lambda outputs: outputs.float()"
        ) from None


def _path(index: int, array: _Array) -> str:
    return f"{index}/{array.name}" if array.name else str(index)


def _size_of(windows: Windowed, index: int) -> tuple[int, ...]:
    sizes = windows.sizes(index)
    return tuple(sizes if isinstance(sizes[0], int) else sizes[0])


def _named(tree: Any) -> list[tuple[str, Tensor]]:
    """The tensors that are written, by name; one alone has none. Raises `UsageError` for other trees."""
    if isinstance(tree, Tensor):
        return [("", tree)]
    if isinstance(tree, Mapping):
        found = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, (tuple, list)):
        found = [(str(number), value) for number, value in enumerate(tree)]
    else:
        found = []
    if not found or not all(isinstance(value, Tensor) for _, value in found):
        raise UsageError(
            f"infer writes tensors, tuples and dicts of them, and the net returns {type(tree).__name__}: "
            "choose what is written by then=lambda outputs: ..."
        )
    return found


def _one_ahead(items: Iterable[_T]) -> Iterator[_T]:
    """The same, each when the next one has been made."""
    before: list[_T] = []
    for item in items:
        yield from before
        before = [item]
    yield from before


def _job(net: nn.Module, windows: Windowed, tile: int, then: _Then) -> str:
    """What decides what is written."""
    sizes = [_size_of(windows, index) for index in range(len(windows))]
    found = hashlib.sha256(f"{sizes} {tile} {_told(then)}".encode())
    for name, value in net.state_dict().items():
        found.update(f"{name} {in_words(value)}".encode())
        if isinstance(value, Tensor):  # of which words tell the beginning
            flat = value.detach().cpu().contiguous().reshape(-1)
            found.update(flat.view(torch.uint8).numpy().data)
    return found.hexdigest()


def _told(value: Any) -> str:
    """As `in_words`, of functions what they do and hold, objects what is in their attributes."""
    if isinstance(value, functools.partial):
        return _told((value.func, value.args, value.keywords))
    if isinstance(value, types.CodeType):
        return f"{value.co_names} {value.co_code.hex()} {_told(value.co_consts)}"
    if isinstance(value, types.FunctionType):
        cells = tuple(cell.cell_contents for cell in value.__closure__ or ())
        return _told((value.__code__, value.__defaults__, value.__kwdefaults__, cells))
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_told, value))})"
    inner = "" if isinstance(value, type) else in_words(getattr(value, "__dict__", {}))
    return f"{in_words(value)} {inner}"
