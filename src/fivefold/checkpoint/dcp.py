"""What is ours of torch.distributed.checkpoint: where files go, how values are read, which plans are kept.

DCP decides who writes what (its planners), and the bytes of the files are its own, so that plain PyTorch
reads them. We commit the files durably, note their digests, and read without executing anything.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemWriter,
    Metadata,
    SavePlan,
    StorageReader,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    WriteItem,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fivefold.checkpoint.files import FileOps
from fivefold.checkpoint.manifest import Item
from fivefold.checkpoint.problems import described
from fivefold.checkpoint.values import from_bytes, tensor_of
from fivefold.errors import CheckpointError
from fivefold.torch_private import forget_plans, load_state_dict, save_state_dict
from fivefold.writing import TorchStream, for_torch

__all__ = ["ByteSource", "Planner", "load", "save"]

PathOf = tuple[str | int, ...]
_PACKED_BYTES = 256 << 10
"""what is smaller is copied once more, which costs less than calls of Python do"""


# ---- writing


class Planner(DefaultSavePlanner):
    """DCP's planner for states that are flat already. Plans are kept from save to save, by each planner."""

    _numbers = itertools.count()

    def __init__(self) -> None:
        super().__init__(flatten_sharded_tensors=False, enable_plan_caching=True)
        # DCP keeps the plans of all planners of a process in one place, by this key.
        self._cached_plans_key = f"fivefold-{next(self._numbers)}"
        self.paths: Mapping[str, PathOf] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,  # noqa: ARG002
        is_coordinator: bool = False,
    ) -> None:
        """Take the state as it is."""
        self.state_dict, self.mappings = state_dict, dict(self.paths)
        self.is_coordinator = is_coordinator

    def forget(self) -> None:
        """Plan anew: on all ranks or on none."""
        forget_plans(self)


class _Committing(FileSystem):
    """DCP's view of a directory: files that are complete and durable, or not there."""

    def __init__(self, files: FileOps) -> None:
        self._files = files
        self.items: list[Item] = []

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[Any]:
        """A file that is committed at the end of the block."""
        assert mode == "wb"
        place = Path(path)
        stream = self._files.create(place)
        try:
            with for_torch(stream) as opened:
                yield opened
                done = stream.commit()
        finally:
            stream.close()
        self.items.append(Item(place.name, done.length, done.digest))


class _Packed:
    """What `torch.save` writes of a small tensor, passed on as one piece: it writes dozens of them."""

    def __init__(self, stream: TorchStream) -> None:
        self._stream, self._pieces = stream, io.BytesIO()
        self.write = self._pieces.write

    def flush(self) -> None:
        """Nothing yet."""

    def close(self) -> None:
        """Pass on; DCP calls it once all is written."""
        self._stream.write(self._pieces.getbuffer())


class _Packing:
    """In the place of DCP's transformations of streams, of which there are none."""

    def transform_save_stream(
        self, item: WriteItem, stream: TorchStream
    ) -> tuple[TorchStream | _Packed, list[str]]:
        """Where to write a tensor or value, and the names of what it passes through."""
        told = item.tensor_data
        if told is None:  # a value: one piece already
            return stream, []
        size = told.size.numel() * told.properties.dtype.itemsize
        return (_Packed(stream) if size < _PACKED_BYTES else stream), []


class _Writer(FileSystemWriter):
    """DCP's writer into a directory of this node. Its metadata is kept in memory."""

    def __init__(self, directory: Path, files: FileOps, prepare: Callable[[], None]) -> None:
        super().__init__(directory, sync_files=False, per_thread_copy_ahead=0)
        self.transforms = cast(Any, _Packing())
        self.committing = _Committing(files)
        self.fs = self.committing
        self._prepare = prepare

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Before any rank writes: what has to be there first."""
        self._prepare()
        return plan

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank: complete the metadata, as the writer of DCP does, and write nothing."""
        with_version = cast(Any, metadata)
        with_version.version = "1.0.0"
        metadata.storage_data = {one.index: one.storage_data for some in results for one in some}
        metadata.storage_meta = self.storage_meta()


def save(
    state: dict[str, Any],
    paths: Mapping[str, PathOf],
    planner: Planner,
    directory: Path,
    files: FileOps,
    *,
    group: dist.ProcessGroup | None,
    prepare: Callable[[], None] = lambda: None,
    what: str = "writing",
) -> tuple[Metadata, list[Item]]:
    """Write this rank's part of a state into `directory`. Collective over `group`.

    Args:
        state: flat; tensors on the CPU, and values.
        paths: where each key stands in the nested state.
        planner: the same from save to save.
        directory: of this node; ranks of other nodes have theirs.
        files: who writes.
        group: gloo; None for one process alone.
        prepare: called first; no rank writes before all have returned from it.
        what: what this is, for errors.

    Returns DCP's metadata, the same on every rank, and the files of this rank.

    Raises `CheckpointError` on every rank if it fails on one.
    """
    planner.paths = paths
    writer = _Writer(directory, files, prepare)
    try:
        metadata = save_state_dict(
            state, writer, process_group=group, no_dist=group is None, planner=planner
        )
    except CheckpointException as problem:
        planner.forget()
        raise CheckpointError(_reasons(what, problem)) from problem
    return metadata, writer.committing.items


def _reasons(what: str, problem: CheckpointException) -> str:
    told = [f"rank {rank}: {_reason(p[0])}" for rank, p in problem.failures.items()]
    more = f"; and {len(told) - 3} more" if len(told) > 3 else ""
    return f"{what} failed on {'; '.join(told[:3])}{more}"


def _reason(problem: BaseException) -> str:
    if isinstance(problem, OSError | CheckpointError):
        return described(problem)
    return f"{type(problem).__name__}: {problem}"


# ---- reading


class ByteSource(Protocol):
    """Where the bytes of a generation's files come from."""

    def read(self, name: str, start: int, length: int) -> memoryview:
        """Some bytes of a file, valid until the next are read. Raises `CheckpointError` or `OSError`."""
        ...


class _Reader(StorageReader):
    """DCP's reader from wherever the pieces are."""

    def __init__(self, metadata: Metadata, source: ByteSource) -> None:
        self._metadata, self._source = metadata, source
        self._stored = cast("Mapping[MetadataIndex, Any]", metadata.storage_data)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing to forget."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        """What was read and checked before."""
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Never asked."""
        del checkpoint_id
        return True

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan asks for; every piece once, in the order of the files."""

        def place(item: ReadItem) -> tuple[str, int]:
            stored = self._stored[item.storage_index]
            return stored.relative_path, stored.offset

        items = sorted(plan.items, key=place)
        for _, several in itertools.groupby(items, key=place):
            wanted = list(several)
            stored = self._stored[wanted[0].storage_index]
            if getattr(stored, "transform_descriptors", None):
                raise CheckpointError(
                    f"{stored.relative_path} is compressed or encrypted by an extension of DCP, which cannot "
                    "be read here: write the checkpoint without extensions"
                )
            data = self._source.read(stored.relative_path, stored.offset, stored.length)
            self._hand_out(data, wanted, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _hand_out(self, data: memoryview, wanted: list[ReadItem], planner: LoadPlanner) -> None:
        name = wanted[0].storage_index.fqn
        if wanted[0].type == LoadItemType.BYTE_IO:
            planner.load_bytes(wanted[0], io.BytesIO(data))
            return
        tensor = tensor_of(data, name)
        for item in wanted:
            piece = cast(Tensor, tensor)
            for dim, (start, length) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                piece = piece.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(piece)
            planner.commit_tensor(item, target)


class _LoadPlanner(DefaultLoadPlanner):
    """DCP's planner for flat states, which executes nothing that it reads."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state as it is."""
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Keep a value."""
        name = read_item.dest_index.fqn
        self.state_dict[name] = from_bytes(value, name)


def load(
    targets: dict[str, Any],
    metadata: Metadata,
    source: ByteSource,
    group: dist.ProcessGroup | None,
) -> None:
    """Fill the tensors of `targets` and replace its other members by the values read. Collective.

    Raises `CheckpointError` on every rank if it fails on one.
    """
    try:
        load_state_dict(
            targets,
            _Reader(metadata, source),
            process_group=group,
            no_dist=group is None,
            planner=_LoadPlanner(),
        )
    except CheckpointException as problem:
        raise CheckpointError(_reasons("reading", problem)) from problem
