"""What Fivefold takes of torch that torch does not promise to keep. It stands here and nowhere else.

All of it is in every version from 2.11 to 2.15, unless its line says since when. A version that is not
among `TRIED` is told once. Classes that stand in for torch's own (groups, works) implement what torch calls,
private names included: those stand with the classes.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _disabled_torch_function_impl as NO_FUNCTION
from torch._C._functorch import (  # pyright: ignore[reportMissingModuleSource]
    is_functorch_wrapped_tensor,
)
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import _reduction as _Reduction
from torch.nn.utils import clip_grad
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils import _pytree as pytree
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = [
    "CHECKPOINT",
    "FUNCTION",
    "KEPT_APPLY_SEEN",
    "LOCAL_SCALAR",
    "NO_FUNCTION",
    "SCRIPTED",
    "TO_COPY",
    "TRIED",
    "AnyBatchNorm",
    "AnyInstanceNorm",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "StorageWeakRef",
    "TorchDispatchMode",
    "after_backward",
    "apply_of",
    "backend_of_device",
    "base_of",
    "broadcast_coalesced",
    "class_of",
    "default_group",
    "default_store",
    "device_types",
    "dtensor",
    "early_stops",
    "fake_group",
    "fake_of",
    "foreach_copy",
    "forget_plans",
    "forward_hooks",
    "gradient_hooks",
    "in_backward",
    "is_aliased",
    "is_dtensor",
    "is_functorch_wrapped_tensor",
    "is_known",
    "is_profiling",
    "legacy_reduction",
    "load_state_dict",
    "loader_iterator",
    "loader_iterator_class",
    "memory_of",
    "nccl_options",
    "norm_functions",
    "note_version",
    "own_buffers",
    "own_parameters",
    "pin",
    "put_in_place",
    "pytree",
    "refuse_numbers",
    "registered_backends",
    "resizes_told",
    "restore_apply",
    "save_state_dict",
    "saved_tensor_hooks",
    "schema_of",
    "sequence_number",
    "spin",
    "step_hooks",
    "values_of",
    "version_of",
    "watch_total_norm",
    "without_modes",
    "without_warnings_of_sockets",
    "world",
]

TRIED = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""versions of torch; README.md says what was run under which"""

_log = logging.getLogger(__name__)
_LOG_WARNINGS, _LOG_ERRORS = 1, 2
"""levels of c10/util/logging_common.h"""


@functools.cache
def note_version() -> None:
    """One line if nobody has tried Fivefold with this torch."""
    release = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    if release not in TRIED:
        _log.warning(
            "Fivefold was tried with torch %s to %s, this is %s: `fivefold verify` shows whether a model is "
            "exact under it",
            TRIED[0], TRIED[-1], torch.__version__,
        )  # fmt: skip


# --- tensors ------------------------------------------------------------------------------------

TO_COPY: Any = torch.ops.aten._to_copy.default
LOCAL_SCALAR: Any = torch.ops.aten._local_scalar_dense.default
"""the operation behind `Tensor.item`"""


def without_memory(
    cls: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str
) -> Any:
    """A tensor of a class that answers operators itself, in `__torch_dispatch__`."""
    return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device(device))


def version_of(tensor: Tensor) -> int:
    """How often it was written to, as autograd counts."""
    return tensor._version


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor that it is a view of."""
    return tensor._base


def memory_of(tensor: Tensor) -> int:
    """A number of the memory that it is a view of; fake tensors, which have no address, have one too."""
    return tensor.untyped_storage()._cdata


def values_of(sparse: Tensor) -> Tensor:
    """The values of a sparse tensor, coalesced or not."""
    return sparse._values()


def foreach_copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, by one call."""
    torch._foreach_copy_(list(targets), list(sources))


def is_aliased(parameter: nn.Parameter) -> bool:
    """Whether anything else lies in the memory of a parameter, or is computed from it just now."""
    both = parameter, nn.Parameter(parameter.detach().new_empty(1))
    found, alone = (torch._C._storage_Use_Count(p.untyped_storage()._cdata) for p in both)
    return found > alone


# --- modules ------------------------------------------------------------------------------------

AnyBatchNorm = nn.modules.batchnorm._BatchNorm
AnyInstanceNorm = nn.modules.instancenorm._InstanceNorm


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The dict in which a module keeps its parameters."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The dict in which a module keeps its buffers."""
    return module._buffers


def forward_hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """The dicts of its hooks after and before forward."""
    return module._forward_hooks, module._forward_pre_hooks


def gradient_hooks(holder: nn.Module | Tensor) -> dict[int, Any] | None:
    """The dict of its hooks of gradients, if it has had any."""
    return cast(Any, holder)._backward_hooks


def accumulate_hooks(parameter: Tensor) -> dict[int, Any]:
    """Its hooks that follow a gradient."""
    return getattr(parameter, "_post_accumulate_grad_hooks", None) or {}


def norm_functions() -> Any:
    """Torch's module of the autograd functions of synchronised norms."""
    from torch.nn.modules import _functions

    return _functions


# --- autograd -----------------------------------------------------------------------------------


_APPLY: Any = vars(torch.autograd.Function)["apply"]
FUNCTION: Any = (
    torch.autograd.function._SingleLevelFunction
    if isinstance(_APPLY, classmethod)
    else torch.autograd.Function
)
"""whose `apply` all autograd functions call. Until torch 2.14 a base class, by way of which a call is seen
also where `apply` was kept as a function; later that is written in C, and what was kept is not seen"""
KEPT_APPLY_SEEN = FUNCTION is not torch.autograd.Function


_OF_TORCH = {"aten", "prim", "prims", "quantized", "torchvision"}


def has_own_backward(function: Any, name: str) -> bool:
    """Whether backward may run code of others: an autograd function's, or that of an operator of theirs."""
    home = str(getattr(function, "__module__", "") or "")
    registered = home.startswith("torch._ops.") and home.split(".")[2] not in _OF_TORCH
    return registered or name.endswith(".apply")


def apply_of(cls: Any) -> Any:
    """The `apply` of an autograd function, as it is when nobody watches."""
    if not KEPT_APPLY_SEEN:
        return _APPLY.__get__(None, cls)
    return super(FUNCTION, cls).apply


def restore_apply() -> None:
    """Undo what has been set as `FUNCTION.apply`."""
    if not KEPT_APPLY_SEEN:
        FUNCTION.apply = _APPLY
    else:
        del FUNCTION.apply


def legacy_reduction(size_average: bool | None, reduce: bool | None) -> str:
    """The reduction that the old options of a loss mean."""
    return _Reduction.legacy_get_string(size_average, reduce, emit_warning=False)


def watch_total_norm(look: Callable[[Sequence[Tensor]], None]) -> None:
    """From now on, `look` is called with the gradients of which torch computes one norm, to clip them."""
    module: Any = clip_grad
    plain = module._get_total_norm

    @functools.wraps(plain)
    def watched(tensors: Any, *args: Any, **kwargs: Any) -> Tensor:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        look(tensors)
        return plain(tensors, *args, **kwargs)

    module._get_total_norm = watched
    if getattr(nn.utils, "get_total_norm", None) is plain:
        nn.utils.get_total_norm = watched


SCRIPTED: tuple[Any, ...] = (torch._C.ScriptFunction, torch._C.ScriptMethod)
"""what TorchScript calls: of functions, and of modules"""

_CHECKPOINT = "_checkpoint_without_reentrant_generator"
CHECKPOINT = max((name for name in vars(torch_checkpoint) if name.startswith(_CHECKPOINT)), key=len)
"""what `checkpoint` does around a function; from 2.15 on, another name calls the one that does it"""


def in_backward() -> bool:
    """Whether this thread computes gradients now."""
    return torch._C._current_graph_task_id() != -1


def after_backward(call: Callable[[], None]) -> None:
    """Call it at the end of the backward that runs now."""
    cast(Any, torch.autograd.Variable._execution_engine).queue_callback(call)


def is_reached(leaf: Tensor) -> bool:
    """Whether the backward that runs now adds to the gradient of a leaf.

    Raises ValueError if `torch.autograd.grad` asks for it instead.
    """
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        return bool(torch._C._will_engine_execute_node(node))  # pyright: ignore[reportAttributeAccessIssue]
    except RuntimeError as problem:
        raise ValueError(str(problem)) from problem


def sequence_number(node: Any) -> int:
    """Of a node of the graph: later ones have larger ones, in each thread."""
    return node._sequence_nr()


def early_stops(asked: bool) -> bool:
    """Whether a checkpoint that asks for it, or not, runs its part again only as far as needed."""
    told = vars(torch_checkpoint)["_enable_checkpoint_early_stop"]
    return asked if told is None else told


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """What is called before and after its steps, and those of all."""
    own = optimizer._optimizer_step_pre_hooks | optimizer._optimizer_step_post_hooks
    return [*(own | _global_optimizer_pre_hooks | _global_optimizer_post_hooks).values()]


def saved_tensor_hooks() -> Any:
    """The innermost pair of `torch.autograd.graph.saved_tensors_hooks`, or None."""
    return cast(Any, torch._C)._autograd._top_saved_tensors_default_hooks(True)


def is_profiling() -> bool:
    """Whether torch's profiler records."""
    return torch.autograd.profiler._is_profiler_enabled


# --- modes --------------------------------------------------------------------------------------


def without_modes() -> AbstractContextManager[Any]:
    """Within the block, no mode sees what torch computes."""
    return _disable_current_modes()


def schema_of(operation: Any) -> Any:
    """Name, arguments and what is written to, of an operation that a dispatch mode sees."""
    return operation._schema


@functools.cache
def _resizes() -> threading.local:
    """Who is told, in each thread, of storages that change their size: no mode sees that."""
    told, plain = threading.local(), torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        made = plain(storage, size)
        tell = getattr(told, "tell", None)
        if tell is not None:
            tell(storage)
        return made

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
    return told


@contextlib.contextmanager
def resizes_told(tell: Callable[[torch.UntypedStorage], None]) -> Generator[None]:
    """Within the block, in this thread, `tell` is called for storages that have changed their size."""
    told = _resizes()
    before = getattr(told, "tell", None)
    told.tell = tell
    try:
        yield
    finally:
        told.tell = before


# --- data ---------------------------------------------------------------------------------------


def loader_iterator(loader: Any, *, take: bool = False) -> Any:
    """What iterates over a DataLoader whose processes persist, or None; `take`: the loader forgets it."""
    iterator, loader._iterator = loader._iterator, None if take else loader._iterator
    return iterator


def loader_iterator_class() -> Any:
    """The class of all iterators of DataLoaders."""
    from torch.utils.data import dataloader

    return dataloader._BaseDataLoaderIter


# --- groups -------------------------------------------------------------------------------------


def world() -> Any:
    """Torch's books of groups."""
    return dist.distributed_c10d._world  # noqa: TID251 - private parts of it are what this module is for


def is_known(group: dist.ProcessGroup) -> bool:
    """Whether torch has noted a group: it does when the group is made."""
    return group in world().pg_map


def device_types(group: dist.ProcessGroup) -> list[torch.device]:
    """Devices whose tensors a group sends."""
    return group._device_types


def backend_of_device(group: dist.ProcessGroup, device: torch.device) -> Any:
    """What a group sends tensors of a device with."""
    return group._get_backend(device)


def default_store() -> Any:
    """The store of the group that all ranks are in. Raises ValueError where torch is not started."""
    return dist.distributed_c10d._get_default_store()  # noqa: TID251


def registered_backends() -> dict[str, Any]:
    """Backends of others, by upper-case name."""
    return cast("dict[str, Any]", dist.Backend._plugins)


def broadcast_coalesced(
    group: dist.ProcessGroup, tensors: Sequence[Tensor], message_bytes: int, source: int
) -> None:
    """Overwrite tensors with those of a rank, packed into messages: what DistributedDataParallel calls."""
    dist._broadcast_coalesced(group, list(tensors), message_bytes, source)


def put_in_place(name: str, group: dist.ProcessGroup) -> None:
    """Have torch find a group under the name of another one."""
    dist.distributed_c10d._unregister_process_group(cast(Any, name))  # noqa: TID251
    dist.distributed_c10d._register_process_group(cast(Any, name), group)  # noqa: TID251


def default_group() -> dist.ProcessGroup:
    """The group that all ranks are in. Raises ValueError where torch is not started."""
    return dist.distributed_c10d._get_default_group()  # noqa: TID251


def nccl_options(timeout: timedelta) -> Any:
    """Of a group over NCCL."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options


def fake_group(rank: int, size: int, name: str) -> dist.ProcessGroup:
    """A group without other ranks, over torch's backend "fake"."""
    from torch.testing._internal.distributed import fake_pg

    group: Any = dist.ProcessGroup(dist.HashStore(), rank, size)
    backend = fake_pg.FakeProcessGroup._create_internal(rank, size)
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, backend)
    group._set_group_name(name)
    return group


@contextlib.contextmanager
def without_warnings_of_sockets() -> Generator[None]:
    """Let torch's C++ log errors only, unless TORCH_CPP_LOG_LEVEL is set.

    Otherwise every socket whose address has no name is a warning; one that cannot be used also raises.
    """
    try:
        core = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        level = ctypes.c_int.in_dll(core, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):  # a torch without its own logging
        yield
        return
    before = level.value
    if before == _LOG_WARNINGS and "TORCH_CPP_LOG_LEVEL" not in os.environ:
        level.value = _LOG_ERRORS
    try:
        yield
    finally:
        level.value = before


# --- checkpoints --------------------------------------------------------------------------------


def save_state_dict(*args: Any, **named: Any) -> Any:
    """As `torch.distributed.checkpoint.save`, with what it returns; a group of one asks nobody."""
    from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

    return _save_state_dict(*args, **named)


def load_state_dict(*args: Any, **named: Any) -> None:
    """As `torch.distributed.checkpoint.load`, for states that are flat."""
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    _load_state_dict(*args, **named)


def forget_plans(planner: Any) -> None:
    """Have a save planner plan anew."""
    from torch.distributed.checkpoint import SavePlanner

    for plans in (
        SavePlanner._cached_save_plan,
        SavePlanner._cached_final_save_plan,
        SavePlanner._cached_all_plans,
        SavePlanner._cached_global_plan,
        SavePlanner._cached_metadata,
    ):
        cast("dict[str, Any]", plans).pop(planner._cached_plans_key, None)


def fake_of(fake: FakeTensorMode, tensor: Tensor) -> FakeTensor:
    """A stand-in for a real tensor. Not logged, for which torch would import its compiler."""
    return fake.from_tensor(tensor, trace=False)


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether a tensor is divided among ranks. Nothing is imported: DTensor takes most of a second."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def refuse_numbers(mesh: DeviceMesh, refuse: Callable[[], NoReturn]) -> None:
    """Have `refuse` called where a number is asked of a tensor of which the ranks of `mesh` have parts.

    Torch gives that of this rank's part: DTensor's `item()`, `float()` and truth values gather nothing.
    """
    from torch.distributed.tensor import DTensor

    def item(op_call: object, args: Any, kwargs: object) -> Any:  # noqa: ARG001 - torch's names
        tensor: DTensor = args[0]
        in_parts = any(not placement.is_replicate() for placement in tensor.placements)
        if in_parts and tensor.device_mesh.size() > 1 and tensor.device_mesh in _REFUSING:
            _REFUSING[tensor.device_mesh]()
        return tensor.to_local().item()

    _REFUSING[mesh] = refuse
    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default] = item


_REFUSING: weakref.WeakKeyDictionary[DeviceMesh, Callable[[], NoReturn]] = (
    weakref.WeakKeyDictionary()
)


def class_of(module: nn.Module) -> type:
    """A module's class without the one that `fully_shard` puts in front; imports nothing, as above."""
    front = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, front))


def dtensor(local: Tensor, like: DTensor) -> DTensor:
    """A DTensor with this part, divided as another one; `from_local` would move it to the mesh's device."""
    return cast(Any, type(like))(local, like._spec, requires_grad=False)


def pin(owner: object, address: int, size_bytes: int, memory: object = None) -> int:
    """Let CUDA know memory of the host until `owner` ends, so that copies run by themselves; its error, or 0.

    `memory` lives until then.
    """
    cudart: Any = torch.cuda.cudart()
    # Its results are of an enumeration that equals no number.
    problem = int(cudart.cudaHostRegister(address, size_bytes, 0))
    if not problem:
        weakref.finalize(owner, _unpin, cudart, address, memory).atexit = False
    return problem


def spin(gpu: torch.device) -> None:
    """Keep one of a GPU's processors busy for some hundredths of a second, and wait for its end."""
    with torch.cuda.device(gpu):
        torch.cuda._sleep(100_000_000)  # pyright: ignore[reportUnknownMemberType]
        torch.cuda.synchronize()


def _unpin(cudart: Any, address: int, memory: object) -> None:  # noqa: ARG001 - which lives until now
    with contextlib.suppress(RuntimeError):
        cudart.cudaHostUnregister(address)
