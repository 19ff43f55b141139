"""``memfix explain``: the rows of a peak, against another form, as pictures and as JSON."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from command_line import Ended

from memfix.checks import measuring
from memfix.meters.base import Reading

NAIVE_LOSS = ("explain", "linear_cross_entropy", "--case", "small")
N, V = 512, 1000
LOGITS = N * V * 4


@pytest.fixture
def _no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal must come before minutes are spent."""

    def measured(*_: object, **__: object) -> None:
        raise AssertionError("something was measured")

    monkeypatch.setattr(measuring, "measure", measured)


# ---------------------------------------------------------------- what is said
def test_the_peak_its_rows_and_the_likely_cause_are_printed(memfix: Any) -> None:
    ended = memfix(*NAIVE_LOSS)
    assert (ended.exit_code, ended.err) == (0, "")
    title, *lines = ended.out.splitlines()
    assert title.startswith(
        "linear_cross_entropy/naive [small, train] on H200: peak 6,144,004 bytes (5.86 MiB) above 382.00 KiB "
        "that existed before, "
    )
    makers = ["_log_softmax, kept for backward", "_log_softmax_backward_data", "nll_loss_backward"]
    for line, maker in zip(lines, makers, strict=False):
        assert line.startswith(f"      1.95 MiB  {maker}   naive.py:")
        assert " in naive_linear_cross_entropy   loss = F.cross_entropy(" in line
    cause = "the (log-)probabilities of all rows are kept for backward; compute the loss a chunk at a time"
    assert f"likely cause: {cause}" in lines


def test_a_peak_above_the_gpus_memory_does_not_fit(memfix: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from memfix.meters.simulated import gpus

    assert memfix(*NAIVE_LOSS).out.splitlines()[0].endswith("; fits in 139.80 GiB")
    small = dataclasses.replace(gpus.GPUS["H200"], memory_bytes=4 << 20)
    monkeypatch.setitem(gpus.GPUS, "H200", small)
    title = memfix(*NAIVE_LOSS, "--save", "step.html").out.splitlines()[0]
    assert title.endswith("; does not fit: 2.23 MiB more than 4.00 MiB")
    assert "does not fit: 2.23 MiB more than 4.00 MiB" in Path("step.html").read_text()


def test_fewer_rows_fold_the_rest_into_one(memfix: Any) -> None:
    lines = memfix(*NAIVE_LOSS, "--rows", "1").out.splitlines()
    assert lines[1].startswith("      1.95 MiB  _log_softmax, kept for backward")
    assert lines[2] == "      3.91 MiB  in 3 smaller places"


def test_an_ordinary_peak_has_no_likely_cause(memfix: Any) -> None:
    ended = memfix("explain", "embedding", "--form", "gather", "--case", "small")
    assert ended.exit_code == 0
    assert "likely cause" not in ended.out


def test_against_another_form_says_what_grew_and_what_went(memfix: Any) -> None:
    ended = memfix("explain", "embedding", "--form", "gather", "--case", "small", "--against", "naive")
    assert ended.exit_code == 0
    lines = ended.out.splitlines()
    changes = lines[lines.index("against naive (23.44 MiB):") + 1 :]
    assert [line.split(": ")[0] for line in changes] == [
        "  +500.00 KiB",
        "  +256.00 KiB",
        "  -7.81 MiB",
        "  -15.62 MiB",
    ]
    assert changes[1].startswith("  +256.00 KiB: `return weight_VD.index_select(0, ids_N)` gather.py:")
    assert changes[1].endswith(", now alive at the peak (index_select, kept for backward)")
    assert changes[3].endswith(", no longer alive at the peak (new_zeros)")


def test_against_itself_nothing_changed(memfix: Any) -> None:
    ended = memfix("explain", "embedding", "--case", "small", "--against", "naive")
    assert ended.exit_code == 0
    assert ended.out.splitlines()[-1] == "against naive (23.44 MiB):"


def test_a_variant_is_explained_by_its_name_in_the_lock(memfix: Any) -> None:
    ended = memfix("explain", "linear_cross_entropy", "--form", "recompute", "--case", "frozen=weight")
    assert ended.exit_code == 0
    assert ended.out.startswith("linear_cross_entropy/recompute [frozen=weight, train] on H200: peak 72,832 bytes")


def test_the_default_is_naive_at_the_first_case_in_training(memfix: Any) -> None:
    ended = memfix("explain", "embedding", "--json", "-")
    assert json.loads(ended.out)["subject"] == "embedding/naive [incident, train] on H200"


def test_another_phase_and_another_gpu_are_named(memfix: Any) -> None:
    ended = memfix("explain", "embedding", "--case", "small", "--phase", "forward", "--gpu", "nvidia a100")
    assert ended.out.startswith("embedding/naive [small, forward] on A100: peak ")


# ---------------------------------------------------------------- what is written
def test_json_on_standard_output_leaves_the_table_to_standard_error(memfix: Any) -> None:
    ended = memfix(*NAIVE_LOSS, "--against", "recompute", "--json", "-")
    assert ended.exit_code == 0
    assert "against recompute (" in ended.err
    data = json.loads(ended.out)
    assert data.pop("subject") == "linear_cross_entropy/naive [small, train] on H200"
    reading = Reading.from_dict(data)
    assert (reading.peak_bytes, reading.meter, reading.device) == (3 * LOGITS + 4, "simulated", "H200")
    assert [row.bytes for row in reading.alive_at_peak] == [LOGITS, LOGITS, LOGITS, 4]
    assert reading.timeline is None


def test_json_is_written_where_it_was_asked_for(memfix: Any, tmp_path: Path) -> None:
    ended = memfix(*NAIVE_LOSS, "--json", "peak.json")
    assert (ended.exit_code, ended.err) == (0, "")
    assert json.loads((tmp_path / "peak.json").read_text())["peak_bytes"] == 3 * LOGITS + 4


def test_every_picture_that_was_asked_for_is_drawn(memfix: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    names = ["a.png", "a.svg", "a.html", "a.pickle", "a.json"]
    ended = memfix(*NAIVE_LOSS, *(argument for name in names for argument in ("--save", name)))
    assert ended.exit_code == 0
    assert ended.out.splitlines()[-5:] == [f"wrote {name}" for name in names]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
    assert "linear_cross_entropy/naive [small, train] on H200" in (tmp_path / "a.html").read_text()
    assert "segments" in pickle.loads((tmp_path / "a.pickle").read_bytes())
    assert json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


# ---------------------------------------------------------------- refusals
@pytest.mark.usefixtures("_no_measuring")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["embeding"], "no op 'embeding'; did you mean 'embedding'?"),
        (["embedding", "--form", "gathr"], "embedding has no form 'gathr'; did you mean 'gather'?"),
        (["embedding", "--against", "gathr"], "embedding has no form 'gathr'; did you mean 'gather'?"),
        (["embedding", "--case", "smal"], "embedding has no case 'smal'; did you mean 'small'?"),
        (["rope", "--case", "base=50000"], "rope has no case 'base=50000'; did you mean 'base=500000.0'?"),
        (["embedding", "--gpu", "H20"], "unknown GPU 'H20'; did you mean 'H200'?"),
        (
            ["embedding", "--save", "a.gif"],
            "cannot draw a.gif: unknown suffix '.gif'; known: .png, .svg, .html, .pickle, .json",
        ),
        (["embedding", "--save", "a"], "cannot draw a: no suffix; known: .png, .svg, .html, .pickle, .json"),
    ],
)
def test_what_does_not_exist_ends_with_4(memfix: Any, arguments: list[str], message: str) -> None:
    assert memfix("explain", *arguments) == Ended(4, "", f"memfix: {message}\n")


@pytest.mark.usefixtures("_no_measuring")
@pytest.mark.parametrize(("option", "what"), [("--json", "report"), ("--save", "picture")])
def test_a_path_that_cannot_be_written_is_refused_before_anything_is_measured(
    memfix: Any, tmp_path: Path, option: str, what: str
) -> None:
    assert memfix(*NAIVE_LOSS, option, "missing/peak.json") == Ended(
        4, "", f"memfix: cannot write the {what} missing/peak.json: no folder {tmp_path / 'missing'}\n"
    )


@pytest.mark.usefixtures("_no_measuring")
def test_no_rows_are_refused(memfix: Any) -> None:
    ended = memfix("explain", "embedding", "--rows", "0")
    assert ended.exit_code == 4
    assert "0 is not in the range x>=1" in ended.err
