"""``memfix fit``: the largest value of a dim, what is refused, and what is written."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from command_line import Ended

from memfix import measure

# gather's forward at the small case: 8 bytes of ids and 256 of result a row, beside a weight of 512,000
GATHER = ("fit", "embedding", "--form", "gather", "--case", "small", "--phase", "forward")
LARGEST_IN_1_MIB = 2032


@pytest.fixture
def _no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal must come before minutes are spent."""

    def measured(*_: object, **__: object) -> None:
        raise AssertionError("something was measured")

    monkeypatch.setattr(measure, "usable_meter", measured)


# ---------------------------------------------------------------- what is found
def test_the_largest_value_is_found_and_the_way_to_it_shown(memfix: Any) -> None:
    ended = memfix(*GATHER, "--over", "N", "--capacity", "1MiB")
    assert (ended.exit_code, ended.err) == (0, "")
    title, *rows = ended.out.splitlines()
    assert title == "embedding/gather [small, forward] on H200, 1.00 MiB: N = 2,032"
    values = [int(row.split()[0].replace(",", "")) for row in rows]
    assert values == sorted(values)
    assert {1024, 2032, 2033, 2048} <= set(values)
    assert [value for value, row in zip(values, rows, strict=True) if " fits" in row][-1] == LARGEST_IN_1_MIB


def test_json_on_standard_output_leaves_the_table_to_standard_error(memfix: Any) -> None:
    ended = memfix(*GATHER, "--over", "N", "--capacity", "1MiB", "--json", "-")
    assert ended.exit_code == 0
    assert "N = 2,032" in ended.err
    found = json.loads(ended.out)["N"]
    assert (found["largest"], found["bounded"], found["capacity_bytes"]) == (LARGEST_IN_1_MIB, False, 1 << 20)
    sizes = {row["value"]: (row["bytes"], row["fits"]) for row in found["tried"]}
    assert sizes[2032] == (512_000 + 2032 * 8 + 2032 * 256, True)
    assert sizes[2033] == (512_000 + 2033 * 8 + 2033 * 256 + 256, False)  # rounded up to 512


def test_several_dims_are_searched_each_in_turn(memfix: Any, tmp_path: Path) -> None:
    ended = memfix(*GATHER, "--over", "N, V", "--capacity", "1MiB", "--json", "fit.json")
    assert ended.exit_code == 0
    found = json.loads((tmp_path / "fit.json").read_text())
    # 1024 rows of ids and result leave 778,240 bytes for a weight of 256 bytes a row
    assert {dim: result["largest"] for dim, result in found.items()} == {"N": LARGEST_IN_1_MIB, "V": 3040}


def test_without_a_capacity_the_gpus_memory_must_suffice(memfix: Any) -> None:
    ended = memfix(*GATHER, "--over", "N", "--high", "2000", "--gpu", "rtx 4090", "--json", "-")
    assert ended.exit_code == 0
    assert json.loads(ended.out)["N"]["capacity_bytes"] == 24_080 << 20
    assert "on RTX4090, 23.52 GiB: N = 2,000 (the largest that was allowed)" in ended.err


@pytest.mark.parametrize("high", [3, 1023, 1024, 1500])
def test_nothing_above_high_is_tried_even_where_the_case_lies_above_it(memfix: Any, high: int) -> None:
    ended = memfix(*GATHER, "--over", "N", "--capacity", "1MiB", "--high", str(high), "--json", "-")
    found = json.loads(ended.out)["N"]
    assert (found["largest"], found["bounded"]) == (high, True)
    assert max(row["value"] for row in found["tried"]) == high


def test_a_chunk_size_can_be_searched(memfix: Any) -> None:
    ended = memfix(
        "fit", "linear_cross_entropy", "--form", "recompute", "--case", "small", "--over", "rows_per_chunk",
        "--capacity", "2MiB", "--json", "-",
    )  # fmt: skip
    assert ended.exit_code == 0
    found = json.loads(ended.out)["rows_per_chunk"]
    assert (found["largest"] >= 128, found["bounded"]) == (True, False)


def test_a_capacity_that_the_smallest_value_exceeds_names_dim_and_form_and_ends_with_2(memfix: Any) -> None:
    ended = memfix(*GATHER, "--over", "N", "--capacity", "500KiB")
    assert (ended.exit_code, ended.err) == (2, "")
    title, smallest, *_ = ended.out.splitlines()
    assert title == "embedding/gather [small, forward] on H200, 500.00 KiB: not even N = 1"
    assert smallest.split() == ["1", "500.51", "KiB", "too", "much"]


def test_an_answer_that_was_found_stays_where_another_dim_has_none(memfix: Any) -> None:
    # 1024 rows of ids and result leave 36,864 bytes for the weight, and the weight of the case alone is too much
    ended = memfix(*GATHER, "--over", "V,N", "--capacity", "300KiB", "--json", "-")
    assert ended.exit_code == 2
    assert "300.00 KiB: V = 144" in ended.err
    assert "300.00 KiB: not even N = 1" in ended.err
    found = json.loads(ended.out)
    assert {dim: result["largest"] for dim, result in found.items()} == {"V": 144, "N": 0}


def test_an_answer_that_was_found_stays_where_another_dim_raises(memfix: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from memfix.registry import contracts

    (contract,) = contracts(["embedding"])
    gather = contract.forms["gather"].function

    def refuses_wide(ids: Any, weight: Any) -> Any:
        if weight.shape[-1] > 64:
            raise ValueError("no more than 64 columns")
        return gather(ids, weight)

    monkeypatch.setitem(contract.forms, "gather", dataclasses.replace(contract.forms["gather"], function=refuses_wide))  # type: ignore[index]
    ended = memfix(*GATHER, "--over", "N,D", "--capacity", "1MiB", "--json", "-")
    assert ended.exit_code == 2
    assert "1.00 MiB: N = 2,032" in ended.err
    assert "1.00 MiB: D could not be searched: ValueError: no more than 64 columns" in ended.err
    assert json.loads(ended.out)["D"] == {"error": "ValueError: no more than 64 columns"}


def test_without_a_form_the_smallest_is_fitted_and_named(memfix: Any) -> None:
    arguments = ("fit", "linear_cross_entropy", "--case", "small", "--over", "N", "--capacity", "1MiB")
    ended = memfix(*arguments)
    assert ended.exit_code == 0
    chosen, title, *_ = ended.out.splitlines()
    sizes = chosen.partition(" has the smallest peak of ")[2]
    assert [part.split()[0] for part in sizes.partition(";")[0].split(", ")] == [
        "checkpoint",
        "recompute",
        "auto",
        "triton",
    ]
    form = chosen.split()[0]
    assert title.startswith(f"linear_cross_entropy/{form} [small, train] on H200, 1.00 MiB: N = ")
    assert memfix(*arguments, "--form", form).out.splitlines()[0] == title


# ---------------------------------------------------------------- refusals
@pytest.mark.usefixtures("_no_measuring")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["embeding", "--over", "N"], "no op 'embeding'; did you mean 'embedding'?"),
        (["embedding", "--over", "N", "--form", "gathr"], "embedding has no form 'gathr'; did you mean 'gather'?"),
        (["embedding", "--over", "N", "--case", "smal"], "embedding has no case 'smal'; did you mean 'small'?"),
        (["embedding", "--over", "Q"], "--over: embedding has no dim 'Q'; known: D, N, V"),
        (["embedding", "--over", "N,"], "--over: embedding has no dim ''; known: D, N, V"),
        (
            ["linear_cross_entropy", "--over", "rows_per_chunks"],
            "--over: linear_cross_entropy has no dim 'rows_per_chunks'; did you mean 'rows_per_chunk'?",
        ),
        (["embedding", "--over", "N", "--gpu", "H20"], "unknown GPU 'H20'; did you mean 'H200'?"),
        (
            ["embedding", "--over", "N", "--gpu", "H20", "--capacity", "1GiB"],
            "unknown GPU 'H20'; did you mean 'H200'?",
        ),
        (
            ["embedding", "--over", "N", "--capacity", "24GB"],
            "capacity: unknown unit 'GB' in '24GB'; memfix counts in powers of two: B, KiB, MiB, GiB, TiB",
        ),
        (["embedding", "--over", "N", "--capacity", "0"], "capacity: nothing fits in 0 bytes"),
    ],
)
def test_what_does_not_exist_ends_with_4(memfix: Any, arguments: list[str], message: str) -> None:
    assert memfix("fit", *arguments) == Ended(4, "", f"memfix: {message}\n")


@pytest.mark.usefixtures("_no_measuring")
def test_a_report_that_cannot_be_written_is_refused_before_anything_is_measured(memfix: Any, tmp_path: Path) -> None:
    assert memfix(*GATHER, "--over", "N", "--json", "missing/fit.json") == Ended(
        4, "", f"memfix: cannot write the report missing/fit.json: no folder {tmp_path / 'missing'}\n"
    )


@pytest.mark.usefixtures("_no_measuring")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing option '--over'"),
        (["--over", "N", "--high", "0"], "0 is not in the range x>=1"),
        (["--over", "N", "--phase", "backward"], "'backward' is not one of 'forward', 'held', 'train'"),
    ],
)
def test_bad_options_end_with_4(memfix: Any, arguments: list[str], message: str) -> None:
    ended = memfix("fit", "embedding", *arguments)
    assert ended.exit_code == 4
    assert message in ended.err
