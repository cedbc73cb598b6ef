"""What is measured between nodes: which nodes, operations, sizes and contenders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "ALONE", "BY_MPI", "COMPARED", "CONTENDERS", "KIB", "MIB", "MPI_ALONE", "ONE", "OPERATIONS", "OWN",
    "PARTS", "REDUCER", "Part",
]  # fmt: skip

KIB, MIB = 1 << 10, 1 << 20
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
COMPARED = ("allreduce", "allgather", "reduce-scatter", "alltoall", "bcast")
CONTENDERS = ("fivefold", "gloo", "sockets")


@dataclass(frozen=True)
class Part:
    """Nodes, and what is moved between them."""

    gbit_per_s: float
    ranks_per_node: int = 1
    sizes: Sequence[int] = (4, 16 * KIB, 256 * KIB, 1 * MIB, 16 * MIB)
    operations: Sequence[str] = OPERATIONS
    nets: Sequence[str] = ()
    """of which DistributedDataParallel makes steps instead"""
    interfaces: int = 1
    """of each node; of several all are measured beside the first alone"""
    dtype: str = "float32"
    """of bfloat16 parts of nodes that are not rounded are measured beside those that are"""
    nodes: int = 2
    against: Sequence[str] = ()
    """contenders of `fivefold bench`, which then measures; operations have its names"""
    limit_s: float = 900.0
    mpi: str = ""
    """which starts two ranks of this machine and carries between them, beside TCP and itself"""


PARTS = {
    "slow": Part(1.0),
    "fast": Part(10.0, sizes=(4, 16 * KIB, 256 * KIB, 1 * MIB, 16 * MIB, 64 * MIB)),
    "pairs": Part(1.0, 2, operations=("all_reduce", "all_gather")),
    "steps": Part(1.0, 2, nets=("resnet18", "resnet50")),
    "interfaces": Part(1.0, sizes=(16 * KIB, 1 * MIB, 16 * MIB), interfaces=2),
    "halves": Part(
        1.0,
        2,
        operations=("all_reduce", "reduce_scatter"),
        sizes=(16 * KIB, 1 * MIB, 16 * MIB),
        dtype="bfloat16",
    ),
    "mpi": Part(1.0, operations=COMPARED, sizes=(4, 4 * MIB), against=("openmpi", "mpich")),
    "four": Part(
        1.0,
        operations=("allreduce", "alltoall"),
        sizes=(4, 1 * MIB),
        nodes=4,
        against=("gloo", "openmpi"),
    ),
    "eight": Part(
        1.0, 2, operations=("allreduce",), sizes=(4, 1 * MIB), nodes=4, against=("gloo",)
    ),
    **{
        f"choices-{count}": Part(
            1.0,
            operations=("allreduce", "allgather"),
            sizes=(4, 16 * KIB),
            nodes=count,
            against=("fivefold-direct", "fivefold-doubling"),
        )
        for count in (3, 4, 8)
    },
    **{
        f"by-{mpi}": Part(0, operations=("all_reduce", "all_to_all", "broadcast"), mpi=mpi)
        for mpi in ("openmpi", "mpich")
    },
    "tiny-by-mpi": Part(0, sizes=(4, 64 * KIB), operations=("all_reduce",), mpi="openmpi"),
    "tiny": Part(1.0, sizes=(4, 64 * KIB), operations=("all_reduce", "broadcast")),
    "tiny-steps": Part(1.0, nets=("resnet20",)),
    "tiny-mpi": Part(1.0, operations=COMPARED[:1], sizes=(4, 16), against=("gloo",)),
}
"""the last ones try the script"""
ALONE = "no exchange"
REDUCER = "own reducer"
ONE = "one interface"
OWN = "parts rounded"
BY_MPI, MPI_ALONE = "by MPI", "MPI alone"
