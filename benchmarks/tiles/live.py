"""Bytes of the tensors that are alive, counted from outside: alike for plain torch and for Fivefold.

Every operation, of forward, of backward and of exchanges, passes through the mode. A storage counts from the
operation that makes it to its end, once however many tensors view it. What existed before does not count:
parameters, buffers, gradients that are only added to, and the images. Gradients that a step makes anew, as
stages do, are left out for the parameters that are named.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary


class Live(TorchDispatchMode):
    """Counts while it is entered."""

    def __init__(self, without: Sequence[nn.Parameter] = ()) -> None:
        super().__init__()
        self._without = without
        self.bytes = self.peak_bytes = 0
        self.saved_bytes = 0
        """alive when backward begins: what autograd saved, and what it was called on"""
        self._known = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        for storage in _storages((args, kwargs)):
            self._known.setdefault(storage, False)  # made before, or counted already
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage not in self._known:
                self._known[storage] = True
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    @contextlib.contextmanager
    def noting_backward(self) -> Generator[None]:
        """Note `saved_bytes` whenever backward begins."""
        backward = torch.autograd.backward

        def noting(*args: Any, **kwargs: Any) -> None:
            self.saved_bytes = max(self.saved_bytes, self._counted())
            backward(*args, **kwargs)

        with mock.patch.object(torch.autograd, "backward", noting):
            yield

    def _counted(self) -> int:
        grads = [p.grad for p in self._without if p.grad is not None]
        made = {id(s): s.nbytes() for s in _storages(grads) if self._known.get(s)}
        return self.bytes - sum(made.values())

    def _add(self, size: int) -> None:
        self.bytes += size
        if size > 0:
            self.peak_bytes = max(self.peak_bytes, self._counted())


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_iter(tree) if isinstance(leaf, Tensor)]
