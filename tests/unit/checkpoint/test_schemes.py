"""One conformance test for all redundancy schemes, and the division of nodes into sets."""

from __future__ import annotations

import copy
import itertools
import random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fivefold.checkpoint.galois import combine
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
    """As many as the scheme needs."""
    return lengths[:1] if scheme.least == 1 else (2 * lengths)[: max(len(lengths), scheme.least)]


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


# --- rs -------------------------------------------------------------------------------------------


def times(a: int, b: int) -> int:
    """Multiplied as polynomials, and reduced: the field of RAID-6, by its definition."""
    result = 0
    for bit in range(8):
        result ^= (a << bit) * (b >> bit & 1)
    for bit in range(14, 7, -1):
        result ^= (0x11D << bit - 8) * (result >> bit & 1)
    return result


@given(st.lists(st.integers(0, 40), min_size=4, max_size=9))
@example([5] * 4)
def test_rs_keeps_p_and_q_of_every_stripe(lengths: list[int]) -> None:
    disks, n = Disks(SCHEMES["rs"], lengths), len(lengths)
    size = -(-max(lengths) // (n - 2))
    p: list[bytes] = []
    q: list[bytes] = []
    for stripe in range(n):
        sums, weighted = bytearray(size), bytearray(size)
        weight = 1
        for k in range(n - 2):  # segment k of the member k + 2 further on
            data = disks.data[(stripe + 2 + k) % n][k * size : (k + 1) * size]
            for at, byte in enumerate(data):
                sums[at] ^= byte
                weighted[at] ^= times(weight, byte)
            weight = times(weight, 2)
        length = max(len(disks.data[(stripe + 2 + k) % n][k * size :][:size]) for k in range(n - 2))
        assert not any(sums[length:]) and not any(weighted[length:])
        p.append(bytes(sums[:length]))
        q.append(bytes(weighted[:length]))
    assert disks.redundancy == {i: p[i] + q[i - 1] for i in range(n)}
    if len(set(lengths)) == 1 and lengths[0] % (n - 2) == 0:
        assert {len(kept) for kept in disks.redundancy.values()} == {2 * size}


def losses(n: int, pair: tuple[int, int]) -> list[tuple[set[int], set[int]]]:
    """What a pair of members may have lost of data and of redundancy."""
    x, y = pair
    return [({x, y}, {x, y}), ({x}, {x, y}), ({x}, {y}), ({x, y}, set()), ({y}, {x})]


def rebuilt(disks: Disks, lengths: list[int], lost: set[int], bare: set[int]) -> None:
    """Without what is lost, the data of the lost is made as it was."""
    less = copy.copy(disks)
    less.data = {m: d for m, d in disks.data.items() if m not in lost}
    less.redundancy = {m: r for m, r in disks.redundancy.items() if m not in bare}
    for wanted in lost:
        pieces = SCHEMES["rs"].rebuild(lengths, lost, wanted, bare)
        assert less.made(pieces) == disks.data[wanted]


@pytest.mark.parametrize("n", [4, 5, 6, 7, 8, 11, 16])
def test_rs_rebuilds_all_pairs(n: int) -> None:
    draw = random.Random(n)
    for lengths in ([60] * n, [draw.choice([0, 1, 59, draw.randrange(90)]) for _ in range(n)]):
        disks = Disks(SCHEMES["rs"], lengths)
        for pair in itertools.combinations(range(n), 2):
            for lost, bare in losses(n, pair):
                rebuilt(disks, lengths, lost, bare)


def test_rs_takes_sets_as_large_as_the_field() -> None:
    n, full = SCHEMES["rs"].most, (0, 1, 102, 254)
    lengths = [n - 2 if member in full else 0 for member in range(n)]
    disks = Disks(SCHEMES["rs"], lengths)
    for pair in itertools.combinations(full, 2):
        rebuilt(disks, lengths, set(pair), set(pair))


@pytest.mark.parametrize("length", [0, 1, 7, 1 << 18, (1 << 18) + 1, (5 << 18) - 3])
def test_sums_of_products_are_those_of_bytes(length: int) -> None:
    """Long and short sources, and such that end anywhere in the strides that are computed at once."""
    draw = np.random.default_rng(length)
    table = np.array([[times(a, b) for b in range(256)] for a in range(256)], np.uint8)
    for coefficients in ([], [1], [2], [255, 1], [1, 1, 1], [0x8E, 3, 128, 77]):
        ends = [length, *(draw.integers(0, length + 1, 3).tolist())]
        data = [draw.integers(0, 256, end, np.uint8) for end in ends]
        expected, total = np.zeros(length, np.uint8), np.ones(length, np.uint8)
        for coefficient, one in zip(coefficients, data, strict=False):
            expected[: len(one)] ^= table[coefficient][one]
        combine([*zip(coefficients, data, strict=False)], total)
        assert total.tobytes() == expected.tobytes()


def test_rs_refuses_three_losses() -> None:
    for lost, bare in (({0, 2, 3}, None), ({0, 2}, {0, 2, 3}), ({0}, {2, 3})):
        with pytest.raises(
            Unrecoverable, match="members 0, 2, 3 of the set are lost or damaged: rs"
        ):
            SCHEMES["rs"].rebuild([9] * 5, lost, 0, bare)


def test_rs_needs_only_what_bears_on_the_lost_member() -> None:
    # Two bytes of member 0, of a segment each: in stripes 3 and 2 of 5, whose P and Q are at 2, 3 and 4.
    assert len(SCHEMES["rs"].rebuild([2, 3, 3, 3, 3], {0}, 0, bare={0, 1, 3})) == 2
    with pytest.raises(Unrecoverable, match="members 0, 2, 3 of the set"):
        SCHEMES["rs"].rebuild([2, 3, 3, 3, 3], {0}, 0, bare={0, 2, 3})


def test_single_rebuilds_nothing() -> None:
    with pytest.raises(Unrecoverable, match="single"):
        SCHEMES["single"].rebuild([3], {0}, 0)


coding = pytest.mark.parametrize("scheme", [SCHEMES["xor"], SCHEMES["rs"]], ids=["xor", "rs"])


@coding
@given(lengths_of_a_set, st.integers(0, 80), st.integers(0, 80))
def test_a_part_of_the_pieces_makes_that_part(
    scheme: Scheme, lengths: list[int], start: int, stop: int
) -> None:
    lengths = members_of(scheme, lengths)
    disks = Disks(scheme, lengths)
    pieces = scheme.rebuild(lengths, range(scheme.tolerates(len(lengths))), 0)
    assert disks.made(clip(pieces, start, stop)) == disks.made(pieces)[start:stop]


@coding
@given(lengths_of_a_set)
def test_reads_are_told_in_advance(scheme: Scheme, lengths: list[int]) -> None:
    lengths = members_of(scheme, lengths)
    pieces = scheme.rebuild(lengths, {1}, 1)
    disks = Disks(scheme, lengths)
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


def test_sets_of_rs_are_not_larger_than_it_can_be() -> None:
    hosts = [f"n{i}" for i in range(257)]
    assert sorted(len(s) for s in sets_of(hosts, "rs", 1000)) == [128, 129]
    assert [len(s) for s in sets_of(hosts, "xor", 1000)] == [257]
    assert sorted(len(s) for s in sets_of(hosts[:7], "rs", 4)) == [7]


def test_single_needs_no_sets() -> None:
    assert sets_of(["a", "a"], "single", 8) == ((0,), (1,))


@pytest.mark.parametrize(
    ("domains", "scheme", "size", "message"),
    [
        (["a"], "xor", 8, "needs 2 nodes that protect each other, and only 1 takes part.*'single'"),
        (["a", "b"], "xor", 1, "set_size is 1; scheme xor needs 2 or more"),
        (["r1", "r1", "r2"], "xor", 8, "2 of 3 nodes are in failure domain 'r1'.*spread"),
        (["a", "b"], "raid", 8, "no redundancy scheme 'raid'; valid: single, partner, xor, rs"),
        (
            ["a", "b", "c"],
            "rs",
            8,
            "needs 4 nodes.*only 3 take part.*'xor', which survives the loss of 1",
        ),
        (list("abcd"), "rs", 3, "set_size is 3; scheme rs needs 4 or more"),
        (list("aabbcc"), "rs", 8, "2 of 6 nodes are in failure domain 'c'.*or use scheme 'xor'"),
    ],
)
def test_what_cannot_be_protected_is_refused_with_the_remedy(
    domains: list[str], scheme: str, size: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        sets_of(domains, scheme, size)


def test_names() -> None:
    assert [scheme_named(name).name for name in SCHEMES] == ["single", "partner", "xor", "rs"]
