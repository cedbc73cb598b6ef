"""The manifest: what is read is what was written, and a single flipped bit is noticed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.checkpoint.manifest import (
    Item,
    Manifest,
    Member,
    generation_name,
    is_item_name,
    parse_generation_name,
)
from fivefold.checkpoint.sealed import seal
from fivefold.errors import Damaged, Foreign

ZERO = "0" * 32


def made(**changes: object) -> Manifest:
    members = tuple(
        Member(number, f"node{number}", (2 * number, 2 * number + 1), tuple(
            Item(f"__{rank}_0.distcp", 100 + rank, ZERO) for rank in (2 * number, 2 * number + 1)
        ))
        for number in range(2)
    )  # fmt: skip
    manifest = Manifest(
        run="run-1", epoch=1, step=120, save="ab12", layout={"data": 4}, world=4, scheme="xor",
        sets=((0, 1),), members=members, metadata=Item(".metadata", 10, ZERO), me=0,
        redundancy=(Item("redundancy-0.bin", 5, ZERO),), extra={"program": "train.py ä"},
    )  # fmt: skip
    return replace(manifest, **changes)


def test_what_is_read_is_what_was_written() -> None:
    assert Manifest.parse(made().to_json()) == made()
    assert Manifest.parse(made().to_json().encode()) == made()


def test_every_flipped_bit_is_noticed() -> None:
    data = made().to_json().encode()
    for at in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[at // 8] ^= 1 << at % 8
        with pytest.raises(Damaged, match="is damaged"):
            Manifest.parse(bytes(flipped))


@pytest.mark.parametrize("cut", [0, 1, 40, -1])
def test_a_torn_manifest_is_noticed(cut: int) -> None:
    with pytest.raises(Damaged):
        Manifest.parse(made().to_json()[:cut])


def test_deeply_nested_nonsense_is_damage_too() -> None:
    with pytest.raises(Damaged):
        Manifest.parse("[" * 100_000)
    with pytest.raises(Damaged):
        Manifest.parse("[]")


def test_a_newer_format_is_told_from_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("fivefold.checkpoint.manifest.FORMAT", 7)
        newer = made().to_json()
    with pytest.raises(Foreign, match="has format 7; this version of Fivefold reads format 1"):
        Manifest.parse(newer)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"metadata": Item("__0_0.distcp", 1, ZERO)}, "metadata has another name"),
        ({"metadata": Item("../.metadata", 1, ZERO)}, "no file of a checkpoint"),
        ({"metadata": Item(".metadata", 1, "abc")}, "no file of a checkpoint"),
        ({"metadata": Item(".metadata", -1, ZERO)}, "no count"),
        ({"redundancy": (Item("redundancy-0.bin\n", 1, ZERO),)}, "no file of a checkpoint"),
        ({"redundancy": (Item("__9_0.distcp", 1, ZERO),)}, "redundancy likewise"),
        ({"me": 2}, "it belongs to no member"),
        ({"sets": ((0, 1), (1,))}, "sets overlap"),
        ({"sets": ((0, 5),)}, "sets overlap"),
        ({"state": "done"}, "there is no state 'done'"),
        ({"world": 5}, "members do not hold each rank once"),
        ({"world": True}, "no count"),
        ({"members": (made().members[1],)}, "members are not numbered from 0"),
        ({"members": (made().members[0],) * 2}, "members are not numbered from 0"),
        ({"run": 7}, "run is 7"),
        ({"layout": {"data": "4"}}, "no count"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused(changes: dict[str, object], told: str) -> None:
    """Each of these has a right digest."""
    with pytest.raises(Damaged, match="it makes no sense") as caught:
        Manifest.parse(made(**changes).to_json())
    assert told in str(caught.value)


def test_a_field_that_is_missing_is_damage() -> None:
    body = json.loads(made().to_json())["manifest"]
    del body["world"]
    with pytest.raises(Damaged, match="world"):
        Manifest.parse(seal("manifest", 1, body))
    with pytest.raises(Damaged, match="is no object"):
        Manifest.parse(seal("manifest", 1, []))


def test_a_directory_holds_its_own_members_files_or_all() -> None:
    local = [item.name for item in made().items()]
    assert local == ["__0_0.distcp", "__1_0.distcp", ".metadata", "redundancy-0.bin"]
    persistent = [item.name for item in made(me=None, redundancy=()).items()]
    assert persistent == [*(f"__{rank}_0.distcp" for rank in range(4)), ".metadata"]
    assert made().length == 4 * 100 + 6
    assert made().members[1].length == 205


def test_the_same_save_is_known_on_every_node_and_in_every_state() -> None:
    assert made().same_save(made(me=1, redundancy=(), state="flushed", extra={}))
    assert not made().same_save(made(save="cd34"))


@given(st.integers(0, 10**12), st.integers(0, 10**6))
def test_names_of_generations_are_read_back(step: int, epoch: int) -> None:
    assert parse_generation_name(generation_name(step, epoch)) == (step, epoch)


@pytest.mark.parametrize(
    "name",
    ["step-1-epoch-1", "step-000000120-epoch-1", "step-00000001-epoch-01", "step-00000001-epoch-1\n",
     "step-0000000१-epoch-1", "x/step-00000001-epoch-1", ""],
)  # fmt: skip
def test_other_names_are_no_generations(name: str) -> None:
    assert parse_generation_name(name) is None


def test_only_plain_names_are_items() -> None:
    assert all(
        map(is_item_name, ["__0_0.distcp", "__12_3.distcp", ".metadata", "redundancy-3.bin"])
    )
    for name in ("", "..", "/etc/passwd", "../__0_0.distcp", "a/__0_0.distcp", "__0_0.distcp/..",
                 "__0_0.distcp\n", "__0_0.distcp.tmp", "manifest.json", "x.metadata"):  # fmt: skip
        assert not is_item_name(name), name
