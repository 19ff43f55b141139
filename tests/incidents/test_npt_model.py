"""The NPT runs of the report: counts of parameters, its switches, its accumulation, and its table of configurations."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import ALONE

from memfix.errors import MeasurementError, UsageError
from memfix.incidents import profile_step
from memfix.incidents.config import RunConfig
from memfix.incidents.fit_step import fit_step, growth_of
from memfix.incidents.incident import load_config
from memfix.incidents.npt_weight_delta.incident import RUNS, incident
from memfix.incidents.npt_weight_delta.int8_linear import Int8Linear
from memfix.incidents.npt_weight_delta.model import SIZES, Decoder
from memfix.incidents.profile import STEP_FAILED_PREFIX, MeasuredRun, ReportedRun, run_columns
from memfix.incidents.training import Run, train
from memfix.meters import get_meter

# the report's files with a tiny model
TINY = (
    "model.converted_layers=2", "model.first_converted=null", "model.rank=3", "data.context_length=12",
    "data.states=16", "training.steps=3", "training.gradient_accumulation_steps=2", "training.device=cpu",
    "optimizer.learning_rate=0.01", "optimizer.warmup_steps=0",
)  # fmt: skip
KINDS = pytest.mark.parametrize("size", ["tiny_llama", "tiny_gpt2"])


def tiny(*overrides: str, size: str = "tiny_llama", file: str = "config.yaml") -> RunConfig:
    return load_config(incident, file, (f"model.size={size}", *TINY, *overrides))


def curve(*overrides: str, size: str = "tiny_llama") -> list[float]:
    return [step.loss for step in train(incident, tiny(*overrides, size=size), ALONE)]


# ---------------------------------------------------------------- the models
@pytest.mark.parametrize(
    ("size", "count"), [("llama_8b", 8_030_261_248), ("llama_7b", 6_738_415_616), ("gpt2", 124_439_808)]
)
def test_the_published_counts(size: str, count: int) -> None:
    assert SIZES[size].num_parameters == count


@pytest.mark.parametrize(
    ("file", "count"),
    [("config.yaml", 16 * 16 * (4096 + 14_336)), ("config_optimized.yaml", 4 * 8 * (4096 + 14_336))],
)
def test_what_trains_is_a_and_b_of_the_converted_layers(file: str, count: int) -> None:
    with torch.device("meta"):
        model = incident.build(load_config(incident, file, ["optimization.use_cpu_offload=false"]))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert sum(parameter.numel() for parameter in trained) == count


def test_more_tokens_than_gpt2_has_positions() -> None:
    ids = torch.zeros(1, 65, dtype=torch.int64)
    with pytest.raises(UsageError, match="at most 64 tokens, the rows of the table of positions, got 65: lower data"):
        Decoder(SIZES["tiny_gpt2"])(ids, ids)


@KINDS
def test_the_models_are_causal(size: str) -> None:
    model = Decoder(SIZES[size])
    ids = torch.arange(8).reshape(1, 8)
    changed = ids.clone()
    changed[0, -1] = 9
    hidden, other = model.hidden_states(ids), model.hidden_states(changed)
    torch.testing.assert_close(other[:, :-1], hidden[:, :-1])
    assert not torch.allclose(other[:, -1], hidden[:, -1])


# ---------------------------------------------------------------- the run
@KINDS
def test_a_run_learns_and_leaves_the_base_alone(size: str) -> None:
    run = Run(incident, tiny("training.steps=12", "optimizer.learning_rate=0.1", size=size), ALONE)
    before = {name: parameter.clone() for name, parameter in run.model.named_parameters()}
    losses = [run.take_step().loss for _ in range(12)]
    assert losses[-1] < losses[0] - 0.02
    moved = {name for name, parameter in run.model.named_parameters() if not torch.equal(parameter, before[name])}
    first = "gate" if size == "tiny_llama" else "up"
    assert moved == {f"layers.{layer}.ffn.{first}.{part}" for layer in (2, 3) for part in "ab"}


@KINDS
def test_every_form_gives_the_same_curve(size: str) -> None:
    expected = curve(size=size)
    for changed in (
        "model.form=naive", "model.form=reported", "optimization.use_cpu_offload=true",
        "training.gradient_checkpointing=true",
    ):  # fmt: skip
        assert curve(changed, size=size) == pytest.approx(expected, rel=1e-5)
    for changed in ("model.modulation=tanh", "model.drops_attention=false"):
        assert curve(changed, size=size) != expected


@pytest.mark.parametrize("prompt_fraction", [0, 0.9])
def test_batch_4_and_8_forwards_are_batch_1_and_32_forwards(prompt_fraction: float) -> None:
    """Also where forwards have ignored labels, and so different counts of targets."""
    parameters = []
    for batch_size, forwards in ((4, 8), (1, 32)):
        config = tiny(
            f"training.batch_size={batch_size}", f"training.gradient_accumulation_steps={forwards}",
            f"data.prompt_fraction={prompt_fraction}", "optimizer.eps=1", "optimizer.clip_norm=null",
        )  # fmt: skip
        run = Run(incident, config, ALONE)
        run.take_step()
        parameters.append(torch.cat([p.detach().flatten() for p in run.model.parameters() if p.requires_grad]))
    torch.testing.assert_close(*parameters, rtol=0, atol=1e-7)


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    settings = ("optimization.mixed_precision=fp16", "optimizer.final_fraction=1")
    first = curve(*settings, "training.steps=2", f"checkpoint.path={tmp_path / 'run.pt'}")
    rest = [step.loss for step in train(incident, tiny(*settings), ALONE, resume=tmp_path / "run.pt")]
    assert [*first, *rest] == curve(*settings)


# ---------------------------------------------------------------- switches
def test_fp16_has_float32_masters_of_what_trains_alone() -> None:
    run = Run(incident, tiny("optimization.mixed_precision=fp16"), ALONE)
    run.take_step()
    dtypes = {parameter.requires_grad: parameter.dtype for parameter in run.model.parameters()}
    assert dtypes == {True: torch.float32, False: torch.float16}
    assert run.config.training.precision == "float16"
    assert curve("optimization.mixed_precision=fp16") == pytest.approx(curve(), rel=5e-3)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimization.mixed_precision=fp17"], "optimization.mixed_precision must be one of fp16, bf16, got 'fp17'"),
        (
            ["optimization.mixed_precision=fp16", "training.precision=bfloat16"],
            "optimization.mixed_precision fp16 contradicts training.precision bfloat16: give one of them",
        ),
        (
            ["optimization.use_cpu_offload=true", "model.form=naive"],
            "optimization.use_cpu_offload and use_8bit choose the form: model.form must be auto with them, got naive",
        ),
        (["model.converted_layers=5"], "converted_layers 5 from layer 0 on: tiny_llama has 4 layers"),
        (["model.first_converted=3"], "converted_layers 2 from layer 3 on: tiny_llama has 4 layers"),
        (["model.rank=0"], "model.rank must be at least 1, got 0"),
        (["optimization.use_4bit=true"], "unknown key optimization.use_4bit; did you mean 'use_8bit'?"),
    ],
)
def test_switches_that_make_no_run(overrides: list[str], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        tiny(*overrides)
    assert message in str(refused.value)


def test_8_bits_are_not_for_a_cpu() -> None:
    with pytest.raises(UsageError) as refused:
        Run(incident, tiny("optimization.use_8bit=true"), ALONE)
    assert str(refused.value) == (
        "optimization.use_8bit needs a GPU, and the run is on the CPU: "
        "set optimization.use_8bit=false, or training.device=cuda if there is a GPU"
    )


def test_frozen_parameters_are_sharded_with_the_others() -> None:
    config = tiny("optimization.mixed_precision=fp16", "data.context_length=4")
    alone, on_rank = (
        profile_step.profile(incident, config, world_size=size).rows[0].kinds["parameters"] for size in (1, 2)
    )
    assert on_rank == pytest.approx(alone / 2, rel=0.01)


def test_8_bits_are_of_the_layers_alone_and_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny("optimization.use_8bit=true")
    monkeypatch.setattr("memfix.incidents.npt_weight_delta.int8_linear.bitsandbytes_is_there", lambda: False)
    model: Any = incident.build(config)
    kinds = [type(module) for module in model.layers.modules()]
    assert (kinds.count(Int8Linear), kinds.count(torch.nn.Linear)) == (7 * 4, 0)
    assert type(model.head) is torch.nn.Linear
    assert "by memfix's own int8: bitsandbytes is not installed" in " ".join(incident.describe(config))
    monkeypatch.setattr("memfix.incidents.npt_weight_delta.int8_linear.bitsandbytes_is_there", lambda: True)
    assert "8-bit base weights by bitsandbytes" in incident.describe(config)
    assert not any("8-bit" in words for words in incident.describe(tiny()))


# ---------------------------------------------------------------- beside the report
def test_8_bits_count_as_parameters_in_a_profile() -> None:
    found = {
        use_8bit: profile_step.profile(
            incident, tiny(f"optimization.use_8bit={use_8bit}", "training.precision=bfloat16")
        )
        for use_8bit in ("false", "true")
    }
    kinds = {use_8bit: of.rows[0].kinds for use_8bit, of in found.items()}
    assert kinds["true"]["batch and tables"] == kinds["false"]["batch and tables"]
    assert kinds["true"]["parameters"] < kinds["false"]["parameters"]


def simulated(run: ReportedRun) -> int:
    of_tiny = dataclasses.replace(run, overrides=("model.size=tiny_llama", *TINY, *run.overrides))
    return profile_step.run_bytes(incident, of_tiny, get_meter("simulated"))


def test_bytes_grow_in_a_line_with_the_converted_layers() -> None:
    all_layers = ("model.converted_layers=4", "model.form=reported", "data.context_length=16")
    run = ReportedRun("basic", all_layers, "", "", linear_in="model.converted_layers")
    assert simulated(run) == simulated(dataclasses.replace(run, linear_in=None))


def test_a_simulation_has_two_forwards_for_any_number() -> None:
    by_forwards = {
        number: simulated(ReportedRun("", (f"training.gradient_accumulation_steps={number}",), "", ""))
        for number in (1, 2, 32)
    }
    assert by_forwards[1] < by_forwards[2] == by_forwards[32]


@pytest.fixture
def _tiny_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs = [{"name": "fits", "peak_bytes": 7, "failed": None, "times_s": [0.9, 0.816, 0.8]}]
    (tmp_path / "profile_npt_weight_delta.json").write_text(json.dumps({"runs": runs}))
    monkeypatch.setattr(profile_step, "H200_RESULTS", tmp_path)

    def later_step_bytes(of: Any, config: RunConfig, *_: Any) -> int:
        if config.model.form == "naive":
            raise MeasurementError(f"{STEP_FAILED_PREFIX}out of memory")
        return 5

    monkeypatch.setattr(profile_step, "later_step_bytes", later_step_bytes)


@pytest.mark.usefixtures("_tiny_runs")
def test_the_configurations_stand_beside_the_reports_own_step_alone(tmp_path: Path) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(
        "model: {size: tiny_gpt2, converted_layers: 1, rank: 2}\ndata: {context_length: 4}\ntraining: {steps: 1}\n"
    )
    own = dataclasses.replace(
        incident,
        config=str(file),
        runs=(
            ReportedRun("fits", (), "~2 GB", "NPT-31", str(file)),
            ReportedRun("fails", ("model.form=naive",), ">80 GB, fails", "NPT-27", str(file)),
        ),
    )
    found = profile_step.profile(own, load_config(own, file))
    count = f"{SIZES['tiny_gpt2'].num_parameters:,}"
    assert run_columns(found.runs, "simulated", 5) == {
        "configuration": ["fits", "fails"],
        "parameters": [count, count],
        "simulated": ["5 B", "out of memory"],
        "H200, kept": ["7 B", "not measured"],
        "H200 step, kept": ["816 ms ±6 %", ""],
        "fits in 5 B": ["yes", "no"],
        "report": ["~2 GB", ">80 GB, fails"],
        "claim": ["NPT-31", "NPT-27"],
    }
    assert run_columns(found.runs, "simulated", 4)["fits in 4 B"] == ["no", "no"]
    fits = {
        "name": "fits", "report": "~2 GB", "parameters": SIZES["tiny_gpt2"].num_parameters, "peak_bytes": 5,
        "failed": None, "times_s": [],
    }  # fmt: skip
    assert found.as_dict()["runs"][0] == fits
    assert not profile_step.profile(own, load_config(own, file, ["data.context_length=8"])).runs


def test_a_run_says_its_median_time_with_the_spread() -> None:
    run = ReportedRun("fits", (), "~2 GB", "NPT-31", "small")
    assert MeasuredRun(run, 5, times_s=(0.80, 0.816, 0.90)).time == "816 ms ±6 %"
    assert MeasuredRun(run, 5).time == ""


@pytest.mark.gpu
def test_a_step_of_few_forwards_is_timed_on_a_gpu() -> None:
    timed, untimed = (
        profile_step._times_s(
            incident, ReportedRun("", (f"training.gradient_accumulation_steps={n}",), "", "", "small")
        )
        for n in (2, 3)
    )
    assert all(seconds > 0 for seconds in timed)
    assert not untimed


def test_the_configurations_are_those_of_the_report() -> None:
    assert [(run.name, run.figure) for run in RUNS if run.figure] == [
        ("original", ">80 GB, fails"),
        ("basic optimization", "~79 GB, fails"),
        ("+ CPU offload", "~78 GB"),
        ("+ fp16", "~40 GB"),
        ("+ fewer layers", "~35 GB"),
        ("small model", "~2 GB"),
    ]


def test_as_many_sequences_as_fit() -> None:
    few, more = fit_step(incident, tiny(), growth_of(incident, "training.batch_size"), ["600KiB", "800KiB"])
    assert 1 < few.value < more.value
