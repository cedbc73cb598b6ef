"""Redundancy: what a member of a set keeps so that the data of others can be rebuilt.

A scheme is arithmetic alone: it says which bytes of which members combine to what. `carry_out` does it,
block by block, wherever the bytes come from. Members of a set are numbered 0.. here; data of unequal length
is thought to go on in zeros.

    partner, 4 members              xor, 4 members: each member's data in 3 segments, `+` is exclusive or

    member   0    1    2    3       member     0       1       2       3
    data     A    B    C    D       data       A0      B0      C0      D0
    keeps    D    A    B    C                  A1      B1      C1      D1
                                               A2      B2      C2      D2
                                    keeps   B0+C0+D0 A0+C1+D1 A1+B1+D2 A2+B2+C2

The layout of xor is the rotated parity of SCR's redset (Moody et al., SC 2010, section IV-C), without its
headers: lengths and digests stand in the manifest.

    rs, 5 members: of every stripe one member keeps P, the sum of the data, and the next one Q, the sum with
    weights in GF(2**8); segment k of any member has the weight 2**k

    member       0     1     2     3     4
    stripe 0     P     Q    1 C0  2 D1  4 E2       as of RAID-6: what is lost of a stripe with two members are
    stripe 1    4 A2   P     Q    1 D0  2 E1       at most two unknowns in two equations (H. P. Anvin, "The
    stripe 2    2 A1  4 B2   P     Q    1 E0       mathematics of RAID-6")
    stripe 3    1 A0  2 B1  4 C2   P     Q
    stripe 4     Q    1 B0  2 C1  4 D2   P
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np

from fivefold.checkpoint.files import Bytes
from fivefold.checkpoint.galois import Source, combine, inverse, power, product
from fivefold.errors import Unrecoverable, UsageError, suggest

__all__ = [
    "BLOCK_BYTES",
    "SCHEMES",
    "CodedPiece",
    "Scheme",
    "Term",
    "carry_out",
    "clip",
    "reads",
    "scheme_named",
    "sets_of",
]

BLOCK_BYTES = 256 * 1024
"""How much is read at once from a member."""


@dataclass(frozen=True)
class Term:
    """A stretch of bytes that a member has; how long it is, says the piece."""

    member: int
    """position in the set"""
    of: Literal["data", "redundancy"]
    start: int
    """first byte; what lies beyond the end is zero"""
    coefficient: int = 1
    """factor in GF(2**8)"""


@dataclass(frozen=True)
class CodedPiece:
    """`length` bytes that are the sum in GF(2**8) of [start, start + length) of every term."""

    length: int
    terms: tuple[Term, ...]


class Scheme(Protocol):
    """One way to protect the members of a set. All implementations run the same conformance test."""

    @property
    def name(self) -> str:
        """As in the plan and in manifests."""
        ...

    @property
    def least(self) -> int:
        """The fewest members of a set."""
        ...

    @property
    def most(self) -> int:
        """The most members of a set."""
        ...

    def tolerates(self, members: int) -> int:
        """How many members of a set of `members` may be lost, whichever they are."""
        ...

    def recipe(self, lengths: Sequence[int], member: int) -> list[CodedPiece]:
        """What `member` keeps: consecutive pieces of its redundancy file. `lengths` of data in bytes."""
        ...

    def rebuild(
        self,
        lengths: Sequence[int],
        lost: Collection[int],
        wanted: int,
        bare: Collection[int] | None = None,
    ) -> list[CodedPiece]:
        """The data of `wanted`, one of the lost, as consecutive pieces.

        Args:
            lengths: of the members' data, in bytes.
            lost: members whose data cannot be read.
            wanted: the member to rebuild.
            bare: members whose redundancy cannot be read; those of `lost` unless told.

        Raises:
            Unrecoverable: too much is lost.
        """
        ...


@dataclass(frozen=True)
class _Named:
    name: str
    least: int
    tolerated: int
    most: int = sys.maxsize

    def tolerates(self, members: int) -> int:
        del members
        return self.tolerated


class _Single(_Named):
    def recipe(self, lengths: Sequence[int], member: int) -> list[CodedPiece]:
        del lengths, member
        return []

    def rebuild(
        self,
        lengths: Sequence[int],
        lost: Collection[int],
        wanted: int,
        bare: Collection[int] | None = None,
    ) -> list[CodedPiece]:
        del lost, bare
        if lengths[wanted] == 0:
            return []
        raise Unrecoverable(
            f"{_nth(wanted)} is lost, and scheme single keeps nothing of it elsewhere"
        )


class _Partner(_Named):
    def recipe(self, lengths: Sequence[int], member: int) -> list[CodedPiece]:
        left = (member - 1) % len(lengths)
        return _pieces([CodedPiece(lengths[left], (Term(left, "data", 0),))])

    def rebuild(
        self,
        lengths: Sequence[int],
        lost: Collection[int],
        wanted: int,
        bare: Collection[int] | None = None,
    ) -> list[CodedPiece]:
        right = (wanted + 1) % len(lengths)
        if lengths[wanted] and right in (lost if bare is None else bare):
            raise Unrecoverable(f"{_nth(wanted)} is lost, and so is its copy at {_nth(right)}")
        return _pieces([CodedPiece(lengths[wanted], (Term(right, "redundancy", 0),))])


class _Xor(_Named):
    def recipe(self, lengths: Sequence[int], member: int) -> list[CodedPiece]:
        terms = _others(lengths, member, without=member)
        segment = _segment_bytes(lengths)
        # Where all others have ended there are only zeros, which need no place.
        longest = max((lengths[term.member] - term.start for term in terms), default=0)
        return _pieces([CodedPiece(min(segment, longest), terms)])

    def rebuild(
        self,
        lengths: Sequence[int],
        lost: Collection[int],
        wanted: int,
        bare: Collection[int] | None = None,
    ) -> list[CodedPiece]:
        bare = lost if bare is None else bare
        segment = _segment_bytes(lengths)
        pieces: list[CodedPiece] = []
        for number in range(len(lengths) - 1):
            keeper = number if number < wanted else number + 1
            length = min(segment, lengths[wanted] - number * segment)
            if length <= 0:
                break
            terms = (Term(keeper, "redundancy", 0), *_others(lengths, keeper, without=wanted))
            missing = {term.member for term in terms[1:]} & set(lost)
            if missing or keeper in bare:
                raise Unrecoverable(
                    f"{_nth(wanted)} is lost, and so is what {_nth(min(missing, default=keeper))} "
                    f"has for it: xor rebuilds one lost member of a set"
                )
            pieces.append(CodedPiece(length, terms))
        return pieces


class _ReedSolomon(_Named):
    def recipe(self, lengths: Sequence[int], member: int) -> list[CodedPiece]:
        before = (member - 1) % len(lengths)
        sums = tuple(replace(term, coefficient=1) for term in _stripe(lengths, member))
        return _pieces(
            [
                CodedPiece(_parity_bytes(lengths, member), sums),
                CodedPiece(_parity_bytes(lengths, before), _stripe(lengths, before)),
            ]
        )

    def rebuild(
        self,
        lengths: Sequence[int],
        lost: Collection[int],
        wanted: int,
        bare: Collection[int] | None = None,
    ) -> list[CodedPiece]:
        segment = _segment_bytes(lengths, 2)
        pieces: list[CodedPiece] = []
        for number in range(len(lengths) - 2):
            length = min(segment, lengths[wanted] - number * segment)
            if length <= 0:
                break
            stripe = (wanted - 2 - number) % len(lengths)
            terms = _solved(lengths, stripe, wanted, lost, lost if bare is None else bare)
            pieces.append(CodedPiece(length, terms))
        return pieces


def _stripe(lengths: Sequence[int], stripe: int) -> tuple[Term, ...]:
    """The data of a stripe, as far as there are bytes, with its weights in Q."""
    segment, count = _segment_bytes(lengths, 2), len(lengths)
    terms = (
        Term((stripe + 2 + number) % count, "data", number * segment, power(number))
        for number in range(count - 2)
    )
    return tuple(term for term in terms if term.start < lengths[term.member])


def _parity_bytes(lengths: Sequence[int], stripe: int) -> int:
    """How long P is, and Q: where all data have ended there are only zeros, which need no place."""
    ends = (lengths[term.member] - term.start for term in _stripe(lengths, stripe))
    return min(_segment_bytes(lengths, 2), max(ends, default=0))


def _solved(
    lengths: Sequence[int], stripe: int, wanted: int, lost: Collection[int], bare: Collection[int]
) -> tuple[Term, ...]:
    """The data of `wanted` in a stripe, as u P + v Q + the data of others, each times u + v its weight."""
    after = (stripe + 1) % len(lengths)  # keeps its own P, and then this Q
    data = _stripe(lengths, stripe)
    own = next(term.coefficient for term in data if term.member == wanted)
    others = [term for term in data if term.member in lost and term.member != wanted]
    gone = [member for member in (stripe, after) if member in bare]
    if not others and stripe not in gone:
        u, v = 1, 0
    elif not others and after not in gone:
        u, v = 0, inverse(own)
    elif len(others) == 1 and not gone:
        [other] = others
        v = inverse(own ^ other.coefficient)
        u = product(v, other.coefficient)
    else:
        missing = sorted({wanted, *(term.member for term in others), *gone})
        raise Unrecoverable(
            f"members {', '.join(map(str, missing))} of the set are lost or damaged: rs rebuilds two at most"
        )
    terms = (
        Term(stripe, "redundancy", 0, u),
        Term(after, "redundancy", _parity_bytes(lengths, after), v),
        *(
            replace(term, coefficient=u ^ product(v, term.coefficient))
            for term in data
            if term.member != wanted and term not in others
        ),
    )
    return tuple(term for term in terms if term.coefficient)


def _nth(position: int) -> str:
    # Numbers count from 0 everywhere, as ranks do.
    return f"member {position} of the set"


def _segment_bytes(lengths: Sequence[int], parities: int = 1) -> int:
    return -(-max(lengths) // (len(lengths) - parities))


def _others(lengths: Sequence[int], keeper: int, without: int) -> tuple[Term, ...]:
    """The segments in the parity of `keeper`, as far as there are bytes, except that of `without`."""
    segment = _segment_bytes(lengths)
    terms = (
        Term(member, "data", (keeper if keeper < member else keeper - 1) * segment)
        for member in range(len(lengths))
        if member not in (keeper, without)
    )
    return tuple(term for term in terms if term.start < lengths[term.member])


def _pieces(pieces: list[CodedPiece]) -> list[CodedPiece]:
    return [piece for piece in pieces if piece.length > 0]


SCHEMES: dict[str, Scheme] = {
    "single": _Single("single", least=1, tolerated=0),
    "partner": _Partner("partner", least=2, tolerated=1),
    "xor": _Xor("xor", least=2, tolerated=1),
    "rs": _ReedSolomon("rs", least=4, tolerated=2, most=255),
}
"""By name."""


def scheme_named(name: str) -> Scheme:
    """The scheme of that name. Raises `UsageError` listing the valid ones."""
    if name not in SCHEMES:
        raise UsageError(f"there is no redundancy scheme {name!r}{suggest(name, SCHEMES)}")
    return SCHEMES[name]


# --- arithmetic on bytes --------------------------------------------------------------------------


def clip(pieces: Sequence[CodedPiece], start: int, stop: int) -> list[CodedPiece]:
    """Bytes [start, stop) of what the pieces make one after the other."""
    clipped: list[CodedPiece] = []
    at = 0
    for piece in pieces:
        first, last = max(start - at, 0), min(stop - at, piece.length)
        if first < last:
            clipped.append(CodedPiece(last - first, _later(piece.terms, first)))
        at += piece.length
    return clipped


def reads(
    pieces: Sequence[CodedPiece], block_bytes: int = BLOCK_BYTES
) -> Iterator[tuple[Term, int]]:
    """What `carry_out` will read, in its order: so that it can be fetched ahead."""
    for piece in pieces:
        for offset in range(0, piece.length, block_bytes):
            length = min(block_bytes, piece.length - offset)
            for term in _later(piece.terms, offset):
                yield term, length


def carry_out(
    pieces: Sequence[CodedPiece],
    read: Callable[[Term, int], Bytes],
    write: Callable[[Bytes], object],
    block_bytes: int = BLOCK_BYTES,
) -> int:
    """Make the bytes that `pieces` describe, block after block. Returns how many were read.

    Args:
        pieces: made one after the other.
        read: gives `length` bytes of a term from its start on, or fewer where its member's bytes end.
        write: takes the next bytes; they are overwritten when it has returned.
        block_bytes: bytes per block.
    """
    total = 0
    room = np.empty(block_bytes, np.uint8)
    for piece in pieces:
        for offset in range(0, piece.length, block_bytes):
            block = room[: min(block_bytes, piece.length - offset)]
            sources: list[Source] = []
            for term in _later(piece.terms, offset):
                source = np.frombuffer(read(term, len(block)), np.uint8)[: len(block)]
                sources.append((term.coefficient, source))
            total += sum(len(source) for _, source in sources)
            match sources:
                case [(1, whole)] if len(whole) == len(block):
                    write(whole.data)  # a copy: nothing to compute
                case _:
                    combine(sources, block)
                    write(block.data)
    return total


def _later(terms: tuple[Term, ...], offset: int) -> tuple[Term, ...]:
    return tuple(replace(term, start=term.start + offset) for term in terms) if offset else terms


# --- who protects whom ----------------------------------------------------------------------------


def sets_of(domains: Sequence[str], scheme: str, size: int) -> tuple[tuple[int, ...], ...]:
    """Divide members into sets, none of which has two members of one failure domain.

    Args:
        domains: of each member: what fails together, a rack or a power supply; the host where nothing
            larger is known.
        scheme: its name.
        size: the most members of a set, as far as the scheme takes so many. A smaller set survives more
            losses and needs more storage. Exceeded only where too few members would be left over.

    Raises:
        UsageError: too few members or failure domains for the scheme, or no such scheme.

    >>> sets_of(["a", "b", "c", "d"], "xor", size=2)
    ((0, 2), (1, 3))
    """
    chosen = scheme_named(scheme)
    least = chosen.least
    if least == 1:
        return tuple((member,) for member in range(len(domains)))
    if size < least:
        raise UsageError(
            f"set_size is {size}; scheme {scheme} needs {least} or more nodes in a set"
        )
    if len(domains) < least:
        raise UsageError(
            f"scheme {scheme} needs {least} nodes that protect each other, and {_nodes(len(domains))}; "
            f"use more nodes, or {_strongest(len(domains))}"
        )
    # Dealt out domain by domain, like cards: the members of a domain go to different sets.
    count = min(-(-len(domains) // min(size, chosen.most)), len(domains) // least)
    crowd = max(list(domains).count(domain) for domain in set(domains))
    count = max(count, crowd)
    if len(domains) // count < least:
        fullest = max(set(domains), key=lambda domain: (list(domains).count(domain), domain))
        raise UsageError(
            f"{crowd} of {len(domains)} nodes are in failure domain {fullest!r}: scheme {scheme} cannot "
            f"give each of them partners elsewhere; spread the nodes over more domains, name smaller "
            f"domains, or use {_strongest(len(domains) // count)}"
        )
    order = sorted(range(len(domains)), key=lambda member: (domains[member], member))
    return tuple(sorted(tuple(sorted(order[first::count])) for first in range(count)))


def _strongest(members: int) -> str:
    """The scheme that survives most in sets of so few."""
    name, scheme = [item for item in SCHEMES.items() if item[1].least <= members][-1]
    if lost := scheme.tolerates(members):
        return f"scheme {name!r}, which survives the loss of {lost} of them"
    return f"scheme {name!r}, which keeps no redundancy"


def _nodes(count: int) -> str:
    return "only 1 takes part" if count == 1 else f"only {count} take part"
