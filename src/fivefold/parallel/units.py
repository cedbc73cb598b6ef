"""Which modules of a net gather their parameters together, each for the time that it computes.

From the net downwards, what holds more than an eighth of all parameters is taken apart, and what is smaller
is a unit; so at most about a quarter is whole at a time, the next unit being gathered while one computes.

    net 100 ──┬── stem 1                                 small: stays with the net
              ├── layer1 9                      unit
              ├── layer2 40 ──┬── block 12      unit
              │               └── ...
              └── head 8                        unit
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import Tensor, nn

__all__ = ["units_of"]

PARTS = 8
LEAST_BYTES = 1 << 16
"""What is smaller is not worth a message of its own"""

_LISTS = (nn.ModuleList, nn.ModuleDict)
"""modules that are not called"""


def units_of(net: nn.Module) -> list[nn.Module]:
    """The modules of `net` that gather on their own; what belongs to none of them is the net's."""
    limit = max(_bytes(net) // PARTS, LEAST_BYTES)
    owners = Counter(id(p) for m in net.modules() for p in m.parameters(recurse=False))
    return list(dict.fromkeys(_divided(net, limit, owners)))  # one may stand at two places


def _divided(module: nn.Module, limit: int, owners: Counter[int]) -> Iterator[nn.Module]:
    for child in module.children():
        if _bytes(child) < LEAST_BYTES:
            continue
        small = _bytes(child) <= limit or not _divisible(child)
        if small and not isinstance(child, _LISTS) and _closed(child, owners):
            yield child
        elif _divisible(child):
            yield from _divided(child, limit, owners)


def _divisible(module: nn.Module) -> bool:
    """Whether the children are called as modules; torch's attention, say, takes the weights of its own."""
    ours = not type(module).__module__.startswith("torch.nn.")
    return ours or isinstance(module, (nn.Sequential, *_LISTS))


def _closed(module: nn.Module, owners: Counter[int]) -> bool:
    """Whether no parameter in it is used by a module outside as well."""
    inside = Counter(id(p) for m in module.modules() for p in m.parameters(recurse=False))
    return all(owners[key] == count for key, count in inside.items())


def _bytes(module: nn.Module) -> int:
    return sum(map(_size, module.parameters()))


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
