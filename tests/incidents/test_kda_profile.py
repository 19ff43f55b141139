"""The stages of the KDA run's train step: what layers keep, where a card ends, and how many layers fit."""

from __future__ import annotations

import pytest
import torch
from kda_runs import SHRUNKEN

from memfix.errors import UsageError
from memfix.incidents.config import RunConfig
from memfix.incidents.fit_step import fit_step, growth_of
from memfix.incidents.incident import load_config
from memfix.incidents.kda_transitions import incident as declared
from memfix.incidents.kda_transitions.incident import incident, is_of_the_report, layer_growth
from memfix.incidents.measured_step import MeasurableStep
from memfix.incidents.profile import BACKWARD, LATER_FORWARDS, LATER_STEP, OPTIMIZER, PARAMETERS, Profile
from memfix.incidents.profile_step import profile
from memfix.incidents.stand_in import StandIns, kept_inputs
from memfix.meters import get_meter
from memfix.meters.base import Reading
from memfix.meters.stages import Stage, listening
from memfix.progress import silent

METER = get_meter("simulated")
# one batch of two sequences, 2 heads of 8: a state is 1 KiB a sequence
TOKENS = 12
STATE_BYTES = 2 * 2 * 8 * 8 * 4
SHORT = (*SHRUNKEN, f"data.context_length={TOKENS}", f"training.batch_tokens={2 * TOKENS}", "model.layers=2")


def config_of(*overrides: str) -> RunConfig:
    return load_config(incident, incident.config, (*SHORT, *overrides))


def staged(config: RunConfig, stand_ins: StandIns | None) -> Reading:
    return METER.measure(MeasurableStep(incident, config, stand_ins=stand_ins).staged)


@pytest.fixture(scope="module")
def streamed() -> Profile:
    """With all forms beside it."""
    return profile(incident, config_of("model.kda_form=streamed"))


@pytest.fixture
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the other forms, which take their time."""
    monkeypatch.setattr(declared, "COMPARED", ())


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
    dense = stages(profile(incident, config_of("model.kda_form=naive")))["layer 2"].added_bytes
    lean = stages(streamed)["layer 2"].added_bytes
    assert dense - lean > 2 * TOKENS * STATE_BYTES - 4 * STATE_BYTES


@pytest.mark.parametrize(
    ("form", "change"), [("streamed", "training.gradient_checkpointing=true"), ("wy", "training.precision=bfloat16")]
)
def test_stand_ins_take_the_bytes_of_the_op(form: str, change: str) -> None:
    config = config_of(f"model.kda_form={form}", "model.value_width=5", change)
    op = incident.stand_ins(config, METER, silent)
    assert op is not None
    assert op.notes == ()
    assert sizes(staged(config, op)) == sizes(staged(config, None))


@pytest.mark.parametrize("form", ["naive", "reported"])
def test_of_forms_of_many_nodes_layers_are_exact_and_backward_nearly(form: str) -> None:
    config = config_of(f"model.kda_form={form}")
    op = incident.stand_ins(config, METER, silent)
    assert op is not None
    assert "many nodes of autograd" in op.notes[0]
    quick, whole = ({stage.name: stage for stage in staged(config, one).stages} for one in (op, None))
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
    measurable = MeasurableStep(incident, config_of(), simulated=False)
    step = measurable.staged("cpu")
    step()
    with listening(heard.append):
        step()
    wanted = [PARAMETERS, "embedding", "layer 1", "layer 2", "loss", BACKWARD, OPTIMIZER, LATER_STEP]
    assert heard == wanted
    assert measurable.parameter_bytes == sum(p.nbytes for p in incident.build(config_of()).parameters())


def test_a_repeated_step_leaves_what_it_found() -> None:
    measurable = MeasurableStep(incident, config_of("model.kda_form=wy", "model.layers=1"))
    reading = METER.measure(measurable.repeated)
    assert (reading.held_bytes, reading.leaked_bytes) == (0, 0)


def test_forwards_after_the_first_are_one_stage() -> None:
    config = config_of("model.kda_form=streamed", "model.layers=1", "training.gradient_accumulation_steps=3")
    by_name = {stage.name: stage for stage in staged(config, None).stages}
    first = [PARAMETERS, "embedding", "layer 1", "loss", BACKWARD]
    assert [*by_name] == [*first, LATER_FORWARDS, OPTIMIZER, LATER_STEP]
    # backward of a later forward has the gradients of earlier ones beside it
    assert by_name[LATER_FORWARDS].peak_bytes > by_name[BACKWARD].peak_bytes
    assert by_name[LATER_FORWARDS].added_bytes == 0


def test_autocast_is_simulated_without_stand_ins() -> None:
    assert incident.stand_ins(config_of("training.precision=autocast"), METER, silent) is None


# ---------------------------------------------------------------- the card
def test_the_layer_is_named_in_which_the_card_ends(streamed: Profile) -> None:
    def crossing(capacity: int) -> str:
        return declared._crossing(streamed.reading.stages, capacity)

    assert " first in: layer 2, which starts at " in crossing(stages(streamed)["layer 2"].peak_bytes - 1)
    assert "the step fits in " in crossing(streamed.peak_bytes)
    assert " first in: " in crossing(streamed.peak_bytes - 1)
    assert any(line.startswith("the step fits in 24.00 GiB: ") for line in streamed.conclusions)


def test_forms_are_compared_by_the_layers_that_fit(streamed: Profile) -> None:
    lines = {line.split(":")[0]: line for line in streamed.conclusions if line.startswith("kda/")}
    assert [*lines] == ["kda/naive", "kda/reported", "kda/streamed", "kda/wy"]
    most = {name: int(line.rsplit(": ", 1)[1].split()[0]) for name, line in lines.items()}
    assert most["kda/streamed"] > 1.3 * most["kda/naive"]
    assert most["kda/wy"] > 1.3 * most["kda/reported"]


def test_long_sequences_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declared, "COMPARED_UP_TO", TOKENS - 1)
    assert not any("layers fit" in line for line in profile(incident, config_of("model.kda_form=wy")).conclusions)


def test_the_line_ends_where_layers_stop_fitting() -> None:
    config, capacity = config_of("model.kda_form=wy"), 1 << 18
    (fit,) = fit_step(incident, config, growth_of(incident, None), [capacity])
    fits = {row.value: row.fits for row in fit.tried}
    assert (fits[fit.value], fits[fit.value + 1]) == (True, False)
    assert abs(layer_growth(config, capacity, METER).most - fit.value) <= 1
    # the rows of each stage look at all buffers: those of hundreds of layers would take longer than the step
    assert not any(row.reading.stages for row in fit.tried)


# ---------------------------------------------------------------- beside the report
def test_figures_of_the_report_stand_beside_its_own_shape_only(streamed: Profile) -> None:
    assert all(row.reported is None for row in streamed.rows)
    assert is_of_the_report(load_config(incident, "hn_xs.yaml"))
    assert not is_of_the_report(load_config(incident, "hn_xs.yaml", ["training.batch_tokens=2048"]))
    assert not is_of_the_report(load_config(incident, "hn_s.yaml"))


def test_a_capacity_in_decimal_units_is_refused() -> None:
    with pytest.raises(UsageError, match="capacity: unknown unit 'GB'"):
        profile(incident, config_of(), capacity="24GB")


def test_a_profile_says_what_it_is_of(streamed: Profile) -> None:
    assert streamed.title == (
        "kda_transitions hn_xs, 2 layers, 2 x 12 tokens, kda/streamed in chunks of 64, float32, H200"
    )
    assert streamed.as_dict()["settings"]["model"]["kda_form"] == "streamed"
    assert (streamed.settings["config"], streamed.settings["world_size"]) == ("hn_xs", 1)
