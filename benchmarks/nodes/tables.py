"""Figures of collectives between nodes as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from figures import Median, ratio, table
from parts import (
    ALONE,
    BY_MPI,
    CONTENDERS,
    KIB,
    MIB,
    MPI_ALONE,
    ONE,
    OWN,
    PARTS,
    REDUCER,
    Part,
)  # fmt: skip
from publishing import conditions

__all__ = ["crossing", "section"]


def crossing(operation: str, size_bytes: int, rank: int, per_node: int) -> tuple[int, int]:
    """Bytes that one node of two has to send and receive, by operation; `size_bytes` is the larger tensor."""
    half = size_bytes // 2
    if operation == "broadcast":
        return (size_bytes, 4) if rank == 0 else (4, size_bytes)
    if operation == "all_reduce":
        return size_bytes, size_bytes
    if operation == "all_to_all":
        return half * per_node, half * per_node
    return half, half


def section(result: dict[str, Any]) -> str:
    """A table of one part."""
    part, found = PARTS[result["part"]], result["found"]
    if part.against:
        title = f"{part.nodes} nodes x {part.ranks_per_node}, {part.gbit_per_s:g} Gbit/s"
        title = f"### {title}, {', '.join(part.against)}"
        return f"{title}\n\n{compared_table(part, found)}\n\n{conditions(result)}"
    if part.mpi:
        title = f"### Carried by {part.mpi}, through memory"
        return f"{title}\n\n{carried_table(part, found)}\n\n{conditions(result)}"
    title = f"2 nodes x {part.ranks_per_node}, {part.gbit_per_s:g} Gbit/s"
    rows: list[tuple[str, ...]] = []
    if part.dtype != "float32":
        title += f", {part.dtype}"
        return f"### {title}\n\n{halves_table(part, found)}\n\n{conditions(result)}"
    if part.interfaces > 1:
        title = f"2 nodes x 1, {part.interfaces} interfaces of {part.gbit_per_s:g} Gbit/s"
        return f"### {title}\n\n{interfaces_table(part, found)}\n\n{conditions(result)}"
    if part.nets:
        return f"### Steps, {title}\n\n{steps_table(part, found)}\n\n{conditions(result)}"
    for operation in part.operations:
        for size_bytes in part.sizes:
            ours, gloo, bare = (found[f"{operation} {size_bytes} {name}"] for name in CONTENDERS)
            line_s = (
                8
                * max(crossing(operation, size_bytes, 0, part.ranks_per_node))
                / part.gbit_per_s
                / 1e9
            )
            rows.append((
                operation, _size(size_bytes), _time(ours), _time(gloo), _time(bare),
                str(ratio(gloo, ours)), str(ratio(bare, ours)), f"{line_s / Median.of(ours).value:.2f}",
            ))  # fmt: skip
    header = (
        "operation", "bytes", "fivefold", "gloo", "sockets", "gloo / fivefold", "sockets / fivefold",
        "of the line",
    )  # fmt: skip
    return f"### {title}\n\n{table(header, rows)}\n\n{conditions(result)}"


def compared_table(part: Part, found: Mapping[str, Any]) -> str:
    """Of what `fivefold bench` found; sizes are those of one rank's contribution."""
    rows: list[tuple[str, ...]] = []
    for operation, results in found.items():
        for at, ours in enumerate(results["fivefold"]):
            times = {name: results[name][at]["rounds_s"] for name in ("fivefold", *part.against)}
            rows.append((
                operation, _size(ours["size_bytes"]), *map(_time, times.values()),
                *(str(ratio(times[name], times["fivefold"])) for name in part.against),
            ))  # fmt: skip
    ratios = (f"{name} / fivefold" for name in part.against)
    return table(("operation", "bytes", "fivefold", *part.against, *ratios), rows)


def steps_table(part: Part, found: Mapping[str, Sequence[float]]) -> str:
    """Of steps of training."""
    names = ("fivefold", REDUCER, "gloo", ALONE)
    rows = [
        (
            net, *map(_time, times), str(ratio(ours, gloo)), str(ratio(own, gloo)),
            str(ratio(alone, ours)),
        )
        for net in part.nets
        for times in [[found[f"{net} {name}"] for name in names]]
        for ours, own, gloo, alone in [times]
    ]  # fmt: skip
    ratios = ("fivefold / gloo", f"{REDUCER} / gloo", f"{ALONE} / fivefold")
    return table(("net", *names, *ratios), rows)


def interfaces_table(part: Part, found: Mapping[str, Sequence[float]]) -> str:
    """Of all interfaces beside one."""
    names = {"all": "fivefold", ONE: ONE, f"sockets, {ONE}": "sockets"}
    return _table_of(part, found, names, [(ONE, "all")])


def halves_table(part: Part, found: Mapping[str, Sequence[float]]) -> str:
    """Of sums of 16-bit floats, whose parts travel in 32 bits or are rounded on each node."""
    names = {name: name for name in ("fivefold", OWN, "gloo")}
    return _table_of(part, found, names, [(OWN, "fivefold"), ("gloo", "fivefold")])


def carried_table(part: Part, found: Mapping[str, Sequence[float]]) -> str:
    """Of streams of TCP beside those that MPI carries, and MPI itself."""
    names = {"by TCP": "fivefold", BY_MPI: BY_MPI, MPI_ALONE: MPI_ALONE}
    return _table_of(part, found, names, [("by TCP", BY_MPI), (MPI_ALONE, BY_MPI)])


def _table_of(
    part: Part,
    found: Mapping[str, Sequence[float]],
    names: Mapping[str, str],
    compared: Sequence[tuple[str, str]],
) -> str:
    """A row for each operation and size: times of contenders, by their titles, and ratios of some."""
    rows: list[tuple[str, ...]] = []
    for operation in part.operations:
        for size in part.sizes:
            times = {title: found[f"{operation} {size} {name}"] for title, name in names.items()}
            ratios = [str(ratio(times[a], times[b])) for a, b in compared]
            rows.append((operation, _size(size), *map(_time, times.values()), *ratios))
    return table(("operation", "bytes", *names, *(f"{a} / {b}" for a, b in compared)), rows)


def _size(size_bytes: int) -> str:
    if size_bytes >= MIB:
        return f"{size_bytes // MIB} MiB"
    return f"{size_bytes // KIB} KiB" if size_bytes >= KIB else f"{size_bytes} B"


def _time(seconds: Sequence[float]) -> str:
    middle = Median.of(seconds).value
    return f"{1e3 * middle:.1f} ms" if middle > 1e-3 else f"{1e6 * middle:.0f} us"
