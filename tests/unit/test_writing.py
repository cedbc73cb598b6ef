"""Files that appear whole or not at all, and what is said of those that do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.errors import UsageError
from fivefold.writing import opened_anew, write_whole


def test_a_link_is_followed_where_a_person_named_it_and_replaced_else(tmp_path: Path) -> None:
    (target := tmp_path / "target").write_text("before")
    (link := tmp_path / "link").symlink_to(target)
    write_whole(link, "after", "the plan")
    assert link.is_symlink() and target.read_text() == "after"
    with opened_anew(link) as file:
        file.write("anew")
    assert not link.is_symlink() and (link.read_text(), target.read_text()) == ("anew", "after")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "target"]


@pytest.mark.parametrize(
    ("name", "why"),
    [("/dev/full", "No space left on device"), ("no/file", "No such file or directory")],
)
def test_what_cannot_be_written_is_told_with_its_name(
    name: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UsageError, match=f"^cannot write the figures {name}: {why}; free space there, "
    ):
        write_whole(name, "{}", "the figures")
    assert not list(tmp_path.iterdir())


def test_what_is_interrupted_leaves_what_was_there(tmp_path: Path) -> None:
    (path := tmp_path / "file").write_text("before")
    with opened_anew(path) as file:
        file.write("half")
        file.flush()
        assert path.read_text() == "before"
    with pytest.raises(AttributeError), opened_anew(path) as file:
        file.no_such_method()
    assert path.read_text() == "half"
    path.write_text("before")
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
