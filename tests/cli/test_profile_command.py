"""``memfix profile`` and ``memfix fit`` of an incident: the table, the files, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from command_line import Ended

from memfix.incidents.kda_transitions import incident as of_layers
from memfix.incidents.npt_weight_delta import incident as of_configurations
from memfix.incidents.profile import ReportedRun
from memfix.meters.simulated import SimulatedMeter
from memfix.units import format_bytes

STEP = ("long_context_loss", "model.size=tiny", "model.attention_type=dense", "model.loss_form=recompute")
TINY, FIT = (("profile", *STEP, "data.context_length=512"), ("fit", *STEP, "data.context_length=512"))


@pytest.fixture
def _no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal must come before minutes are spent."""

    def measured(*_: object, **__: object) -> None:
        raise AssertionError("something was measured")

    monkeypatch.setattr(SimulatedMeter, "measure", measured)


# ---------------------------------------------------------------- profile
def test_stages_holders_and_pictures_of_one_run(memfix: Any, tmp_path: Path) -> None:
    ended = memfix(*TINY, "--rows", "1", "--save", "step.svg", "--save", "step.html", "--json", "step.json")
    assert (ended.exit_code, ended.err) == (0, "")
    lines = ended.out.splitlines()
    assert lines[0] == (
        "long_context_loss report, tiny, dense, 512 tokens, loss recompute, checkpointed, pure_bfloat16, H200"
    )
    assert lines[2].split() == ["stage", "at", "its", "end", "peak", "report", "remark"]
    data = json.loads((tmp_path / "step.json").read_text())
    assert lines[1].startswith(f"peak of the step: {format_bytes(data['peak_bytes'])}, ")
    assert lines[1].endswith("; fits in 139.80 GiB")
    by_name = {stage["name"]: stage for stage in data["stages"]}
    assert data["settings"]["data"]["context_length"] == 512
    assert by_name["with the logits"]["end_bytes"] - by_name["with the logits"]["start_bytes"] == 512 * 512 * 2
    assert data["peak_bytes"] == by_name["every later step"]["peak_bytes"]
    for name, stage in by_name.items():
        assert any(line.startswith(f"{'· ' if stage['aside'] else ''}{name} ") for line in lines), name
        assert sum(stage["kinds_at_peak"].values()) == stage["peak_bytes"]
    held = lines[lines.index("what holds the memory at the peak of each stage") :]
    assert any(line.endswith("  gradients") for line in held)
    assert any(line.endswith("  optimizer states") for line in held)
    assert {"wrote step.svg", "wrote step.html"} <= set(lines)
    for picture in ("step.svg", "step.html"):
        drawn = (tmp_path / picture).read_text()
        assert all(name in drawn for name in ("with the logits", "loss, chunked as reported", "every later step"))


def test_a_picture_headlines_the_peak_of_the_text_also_where_more_was_tried_beside_the_step(
    memfix: Any, tmp_path: Path
) -> None:
    options = ("data.context_length=4096", "model.rows_per_chunk=32", "--capacity", "1MiB", "--rows", "0")
    ended = memfix("profile", *STEP, *options, "--save", "step.svg", "--save", "step.html", "--json", "step.json")
    assert (ended.exit_code, ended.err) == (0, "")
    data = json.loads((tmp_path / "step.json").read_text())
    own = data["peak_bytes"]
    assert max(stage["peak_bytes"] for stage in data["stages"] if stage["aside"]) > own
    headline = ended.out.splitlines()[1]
    does_not_fit = f"does not fit: {format_bytes(own - (1 << 20))} more than 1.00 MiB"
    assert headline.startswith(f"peak of the step: {format_bytes(own)}, ")
    assert headline.endswith(f"; {does_not_fit}")
    above = headline.split(", ")[1].partition(";")[0]
    for picture in ("step.svg", "step.html"):
        drawn = (tmp_path / picture).read_text()
        assert f"peak {above}, {does_not_fit}" in drawn, picture
    assert f'"in all at the peak","{format_bytes(own)}"' in (tmp_path / "step.html").read_text()


def test_a_reports_configurations_stand_below_its_own_step(
    memfix: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(
        "model: {size: tiny_gpt2, converted_layers: 1, rank: 2}\ndata: {context_length: 4}\ntraining: {steps: 1}\n"
    )
    runs = (ReportedRun("basic", ("model.form=reported",), "~79 GB, fails", "NPT-28", str(file)),)
    own = dataclasses.replace(of_configurations.incident, config=str(file), runs=runs)
    monkeypatch.setattr(of_configurations, "incident", own)
    ended = memfix("profile", "npt_weight_delta", "--rows", "0", "--json", "step.json")
    assert (ended.exit_code, ended.err) == (0, "")
    (row,) = json.loads((tmp_path / "step.json").read_text())["runs"]
    assert (row["name"], row["failed"]) == ("basic", None)
    words = [
        "basic",
        f"{row['parameters']:,}",
        *format_bytes(row["peak_bytes"]).split(),
        "yes",
        "~79",
        "GB,",
        "fails",
        "NPT-28",
    ]
    assert words in [line.split() for line in ended.out.splitlines()]


def test_json_on_standard_output_leaves_the_table_to_standard_error(memfix: Any) -> None:
    ended = memfix(
        *TINY, "data.context_length=40", "training.gradient_checkpointing=false", "--rows", "0", "--json", "-"
    )
    assert ended.exit_code == 0
    data = json.loads(ended.out)
    assert data["subject"].startswith("long_context_loss report, tiny, dense, 40 tokens, loss recompute, pure_bf")
    assert "what holds the memory" not in ended.err
    assert "every later step" in ended.err


# ---------------------------------------------------------------- fit
def test_the_longest_context_is_found_for_each_capacity(memfix: Any) -> None:
    ended = memfix(*FIT, "--capacity", "1MiB, 4MiB, 1GiB", "--high", "1000", "--json", "-")
    assert ended.exit_code == 0
    none, some, all_allowed = json.loads(ended.out)["data.context_length"]
    assert (none["largest"], none["capacity_bytes"]) == (0, 1 << 20)
    assert "1.00 MiB: not even 64 tokens" in ended.err
    assert f"4.00 MiB: {some['largest']:,} tokens" in ended.err
    fits = {row["value"]: row["fits"] for row in some["tried"]}
    assert fits[some["largest"]]
    assert not fits[some["largest"] + 64]
    assert len(fits) <= 7
    assert (all_allowed["largest"], all_allowed["bounded"]) == (960, True)
    assert "1.00 GiB: 960 tokens (the largest that was allowed)" in ended.err


def test_where_nothing_fits_it_ends_with_2(memfix: Any) -> None:
    ended = memfix(*FIT, "--capacity", "1MiB")
    assert (ended.exit_code, ended.err) == (2, "")
    assert ended.out.startswith("long_context_loss on H200, 1.00 MiB: not even 64 tokens")


def test_the_fewest_ranks_are_found_for_each_capacity(memfix: Any) -> None:
    arguments = (*FIT, "data.context_length=64", "--over", "world_size", "--high", "8")
    (none,) = json.loads(memfix(*arguments, "--capacity", "1KiB", "--json", "-").out)["world_size"]
    sizes = {row["value"]: row["bytes"] for row in none["tried"]}
    assert none["smallest"] == 0
    ended = memfix(*arguments, "--capacity", f"1GiB, {sizes[4]}", "--json", "-")
    alone, some = json.loads(ended.out)["world_size"]
    assert (alone["smallest"], some["smallest"]) == (1, 4)
    assert [row["fits"] for row in some["tried"]] == [False, False, True]
    assert "1.00 GiB: 1 ranks" in ended.err
    assert memfix(*arguments, "--world-size", "2").err.endswith(
        "--over world_size searches the number of ranks: --world-size does not apply\n"
    )


def test_another_key_can_be_grown(memfix: Any) -> None:
    ended = memfix(*FIT, "data.context_length=64", "--over", "training.batch_size", "--capacity", "4MiB", "--json", "-")
    assert ended.exit_code == 0
    (found,) = json.loads(ended.out)["training.batch_size"]
    fits = {row["value"]: row["fits"] for row in found["tried"]}
    assert fits[found["largest"]]
    assert not fits[found["largest"] + 1]
    assert f"4.00 MiB: {found['largest']} sequences" in ended.err


# ---------------------------------------------------------------- layer by layer
KDA_RUN = (
    "model.layers=2", "model.width=16", "model.heads=2", "model.head_width=8", "model.ffn_width=24",
    "model.vocabulary=64", "data.context_length=20", "data.states=16", "training.batch_tokens=40",
)  # fmt: skip


def test_layers_of_a_run_and_the_card_that_it_does_not_fit(memfix: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_layers, "COMPARED", ("naive",))  # all of them take their time
    ended = memfix(
        "profile", "kda_transitions", *KDA_RUN, "model.kda_form=streamed", "--capacity", "150KiB", "--json", "-"
    )
    assert ended.exit_code == 0
    data = json.loads(ended.out)
    names = [stage["name"] for stage in data["stages"]]
    assert names[:5] == ["parameters", "embedding", "layer 1", "layer 2", "loss"]
    assert (data["settings"]["config"], data["capacity_bytes"]) == ("hn_xs", 150 << 10)
    assert "the step exceeds 150.00 KiB first in: layer " in ended.err
    assert "more than the GPU's 150.00 KiB" in ended.err
    assert "\nkda/naive: " in ended.err


def test_the_most_layers_are_found(memfix: Any) -> None:
    ended = memfix("fit", "kda_transitions", *KDA_RUN, "model.kda_form=wy", "--capacity", "256KiB", "--json", "-")
    assert ended.exit_code == 0
    (found,) = json.loads(ended.out)["model.layers"]
    fits = {row["value"]: row["fits"] for row in found["tried"]}
    assert fits[found["largest"]]
    assert not fits[found["largest"] + 1]
    assert f"256.00 KiB: {found['largest']} layers" in ended.err


# ---------------------------------------------------------------- refusals
@pytest.mark.usefixtures("_no_measuring")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["profile", "long_context_los"], "no incident 'long_context_los'; did you mean 'long_context_loss'?"),
        (
            ["profile", "long_context_loss", "model.size=8B"],
            "override model.size=8B: model.size must be one of 4B, tiny, got '8B'",
        ),
        (
            ["profile", "long_context_loss", "model.attention_type=nsaa"],
            "override model.attention_type=nsaa: model.attention_type must be one of nsa, dense, got 'nsaa'",
        ),
        (
            ["profile", "long_context_loss", "data.context_length=0"],
            "override data.context_length=0: data.context_length must be at least 1, got 0",
        ),
        (["profile", "long_context_loss", "--world-size", "0"], "world_size must be at least 1, got 0"),
        (["profile", "long_context_loss", "--gpu", "H20"], "unknown GPU 'H20'; did you mean 'H200'?"),
        (["fit", "long_context_loss", "--gpu", "H20"], "unknown GPU 'H20'; did you mean 'H200'?"),
        (["fit", "long_context_loss", "--world-size", "-1"], "world_size must be at least 1, got -1"),
        (
            ["fit", "long_context_loss", "--over", "model.layers"],
            "long_context_loss cannot grow 'model.layers'; known: data.context_length, training.batch_size, world_size",
        ),
        (
            ["profile", "kda_transitions", "--config", "hn_xl.yaml"],
            "no config file hn_xl.yaml, and kda_transitions comes with none of that name; did you mean 'hn_xs.yaml'?",
        ),
        (
            ["fit", "kda_transitions", "model.kda_form=dense"],
            "override model.kda_form=dense: model.kda_form must be one of auto, naive, reported, streamed, wy, triton, "
            "got 'dense'",
        ),
        (
            ["fit", "long_context_loss", "--capacity", "80GiB,"],
            "capacity: cannot read '' as a size; write it as '24GiB', '512MiB' or a number of bytes",
        ),
    ],
)
def test_what_does_not_exist_ends_with_4(memfix: Any, arguments: list[str], message: str) -> None:
    assert memfix(*arguments) == Ended(4, "", f"memfix: {message}\n")


@pytest.mark.usefixtures("_no_measuring")
def test_files_that_cannot_be_written_are_refused_before_anything_is_measured(memfix: Any, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert memfix(*TINY, "--json", "missing/step.json") == Ended(
        4, "", f"memfix: cannot write the report missing/step.json: no folder {missing}\n"
    )
    assert memfix(*TINY, "--save", "missing/step.html") == Ended(
        4, "", f"memfix: cannot write the picture missing/step.html: no folder {missing}\n"
    )


@pytest.mark.usefixtures("_no_measuring")
def test_without_a_gpu_the_cuda_meter_ends_with_2(memfix: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert memfix(*TINY, "--meter", "cuda") == Ended(
        2, "", "memfix: cuda meter unavailable: torch sees no GPU; use the simulated meter\n"
    )


@pytest.mark.usefixtures("_no_measuring")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit", "long_context_loss", "--phase", "train"], "long_context_loss is an incident: --phase does not apply"),
        (["fit", "embedding", "--over", "N", "--world-size", "2"], "embedding is an op, not an incident: --world-size"),
        (
            ["fit", "embedding", "model.layers=2", "--over", "N"],
            "embedding is an op, not an incident: [SECTION.KEY=VALUE]... does not apply",
        ),
        (["profile", "long_context_loss", "--rows", "-1"], "-1 is not in the range x>=0"),
    ],
)
def test_options_of_something_else_end_with_4(memfix: Any, arguments: list[str], message: str) -> None:
    ended = memfix(*arguments)
    assert ended.exit_code == 4
    assert message in ended.err


@pytest.mark.usefixtures("_no_measuring")
@pytest.mark.parametrize("command", ["profile", "fit"])
@pytest.mark.parametrize(
    ("option", "now"),
    [
        (["--model-size", "tiny"], "model.size=tiny"),
        (["--attention-type", "dense"], "model.attention_type=dense"),
        (["--context-length", "512"], "data.context_length=512"),
        (["--gradient-checkpointing"], "training.gradient_checkpointing=true"),
        (["--no-gradient-checkpointing"], "training.gradient_checkpointing=false"),
        (["--batch-size", "2"], "training.batch_size=2"),
        (["--loss", "recompute"], "model.loss_form=recompute"),
        (["--precision", "bfloat16"], "training.precision=pure_bfloat16"),
        (["--precision", "mixed"], "training.precision=autocast"),
    ],
)
def test_options_that_became_keys_say_which(memfix: Any, command: str, option: list[str], now: str) -> None:
    ended = memfix(command, "long_context_loss", *option)
    assert (ended.exit_code, ended.out) == (4, "")
    assert f"{' '.join(option)} is now a key of the config; write {now} instead" in ended.err
    assert option[0] not in memfix(command, "--help").out
