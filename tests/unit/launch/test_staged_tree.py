"""What of a folder is copied to a node, and how copies are named, kept and removed."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fivefold.errors import UsageError
from fivefold.launch.staged_tree import Store, Tree


def made(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def blocks(tree: Tree, size: int = 3) -> Iterator[memoryview]:
    """The contents, in pieces that keep to no file."""
    content = b"".join(Path(tree.source, entry.path).read_bytes() for entry in tree.files())
    return (memoryview(content[at : at + size]) for at in range(0, len(content), size))


def copied(store: Store, tree: Tree) -> Path:
    with store.new(tree) as folder:
        tree.write(str(folder), blocks(tree))
    return store.place(tree.key)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path))


def test_an_environment_is_copied_whole(tmp_path: Path, store: Store) -> None:
    env = tmp_path / "env"
    made(
        env,
        {
            "bin/tool": f"#!{env}/bin/python\n",
            "bin/folder/x": "",
            "lib/python3.11/site-packages/p/a.py": "12345",
        },
    )
    made(tmp_path / "packages", {"one.so": "binary", "folder/x": ""})
    site = env / "lib/python3.11/site-packages"
    (env / "lib64").symlink_to("lib")
    (env / "bin/python").symlink_to("/usr/bin/python3")
    (env / "absolute").symlink_to(site / "p")
    (site / "one.so").symlink_to(tmp_path / "packages/one.so")  # as uv and conda make them
    (site / "folder").symlink_to("../../../../packages/folder")
    (site / "nowhere").symlink_to("nothing")
    (site / "p/a.py").chmod(0o750)
    os.mkfifo(env / "pipe")
    os.utime(site / "p/a.py", ns=(5, 1234567890123456789))

    copy = copied(store, Tree.seen(str(env), whole=True))
    there = copy / "lib/python3.11/site-packages"
    assert (there / "p/a.py").read_text() == "12345"
    found = (there / "p/a.py").stat()
    assert (found.st_mtime_ns, stat.S_IMODE(found.st_mode)) == (1234567890123456789, 0o750)
    assert (copy / "bin/tool").read_text() == f"#!{copy}/bin/python\n"
    links = {name: str((copy / name).readlink()) for name in ("lib64", "bin/python", "absolute")}
    assert links == {
        "lib64": "lib",
        "bin/python": "/usr/bin/python3",
        "absolute": "lib/python3.11/site-packages/p",
    }
    assert not (there / "one.so").is_symlink() and (there / "one.so").read_text() == "binary"
    assert str((there / "folder").readlink()) == str(tmp_path / "packages/folder")
    assert str((there / "nowhere").readlink()) == "nothing"
    assert not (copy / "pipe").exists()
    assert copy.stat().st_mode & 0o777 == 0o700


def test_conda_environments_within_one_are_not_carried(tmp_path: Path) -> None:
    env = made(tmp_path / "conda", {"conda-meta/history": "", "pkgs/big": "", "envs/other/x": ""})
    assert {entry.path for entry in Tree.seen(str(env), whole=True).entries} == {
        "conda-meta",
        "conda-meta/history",
    }


def test_of_code_python_files_are_carried_and_the_rest_is_linked(
    tmp_path: Path, store: Store
) -> None:
    job = made(
        tmp_path / "job",
        {
            "train.py": "1",
            "config.toml": "",
            "ext.so": "2",
            "__pycache__/train.pyc": "3",
            "package/inner.py": "4",
            "package/data.json": "",
            "data/x.bin": "",
            "venv/lib/y.py": "",
        },
    )
    (job / "elsewhere").symlink_to("package")
    tree = Tree.seen(str(job), whole=False)
    copy = copied(store, tree)
    real = {str(p.relative_to(copy)) for p in copy.rglob("*") if p.is_file() and not p.is_symlink()}
    assert real == {"train.py", "ext.so", "__pycache__/train.pyc", "package/inner.py"}
    for name in ("config.toml", "package/data.json", "data", "venv", "elsewhere"):
        assert str((copy / name).readlink()) == str(job / name)
    # A script that writes beside itself is told so; bytecode may be added.
    closed = {copy: 0o5, copy / "package": 0o5, copy / "package/__pycache__": 0o7}
    assert {path: path.stat().st_mode >> 6 & 7 for path in closed} == closed


CHANGES: dict[str, tuple[Callable[[Path], object], bool]] = {
    "content": (lambda job: (job / "a.py").write_text("other"), False),
    "time": (lambda job: os.utime(job / "a.py", (1, 1)), False),
    "one more": (lambda job: (job / "new.py").touch(), False),
    "mode": (lambda job: (job / "a.py").chmod(0o700), False),
    "bytecode": (lambda job: made(job, {"__pycache__/a.pyc": ""}), True),
    "nothing": (Path.stat, True),
}


@pytest.mark.parametrize("what", CHANGES)
def test_the_key_is_of_what_can_be_imported(tmp_path: Path, what: str) -> None:
    change, same = CHANGES[what]
    job = made(tmp_path / "job", {"a.py": "text"})
    (job / "__pycache__").mkdir()
    keys = [Tree.seen(str(job), whole=False).key]
    change(job)
    keys.append(Tree.seen(str(job), whole=False).key)
    assert (keys[0] == keys[1]) is same
    assert keys[0].partition("-")[0] == keys[1].partition("-")[0]


def test_it_travels_as_a_line(tmp_path: Path) -> None:
    job = made(tmp_path / "job", {"a.py": "", "line\nbreak.py": ""})
    tree = Tree.seen(str(job), whole=False)
    assert tree.pack().count(b"\n") == 1
    assert Tree.parse(tree.pack()) == tree


def test_what_is_cut_off_leaves_nothing(tmp_path: Path, store: Store) -> None:
    tree = Tree.seen(str(made(tmp_path / "job", {"a.py": "123456", "b.py": "7"})), whole=False)
    with pytest.raises(OSError, match="cut"), store.new(tree) as folder:
        tree.write(str(folder), _cut_off())
    assert store.hold(tree.key) is None
    assert not [*store.folder.iterdir()]


def _cut_off() -> Iterator[memoryview]:
    yield memoryview(b"123")
    raise OSError("cut")


def test_older_copies_go_unless_somebody_uses_them(tmp_path: Path, store: Store) -> None:
    job = made(tmp_path / "job", {"a.py": "1"})
    old = Tree.seen(str(job), whole=False)
    copied(store, old)
    held = store.hold(old.key)
    assert held is not None
    made(job, {"a.py": "22"})
    new = Tree.seen(str(job), whole=False)
    copied(store, new)
    assert store.place(old.key).is_dir()
    os.close(held)
    made(job, {"a.py": "333"})
    newest = Tree.seen(str(job), whole=False)
    copied(store, newest)
    assert [*store.folder.iterdir()] == [store.place(newest.key)]


def test_what_was_not_used_for_a_week_goes(tmp_path: Path, store: Store) -> None:
    trees = [
        Tree.seen(str(made(tmp_path / name, {"a.py": name})), whole=False)
        for name in ("x", "y", "z")
    ]
    for tree in trees[:2]:
        copied(store, tree)
    for tree in trees[:2]:
        os.utime(store.place(tree.key), (1, 1))
    held = store.hold(trees[0].key)  # which is a use
    assert held is not None
    os.close(held)
    copied(store, trees[2])
    assert {*store.folder.iterdir()} == {store.place(tree.key) for tree in (trees[0], trees[2])}


def test_two_that_write_the_same_at_once(tmp_path: Path, store: Store) -> None:
    tree = Tree.seen(str(made(tmp_path / "job", {"a.py": "1"})), whole=False)
    with store.new(tree) as first, store.new(tree) as second:
        tree.write(str(first), blocks(tree))
        tree.write(str(second), blocks(tree))
    assert [*store.folder.iterdir()] == [store.place(tree.key)]
    assert (store.place(tree.key) / "a.py").read_text() == "1"


def test_lack_of_space_is_told_and_others_give_way(tmp_path: Path, store: Store) -> None:
    other = Tree.seen(str(made(tmp_path / "other", {"a.py": "1"})), whole=False)
    copied(store, other)
    tree = Tree.seen(str(made(tmp_path / "job", {"a.py": "1"})), whole=False)
    huge = tree.entries[0]._replace(size=1 << 60)
    full = Tree(tree.source, whole=False, entries=(huge,))
    says = r"no room for a copy of .*job in .*: it takes .* MB, and"
    with pytest.raises(UsageError, match=says), store.new(full):
        pass
    assert not [*store.folder.iterdir()]


def test_a_folder_that_others_made_is_refused(tmp_path: Path) -> None:
    place = tmp_path / f"fivefold-{os.geteuid()}-stage"
    place.symlink_to(tmp_path)
    with pytest.raises(UsageError, match=r"is no folder that only you can use.*FIVEFOLD_STAGE"):
        Store(str(tmp_path))
    place.unlink()
    place.mkdir(0o755)
    with pytest.raises(UsageError, match="is no folder that only you can use"):
        Store(str(tmp_path))
    with pytest.raises(UsageError, match="cannot be made: No such file or directory"):
        Store(str(tmp_path / "absent"))
