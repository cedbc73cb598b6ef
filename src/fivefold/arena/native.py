"""The C core, loaded with ctypes: `native/fivefold.h` says what its functions do.

Installed without a C compiler, Fivefold has no core; `problem` then says so, and what needs it fails with
that text or does without.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from ctypes import (
    CDLL,
    POINTER,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
)
from ctypes import c_void_p as pointer
from pathlib import Path
from typing import ClassVar

from fivefold.errors import FivefoldError

__all__ = [
    "CONNECT",
    "DTYPES",
    "KINDS",
    "MAX_LOCAL",
    "MAX_RANKS",
    "MESSAGES",
    "MISSING",
    "REDUCTIONS",
    "ArenaError",
    "Call",
    "CallReport",
    "MpiFunctions",
    "core",
    "library_path",
    "problem",
]

ABI = 11
LIBRARY = "libfivefold_core.so"
MAX_LOCAL, MAX_RANKS, MISSING = 256, 4096, 7
MESSAGES = 1
"""the lane of messages; 0 is that of collectives"""

KINDS = (
    "all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter",
    "all_to_all", "all_to_all_v", "barrier",
)  # fmt: skip
"""operations in the order of `enum ff_kind`"""
DTYPES = (
    "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "bool", "float16",
    "bfloat16", "float32", "float64",
)  # fmt: skip
"""element types in the order of `enum ff_dtype`"""
REDUCTIONS = ("sum", "avg", "prod", "min", "max", "band", "bor", "bxor")
"""in the order of `enum ff_reduction`"""


class ArenaError(FivefoldError):
    """Shared memory could not be had, passed on or used; the message says what to do."""


class CallReport(ctypes.Structure):
    """`ff_report`: when all had come, what went wrong, and who is missing."""

    _fields_: ClassVar = [
        ("status", c_uint32),
        ("other", c_int32),
        ("other_kind", c_uint32),
        ("other_dtype", c_uint32),
        ("other_reduction", c_uint32),
        ("other_root", c_int32),
        ("other_count", c_uint64),
        ("other_bytes", c_uint64),
        ("other_status", c_uint32),
        ("kind", c_uint32),
        ("sequence", c_uint64),
        ("started_ns", c_uint64),
        ("missing_count", c_uint32),
        ("missing", c_int32 * MISSING),
    ]


class Call(ctypes.Structure):
    """`ff_call`: one collective."""

    _fields_: ClassVar = [
        ("kind", c_uint32),
        ("dtype", c_uint32),
        ("reduction", c_uint32),
        ("root", c_int32),
        ("count", c_uint64),
        ("input", pointer),
        ("output", pointer),
        ("inputs", pointer),
        ("outputs", pointer),
        ("input_counts", pointer),
        ("output_counts", pointer),
        ("timeout_s", c_double),
        # Of `ff_note`: the row of a trace that an operation that is run now is written to.
        ("row", pointer),
        ("seq", c_uint64),
        ("size_bytes", c_int64),
        ("number", c_uint32),
        ("step", c_uint32),
        ("what", c_uint64),
    ]


CONNECT = ctypes.CFUNCTYPE(c_int, pointer, c_int, c_int, c_int)
"""`ff_connect`: self, rank, lane, tag of MPI or -1 -> descriptor, or -1"""


class MpiFunctions(ctypes.Structure):
    """`ff_mpi`: functions of MPI, handles, and how many tags there are."""

    _fields_: ClassVar = [
        ("send", pointer),
        ("receive", pointer),
        ("test", pointer),
        ("count", pointer),
        ("cancel", pointer),
        ("comm", c_uint64),
        ("byte", c_uint64),
        ("pointers", c_int32),
        ("tags", c_int32),
    ]


_INTS, _INT32S = POINTER(c_int), POINTER(c_int32)
_SIGNATURES: dict[str, tuple[object, ...]] = {
    # name: (result, arguments...)
    "ff_abi": (c_uint32,),
    "ff_instructions": (c_char_p,),
    "ff_dtype_bytes": (c_size_t, c_uint32),
    "ff_group_bytes": (c_size_t, c_int, c_size_t, c_size_t),
    "ff_group_set_up": (c_int, pointer, c_int, c_size_t, c_size_t),
    "ff_group_open": (pointer, pointer, c_int, c_int),
    "ff_group_peer": (None, pointer, c_int, c_int, pointer, c_size_t),
    "ff_group_probe": (c_int, pointer, c_double, POINTER(CallReport)),
    "ff_group_spread": (
        c_int, pointer, c_int, c_int, _INT32S, CONNECT, pointer, _INTS, c_int, c_int, c_uint64,
    ),
    "ff_group_accept": (c_int, pointer, c_int, c_int, c_int, c_int),
    "ff_mpi_use": (None, POINTER(MpiFunctions)),
    "ff_mpi_finish": (c_int, c_double),
    "ff_group_by_mpi": (c_int, pointer, _INT32S),
    "ff_group_forget": (None, pointer),
    "ff_group_in_order": (None, pointer),
    "ff_group_break": (None, pointer),
    "ff_group_close": (None, pointer),
    "ff_run": (c_int, pointer, POINTER(Call), POINTER(CallReport)),
    "ff_all_reduce": (
        c_int, pointer, c_uint32, c_uint32, c_uint64, pointer, c_double, POINTER(CallReport),
    ),
    "ff_all_reduce_noted": (
        c_int, pointer, c_uint32, c_uint32, c_uint64, pointer, c_double, POINTER(CallReport),
        pointer, c_uint64, c_uint32, c_uint32, c_uint64,
    ),
    "ff_held_up": (c_int, pointer, POINTER(CallReport)),
    "ff_post": (pointer, pointer, POINTER(Call)),
    "ff_op_done": (c_int, pointer),
    "ff_wait": (c_int, pointer, pointer, c_double, POINTER(CallReport)),
    "ff_op_free": (None, pointer, pointer),
    "ff_gone": (pointer,),
    "ff_send": (pointer, pointer, c_int, c_int32, c_uint32, pointer, c_uint64, c_double),
    "ff_receive": (pointer, pointer, c_int, c_int32, c_uint32, pointer, c_uint64, c_double),
    "ff_message_done": (c_int, pointer, pointer),
    "ff_message_wait": (c_int, pointer, pointer, c_double, POINTER(CallReport)),
    "ff_message_peer": (c_int, pointer),
    "ff_message_free": (None, pointer, pointer),
    "ff_slots_bytes": (c_size_t, c_uint32),
    "ff_slots_set_up": (c_int, pointer, c_uint32),
    "ff_slots_join": (c_int, pointer, c_uint32),
    "ff_slots_leave": (None, pointer, c_int),
    "ff_slots_holder": (c_uint32, pointer, c_int),
    "ff_slot_take": (c_int, pointer, c_int, c_double),
    "ff_slot_hold": (c_int, pointer, c_int, c_int),
    "ff_slot_drop": (None, pointer, c_int, c_int),
    "ff_slot_holders": (c_uint64, pointer, c_int),
    "ff_word_read": (c_uint32, pointer),
    "ff_word_set": (None, pointer, c_uint32),
    "ff_word_wait": (c_int, pointer, c_uint32, c_double),
}  # fmt: skip


def library_path() -> Path | None:
    """Where the core is: an editable installation keeps it in a second folder of this package."""
    import fivefold.arena

    places = (Path(folder) / LIBRARY for folder in fivefold.arena.__path__)
    return next((place for place in places if place.exists()), None)


_loading = threading.Lock()


def problem() -> str:
    """Why there is no core, or nothing."""
    with _loading:
        return _load()[1]


def core() -> CDLL:
    """The core. Raises `ArenaError` where there is none."""
    with _loading:
        library, why = _load()
    if library is None:
        raise ArenaError(why)
    return library


@functools.cache
def _load() -> tuple[CDLL | None, str]:
    path = library_path()
    if path is None:
        return None, (
            "Fivefold was installed without its C core: install a C compiler (on Debian and Ubuntu: apt "
            "install gcc), then pip install --force-reinstall --no-deps fivefold"
        )
    try:
        library = CDLL(str(path))
        version = int(library.ff_abi())
    except (OSError, AttributeError) as error:
        return None, f"the C core cannot be loaded ({error}); install Fivefold again"
    if version != ABI:
        return None, (
            f"the C core is of version {version}, this Fivefold needs {ABI}; install Fivefold again"
        )
    for name, (result, *arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library, ""
