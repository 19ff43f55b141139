"""What was alive at the locked peaks: kept beside the lock, named when a gate fails, and never a failure itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memfix.checks.effort import PROFILES
from memfix.contract import Contract, Dim, TensorSpec
from memfix.errors import EXIT_PASS, EXIT_REGRESSION
from memfix.gate.judge import Verdict, judge_entry
from memfix.gate.lock import Key, read_lock, spelled
from memfix.gate.peaks import ROWS, peaks_path, read_peaks, write_peaks
from memfix.gate.run import run_gate
from memfix.meters.base import Allocation, Reading
from memfix.units import MiB

KEY: Key = ("loss", "chunked", "small", "train")
PRODUCT = Allocation(512 * MiB, "mm", "loss.py:40 in loss", "logits = hidden @ weight.T")
UPCAST = Allocation(512 * MiB, "_to_copy", "loss.py:41 in loss", "logits.float()")


def reading(*alive: Allocation) -> Reading:
    peak = sum(row.bytes for row in alive)
    return Reading("simulated", "H200", peak, 0, 0, 0, peak, alive_at_peak=alive)


def details(then: tuple[Allocation, ...], now: tuple[Allocation, ...]) -> list[str]:
    """What stands below a failure, up to the table of the peak."""
    measured = reading(*now)
    found = judge_entry(KEY, measured.peak_bytes, 1, measured, then)
    assert found.status == "fail"
    lines = list(found.details)
    return lines[: lines.index("  alive at the peak, largest first")]


def many(count: int, size: int = 100) -> tuple[Allocation, ...]:
    """``count`` rows, each a byte smaller than the one before."""
    return tuple(Allocation(size - number, "mm", "loss.py:1 in f", f"x{number} = a @ b") for number in range(count))


# ---------------------------------------------------------------- the file
def test_what_is_written_is_read_back_without_places(tmp_path: Path) -> None:
    path = tmp_path / "memory.peaks.json"
    write_peaks(path, {"b": (PRODUCT, UPCAST), "a": (Allocation(7, "exp", "x.py:1 in f", "", 3),), "none": ()})
    assert read_peaks(path) == {
        "a": (Allocation(7, "exp", "", "", 3),),
        "b": (
            Allocation(512 * MiB, "mm", "", "logits = hidden @ weight.T"),
            Allocation(512 * MiB, "_to_copy", "", "logits.float()"),
        ),
        "none": (),
    }


def test_the_file_is_one_sorted_line_a_peak(tmp_path: Path) -> None:
    path = tmp_path / "memory.peaks.json"
    write_peaks(path, {"b": (UPCAST,), "a": (Allocation(7, "exp", "x.py:1 in f", 'f("ß")', 3),)})
    assert path.read_text() == (
        '{\n"a": [[7, 3, "exp", "f(\\"\\u00df\\")"]],\n\n"b": [[536870912, 1, "_to_copy", "logits.float()"]]\n}\n'
    )


def test_no_peaks_are_still_json(tmp_path: Path) -> None:
    write_peaks(tmp_path / "peaks.json", {})
    assert json.loads((tmp_path / "peaks.json").read_text()) == {}


def test_only_the_largest_rows_are_kept(tmp_path: Path) -> None:
    write_peaks(tmp_path / "peaks.json", {"a": many(ROWS + 1)})
    assert [row.bytes for row in read_peaks(tmp_path / "peaks.json")["a"]] == list(range(100, 100 - ROWS, -1))


@pytest.mark.parametrize(
    ("lock", "peaks"),
    [("memory.lock", "memory.peaks.json"), ("a/my.memory.lock", "a/my.memory.peaks.json"), ("lock", "lock.peaks.json")],
)
def test_the_file_lies_beside_the_lock(lock: str, peaks: str) -> None:
    assert peaks_path(Path(lock)) == Path(peaks)


BROKEN = {
    "empty": b"",
    "cut short": b'{\n"a": [[7, 3, "exp"',
    "a merge conflict": b"{\n<<<<<<< HEAD\n}\n",
    "not text": b"\xff\xfe",
    "a list": b"[1]",
    "a number": b"7",
    "rows as a number": b'{"a": 7}',
    "rows as words": b'{"a": ["mm"]}',
    "a short row": b'{"a": [[7, 3, "exp"]]}',
    "bytes as words": b'{"a": [["7", 1, "mm", ""]]}',
    "bytes as a fraction": b'{"a": [[7.5, 1, "mm", ""]]}',
    "bytes without end": b'{"a": [[Infinity, 1, "mm", ""]]}',
    "no count": b'{"a": [[7, null, "mm", ""]]}',
    "a maker as a list": b'{"a": [[7, 1, ["mm"], ""]]}',
    "no code": b'{"a": [[7, 1, "mm", null]]}',
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_explains_nothing_and_raises_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "peaks.json").write_bytes(content)
    assert read_peaks(tmp_path / "peaks.json") == {}


def test_a_missing_file_and_a_folder_explain_nothing(tmp_path: Path) -> None:
    assert read_peaks(tmp_path / "peaks.json") == {}
    assert read_peaks(tmp_path) == {}


# ---------------------------------------------------------------- what grew
def test_a_growth_of_a_few_bytes_has_no_likely_cause() -> None:
    measured = reading(PRODUCT, UPCAST)
    assert measured.hint
    found = judge_entry(KEY, measured.peak_bytes, measured.peak_bytes - 512, measured, (PRODUCT, UPCAST))
    assert "likely cause" not in found.text()


def test_a_failure_names_what_is_now_alive_before_the_table() -> None:
    measured = reading(PRODUCT, UPCAST)
    found = judge_entry(KEY, measured.peak_bytes, 512 * MiB, measured, (PRODUCT,))
    assert found.text().splitlines() == [
        "loss/chunked [small, train]: 1,073,741,824 bytes (1.00 GiB), lock 536,870,912 (512.00 MiB): +536,870,912 "
        "(2.0x over), meter simulated",
        "  +512.00 MiB: `logits.float()` loss.py:41, now alive at the peak (_to_copy)",
        "  alive at the peak, largest first",
        "      512.00 MiB  mm   loss.py:40 in loss   logits = hidden @ weight.T",
        "      512.00 MiB  _to_copy   loss.py:41 in loss   logits.float()",
        f"  likely cause: {measured.hint}",
        "  if this is meant, run memfix gate --update and commit the lock file",
    ]


def test_what_shrank_is_left_out() -> None:
    smaller = Allocation(MiB, "mm", "loss.py:40 in loss", "logits = hidden @ weight.T")
    assert details((PRODUCT,), (UPCAST, smaller)) == [
        "  +512.00 MiB: `logits.float()` loss.py:41, now alive at the peak (_to_copy)"
    ]


def test_only_the_four_that_grew_most_are_named() -> None:
    assert [line.split(":")[0] for line in details((PRODUCT,), many(6))] == [
        "  +100 B",
        "  +99 B",
        "  +98 B",
        "  +97 B",
    ]


def test_without_a_known_peak_nothing_is_said_to_have_grown() -> None:
    assert details((), (PRODUCT, UPCAST)) == []


def test_a_row_too_small_to_have_been_kept_is_not_called_new(tmp_path: Path) -> None:
    before = many(ROWS + 5)
    write_peaks(tmp_path / "peaks.json", {"a": before})
    then = read_peaks(tmp_path / "peaks.json")["a"]
    assert details(then, before) == []
    grown = (Allocation(101, "exp", "loss.py:2 in f", "y = x.exp()"), *before)
    assert details(then, grown) == ["  +101 B: `y = x.exp()` loss.py:2, now alive at the peak (exp)"]


def test_bytes_as_locked_and_below_say_nothing_of_growth() -> None:
    measured = reading(UPCAST)
    for locked in (512 * MiB, 513 * MiB):
        assert judge_entry(KEY, measured.peak_bytes, locked, measured, (PRODUCT,)).details == ()


# ---------------------------------------------------------------- through the gate
def naive_affine(x: Any) -> Any:
    return x * 2 + 1


def in_place_affine(x: Any) -> Any:
    return (x * 2).add_(1)


def wasteful_affine(x: Any) -> Any:
    copies = x.detach().repeat(8)  # noqa: F841  alive until the return
    return (x * 2).add_(1)


def affine(name: str = "affine", in_place: Any = in_place_affine) -> Contract:
    return Contract(
        name,
        naive=naive_affine,
        forms={"in_place": in_place},
        dims={"N": Dim(1, 9)},
        inputs=[TensorSpec("x", "N", grad=True)],
        cases={"small": {"N": 256}},
        dtypes=("float32",),
    )


def gate(lock: Path, *contracts: Contract, **options: Any) -> Verdict:
    return run_gate(contracts, meter_name="simulated", effort=PROFILES["dev"], lock_path=lock, **options)


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    """A lock that was just written, of one op."""
    path = tmp_path / "memory.lock"
    assert gate(path, affine(), update=True).exit_code == EXIT_PASS
    return path


def test_an_update_writes_what_was_alive_at_each_peak_beside_the_lock(lock: Path) -> None:
    assert sorted(path.name for path in lock.parent.iterdir()) == ["memory.lock", "memory.peaks.json"]
    peaks = read_peaks(peaks_path(lock))
    assert list(peaks) == [
        "affine/in_place [small, forward]",
        "affine/in_place [small, train]",
        "affine/naive [small, forward]",
        "affine/naive [small, train]",
    ]
    assert peaks["affine/in_place [small, forward]"] == (Allocation(1024, "mul.Tensor", "", "return (x * 2).add_(1)"),)
    locked = {spelled(key): size for key, size in read_lock(lock).items()}
    assert {key: sum(row.bytes for row in rows) for key, rows in peaks.items()} == {key: locked[key] for key in peaks}


def test_a_gate_that_fails_names_what_grew(lock: Path) -> None:
    verdict = gate(lock, affine(in_place=wasteful_affine))
    assert verdict.exit_code == EXIT_REGRESSION
    failed = {(f.form, f.phase): f for f in verdict.with_status("fail")}
    assert failed.keys() == {("in_place", "forward"), ("in_place", "train")}
    grown, table, *_ = failed["in_place", "forward"].details
    assert grown.startswith("  +8.00 KiB: `copies = x.detach().repeat(8)  # noqa: F841  alive until the return` ")
    assert grown.endswith(", now alive at the peak (repeat)")
    assert table == "  alive at the peak, largest first"


def test_an_update_of_one_op_keeps_the_rows_of_the_others(lock: Path) -> None:
    before = read_peaks(peaks_path(lock))
    assert gate(lock, affine("other"), update=True, whole=False).exit_code == EXIT_PASS
    after = read_peaks(peaks_path(lock))
    assert {key.split("/")[0] for key in after} == {"affine", "other"}
    assert {key: rows for key, rows in after.items() if key.startswith("affine/")} == before


def test_an_update_of_all_ops_drops_the_rows_of_one_that_is_gone(lock: Path) -> None:
    assert gate(lock, affine("other"), update=True).exit_code == EXIT_PASS
    assert {key.split("/")[0] for key in read_peaks(peaks_path(lock))} == {"other"}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_of_peaks_fails_no_gate(lock: Path, content: bytes) -> None:
    broken = content.replace(b'"a"', b'"affine/in_place [small, forward]"')
    peaks_path(lock).write_bytes(broken)
    assert gate(lock, affine()).exit_code == EXIT_PASS
    assert peaks_path(lock).read_bytes() == broken


def test_a_broken_file_of_peaks_leaves_a_failing_gate_its_own_failure(lock: Path) -> None:
    peaks_path(lock).write_text('{"affine/in_place [small, forward]": [["7", 1, "mm", ""]]}')
    verdict = gate(lock, affine(in_place=wasteful_affine))
    assert verdict.exit_code == EXIT_REGRESSION
    assert all(f.details[0] == "  alive at the peak, largest first" for f in verdict.with_status("fail"))


def test_an_update_mends_a_broken_file_of_peaks(lock: Path) -> None:
    whole = peaks_path(lock).read_text()
    peaks_path(lock).write_text("{")
    assert gate(lock, affine(), update=True).exit_code == EXIT_PASS
    assert peaks_path(lock).read_text() == whole


def test_an_update_that_is_refused_leaves_the_file_of_peaks(lock: Path) -> None:
    whole = peaks_path(lock).read_text()
    verdict = gate(lock, affine(in_place=lambda x: x * 3), update=True)
    assert verdict.exit_code == EXIT_REGRESSION
    assert peaks_path(lock).read_text() == whole
