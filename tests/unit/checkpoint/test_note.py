"""What is known of a run whose saves are gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.checkpoint.note import (
    Note,
    SavingCosts,
    is_note,
    last_save,
    newest_note,
    read_note,
    write_note,
)
from fivefold.checkpoint.place import Place, place_at
from fivefold.checkpoint.run import RunHistory
from fivefold.checkpoint.store import PersistentStore
from fivefold.errors import Damaged
from saves import RUN_ID

NOTE = Note(RUN_ID, 2, 120, ("a", "b"), "partner", SavingCosts(0.25, 1.5, 30.0, 3600.0, 10))


@pytest.fixture(params=["path", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return place_at(tmp_path if request.param == "path" else f"memory:/{tmp_path}")


def test_a_note_is_read_back_and_every_flipped_bit_is_noticed(place: Place) -> None:
    assert read_note(place, 2) is None and newest_note(place) is None
    write_note(place, NOTE)
    assert read_note(place, 2) == newest_note(place) == NOTE
    [name] = place.list()
    assert is_note(name) and not is_note("saved-epoch-2.json.tmp")
    data = NOTE.to_json().encode()
    for at in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[at // 8] ^= 1 << at % 8
        with pytest.raises(Damaged):
            Note.parse(bytes(flipped), "here")


def test_a_damaged_note_is_passed_over_for_costs_and_counts_as_a_save(place: Place) -> None:
    write_note(place, NOTE)
    place.write("saved-epoch-3.json", [b"{"])
    assert newest_note(place) == NOTE
    run = RunHistory(RUN_ID, ()).started(None).started((100, 1)).started(None)
    assert "start 3" in last_save(run, lambda epoch: read_note(place, epoch))


def test_what_a_run_has_saved_on_its_way() -> None:
    notes = {1: Note(RUN_ID, 1, 200, ("a",), "single"), 4: Note(RUN_ID, 4, 7, ("a",), "single")}
    run, told = RunHistory(RUN_ID, ()), list[str]()
    told.append(last_save(run, notes.get))
    for resumed in (None, (100, 1), None, None):
        run = run.started(resumed)
        told.append(last_save(run, notes.get))
    nothing, first, went_on, began_again, saved = told
    assert nothing == began_again == ""
    assert first.startswith("step 200 of start 1, on a")
    assert went_on == "step 100 of start 1, from which start 2 went on"
    assert saved.startswith("step 7 of start 4")


def test_a_note_without_the_record_of_the_run_is_told(place: Place) -> None:
    write_note(place, NOTE)
    with pytest.raises(Damaged, match="it is missing; restore the file"):
        PersistentStore(place.where()).read_run()
