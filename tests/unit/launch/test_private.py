"""Folders that only this user can use, where anybody may have put something before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fivefold.errors import UsageError
from fivefold.launch.private import private_folder


def made(path: Path) -> Path:
    return private_folder(path, "where things go", "name another")


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def of_another_user(path: Path) -> Path:
    """A folder of somebody else: root's, unless we are root and can give one away."""
    if os.geteuid():
        return Path("/usr")
    path.mkdir(mode=0o700)
    os.chown(path, 65534, 65534)
    return path


def test_it_is_made_for_this_user_alone(tmp_path: Path) -> None:
    assert mode(made(tmp_path / "new")) == 0o700


@pytest.mark.parametrize("before", [0o755, 0o775, 0o777])
def test_one_that_was_open_to_others_is_closed_and_keeps_what_it_holds(
    tmp_path: Path, before: int
) -> None:
    (tmp_path / "open" / "run").mkdir(parents=True)
    (tmp_path / "open" / "run" / "save").write_text("state")
    (tmp_path / "open").chmod(before)
    assert mode(made(tmp_path / "open")) == 0o700
    assert (tmp_path / "open" / "run" / "save").read_text() == "state"


def test_another_users_is_refused(tmp_path: Path) -> None:
    path = of_another_user(tmp_path / "theirs")
    owner, me = path.stat().st_uid, os.geteuid()
    told = (
        rf"{path}, where things go, belongs to user {owner}, not to you \(user {me}\); name another"
    )
    with pytest.raises(UsageError, match=told):
        made(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_one_into_which_another_user_has_put_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open" / "run").mkdir(parents=True)
    (tmp_path / "open").chmod(0o777)
    planted = tmp_path / "open" / "run" / "save"
    planted.write_text("planted")
    os.chown(planted, 65534, 65534)
    for _ in range(2):
        with pytest.raises(UsageError, match=f"was open to others, and {planted} is not yours"):
            made(tmp_path / "open")
    assert planted.read_text() == "planted"


def test_what_is_no_folder_or_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="is no folder"):
        made(tmp_path / "file")
    with pytest.raises(UsageError, match="is a link"):
        made(tmp_path / "link")
    with pytest.raises(UsageError, match=r"\(No such file or directory\)"):
        made(tmp_path / "missing" / "folder")
