"""``memfix train``: a run from a config file, told as it goes."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from command_line import Ended

import memfix as package
from memfix.cli.train import _progress
from memfix.incidents import get_incident
from memfix.incidents.incident import load_config
from memfix.incidents.training import StepReport

INCIDENT = "long_context_loss"
CONFIGS = Path(package.__file__).parent / "incidents" / INCIDENT / "configs"
TINY = ("train", INCIDENT, "--config", str(CONFIGS / "tiny.yaml"))
SHORT = ("training.device=cpu", "training.steps=2", "data.context_length=8")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_the_tiny_config_trains_and_its_loss_falls(memfix: Any, tmp_path: Path) -> None:
    ended = memfix(*TINY, "training.device=cpu", "--json", "steps.jsonl")
    assert (ended.exit_code, ended.err) == (0, "")
    title, *lines = ended.out.splitlines()
    assert title.startswith(f"{INCIDENT}: 40 steps, processes: 1, cpu, float32, tiny, dense, 64 tokens")
    assert [line.split("/")[0].split()[1] for line in lines] == ["1", "5", "10", "15", "20", "25", "30", "35", "40"]
    assert " tokens/s  peak " in lines[-1]
    assert lines[-1].endswith("iB host RSS")
    start, *steps, end = (json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines())
    assert (start["event"], end) == ("start", {"event": "end"})
    assert (start["config"]["data"]["context_length"], start["processes"], start["device"]) == (64, 1, "cpu")
    assert start["surroundings"]["torch"].startswith("2.")
    losses = [step["loss"] for step in steps]
    assert losses[0] == pytest.approx(6.24, abs=0.1)  # log 512, as nothing is known
    assert sum(losses[-5:]) / 5 < 1.9  # the stream leaves log 4 = 1.39
    assert all(step["tokens_per_s"] > 0 and step["peak_bytes"] > 1 << 20 for step in steps)


@pytest.mark.parametrize("attention_type", ["dense", "nsa"])
def test_json_on_standard_output_leaves_the_progress_to_standard_error(memfix: Any, attention_type: str) -> None:
    ended = memfix(*TINY, *SHORT, f"model.attention_type={attention_type}", "--json", "-")
    assert ended.exit_code == 0
    assert "step 2/2  loss " in ended.err
    assert [json.loads(line)["event"] for line in ended.out.splitlines()] == ["start", "step", "step", "end"]


def test_a_decoder_of_images_shows_its_psnr(memfix: Any) -> None:
    smaller = ("model.hidden_dim=8", "model.latent_dim=8", "model.latent_tokens=4", "data.resolution=4")
    ended = memfix("train", "scent_decoder", "--config", "small", *smaller, "training.steps=1", "training.batch_size=2")
    assert ended.exit_code == 0
    ((loss, shown),) = re.findall(r"loss (\d\.\d+)  PSNR (-?\d+\.\d+) dB  rate", ended.out)
    assert float(shown) == pytest.approx(-10 * math.log10(float(loss)), abs=0.02)


NPT = (
    "train", "npt_weight_delta", "--config", "small", "model.size=tiny_gpt2", "model.converted_layers=2",
    "data.context_length=8", "training.steps=2", "training.device=cpu",
)  # fmt: skip


def test_a_config_is_named_without_its_suffix(memfix: Any) -> None:
    ended = memfix(*NPT, "optimization.mixed_precision=fp16", "--json", "-")
    assert ended.exit_code == 0
    assert "npt_weight_delta: 2 steps, processes: 1, cpu, float16, tiny_gpt2, 54,976 parameters" in ended.err
    steps = [record for line in ended.out.splitlines() if (record := json.loads(line))["event"] == "step"]
    assert [(step["loss_scale"], step["skipped"]) for step in steps] == [(65_536.0, False)] * 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimization.use_8bit=true", "optimization.use_8bit needs a GPU"),
        ("optimization.mixed_precision=fp17", "optimization.mixed_precision must be one of fp16, bf16, got 'fp17'"),
    ],
)
def test_a_switch_that_makes_no_run_is_refused(override: str, message: str, memfix: Any) -> None:
    ended = memfix(*NPT, override)
    assert ended.exit_code == 4
    assert message in ended.err


def test_a_skipped_step_says_so() -> None:
    step = StepReport(
        step=1, steps=2, loss=1.0, num_targets=1, learning_rate=0.1, gradient_norm=math.inf, loss_scale=65_536.0,
        skipped=True, elapsed_s=1.0, examples_per_s=1.0, tokens_per_s=None, peak_bytes=1, peak_meter="cuda",
    )  # fmt: skip
    assert _progress(step).endswith("  skipped: gradients overflow at loss scale 65536")
    assert "skipped" not in _progress(dataclasses.replace(step, skipped=False))


def test_a_resumed_run_goes_on_in_its_own_log(memfix: Any, tmp_path: Path) -> None:
    saved = ("checkpoint.path=run.pt", "--json", "steps.jsonl")
    assert memfix(*TINY, *SHORT, *saved).exit_code == 0
    ended = memfix(*TINY, *SHORT, "training.steps=3", *saved, "--resume", "run.pt")
    assert (ended.exit_code, ended.err) == (0, "")
    assert ended.out.splitlines()[1].startswith("resumed from run.pt after step 2, ")
    records = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["event"] == "step"] == [1, 2, 3]


def test_every_flag_of_the_reports_command_is_a_key(memfix: Any) -> None:
    """LOG-43: --model_size, --context_length, --gradient_checkpointing, --batch_size, --gradient_accumulation_steps."""
    incident = get_incident(INCIDENT)
    config = load_config(incident, CONFIGS / "131k.yaml")
    assert (config.model.size, config.data.context_length) == ("4B", 131_072)
    assert config.training.gradient_checkpointing
    assert (config.training.batch_size, config.training.gradient_accumulation_steps) == (1, 4)
    flags = {
        "model.size": "4B", "data.context_length": "131072", "training.gradient_checkpointing": "true",
        "training.batch_size": "1", "training.gradient_accumulation_steps": "4",
    }  # fmt: skip
    overrides = [f"{key}={value}" for key, value in flags.items()]
    tiny = load_config(incident, CONFIGS / "tiny.yaml", overrides).as_dict()
    assert all(str(tiny[key.split(".")[0]][key.split(".")[1]]).lower() == flags[key].lower() for key in flags)
    listed = memfix("train", INCIDENT, "--keys")
    assert listed.exit_code == 0
    assert flags.keys() <= {line.split()[0] for line in listed.out.splitlines()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["long_context", "--config", "a.yaml"], "no incident 'long_context'; did you mean 'long_context_loss'?"),
        (
            [INCIDENT, "--config", "131.yaml"],
            f"no config file 131.yaml, and {INCIDENT} comes with none of that name; did you mean '131k.yaml'?",
        ),
        ([*TINY[1:], "model.siz=4B"], "override model.siz=4B: unknown key model.siz; did you mean 'size'?"),
        ([*TINY[1:], "model.size=40B"], "override model.size=40B: model.size must be one of 4B, tiny, got '40B'"),
        ([*TINY[1:], *SHORT, "--resume", "none.pt"], "no checkpoint file none.pt"),
        ([*TINY[1:], *SHORT, "checkpoint.path=."], "checkpoint.path must be a file, got the folder ."),
        ([*TINY[1:], *SHORT, "data.states=600"], "data.states must be at most the vocabulary, 512, got 600"),
    ],
)
def test_what_is_wrong_ends_with_4_and_one_line(memfix: Any, arguments: list[str], message: str) -> None:
    ended = memfix("train", *arguments)
    assert (ended.exit_code, ended.err) == (4, f"memfix: {message}\n")


def test_a_config_of_the_incident_is_found_by_its_name_and_a_file_goes_first(memfix: Any, tmp_path: Path) -> None:
    by_name = ("train", INCIDENT, "--config", "tiny.yaml", *SHORT)
    assert "step 2/2" in memfix(*by_name).out
    (tmp_path / "tiny.yaml").write_text("model: {size: tiny, attention_type: dense}\ntraining: {steps: 1}\n")
    assert "data.context_length is missing" in memfix("train", INCIDENT, "--config", "tiny.yaml").err


def test_the_run_of_the_kda_report_trains_shrunken(memfix: Any) -> None:
    """KDA-27: bash scripts/run_pretrain.sh configs/hn_xs.yaml."""
    shrunken = (
        "model.layers=2", "model.width=16", "model.heads=2", "model.head_width=8", "model.ffn_width=24",
        "model.vocabulary=64", "data.context_length=20", "data.states=16", "training.batch_tokens=40",
        "training.steps=3", "training.device=cpu", "optimizer.warmup_steps=0", "optimizer.learning_rate=1e-2",
    )  # fmt: skip
    ended = memfix("train", "kda_transitions", "--config", "hn_xs.yaml", *shrunken, "--json", "-")
    assert ended.exit_code == 0
    start, *steps, _ = (json.loads(line) for line in ended.out.splitlines())
    assert (start["config"]["training"]["batch_tokens"], start["config"]["model"]["kda_memory_chunk_size"]) == (40, 64)
    assert [step["num_targets"] for step in steps] == [40, 40, 40]


def test_a_report_that_cannot_be_written_is_refused_before_anything_is_trained(memfix: Any, tmp_path: Path) -> None:
    assert memfix(*TINY, "--json", "missing/steps.jsonl") == Ended(
        4, "", f"memfix: cannot write the report missing/steps.jsonl: no folder {tmp_path / 'missing'}\n"
    )


def test_without_a_config_it_says_which_there_are(memfix: Any) -> None:
    ended = memfix("train", "scent_decoder", "training.steps=300")
    assert ended.exit_code == 4
    words = "Missing option '--config': scent_decoder comes with config, small; --keys lists the keys of a config"
    assert words in ended.err


def test_a_misspelt_key_is_named_with_its_line(memfix: Any, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model:\n  size: tiny\ndata:\n  contxt_length: 8\ntraining:\n  steps: 1\n")
    ended = memfix("train", INCIDENT, "--config", "run.yaml")
    assert ended.exit_code == 4
    assert ended.err.splitlines() == [
        "memfix: run.yaml:4: unknown key data.contxt_length; did you mean 'context_length'?",
        "run.yaml:3: data.context_length is missing: tokens per sequence",
    ]
