"""Why ranks stand still, from states alone."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.trace.standstill import judge, listed, waiting
from fivefold.trace.states import (
    LinkProgress,
    PendingCall,
    RankGroup,
    RankState,
    from_json,
    to_json,
)

WORLD = RankGroup("all ranks", "0", (0, 1, 2))


def call(number: int, kind: str = "all_reduce", **other: object) -> PendingCall:
    told = {"size_bytes": 4096, "dtype": "float32", "group": WORLD, "since_s": 31.0, **other}
    return PendingCall(kind=kind, number=number, **told)  # type: ignore[arg-type]


def waits(rank: int, one: PendingCall, **other: object) -> RankState:
    told = {"phase": "backward", "since_s": 31.0, "open": (one,), "recent": (one,), **other}
    return RankState(rank, "a", 100 + rank, step=7, **told)  # type: ignore[arg-type]


def busy(rank: int, last: int, **other: object) -> RankState:
    told = {"phase": "load", "since_s": 31.0, "waits": False, "at": "reader.py:12 read (open)"}
    recent = tuple(call(n) for n in range(max(0, last - 7), last + 1))
    return RankState(rank, "a", 100 + rank, step=7, recent=recent, **{**told, **other})  # type: ignore[arg-type]


def test_the_rank_that_has_not_come_is_named_with_what_it_does_instead() -> None:
    states = {0: waits(0, call(5)), 1: waits(1, call(5)), 2: busy(2, 4)}
    still = judge(states, 0)
    assert still is not None
    assert (still.kind, still.waiting, still.missing) == ("hang", (0, 1), (2,))
    first, second, *_ = still.text.splitlines()
    assert first == (
        "ranks 0, 1 have waited 31 s in all_reduce number 5 of all ranks (4,096 bytes of float32) for rank 2"
    )
    assert second == "  rank 2 on a: step 7, load for 31 s at reader.py:12 read (open)"


def test_an_operation_that_is_over_but_not_noticed_keeps_nobody() -> None:
    over = call(3)
    late = replace(busy(2, 4), open=(over,))
    states = {
        r: replace(waits(r, call(5)), open=(over, call(5)), recent=(call(4), call(5)))
        for r in (0, 1)
    }
    states[2] = replace(late, waits=True)
    still = judge(states, 0)
    assert still is not None
    assert still.call.number == 5
    assert 2 in still.missing or still.kind == "mismatch"
    states[2] = late
    still = judge(states, 0)
    assert still is not None
    assert still.missing == (2,)
    assert waiting(states) == [0, 1]


def test_a_chain_of_waiting_leads_to_its_end() -> None:
    pair, other = RankGroup("pipe", "p", (0, 1)), RankGroup("data", "d", (1, 2))
    states = {
        0: waits(0, call(5, group=pair)),
        1: waits(1, call(9, group=other)),
        2: busy(2, 3),
    }
    still = judge(states, 0)
    assert still is not None
    assert still.missing == (2,)
    assert "for rank 2" in still.text


def test_links_over_which_ranks_that_have_come_wait_are_told() -> None:
    far = {0: (1, False, 2048), 1: (0, True, 4096), 2: (1, False, 0)}
    states = {
        rank: replace(
            waits(rank, call(5, transfer=LinkProgress(peer, sends, moved, 4096))),
            host=f"node{rank}",
        )
        for rank, (peer, sends, moved) in far.items()
    }
    assert all(from_json(to_json(state)) == state for state in states.values())
    still = judge(states, 0)
    assert still is not None
    assert (still.kind, still.missing) == ("hang", ())
    assert still.text.splitlines()[0].endswith(
        "; all ranks have asked for it: what goes from rank 1 on node1 to rank 0 on node0 (2,048 of 4,096 "
        "bytes), from rank 1 on node1 to rank 2 on node2 (0 of 4,096 bytes) does not arrive, or is slow"
    )
    assert still.fields()["states"][1]["transfer"] == {
        "peer": 0, "sends": True, "moved_bytes": 4096, "size_bytes": 4096,
    }  # fmt: skip


def test_ranks_that_wait_for_each_other_disagree() -> None:
    one, other = RankGroup("data", "d", (0, 1)), RankGroup("height", "h", (0, 1))
    states = {0: waits(0, call(5, group=one)), 1: waits(1, call(9, group=other))}
    still = judge(states, 0)
    assert still is not None
    assert still.kind == "mismatch"
    assert "each waits for another" in still.text


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (call(5, "barrier", size_bytes=0, dtype=""), "for barrier number 5"),
        (call(5, size_bytes=8192), "8,192 bytes of float32"),
        (call(5, dtype="bfloat16"), "4,096 bytes of bfloat16"),
    ],
)
def test_calls_that_do_not_belong_together_are_both_told(other: PendingCall, told: str) -> None:
    states = {0: waits(0, call(5)), 1: waits(1, other, at="train.py:9 main"), 2: waits(2, call(5))}
    still = judge(states, 0)
    assert still is not None
    assert (still.kind, still.missing) == ("mismatch", (1,))
    assert "rank 0 asks for all_reduce number 5 of all ranks (4,096 bytes of float32)" in still.text
    assert told in still.text
    assert "at train.py:9 main" in still.text


def test_another_root_is_a_mismatch_and_uneven_gathers_are_none() -> None:
    for kind, change, mismatch in (
        ("broadcast", {"peer": 1}, True), ("all_gather", {"size_bytes": 8}, False),
    ):  # fmt: skip
        own = call(5, kind, peer=0)
        states = {0: waits(0, own), 1: waits(1, replace(own, **change)), 2: busy(2, 4)}
        still = judge(states, 0)
        assert still is not None
        assert (still.kind == "mismatch") is mismatch


def test_a_dead_rank_is_told_as_dead_and_a_failed_one_is_not_to_blame() -> None:
    states = {0: waits(0, call(5)), 1: waits(1, call(5)), 2: busy(2, 4, condition="dead")}
    still = judge(states, 0)
    assert still is not None
    assert still.missing == (2,)
    assert "its process 102 is dead" in still.text
    states[1] = replace(waits(1, call(5)), condition="failed", open=())
    still = judge(states, 0)
    assert still is not None
    assert still.missing == (2,)


def test_a_stopped_rank_is_missing_even_if_it_asked() -> None:
    states = {0: waits(0, call(5)), 1: waits(1, call(5), condition="stopped by a signal")}
    still = judge(states, 0)
    assert still is not None
    assert still.missing == (1, 2)
    assert "stopped by a signal" in still.text
    assert "rank 2: nothing is known of it" in still.text


def test_when_all_have_come_it_is_the_network() -> None:
    states = {r: waits(r, call(5)) for r in range(3)}
    still = judge(states, 0)
    assert still is not None
    assert still.missing == ()
    assert "all ranks have asked for it" in still.text


def test_a_message_waits_for_its_peer() -> None:
    states = {
        0: waits(0, call(5, "receive", peer=2)), 1: waits(1, call(5)), 2: busy(2, 9)
    }  # fmt: skip
    still = judge(states, 0)
    assert still is not None
    assert still.missing == (2,)
    assert "from rank 2" in still.text


def test_who_waits_for_nothing_has_nothing_to_explain() -> None:
    assert judge({0: busy(0, 4), 1: waits(1, call(5))}, 0) is None


def test_notes_are_small_for_many_ranks() -> None:
    everyone = RankGroup("all ranks", "0", tuple(range(2000)))
    states = {r: waits(r, call(5, group=everyone), stack=("x" * 80,) * 16) for r in range(1999)}
    still = judge(states, 0)
    assert still is not None
    assert still.missing == (1999,)
    assert len(still.text) < 3000
    assert len(json.dumps(still.fields())) < 64 << 10


@given(st.integers(0, 2**31), st.floats(0, 1e6), st.booleans(), st.lists(st.text(), max_size=3))
def test_states_travel_as_text(number: int, since_s: float, waits_: bool, lines: list[str]) -> None:
    one = call(number, since_s=since_s)
    state = RankState(3, open=(one,), waits=waits_, recent=(one, one), stack=tuple(lines))
    assert from_json(to_json(state)) == state


@pytest.mark.parametrize("text", ["", "{}", "[]", "1", '{"rank": 1}', '{"open": [], "recent": []}'])
def test_other_text_is_no_state(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - json's own, or ours
        from_json(text)


def test_listed_is_short() -> None:
    assert listed(range(100)).endswith("11, ...")
