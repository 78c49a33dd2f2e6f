"""Files and folders are written whole, or what was there stays."""

import os
import shutil
from pathlib import Path

import pytest

from sequencematch.data import files
from sequencematch.data.files import settle, write_beside, write_files, write_folder
from tests.file_calls import deaths


def content(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in folder.rglob("*")}


def test_files_are_written_into_a_new_folder_and_replaced_beside_others(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    write_files(folder, {"x.md": "é\n", "y.json": "{}"})
    assert content(folder) == {"x.md": "é\n", "y.json": "{}"}
    write_files(str(folder), {"x.md": "new"})
    assert content(folder) == {"x.md": "new", "y.json": "{}"}


@pytest.mark.parametrize("method", ["write_text", "replace"])
def test_a_failure_leaves_the_files_that_were_there(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing fails at the second file and then the first is not replaced; renaming fails at the first."""
    write_files(tmp_path, {"x": "old", "y": "old"})
    real = getattr(Path, method)

    def fail(path: Path, *arguments: str) -> object:
        if method == "write_text" and path.name == "x":
            return real(path, *arguments)
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, method, fail)
    with pytest.raises(OSError, match="No space left"):
        write_files(tmp_path, {"x": "new", "y": "new"})
    monkeypatch.undo()
    assert content(tmp_path) == {"x": "old", "y": "old"}
    write_files(tmp_path, {"x": "new", "y": "new"})  # the control
    assert content(tmp_path) == {"x": "new", "y": "new"}


def test_a_file_is_never_seen_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path, {"x": "old"})
    seen: list[str] = []
    real = Path.write_text

    def look(path: Path, text: str, *arguments: str) -> int:
        real(path, text[:1], *arguments)
        seen.append((tmp_path / "x").read_text())
        return real(path, text, *arguments)

    monkeypatch.setattr(Path, "write_text", look)
    write_files(tmp_path, {"x": "new"})
    assert seen == ["old"]
    assert (tmp_path / "x").read_text() == "new"


def fill(folder: Path) -> None:
    (folder / "mark").write_text("ours")


def test_a_folder_is_swapped_where_it_is_empty_or_ours(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b"
    write_folder(target, fill, "mark")
    (target / "more").write_text("old")
    write_folder(target, fill, "mark")
    assert content(tmp_path / "a" / "b") == {"mark": "ours"}
    (target / "mark").rename(target / "other")
    with pytest.raises(
        ValueError, match=r"`folder` must be new, empty, or hold mark from an earlier save\. Got .*, which has none\."
    ):
        write_folder(target, fill, "mark")
    assert content(target) == {"other": "ours"}
    write_folder(target, fill, None)
    assert content(target) == {"mark": "ours"}
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


def test_a_folder_stays_as_it_was_where_filling_fails(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        fill(folder)
        raise KeyError("half")

    write_folder(tmp_path / "a", fill, "mark")
    (tmp_path / "a" / "more").write_text("old")
    with pytest.raises(KeyError, match="half"):
        write_folder(tmp_path / "a", fail, "mark")
    assert content(tmp_path / "a") == {"mark": "ours", "more": "old"}
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def old(folder: Path) -> None:
    (folder / "mark").write_text("old")
    (folder / "only old").write_text("old")
    (folder / "sub").mkdir()
    (folder / "sub" / "file").write_text("old")


def new(folder: Path) -> None:
    (folder / "mark").write_text("new")
    (folder / "sub").mkdir()
    (folder / "sub" / "file").write_text("new")


OLD = {"mark": "old", "only old": "old", "sub/file": "old"}
NEW = {"mark": "new", "sub/file": "new"}


def visible(folder: Path) -> dict[str, str] | None:
    """What a reader finds after `settle`, hidden names left out."""
    settle(folder)
    if not folder.exists():
        return None
    names = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {
        name.as_posix(): path.read_text()
        for name, path in names.items()
        if not any(part.startswith(".") for part in name.parts)
    }


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_folder_that_is_replaced_is_the_old_or_the_new_one_wherever_the_process_dies(
    can_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:
        monkeypatch.setattr(files, "_exchange", lambda *_: False)
    target, seen = tmp_path / "run" / "folder", []

    def prepare() -> None:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        write_folder(target, old, "mark")

    for number in deaths(tmp_path, lambda: write_folder(target, new, "mark"), prepare):
        if can_exchange:
            assert target.exists(), "there must be one at every moment"
        seen.append(visible(target))
        assert seen[-1] in (OLD, NEW), f"after {number} changes"
        write_folder(target, new, "mark")  # the next save works whatever was left behind
        assert visible(target) == NEW
    assert seen[0] == OLD
    assert seen[-1] == NEW
    assert len(seen) > 8


def test_without_settling_a_kill_between_two_renames_leaves_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: file systems that can't exchange two names have such a moment."""
    monkeypatch.setattr(files, "_exchange", lambda *_: False)
    target = tmp_path / "run" / "folder"

    def prepare() -> None:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        write_folder(target, old, "mark")

    assert any(not target.exists() for _ in deaths(tmp_path, lambda: write_folder(target, new, "mark"), prepare))


@pytest.mark.parametrize("is_over_an_older_one", [True, False])
def test_files_written_beside_others_are_all_old_or_all_new_wherever_the_process_dies(
    is_over_an_older_one: bool, tmp_path: Path
) -> None:
    target, seen = tmp_path / "folder", []

    def prepare() -> None:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        (target / "other").write_text("stays")
        if is_over_an_older_one:
            write_beside(target, old)

    before = {"other": "stays", **(OLD if is_over_an_older_one else {})}
    for number in deaths(tmp_path, lambda: write_beside(target, new), prepare):
        seen.append(visible(target))
        assert seen[-1] in (before, {**before, **NEW}), f"after {number} changes"
        write_beside(target, new)
        assert visible(target) == {**before, **NEW}
        assert not [path.name for path in target.iterdir() if path.name == files.SAVING]
    assert seen[0] == before
    assert seen[-1] == {**before, **NEW}
    assert len(seen) > 8


def test_everything_is_flushed_before_it_is_renamed_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file without `fsync` may be empty after a power cut, and a name without one may be the old one."""
    events: list[tuple[str, str]] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        events.append(("flush", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
        real(descriptor)

    def rename(path: Path, target: Path) -> None:
        events.append(("name", target.name))
        os.replace(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    monkeypatch.setattr(Path, "replace", rename)
    write_files(tmp_path / "one", {"x": "1"})
    assert events.index(("flush", "x")) < events.index(("name", "x")) < last(events, ("flush", "one"))
    events.clear()
    write_folder(tmp_path / "two", new, "mark")
    renamed = events.index(("name", "two"))
    for name in ("mark", "file", "sub", "new"):
        assert events.index(("flush", name)) < renamed
    assert last(events, ("flush", tmp_path.name)) > renamed
    events.clear()
    write_beside(tmp_path / "three", new)
    assert events.index(("flush", "mark")) < events.index(("name", files.SAVING)) < events.index(("name", "mark"))
    assert last(events, ("flush", "three")) > events.index(("name", "mark"))


def last(events: list[tuple[str, str]], event: tuple[str, str]) -> int:
    return len(events) - 1 - events[::-1].index(event)
