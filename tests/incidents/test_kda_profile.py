"""The stages of the KDA run's train step: what layers keep, where a card ends, and how many layers fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from kda_runs import SHRUNKEN

from memfix.errors import UsageError
from memfix.incidents.kda_transitions import profile as profiling
from memfix.incidents.kda_transitions.most_layers import grown, most_layers
from memfix.incidents.kda_transitions.profile import profile
from memfix.incidents.kda_transitions.settings import ProfileSettings, settings_of
from memfix.incidents.kda_transitions.stand_ins import simulated_op
from memfix.incidents.kda_transitions.trainable import trainable
from memfix.incidents.profile import BACKWARD, LATER_STEP, OPTIMIZER, PARAMETERS, Profile
from memfix.incidents.stand_in import kept_inputs
from memfix.incidents.train_state import RepeatedStep, StagedStep, TrainState
from memfix.meters import get_meter
from memfix.meters.base import Reading
from memfix.meters.stages import Stage, listening

METER = get_meter("simulated")
# one batch of two sequences, 2 heads of 8: a state is 1 KiB a sequence
TOKENS = 12
STATE_BYTES = 2 * 2 * 8 * 8 * 4
SHORT = (*SHRUNKEN, f"data.context_length={TOKENS}", f"training.batch_tokens={2 * TOKENS}", "model.layers=2")


def settings(*overrides: str, capacity: int | str = "24GiB") -> ProfileSettings:
    return settings_of(overrides=(*SHORT, *overrides), capacity=capacity)


@pytest.fixture(scope="module")
def streamed() -> Profile:
    """With all forms beside it."""
    return profile(settings("model.kda_form=streamed"))


@pytest.fixture
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the other forms, which take their time."""
    monkeypatch.setattr(profiling, "COMPARED", ())


def stages(found: Profile) -> dict[str, Stage]:
    return {row.stage.name: row.stage for row in found.rows}


# ---------------------------------------------------------------- layer by layer
def test_every_layer_is_a_stage_and_all_keep_alike(streamed: Profile) -> None:
    found = stages(streamed)
    layers = ["layer 1", "layer 2"]
    assert [*found] == [PARAMETERS, "embedding", *layers, "loss", BACKWARD, OPTIMIZER, LATER_STEP]
    assert len({found[name].added_bytes for name in layers}) == 1
    assert streamed.peak_bytes == found[LATER_STEP].peak_bytes


@pytest.mark.usefixtures("_alone")
def test_dense_layers_keep_transitions_and_states_and_streamed_ones_do_not(streamed: Profile) -> None:
    dense = stages(profile(settings("model.kda_form=naive")))["layer 2"].added_bytes
    lean = stages(streamed)["layer 2"].added_bytes
    assert dense - lean > 2 * TOKENS * STATE_BYTES - 4 * STATE_BYTES


@pytest.mark.parametrize(
    ("form", "change"), [("streamed", "training.gradient_checkpointing=true"), ("wy", "training.precision=bfloat16")]
)
def test_stand_ins_take_the_bytes_of_the_op(form: str, change: str) -> None:
    run = settings(f"model.kda_form={form}", "model.value_width=5", change).run
    op = simulated_op(run, METER)
    assert op.notes == ()
    quick, whole = (METER.measure(StagedStep(trainable, run, *prepare)) for prepare in ((op.put_into,), ()))
    assert sizes(quick) == sizes(whole)


@pytest.mark.parametrize("form", ["naive", "reported"])
def test_of_forms_of_many_nodes_layers_are_exact_and_backward_nearly(form: str) -> None:
    run = settings(f"model.kda_form={form}").run
    op = simulated_op(run, METER)
    assert "many nodes of autograd" in op.notes[0]
    quick, whole = (
        {stage.name: stage for stage in METER.measure(StagedStep(trainable, run, *prepare)).stages}
        for prepare in ((op.put_into,), ())
    )
    token_bytes = 2 * TOKENS * 2 * 8 * 4
    for name, stage in whole.items():
        assert quick[name].end_bytes == stage.end_bytes
        assert 0 <= quick[name].peak_bytes - stage.peak_bytes <= 4 * token_bytes


def sizes(found: Reading) -> list[tuple[str, int, int]]:
    return [(stage.name, stage.end_bytes, stage.peak_bytes) for stage in found.stages]


def test_inputs_that_backward_needs_are_told_from_others() -> None:
    def function(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return x * y[:1] + z

    assert kept_inputs(METER, function, [((2, 3), torch.float32)] * 3) == (True, True, False)


def test_the_step_runs_on_real_tensors_and_says_its_stages() -> None:
    heard: list[str | None] = []
    build = StagedStep(trainable, settings().run)
    step = build("cpu")
    step()
    with listening(heard.append):
        step()
    wanted = [PARAMETERS, "embedding", "layer 1", "layer 2", "loss", BACKWARD, OPTIMIZER, LATER_STEP]
    assert heard == wanted
    assert build.parameter_bytes == TrainState(trainable, settings().run, "meta").parameter_bytes


def test_a_repeated_step_leaves_what_it_found() -> None:
    reading = METER.measure(RepeatedStep(trainable, settings("model.kda_form=wy", "model.layers=1").run))
    assert (reading.held_bytes, reading.leaked_bytes) == (0, 0)


def test_steps_of_several_forwards_are_refused() -> None:
    with pytest.raises(UsageError, match=r"use training\.gradient_accumulation_steps=1"):
        settings("training.gradient_accumulation_steps=2")


# ---------------------------------------------------------------- the card
def test_the_layer_is_named_in_which_the_card_ends(streamed: Profile) -> None:
    def crossing(capacity: int) -> str:
        return profiling._conclusions(settings(capacity=capacity), streamed.reading, None)[-1]

    assert "are crossed in: layer 2, which finds " in crossing(stages(streamed)["layer 2"].peak_bytes - 1)
    assert "suffice" in crossing(streamed.peak_bytes)
    assert "are crossed in: " in crossing(streamed.peak_bytes - 1)
    assert any(line.startswith("24.00 GiB suffice: ") for line in streamed.conclusions)


def test_forms_are_compared_by_the_layers_that_fit(streamed: Profile) -> None:
    lines = {line.split(":")[0]: line for line in streamed.conclusions if line.startswith("kda/")}
    assert [*lines] == ["kda/naive", "kda/reported", "kda/streamed", "kda/wy"]
    most = {name: int(line.rsplit(": ", 1)[1].split()[0]) for name, line in lines.items()}
    assert most["kda/streamed"] > 1.3 * most["kda/naive"]
    assert most["kda/wy"] > 1.3 * most["kda/reported"]


def test_long_sequences_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "COMPARED_UP_TO", TOKENS - 1)
    assert list(profiling._compared(settings(), METER, print)) == []


def test_the_line_ends_where_layers_stop_fitting() -> None:
    chosen, capacity = settings("model.kda_form=wy"), 1 << 18
    (fit,) = most_layers(chosen, [capacity])
    fits = {row.value: row.fits for row in fit.tried}
    assert (fits[fit.value], fits[fit.value + 1]) == (True, False)
    assert abs(grown(chosen, capacity, METER).most - fit.value) <= 1


# ---------------------------------------------------------------- beside the report
def test_figures_of_the_report_stand_beside_its_own_shape_only(streamed: Profile) -> None:
    assert all(row.beside is None for row in streamed.rows)
    assert settings_of().is_of_the_report
    assert not settings_of(overrides=["training.batch_tokens=2048"]).is_of_the_report
    assert not settings_of("hn_s.yaml").is_of_the_report


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": "hn_m.yaml"}, "no config file hn_m.yaml"),
        ({"overrides": ["model.layer=2"]}, "unknown key model.layer; did you mean 'layers'?"),
        ({"capacity": "24GB"}, "capacity: unknown unit 'GB'"),
    ],
)
def test_settings_that_do_not_exist_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        settings_of(**change)
    assert message in str(refused.value)


def test_a_profile_says_what_it_is_of(streamed: Profile) -> None:
    assert streamed.title == (
        "kda_transitions hn_xs, 2 layers, 2 x 12 tokens, kda/streamed in chunks of 64, float32, H200"
    )
    assert dataclasses.replace(streamed).as_dict()["settings"]["model"]["kda_form"] == "streamed"
