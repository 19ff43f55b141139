"""Tables of GPUs: written and read back, refused by name, and the user's own before ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import memfix
from memfix.errors import EXIT_NOT_MEASURED, MemfixError
from memfix.meters.base import Step
from memfix.meters.simulated import tables
from memfix.meters.simulated.gpus import GPUS, H200
from memfix.meters.simulated.tables import Standing, Table, own_tables, read_table, table_of

TABLE = Table(
    H200,
    {"torch": "2.11.0", "date": "2025-01-02T03:04:05Z"},
    {"aten.sort": Standing(7, 2, 1), "aten.mm": Standing(calls=3)},
    {"aten.stft.default(float32[9])": 512, "aten.fft_r2c.default(float32[8])": 0},
    {"forward float32 2,3,8,8 4,3,3,3": 131, "weight float16 2,3,8,8 4,3,3,3 stride=2,2 channels_last": 0},
)
A100 = GPUS["A100"]


@pytest.fixture
def _no_tables_yet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An empty folder of one's own, and nothing remembered."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    table_of.cache_clear()
    yield
    table_of.cache_clear()


def own(table: Table) -> Path:
    """``table`` as the user's own."""
    path = own_tables() / f"{table.gpu.name.lower()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table.as_text())
    return path


# ---------------------------------------------------------------- the file
def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    path.write_text(TABLE.as_text())
    assert read_table(path) == TABLE


@pytest.mark.parametrize("table", [TABLE, Table(A100, {})], ids=["full", "empty"])
def test_the_file_is_json_with_one_entry_a_line(table: Table) -> None:
    text = table.as_text()
    assert json.loads(text).keys() == {"gpu", "surroundings", "operators", "measured", "convolutions"}
    assert text.startswith("{\n")
    assert text.endswith("}\n")


def test_the_order_of_what_was_seen_does_not_change_the_file() -> None:
    turned = replace(
        TABLE,
        operators=dict(reversed(TABLE.operators.items())),
        measured=dict(reversed(TABLE.measured.items())),
    )
    assert turned.as_text() == TABLE.as_text()
    assert '  "aten.mm": {"calls": 3, "missed": 0, "unknown": 0},\n' in TABLE.as_text()


@pytest.mark.parametrize("version", ["91900", "92300"])
def test_convolutions_of_another_cudnn_are_forgotten(version: str) -> None:
    before = replace(TABLE, surroundings={"cudnn": "91900"})
    newer = Table(H200, {"cudnn": version}, convolutions={"forward float32 2,3,8,8 4,3,3,3": 7})
    kept = before.convolutions if version == "91900" else {}
    assert before.updated(newer).convolutions == {**kept, **newer.convolutions}


def changed(**parts: object) -> str:
    return json.dumps({**json.loads(TABLE.as_text()), **parts})


BROKEN = {
    "empty": "",
    "cut short": TABLE.as_text()[:-20],
    "a list": "[]",
    "a number": "7",
    "no GPU": json.dumps({"operators": {}}),
    "another GPU's fields": changed(gpu={"name": "H200", "capability": [9, 0], "cores": 1}),
    "operators as a list": changed(operators=[]),
    "an operator as a number": changed(operators={"aten.mm": 3}),
    "unknown standing": changed(operators={"aten.mm": {"called": 3}}),
    "surroundings as a number": changed(surroundings=7),
    "measured as a list": changed(measured=[1]),
    "measured as words": changed(measured={"aten.mm.default()": "much"}),
    "not text": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_refused_by_name(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "h200.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(MemfixError) as refused:
        read_table(path)
    assert str(refused.value).startswith(f"{path}: not a table of memfix calibrate (")
    assert str(refused.value).endswith("); delete it or write it anew")
    assert refused.value.exit_code == EXIT_NOT_MEASURED


def test_a_folder_in_its_place_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(MemfixError, match=r"not a table of memfix calibrate \(.*Is a directory"):
        read_table(tmp_path)


# ---------------------------------------------------------------- whose table
@pytest.mark.usefixtures("_no_tables_yet")
def test_a_gpu_that_nobody_measured_has_no_table() -> None:
    assert table_of(A100) is None


@pytest.mark.usefixtures("_no_tables_yet")
def test_the_users_own_table_comes_before_the_one_that_memfix_brings() -> None:
    own(TABLE)
    assert table_of(H200) == TABLE


@pytest.mark.usefixtures("_no_tables_yet")
def test_the_table_that_memfix_brings_is_found_where_the_user_has_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    brought = tmp_path / "package"
    brought.mkdir()
    (brought / "h200.json").write_text(TABLE.as_text())
    monkeypatch.setattr(tables, "SHIPPED", brought)
    assert table_of(H200) == TABLE
    assert table_of(A100) is None
    table_of.cache_clear()
    theirs = replace(TABLE, measured={})
    own(theirs)
    assert table_of(H200) == theirs


def test_own_tables_lie_in_the_users_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "/somewhere")
    assert own_tables() == Path("/somewhere/memfix/tables")
    for unset in (lambda: monkeypatch.setenv("XDG_DATA_HOME", ""), lambda: monkeypatch.delenv("XDG_DATA_HOME")):
        unset()
        assert own_tables() == Path.home() / ".local/share/memfix/tables"


def test_the_tables_that_memfix_brings_can_be_read() -> None:
    for path in Path(tables.__file__).parent.glob("*.json"):
        assert read_table(path).gpu.name.lower() == path.stem


# ---------------------------------------------------------------- doubt
@pytest.mark.parametrize(
    ("standing", "doubt"),
    [
        (None, "the rule for aten.sort.default is assumed: no call of it was measured on H200"),
        (Standing(), "the rule for aten.sort.default is assumed: no call of it was measured on H200"),
        (Standing(2, 0, 2), "the rule for aten.sort.default is assumed: no call of it was measured on H200"),
        (Standing(7, 2, 1), "the rule for aten.sort.default missed 2 of 7 calls on H200"),
        (Standing(7, 0, 1), None),
        (Standing(7), None),
    ],
)
def test_a_rule_is_doubted_until_a_call_of_it_was_measured_and_none_missed(
    standing: Standing | None, doubt: str | None
) -> None:
    table = Table(H200, {}, {} if standing is None else {"aten.sort": standing})
    assert table.doubt(torch.ops.aten.sort.default) == doubt


def sort(device: str) -> Step:
    x = torch.empty(64, 64, device=device)
    return lambda: x.sort()


@pytest.mark.usefixtures("_no_tables_yet")
@pytest.mark.parametrize(
    ("standing", "notes"),
    [
        (Standing(5), ()),
        (Standing(5, missed=1), ("the rule for aten.sort.default missed 1 of 5 calls on H200",)),
    ],
    ids=["measured", "missed"],
)
def test_a_reading_is_exact_where_the_table_bears_its_rules_out(standing: Standing, notes: tuple[str, ...]) -> None:
    own(Table(H200, {}, {"aten.sort": standing}))
    reading = memfix.peak(sort)
    assert (reading.exact, reading.notes) == (not notes, notes)


@pytest.mark.usefixtures("_no_tables_yet")
def test_a_reading_without_a_table_is_an_estimate() -> None:
    reading = memfix.peak(sort, gpu="A100")
    assert (reading.exact, reading.notes) == (
        False,
        ("no rule was measured on A100: its kernels are assumed to take what they do elsewhere",),
    )
