"""The lock file: what is written is read back, and what is damaged is refused by line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from memfix.errors import EXIT_USAGE, LockError, UsageError
from memfix.gate.lock import HEADER, Key, read_lock, spelled, write_lock

ENTRIES: dict[Key, int] = {
    ("loss", "chunked", "small", "train"): 1024,
    ("loss", "chunked", "small", "held"): 0,
    ("embedding", "gather", "incident", "forward"): 33_554_432,
    ("loss", "chunked", "small", "forward"): 512,
    ("loss", "chunked", "in-flight", "train"): 7,
}
TEXT = f"""\
{HEADER}

embedding/gather [incident, forward] 33554432 bytes

loss/chunked [in-flight, train] 7 bytes

loss/chunked [small, forward] 512 bytes

loss/chunked [small, held] 0 bytes

loss/chunked [small, train] 1024 bytes
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "memory.lock"


def refusal(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(LockError) as refused:
        read_lock(path)
    assert refused.value.exit_code == EXIT_USAGE
    return str(refused.value)


def test_what_is_written_is_read_back(path: Path) -> None:
    write_lock(path, ENTRIES)
    assert read_lock(path) == ENTRIES


def test_entries_are_sorted_and_kept_apart_by_one_empty_line(path: Path) -> None:
    write_lock(path, ENTRIES)
    assert path.read_text() == TEXT


def test_the_order_of_the_entries_does_not_matter_to_the_file(path: Path, tmp_path: Path) -> None:
    write_lock(path, ENTRIES)
    write_lock(tmp_path / "other.lock", dict(reversed(ENTRIES.items())))
    assert path.read_bytes() == (tmp_path / "other.lock").read_bytes()


def test_an_empty_lock_is_a_header_alone(path: Path) -> None:
    write_lock(path, {})
    assert path.read_text() == HEADER + "\n"
    assert read_lock(path) == {}


def test_a_missing_file_is_an_empty_lock(path: Path) -> None:
    assert read_lock(path) == {}


def test_missing_folders_are_made(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b" / "memory.lock"
    write_lock(deep, ENTRIES)
    assert read_lock(deep) == ENTRIES


def test_line_ends_of_windows_are_read(path: Path) -> None:
    path.write_bytes(TEXT.replace("\n", "\r\n").encode())
    assert read_lock(path) == ENTRIES


def test_a_key_is_spelled_as_op_form_case_and_phase() -> None:
    assert spelled(("loss", "chunked", "small", "train")) == "loss/chunked [small, train]"


# ---------------------------------------------------------------- damaged files
@pytest.mark.parametrize("marker", ["<<<<<<< HEAD", "=======", ">>>>>>> branch", "||||||| base"])
def test_a_merge_conflict_is_named_by_its_line(path: Path, marker: str) -> None:
    with_marker = TEXT.replace("\n\nloss/chunked [small, held]", f"\n{marker}\nloss/chunked [small, held]")
    for text, line in ((with_marker, 8), (f"{marker}\n{TEXT}", 1), (with_marker.rstrip(), 8)):
        assert refusal(path, text) == (
            f"{path}:{line}: the lock file has a merge conflict; run memfix gate --update for all ops, which writes "
            "today's bytes, or take one side (git checkout --ours or --theirs) and then run it"
        )


def test_a_file_cut_in_the_middle_of_a_number_is_refused(path: Path) -> None:
    cut = TEXT[: TEXT.index("24 bytes")]
    assert cut.endswith(" 10")
    assert refusal(path, cut) == (f"{path}: the lock file is cut short: its last line has no end; restore it from git")


def test_a_number_cut_short_is_refused_even_with_a_line_end(path: Path) -> None:
    assert refusal(path, TEXT[: TEXT.index("24 bytes")] + "\n") == (
        f"{path}:11: cannot read 'loss/chunked [small, train] 10'; restore the file from git"
    )


def test_a_last_line_without_an_end_is_refused(path: Path) -> None:
    assert refusal(path, TEXT.rstrip("\n")) == (
        f"{path}: the lock file is cut short: its last line has no end; restore it from git"
    )


def test_an_entry_that_is_there_twice_is_refused(path: Path) -> None:
    assert refusal(path, TEXT + "\nloss/chunked [small, train] 2048 bytes\n") == (
        f"{path}:13: loss/chunked [small, train] is there twice; delete one"
    )


@pytest.mark.parametrize(
    "line",
    [
        "hello",
        "loss/chunked [small, train] 1,024 bytes",
        "loss/chunked [small, train] -1 bytes",
        "loss/chunked [small, train] 007 bytes",
        "loss/chunked [small, train] 1024 bytes ",
        "loss/chunked [small, backward] 1024 bytes",
        "loss/chunked [small] 1024 bytes",
    ],
)
def test_a_line_that_is_no_entry_is_refused_by_its_number(path: Path, line: str) -> None:
    assert refusal(path, f"{HEADER}\n\n{line}\n") == f"{path}:3: cannot read {line!r}; restore the file from git"


def test_a_long_line_is_shown_by_its_first_80_characters(path: Path) -> None:
    assert refusal(path, f"{HEADER}\n\n{'x' * 500}\n") == (
        f"{path}:3: cannot read {'x' * 80!r}; restore the file from git"
    )


@pytest.mark.parametrize("header", ["", "# memfix lock 2: something newer\n", "{}\n", TEXT.split("\n", 1)[1]])
def test_a_file_with_another_header_is_refused(path: Path, header: str) -> None:
    assert refusal(path, header) == f"{path}:1: not a memfix lock file of version 1; restore it from git"


def test_binary_garbage_is_refused(path: Path) -> None:
    assert refusal(path, b"\x80\xff\x00\x01" * 100).startswith(
        f"{path}: the lock file cannot be read: 'utf-8' codec can't decode byte 0x80 in position 0"
    )


def test_zeros_where_the_text_was_are_refused(path: Path) -> None:
    assert refusal(path, bytes(4096)) == f"{path}:1: not a memfix lock file of version 1; restore it from git"


def test_a_folder_in_the_place_of_the_lock_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LockError, match="the lock file cannot be read"):
        read_lock(tmp_path)


# ---------------------------------------------------------------- writing that fails
def test_a_folder_in_the_place_of_the_lock_stays_and_no_temporary_file_is_left(tmp_path: Path) -> None:
    target = tmp_path / "memory.lock"
    target.mkdir()
    (target / "kept").write_text("kept")
    with pytest.raises(UsageError) as refused:
        write_lock(target, ENTRIES)
    assert str(refused.value) == f"cannot write the lock file {target}: Is a directory"
    assert (target / "kept").read_text() == "kept"
    assert list(tmp_path.iterdir()) == [target]


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "benchmarks").write_text("no folder")
    target = tmp_path / "benchmarks" / "memory.lock"
    with pytest.raises(UsageError) as refused:
        write_lock(target, ENTRIES)
    assert str(refused.value) == f"cannot write the lock file {target}: File exists"
    assert (tmp_path / "benchmarks").read_text() == "no folder"


@pytest.mark.parametrize("step", ["fsync", "chmod", "replace"])
def test_a_full_disk_keeps_the_old_lock_and_leaves_no_temporary_file(
    path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lock(path, ENTRIES)

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, fails)
    with pytest.raises(UsageError) as refused:
        write_lock(path, {("loss", "chunked", "small", "train"): 1})
    monkeypatch.undo()
    assert str(refused.value) == f"cannot write the lock file {path}: No space left on device"
    assert path.read_text() == TEXT
    assert list(path.parent.iterdir()) == [path]
