"""A forked process becomes a script, as if Python had been started with it; so do those that it starts.

become(["train.py", "--epochs", "2"], environment)      # what `python train.py --epochs 2` does

What cannot be had without a new interpreter (flags, variables that it reads as it starts, a parent with
threads or one that has used torch) gets one.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import inspect
import io
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

__all__ = ["become", "prepare", "startable"]

_popen = subprocess.Popen._execute_child  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
_LATE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""set by the template: backends are loaded when a script imports torch"""
_begun = {name: value for name, value in os.environ.items() if name != _LATE}
_added: dict[str, str] = {}
"""variables that libraries set as they are imported"""
_modules: dict[str, ModuleType] = {}
"""what every script finds imported: what Python itself brings"""
_packages: dict[str, dict[str, ModuleType]] = {}
"""by name, the others: they are there at once when they are imported"""
_paths: list[str] = []
_files: set[int] = set()
_filters: list[Any] = []
_finalizers: set[weakref.finalize[..., Any]] = set()
_registered: list[Callable[..., object]] = []
"""what this process, once it is a script, wants to have called at its end"""


class _Ready(MetaPathFinder, Loader):
    """Packages that have been imported already."""

    def __init__(self) -> None:
        self._left = {**_packages}

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in self._left else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        modules = self._left.pop(spec.name)
        sys.modules.update(modules)
        self._spec = modules[spec.name].__spec__
        return modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
        if module.__name__ == "torch":
            threads = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
            if module.get_num_threads() != threads:
                module.set_num_threads(threads)
            module._import_device_backends()
        if module.__name__ == "numpy":
            module.random.seed()  # a fork has that of its parent


def prepare(besides: int, packages: Collection[str]) -> None:
    """From now on every script begins here, with the files that are open, but for one."""
    given = set(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    _added.update((n, v) for n, v in os.environ.items() if _begun.get(n) != v and n != _LATE)
    _modules.update({n: m for n, m in sys.modules.items() if n.partition(".")[0] not in packages})
    for name in sys.modules.keys() - _modules.keys():
        _packages.setdefault(name.partition(".")[0], {})[name] = sys.modules[name]
    _paths[:] = [path for path in sys.path[1:] if path not in given]
    _files.update(_numbers("/proc/self/fd") - {besides})
    _filters[:] = warnings.filters
    _finalizers.update(weakref.finalize._registry)  # pyright: ignore[reportAttributeAccessIssue]
    gc.collect()
    gc.freeze()


def startable(argv: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether Python with these arguments needs no interpreter of its own."""
    told = {
        n
        for n, v in environment.items()
        if n.startswith(_READ_AT_START) and (_begun | _added).get(n) != v
    }
    gone = {n for n in _begun.keys() - environment.keys() if n.startswith(_READ_AT_START)}
    kind = argv[0] if argv else "-"
    script = (kind in ("-m", "-c") and len(argv) > 1) or not kind.startswith("-")
    return script and not (told | gone) - _FOLLOWED


_FOLLOWED = {
    "PYTHONPATH", "PYTHONUNBUFFERED", "OMP_NUM_THREADS",
    "TORCHINDUCTOR_CACHE_DIR",  # set by torch's compiler, which asks for it whenever it compiles
}  # fmt: skip
"""variables that a fork can follow"""
# Not KMP_, which scikit-learn sets once a test has imported it: torch has GNU's OpenMP, not Intel's.
_READ_AT_START = ("PYTHON", "OMP_", "GOMP_", "MKL_", "LD_", "TORCH", "LC_", "LANG", "ATEN_")


def become(
    argv: Sequence[str], environment: Mapping[str, str], keep: Sequence[int] = ()
) -> NoReturn:
    """Run a script, `-m MODULE` or `-c CODE` with its arguments, and end.

    Of the files of this process only its standard ones and `keep` stay open.
    """
    _forget()
    # Now, when nothing is left that would close them later, by numbers that others have then.
    for number in _numbers("/proc/self/fd") - _files - {0, 1, 2, *keep}:
        with contextlib.suppress(OSError):
            os.close(number)
    os.environ.clear()
    os.environ.update(_added | dict(environment))
    _streams(unbuffered=bool(environment.get("PYTHONUNBUFFERED")))
    _watch_exits()
    sys.path[:] = [p for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p] + _paths
    sys.orig_argv = [sys.executable, *argv]
    # What it starts is forked as well.
    subprocess.Popen._execute_child = _execute_child  # pyright: ignore[reportAttributeAccessIssue]
    code = 1
    try:
        code = _run(list(argv))
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
        code = _flush() or code
        # What the script held ends; taking torch apart, which lasts, is left out.
        vars(sys.modules["__main__"]).clear()
        gc.collect()
        _flush()
    finally:
        os._exit(code & 0xFF)


def _forget() -> None:
    """What is left of the process that this one was forked from."""
    for function in _registered:
        atexit.unregister(function)
    _registered.clear()
    for finalizer in [*weakref.finalize._registry]:  # pyright: ignore[reportAttributeAccessIssue]
        if finalizer not in _finalizers:
            finalizer.detach()
    for name in sys.modules.keys() - _modules.keys():
        del sys.modules[name]
    sys.modules.update(_modules)
    sys.meta_path[:] = [_Ready(), *(f for f in sys.meta_path if not isinstance(f, _Ready))]
    warnings.filters[:] = _filters  # pyright: ignore[reportIndexIssue]
    tempfile.tempdir = None  # that of another environment
    sys.excepthook, threading.excepthook = sys.__excepthook__, threading.__excepthook__
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    gc.collect()


def _streams(*, unbuffered: bool) -> None:
    def opened(number: int, errors: str, *, lines: bool) -> io.TextIOWrapper:
        raw = open(number, "wb", 0, closefd=False)  # noqa: SIM115 - for as long as the process lives
        return io.TextIOWrapper(
            raw if unbuffered else io.BufferedWriter(raw), "utf-8", errors, write_through=unbuffered,
            line_buffering=lines or os.isatty(number),
        )  # fmt: skip

    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115 - as above
    sys.stdout = sys.__stdout__ = opened(1, "strict", lines=False)
    sys.stderr = sys.__stderr__ = opened(2, "backslashreplace", lines=True)


def _watch_exits() -> None:
    register = atexit.register

    def registered(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        _registered.append(function)
        return register(function, *args, **kwargs)

    atexit.register = registered


def _run(argv: list[str]) -> int:
    """The script; the exit code."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main).update(__builtins__=sys.modules["builtins"], __spec__=None)
    try:
        if argv[0] == "-m":
            sys.path.insert(0, str(Path.cwd()))
            sys.argv = ["-m", *argv[2:]]
            runpy._run_module_as_main(argv[1])  # pyright: ignore[reportAttributeAccessIssue]
        elif argv[0] == "-c":
            sys.path.insert(0, "")
            sys.argv = ["-c", *argv[2:]]
            exec(compile(argv[1], "<string>", "exec"), vars(main))
        else:
            sys.path.insert(0, str(Path(argv[0]).resolve().parent))
            sys.argv = argv
            vars(main)["__file__"] = str(Path(argv[0]).absolute())
            exec(compile(Path(argv[0]).read_bytes(), vars(main)["__file__"], "exec"), vars(main))
    except BaseException as problem:  # noqa: BLE001 - as the interpreter does
        # The first frame, of this module, is none of the script.
        problem.__traceback__ = problem.__traceback__ and problem.__traceback__.tb_next
        return _told(problem)
    return 0


def _told(problem: BaseException) -> int:
    """What the interpreter says and ends with after this."""
    if isinstance(problem, SystemExit):
        if isinstance(problem.code, int) or problem.code is None:
            return problem.code or 0
        print(problem.code, file=sys.stderr)
        return 1
    try:
        sys.excepthook(type(problem), problem, problem.__traceback__)
    except SystemExit as ended:
        return _told(ended)
    if isinstance(problem, KeyboardInterrupt):
        _flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return 1


def _flush() -> int:
    code = 0
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError) as problem:
            if not getattr(stream, "closed", True):
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.write(f"Exception ignored in: {stream!r}\n{problem!r}\n")
                code = 120
    return code


def _numbers(folder: str) -> set[int]:
    listed = [*Path(folder).iterdir()]
    return {int(path.name) for path in listed if path.exists()}  # the folder was open itself


def _execute_child(popen: Any, *given: Any) -> None:
    """Of `subprocess.Popen`: start the process."""
    asked = dict(zip(_ARGUMENTS, (popen, *given), strict=True))
    environment = dict(os.environ if asked["env"] is None else asked["env"])
    words = [*map(os.fspath, asked["args"])] if isinstance(asked["args"], (list, tuple)) else [""]
    plain = asked["close_fds"] and not any(
        asked[n] for n in ("shell", "executable", "gid", "gids", "uid")
    )
    forks = plain and words[0] == sys.executable and startable(words[1:], environment)
    # Torch is as it was imported, and no thread holds a lock.
    if not forks or "torch" in sys.modules or len(_numbers("/proc/self/task")) > 1:
        _popen(popen, *given)
        return
    if asked["cwd"] is not None and not Path(asked["cwd"]).is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), asked["cwd"])
    sys.stdout.flush()
    sys.stderr.flush()
    settled, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _settle(asked)
            os.close(told)
        except BaseException:  # noqa: BLE001 - of two processes, this one must not go on
            traceback.print_exc()
            os._exit(255)
        become(words[1:], environment, [*map(int, asked["pass_fds"])])
    os.close(told)
    os.read(settled, 1)  # as `Popen` waits until the program has begun
    os.close(settled)
    popen.pid, popen._child_created = pid, True
    popen._close_pipe_fds(*(asked[name] for name in _PIPES))


_ARGUMENTS = tuple(inspect.signature(_popen).parameters)
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def _settle(asked: Mapping[str, Any]) -> None:
    """Files, folder and group that `Popen` was asked for."""
    files = [asked["p2cread"], asked["c2pwrite"], asked["errwrite"]]
    for number, file in enumerate([os.dup(file) if 0 <= file < 3 else file for file in files]):
        if file >= 0:
            os.dup2(file, number)
    if asked["cwd"] is not None:
        os.chdir(asked["cwd"])
    if asked["start_new_session"]:
        os.setsid()
    if asked["process_group"] >= 0:
        os.setpgid(0, asked["process_group"])
    if asked["preexec_fn"] is not None:
        asked["preexec_fn"]()
