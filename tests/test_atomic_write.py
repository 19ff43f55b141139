"""Files are written whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from memfix.atomic_write import write_whole
from memfix.errors import EXIT_USAGE, UsageError


@pytest.mark.parametrize(
    ("content", "data"), [("größe\n", "größe\n".encode()), (b"\x00\xff\r\n", b"\x00\xff\r\n"), ("", b"")]
)
def test_text_and_bytes_are_written_as_they_are(tmp_path: Path, content: str | bytes, data: bytes) -> None:
    write_whole(tmp_path / "file", content, "the file")
    assert (tmp_path / "file").read_bytes() == data
    assert os.listdir(tmp_path) == ["file"]


def test_an_old_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("a longer one that was there before")
    write_whole(path, "new", "the file")
    assert path.read_text() == "new"


def test_missing_folders_are_made(tmp_path: Path) -> None:
    write_whole(tmp_path / "a" / "b" / "file", "x", "the file")
    assert (tmp_path / "a" / "b" / "file").read_text() == "x"


def test_others_may_read_it(tmp_path: Path) -> None:
    write_whole(tmp_path / "file", "x", "the file")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o644


def refusal(path: Path) -> str:
    with pytest.raises(UsageError) as refused:
        write_whole(path, "new", "the lock file")
    assert refused.value.exit_code == EXIT_USAGE
    return str(refused.value)


def test_a_folder_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    assert refusal(tmp_path / "file") == f"cannot write the lock file {tmp_path / 'file'}: Is a directory"
    assert os.listdir(tmp_path) == ["file"], "no temporary file stays"


def test_a_file_in_the_place_of_its_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("old")
    path = tmp_path / "folder" / "file"
    assert refusal(path) == f"cannot write the lock file {path}: File exists"
    assert (tmp_path / "folder").read_text() == "old"


@pytest.mark.parametrize("broken", ["fsync", "chmod", "replace"])
def test_a_failure_on_the_way_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, broken, fail)
    assert refusal(path) == f"cannot write the lock file {path}: No space left on device"
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_link_stays_a_link_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link, target = tmp_path / "link", tmp_path / "elsewhere/file"
    for content in ("first", "second"):  # at first the target is missing
        link.unlink(missing_ok=True)
        link.symlink_to(Path("elsewhere/file"))
        write_whole(link, content, "the file")
        assert link.is_symlink()
        assert target.read_text() == content
    assert os.listdir(tmp_path / "elsewhere") == ["file"]
