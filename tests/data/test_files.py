"""Files and folders are written whole, or what was there stays."""

from pathlib import Path

import pytest

from sequencematch.data.files import write_files, write_folder


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
