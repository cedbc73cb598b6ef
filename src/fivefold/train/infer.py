"""Inference on images of any size, window by window.

    read a window and its surroundings ──► compute it ──► write it into a zarr array, and mark it as done
    (the next one meanwhile)               score it       (while the next one is computed)

What is written is what the net returns for the whole image. A run that was killed goes on where it was.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import types
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fivefold.data.windows import Box, Windowed, windows_of
from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.mesh.heap import give_back, keep_memory, return_blocks
from fivefold.parallel import ParallelModel
from fivefold.parallel.graph.fingerprint import in_words
from fivefold.parallel.modes import evaluating
from fivefold.parallel.program.alone import AloneNet, AloneWindow
from fivefold.parallel.trees import map_tensors
from fivefold.torch_private import is_dtensor
from fivefold.train.infer_score import WindowScore
from fivefold.train.infer_store import OutputArray, OutputPart, OutputStore
from fivefold.train.infer_tiff import TiffStore, is_tiff
from fivefold.train.shown import progress

__all__ = ["infer"]

_T = TypeVar("_T")
_Then = Callable[[Any], Any] | None
_Score = Callable[[Any, Any], Tensor] | None
_KEPT = 256
"""windows of an image up to which their plans are kept for the next one of its size"""


def infer(
    model: ParallelModel,
    dataset: Any,
    to: str | Path | None,
    *,
    tile: int = 1024,
    then: Callable[[Any], Any] | None = None,
    score: Callable[[Any, Any], Tensor] | None = None,
) -> Tensor:
    """Write what a net returns for each image of a data set, which need not fit in memory. Collective.

    Images are computed in windows, each from its surroundings alone, which are read with it; ranks of the
    mesh take windows in turn. The result is that of whole images in evaluation mode.

    Args:
        model: what `parallelize` returned, under any layout whose ranks hold the whole net.
        dataset: images of which windows can be read: `TiffImages`, `ZarrImages`, or a class of your own that
            is `fivefold.data.windows.Windowed`. Of a sample the image is taken: channels, then pixels.
        to: folder of a zarr group to write: for each image an array "0", "1" ..., channels first, or a
            group of such arrays where the net returns several tensors. Of one image of 2 dims a tiled BigTIFF
            file, if it is called .tif or .tiff; until that is complete, FILE.zarr lies beside it. What an
            interrupted run of the same weights, sizes, windows and code of `then` and `score` has left is
            gone on with. With None nothing is written.
        tile: pixels of an edge of a window; the last one's are up to half as many more. Best a multiple of
            what the net strides over, since chunks are as large as the first window's outputs, and those that
            windows share are written one by one.
        then: what is written instead, given what the net returns for a window of one sample. It may
            change channels and dtype, such as `lambda y: y.argmax(1).byte()`, and sees one pixel at a time.
        score: (outputs, targets) of a window to sums over its pixels, (sums,) float64, as `model.evaluate`
            takes it: what the net returns for one sample, and the target's same pixels. Samples are
            (image, target) then, the target as large as what the net returns.

    Returns the sums of `score` over all windows of all images, (sums,), float64; equal on all ranks, each
    window counted once, also by a run that goes on. Without `score` there are none: (0,).

    Raises:
        UsageError: the net looks at whole images (norms or attention over them), draws random numbers or
            leaves something behind; the data set has no windows; `to` holds something else, or is a TIFF
            file for what those cannot hold; or `score` is no sum over pixels, or targets are of other sizes.
        DataError: zarr or tifffile is not installed (extra images).
    """
    mesh, net, windows = model.mesh, model.module, _checked(model, dataset, tile)
    if to is None and (score is None or then is not None):
        raise UsageError("with to=None nothing is written: give a score, and no then")
    scored = None if score is None else WindowScore(score, windows)
    sizes = [_size_of(windows, index) for index in range(len(windows))]
    with evaluating(model), torch.no_grad():
        job = _job(net, (sizes, tile, to is not None and is_tiff(to)), (then, score))
        store = _store(None if to is None else Path(to), mesh, job, sizes)
        plan: _Plan | None = None
        with _returning_blocks():
            for index in range(0 if store.complete else len(windows)):
                size = sizes[index]
                target = scored and scored.pixel(index)
                pixel = _read(windows, index, size, [(0, 1)] * len(size), target)[0].to(mesh.device)
                if plan is None or not plan.suits(pixel, size):
                    plan = _Plan(net, pixel, size, tile, then)
                _infer_one(plan, windows, index, store, scored)
    return store.finish()


@contextlib.contextmanager
def _returning_blocks() -> Generator[None]:
    """Nothing is kept of a window's memory for a step of training."""
    return_blocks()
    try:
        yield
    finally:
        keep_memory()


def _checked(model: ParallelModel, dataset: Any, tile: int) -> Windowed:
    """How windows are read. Raises `UsageError` where nothing can be inferred so."""
    windows = windows_of(dataset)
    if windows is None:
        raise UsageError(
            f"infer reads windows of images, which {type(dataset).__name__} does not offer: use TiffImages "
            "or ZarrImages, or give it the methods sizes and window (fivefold.data.windows.Windowed)"
        )
    if tile < 1:
        raise UsageError(f"tile={tile}: windows have at least one pixel along each edge")
    if any(p.is_meta or is_dtensor(p) for p in model.module.parameters()):
        raise UsageError(
            "ranks divide the parameters of the net among them (a pipe axis, or memory.shard), and each has "
            "to compute whole windows: use a layout without"
        )
    return windows


def _store(
    path: Path | None, mesh: Mesh, job: str, sizes: Sequence[tuple[int, ...]]
) -> OutputStore:
    """Where outputs go. Collective."""
    if path is not None and is_tiff(path):
        return TiffStore(path, mesh, job, sizes)
    return OutputStore(path, mesh, job)


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

    def _arrays(self) -> list[OutputArray]:
        """What is to be written."""
        shapes = [self._alone.tape.shapes[ref.index] for ref in self._alone.returned]
        dims = len(self.size)
        # Images of a size each, by which `then` is seen to use the one or the other.
        edges = [1 + self._bounds.index(bounds) for bounds in self._bounds]
        blank = self._alone.blank(
            [(*shape[:-dims], *(edge,) * dims) for shape, edge in zip(shapes, edges, strict=True)]
        )
        made: list[OutputArray] = []
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
            made.append(
                OutputArray(name, (*lead, *whole), (*lead, *chunk), leaf.dtype, number, shared)
            )
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

    def target(self, place: tuple[int, ...], size: tuple[int, ...]) -> Box:
        """The pixels of a target of some size that are compared with what is computed at a place."""
        fits = {(*bounds,) for bounds in self._bounds if tuple(b[-1] for b in bounds) == size}
        if len(fits) != 1:
            returned = " and ".join(str(tuple(b[-1] for b in bounds)) for bounds in self._bounds)
            raise UsageError(
                f"score compares what the net returns with targets of its size: that has {returned} pixels, "
                f"and the target {size}"
            )
        (bounds,) = fits
        return Box(size, tuple(range(b[n], b[n + 1]) for b, n in zip(bounds, place, strict=True)))

    def parts(self, place: tuple[int, ...], outputs: Any) -> list[OutputPart]:
        """What is to be written at a place, given what the net returns there."""
        made = list[OutputPart]()
        written = _named(outputs if self._then is None else self._then(outputs))
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


def _infer_one(
    plan: _Plan, windows: Windowed, index: int, store: OutputStore, score: WindowScore | None
) -> None:
    """Compute what is missing of an image, and write it. Collective."""
    mesh, size = store.mesh, plan.size
    compared = None if score is None else functools.partial(plan.target, size=score.size(index))
    if compared is not None:
        compared(plan.places[0])  # refused by all ranks, or by none
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
            (number, place, box, reader.submit(_read, windows, index, size, reads, box))
            for number, place in mine
            for reads in [plan.window(place).reads[-len(size) :]]
            for box in [compared and compared(place)]
        )
        for number, place, box, read in progress(_one_ahead(jobs), mesh, total=len(mine)):
            image, target = read.result()
            outputs, sums = plan.window(place).compute(image.to(mesh.device)), None
            if score is not None and target is not None and box is not None:
                # A score may change what it is given.
                given = map_tensors(torch.clone, outputs) if store.writes else outputs
                sums = score.sums(given, target.to(mesh.device), box)
            parts = plan.parts(place, outputs) if store.writes else []
            if writing is not None:
                writing.result()
            writing = writer.submit(store.write, index, number, parts, sums)
            del image, target, outputs, parts, read
            give_back()  # what lies between windows adds up to a multiple of one
        if writing is not None:
            writing.result()


def _read(
    windows: Windowed,
    index: int,
    size: tuple[int, ...],
    ranges: Sequence[tuple[int, int]],
    target: Box | None,
) -> tuple[Tensor, Tensor | None]:
    """A window of an image, one sample, and one of its target."""
    box = Box(size, tuple(range(*one) for one in ranges))
    sizes = windows.sizes(index)
    if isinstance(sizes[0], int):
        return torch.as_tensor(windows.window(index, box))[None], None
    # Of images that are not asked for, a pixel: who reads windows is given a box for each.
    others = [None if one is None else Box(one, (range(1),) * len(one)) for one in sizes[1:]]
    others[:1] = others[:1] if target is None else [target]
    found = [
        torch.as_tensor(one)[None]
        for one in windows.window(index, (box, *others))[: 2 if target else 1]
    ]
    return found[0], found[1] if target else None


def _divided(n: int, tile: int) -> list[range]:
    """Pixels in windows of `tile`; the last has up to half as many more, since nets lose what is too thin."""
    starts = [*range(0, max(n - tile // 2, 1), tile)]
    return [range(a, b) for a, b in itertools.pairwise([*starts, n])]


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


def _job(net: nn.Module, sizes: object, functions: tuple[_Then, _Score]) -> str:
    """What decides what is written."""
    found = hashlib.sha256(f"{sizes} {_told(functions)}".encode())
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
