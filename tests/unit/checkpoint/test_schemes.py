"""One conformance test for all redundancy schemes, and the division of nodes into sets."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fivefold.checkpoint.schemes import (
    SCHEMES,
    CodedPiece,
    Scheme,
    Term,
    carry_out,
    clip,
    reads,
    scheme_named,
    sets_of,
)
from fivefold.errors import Unrecoverable, UsageError

schemes = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=list(SCHEMES))
lengths_of_a_set = st.lists(st.integers(0, 70), min_size=2, max_size=6)
BLOCK_BYTES = 8


class Disks:
    """What the members of a set have: data and redundancy; what is lost cannot be read."""

    def __init__(self, scheme: Scheme, lengths: list[int]) -> None:
        draw = random.Random(repr(lengths))
        self.data: dict[int, bytes] = {i: draw.randbytes(n) for i, n in enumerate(lengths)}
        self.redundancy: dict[int, bytes] = {}
        self.redundancy |= {i: self.made(scheme.recipe(lengths, i)) for i in range(len(lengths))}

    def read(self, term: Term, length: int) -> bytes:
        kept = self.data if term.of == "data" else self.redundancy
        return kept[term.member][term.start : term.start + length]

    def made(self, pieces: list[CodedPiece]) -> bytes:
        made = bytearray()
        carry_out(pieces, self.read, made.extend, BLOCK_BYTES)
        return bytes(made)


def members_of(scheme: Scheme, lengths: list[int]) -> list[int]:
    return lengths if scheme.least > 1 else lengths[:1]


@schemes
@given(lengths_of_a_set)
@example([0, 0])
@example([0, 1])
@example([17, 0, 0])
@example([8, 16, 24])
@example([1, 70, 3, 70])
def test_every_tolerated_loss_is_rebuilt(scheme: Scheme, lengths: list[int]) -> None:
    lengths = members_of(scheme, lengths)
    n = len(lengths)
    for count in range(1, scheme.tolerates(n) + 1):
        for lost in itertools.combinations(range(n), count):
            disks = Disks(scheme, lengths)
            expected = {m: disks.data.pop(m) for m in lost}
            for member in lost:
                disks.redundancy.pop(member)
            for wanted in lost:
                assert disks.made(scheme.rebuild(lengths, lost, wanted)) == expected[wanted]


@schemes
@given(lengths_of_a_set, st.sets(st.integers(0, 5), min_size=1), st.sets(st.integers(0, 5)))
def test_any_loss_is_rebuilt_from_what_is_there_or_refused(
    scheme: Scheme, lengths: list[int], lost: set[int], bare: set[int]
) -> None:
    lengths = members_of(scheme, lengths)
    lost, bare = ({m for m in who if m < len(lengths)} for who in (lost, bare))
    disks = Disks(scheme, lengths)
    expected = {m: disks.data.pop(m) for m in lost}
    for member in bare:
        disks.redundancy.pop(member)
    for wanted in lost:
        try:
            pieces = scheme.rebuild(lengths, lost, wanted, bare)
        except Unrecoverable:
            continue
        assert disks.made(pieces) == expected[wanted]


@given(lengths_of_a_set)
def test_redundancy_of_xor_is_one_share_of_the_longest_member(lengths: list[int]) -> None:
    share = -(-max(lengths) // (len(lengths) - 1))
    kept = [len(r) for r in Disks(SCHEMES["xor"], lengths).redundancy.values()]
    assert max(kept) <= share
    if len(set(lengths)) == 1 and lengths[0] % (len(lengths) - 1) == 0:
        assert kept == [share] * len(lengths)


def test_a_partner_keeps_its_left_neighbour() -> None:
    disks = Disks(SCHEMES["partner"], [5, 0, 9])
    assert disks.redundancy == {0: disks.data[2], 1: disks.data[0], 2: b""}


def test_partners_survive_losses_that_are_not_neighbours() -> None:
    assert SCHEMES["partner"].rebuild([4] * 4, {0, 2}, 2) == [
        CodedPiece(4, (Term(3, "redundancy", 0),))
    ]
    with pytest.raises(
        Unrecoverable, match="member 2 of the set is lost, and so is its copy at member 3"
    ):
        SCHEMES["partner"].rebuild([4] * 4, {2, 3}, 2)


def test_xor_refuses_two_losses() -> None:
    with pytest.raises(Unrecoverable, match="member 0 of the set is lost, and so is what member 2"):
        SCHEMES["xor"].rebuild([8] * 4, {0, 2}, 0)


def test_xor_needs_no_redundancy_that_protects_nothing_of_the_lost_member() -> None:
    # Three bytes of member 0 lie in the parity of member 1; those of 2 and 3 hold nothing of it.
    assert len(SCHEMES["xor"].rebuild([3, 9, 9, 9], {0}, 0, bare={0, 2, 3})) == 1


def test_single_rebuilds_nothing() -> None:
    with pytest.raises(Unrecoverable, match="single"):
        SCHEMES["single"].rebuild([3], {0}, 0)


@given(lengths_of_a_set, st.integers(0, 80), st.integers(0, 80))
def test_a_part_of_the_pieces_makes_that_part(lengths: list[int], start: int, stop: int) -> None:
    scheme = SCHEMES["xor"]
    disks = Disks(scheme, lengths)
    pieces = scheme.rebuild(lengths, {0}, 0)
    assert disks.made(clip(pieces, start, stop)) == disks.made(pieces)[start:stop]


@given(lengths_of_a_set)
def test_reads_are_told_in_advance(lengths: list[int]) -> None:
    pieces = SCHEMES["xor"].rebuild(lengths, {1}, 1)
    disks = Disks(SCHEMES["xor"], lengths)
    seen: list[tuple[Term, int]] = []

    def read(term: Term, length: int) -> bytes:
        seen.append((term, length))
        return disks.read(term, length)

    carry_out(pieces, read, lambda _: None, BLOCK_BYTES)
    assert seen == list(reads(pieces, BLOCK_BYTES))


# --- sets -----------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=20), st.integers(2, 9))
def test_sets_hold_every_member_once_and_no_domain_twice(domains: list[str], size: int) -> None:
    try:
        sets = sets_of(domains, "xor", size)
    except UsageError:
        assert len(set(domains)) == 1 or max(map(domains.count, domains)) * 2 > len(domains)
        return
    assert sorted(itertools.chain(*sets)) == list(range(len(domains)))
    for members in sets:
        assert len(members) >= 2
        assert len({domains[m] for m in members}) == len(members)
        assert len(members) <= max(size, 3)


def test_nodes_that_are_alone_in_their_domain_are_dealt_out_evenly() -> None:
    assert [len(s) for s in sets_of([f"n{i:02}" for i in range(10)], "xor", 8)] == [5, 5]
    assert sets_of(["a", "b", "c"], "partner", 2) == ((0, 1, 2),)


def test_single_needs_no_sets() -> None:
    assert sets_of(["a", "a"], "single", 8) == ((0,), (1,))


@pytest.mark.parametrize(
    ("domains", "scheme", "size", "message"),
    [
        (["a"], "xor", 8, "needs 2 nodes that protect each other, and only 1 takes part.*'single'"),
        (["a", "b"], "xor", 1, "set_size is 1; scheme xor needs 2 or more"),
        (["r1", "r1", "r2"], "xor", 8, "2 of 3 nodes are in failure domain 'r1'.*spread"),
        (["a", "b"], "raid", 8, "no redundancy scheme 'raid'; valid: single, partner, xor"),
    ],
)
def test_what_cannot_be_protected_is_refused_with_the_remedy(
    domains: list[str], scheme: str, size: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        sets_of(domains, scheme, size)


def test_names() -> None:
    assert [scheme_named(name).name for name in SCHEMES] == ["single", "partner", "xor"]
