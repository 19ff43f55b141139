"""The stages of the incident's train step: exact bytes, who holds them, and what the report says beside them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from memfix.errors import MeasurementError, UsageError
from memfix.incidents.config import RunConfig
from memfix.incidents.decoder_parts import EMBEDDING, FeedForward
from memfix.incidents.incident import load_config
from memfix.incidents.long_context_loss import incident as declared
from memfix.incidents.long_context_loss.incident import (
    LOGITS,
    REPORTED,
    ROPE_TABLES,
    STANDARD,
    WARMUP_TOKENS,
    WHOLE_LAYER,
    incident,
    is_of_the_report,
)
from memfix.incidents.long_context_loss.model import FIRST_LAYER, OTHER_LAYERS, Decoder, SparseAttention
from memfix.incidents.measured_step import MeasurableStep
from memfix.incidents.profile import (
    ACTIVATIONS,
    BACKWARD,
    GRADIENTS,
    LATER_FORWARDS,
    LATER_STEP,
    OPTIMIZER,
    PARAMETERS,
    STATES,
    Profile,
    Row,
)
from memfix.incidents.profile_step import profile
from memfix.incidents.stand_in import Footprint, StandIn, StandIns
from memfix.incidents.step import TrainStep
from memfix.meters import get_meter
from memfix.meters.base import Reading
from memfix.meters.one_rank import one_rank_of
from memfix.meters.stages import Stage, listening
from memfix.progress import silent

LOSS = Decoder.loss_stage
STANDARD_BACKWARD, REPORTED_BACKWARD = f"{STANDARD}: backward", f"{REPORTED}: backward"
T, D, V, LAYERS, HEAD_WIDTH, E = 300, 64, 512, 2, 16, 2
TINY = ("model.size=tiny", "model.attention_type=dense", "model.loss_form=recompute", f"data.context_length={T}")
ASIDES = {ROPE_TABLES, WHOLE_LAYER, LOGITS, STANDARD, STANDARD_BACKWARD, REPORTED, REPORTED_BACKWARD}
METERS = ("simulated", "cuda")
IN_ORDER = [
    PARAMETERS, ROPE_TABLES, EMBEDDING, WHOLE_LAYER, FIRST_LAYER, OTHER_LAYERS, LOGITS, STANDARD, STANDARD_BACKWARD,
    REPORTED, REPORTED_BACKWARD, LOSS, BACKWARD, OPTIMIZER, LATER_STEP,
]  # fmt: skip


def tiny_config(*overrides: str) -> RunConfig:
    return load_config(incident, incident.config, (*TINY, *overrides))


def tiny_profile(*overrides: str, **options: Any) -> Profile:
    return profile(incident, tiny_config(*overrides), **options)


@pytest.fixture(scope="module")
def tiny() -> Profile:
    return tiny_profile()


def rows(found: Profile) -> dict[str, Row]:
    return {row.stage.name: row for row in found.rows}


def stages(found: Profile) -> dict[str, Stage]:
    return {row.stage.name: row.stage for row in found.rows}


# ---------------------------------------------------------------- bytes
def test_stages_come_in_order_and_say_which_were_only_tried(tiny: Profile) -> None:
    assert [row.stage.name for row in tiny.rows] == IN_ORDER
    assert {row.stage.name for row in tiny.rows if row.aside} == ASIDES
    assert tiny.peak_bytes == stages(tiny)[LATER_STEP].peak_bytes


def test_embedding_logits_and_private_tables_take_what_their_shapes_say(tiny: Profile) -> None:
    found = stages(tiny)
    assert found[EMBEDDING].added_bytes == T * D * E
    assert found[LOGITS].added_bytes == T * V * E
    assert found[ROPE_TABLES].added_bytes == LAYERS * 2 * T * HEAD_WIDTH * E


def test_checkpointing_keeps_the_input_of_each_layer_and_no_more(tiny: Profile) -> None:
    found = stages(tiny)
    assert found[FIRST_LAYER].end_bytes - found[EMBEDDING].end_bytes == T * D * E
    # the last layer's output, the head's input, and one float32 number a token of the norm
    assert found[OTHER_LAYERS].end_bytes - found[FIRST_LAYER].end_bytes == 2 * T * D * E + T * 4
    kept = stages(tiny_profile("training.gradient_checkpointing=false"))
    whole_layer = kept[WHOLE_LAYER].end_bytes - kept[EMBEDDING].end_bytes
    assert kept[FIRST_LAYER].end_bytes - kept[EMBEDDING].end_bytes == whole_layer > 10 * T * D * E


def test_what_is_tried_leaves_nothing_behind(tiny: Profile) -> None:
    found = stages(tiny)
    assert found[EMBEDDING].start_bytes == found[PARAMETERS].end_bytes
    assert found[FIRST_LAYER].start_bytes == found[EMBEDDING].end_bytes
    assert found[LOSS].start_bytes == found[OTHER_LAYERS].end_bytes


def test_the_reported_loss_holds_all_log_probabilities_and_ours_does_not(tiny: Profile) -> None:
    found = stages(tiny)
    assert found[REPORTED].added_bytes >= T * V * E
    assert found[STANDARD_BACKWARD].peak_bytes - found[STANDARD].start_bytes >= 3 * T * V * E
    assert found[LOSS].added_bytes < T * V * E / 2


def test_gradients_and_states_are_told_from_activations(tiny: Profile) -> None:
    found = rows(tiny)
    parameter_bytes = found[PARAMETERS].kinds[PARAMETERS]
    num_parameters = sum(1 for _ in incident.build(tiny_config()).parameters())
    at_the_end = found[OPTIMIZER].kinds
    assert at_the_end[GRADIENTS] == parameter_bytes
    # AdamW's two, and a float32 count of steps for each parameter
    assert at_the_end[STATES] == 2 * parameter_bytes + 4 * num_parameters
    assert found[FIRST_LAYER].kinds[GRADIENTS] == found[FIRST_LAYER].kinds[STATES] == 0
    assert found[LATER_STEP].kinds[STATES] == at_the_end[STATES]
    for row in tiny.rows:
        assert sum(row.kinds.values()) == row.stage.peak_bytes
        assert sum(allocation.bytes for allocation in row.activations) == row.kinds[ACTIVATIONS]


@pytest.mark.parametrize(
    "change",
    [
        ("model.attention_type=nsa", "training.precision=autocast"),
        ("training.gradient_checkpointing=false", "training.batch_size=2"),
        ("model.attention_type=nsa", "training.precision=float32"),
    ],
    ids=["checkpointed", "all-kept", "float32"],
)
def test_stand_ins_take_the_bytes_of_what_they_stand_for(change: tuple[str, ...]) -> None:
    config = tiny_config(f"data.context_length={WARMUP_TOKENS + 3}", *change)
    meter = get_meter("simulated")
    stand_ins = incident.stand_ins(config, meter, silent)
    assert stand_ins is not None
    assert stand_ins.notes == ()
    quick, whole = (
        meter.measure(MeasurableStep(incident, config, stand_ins=one).repeated) for one in (stand_ins, None)
    )

    def sizes(found: Reading) -> list[tuple[str, int, int]]:
        return [(one.name, one.end_bytes, one.peak_bytes) for one in found.stages]

    assert sizes(quick) == sizes(whole)
    assert (quick.peak_bytes, quick.base_bytes) == (whole.peak_bytes, whole.base_bytes)
    assert [one.name for one in quick.stages] == [EMBEDDING, FIRST_LAYER, OTHER_LAYERS, LOSS, BACKWARD, OPTIMIZER]


def test_a_context_as_short_as_the_warm_up_needs_no_stand_ins() -> None:
    config = tiny_config("model.attention_type=nsa", f"data.context_length={WARMUP_TOKENS}")
    assert incident.stand_ins(config, get_meter("simulated"), silent) is None


def test_float32_parameters_double_what_the_model_and_its_optimizer_take(tiny: Profile) -> None:
    mixed = rows(tiny_profile("training.precision=autocast"))[OPTIMIZER].kinds
    plain = rows(tiny)[OPTIMIZER].kinds
    assert mixed[PARAMETERS] == 2 * plain[PARAMETERS]
    assert mixed[GRADIENTS] == 2 * plain[GRADIENTS]


def test_the_losses_that_are_tried_compute_in_the_dtype_of_the_step(tiny: Profile) -> None:
    copied = rows(tiny_profile("training.precision=bfloat16"))
    for name in (LOGITS, STANDARD, REPORTED):
        assert copied[name].stage.added_bytes == rows(tiny)[name].stage.added_bytes


def test_the_profiled_step_runs_on_real_tensors() -> None:
    config = tiny_config("model.attention_type=nsa", "training.precision=autocast", "data.context_length=70")
    measurable = MeasurableStep(incident, config, simulated=False)
    heard: list[str | None] = []
    step = measurable.staged("cpu")
    step()
    with listening(heard.append):
        step()
    assert [name for name in dict.fromkeys(heard) if name] == IN_ORDER
    assert (measurable.asides.names, measurable.asides.failures) == (ASIDES, {})
    assert measurable.parameter_bytes == 4 * sum(p.numel() for p in incident.build(config).parameters())


def test_what_is_tried_is_tried_once_in_a_step_of_several_forwards() -> None:
    config = tiny_config("training.gradient_accumulation_steps=2", "data.context_length=20")
    measurable = MeasurableStep(incident, config, simulated=False)
    step = measurable.staged("cpu")
    step()
    heard: list[str | None] = []
    with listening(heard.append):
        step()
    place = heard.index(LATER_FORWARDS)
    assert {*heard[:place]} >= ASIDES
    assert heard[place + 1 :] == [OPTIMIZER, LATER_STEP]


@pytest.mark.gpu(use="meters")
def test_a_gpu_gives_the_stages_that_were_simulated() -> None:
    tokens = 4096
    simulated, real = (stages(tiny_profile(f"data.context_length={tokens}", meter=meter)) for meter in METERS)
    assert [*real] == [*simulated]
    # a GPU's base has the workspaces of cuBLAS, and whatever else this process keeps there, from the first stage on
    kept_bytes = real[PARAMETERS].end_bytes - simulated[PARAMETERS].end_bytes
    assert kept_bytes >= 0
    for name, one in real.items():
        end_bytes, peak_bytes = simulated[name].end_bytes, simulated[name].peak_bytes
        assert one.end_bytes - kept_bytes == pytest.approx(end_bytes, rel=0.01, abs=64 << 10), name
        assert one.peak_bytes - kept_bytes == pytest.approx(peak_bytes, rel=0.01, abs=64 << 10), name


# ---------------------------------------------------------------- who holds them
def test_a_planted_allocation_is_named_by_its_line_and_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = FeedForward.forward
    planted_bytes = 64 << 20

    def forward(self: FeedForward, x_BTD: torch.Tensor) -> torch.Tensor:
        planted = torch.empty(planted_bytes, dtype=torch.uint8, device=x_BTD.device)  # noqa: F841
        return plain(self, x_BTD)

    monkeypatch.setattr(FeedForward, "forward", forward)
    found = rows(tiny_profile())
    for name in (FIRST_LAYER, OTHER_LAYERS, BACKWARD, LATER_STEP):
        largest = found[name].activations[0]
        assert (largest.bytes, "test_profile.py" in largest.place) == (planted_bytes, True)
        assert largest.code.startswith("planted = torch.empty(planted_bytes")
        assert any("planted = torch.empty" in line for line in found[name].holders(1))
    for name in (EMBEDDING, LOSS, OPTIMIZER):
        assert all("planted" not in allocation.code for allocation in found[name].activations)


class _TooMuchInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 37.09 GiB.\nGPU 0 has ...")


@pytest.mark.parametrize("where", [STANDARD, STANDARD_BACKWARD])
def test_what_is_too_much_for_the_gpu_is_a_row_and_not_the_end(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = declared._standard_loss

    def too_much(*tensors: torch.Tensor) -> torch.Tensor:
        if where == STANDARD:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 37.09 GiB.\nGPU 0 has ...")
        return _TooMuchInBackward.apply(plain(*tensors))

    monkeypatch.setattr(declared, "_standard_loss", too_much)
    found = rows(tiny_profile(f"data.context_length={WARMUP_TOKENS}"))
    failed = {name: row.failed for name, row in found.items() if row.failed}
    assert failed == {where: "out of memory, asked for 37.09 GiB"}
    missing = [STANDARD_BACKWARD] if where == STANDARD else []
    assert [*found] == [name for name in IN_ORDER if name not in missing]


def test_a_step_that_is_too_much_itself_cannot_be_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.25 GiB.")

    monkeypatch.setattr(TrainStep, "take", too_much)
    with pytest.raises(MeasurementError, match=r"^the step itself: out of memory, asked for 2.25 GiB$"):
        tiny_profile()


# ---------------------------------------------------------------- sharded
def test_a_rank_of_two_holds_half_of_the_model_and_all_of_the_activations(tiny: Profile) -> None:
    sharded = tiny_profile(world_size=2)
    alone, half = rows(tiny), rows(sharded)
    for kind in (PARAMETERS, GRADIENTS):
        assert half[OPTIMIZER].kinds[kind] == alone[OPTIMIZER].kinds[kind] / 2
    # nothing as large as the whole model, only what is being unpacked for one kernel
    assert half[OPTIMIZER].kinds[ACTIVATIONS] < half[OPTIMIZER].kinds[PARAMETERS] / 4
    assert half[OPTIMIZER].stage.peak_bytes < alone[OPTIMIZER].stage.peak_bytes
    # what each layer leaves for backward is whole: its input
    assert half[OTHER_LAYERS].stage.added_bytes == alone[OTHER_LAYERS].stage.added_bytes
    assert half[LATER_STEP].kinds[ACTIVATIONS] >= alone[LATER_STEP].kinds[ACTIVATIONS]
    assert half[LATER_STEP].stage.peak_bytes > alone[LATER_STEP].stage.peak_bytes / 2
    assert not ASIDES & half.keys()
    assert sharded.reading.exact  # FSDP2's packing was held against an H200
    assert not dist.is_initialized()


def test_a_rank_of_a_real_group_is_not_made_one_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(MeasurementError, match="a rank of another group already"), one_rank_of(2):
        pass


# ---------------------------------------------------------------- beside the report
def test_the_reports_step_has_the_reports_sizes() -> None:
    """One forward of the 4B model. Attention's own memory is not in question, so its stand-in takes none."""

    def outputs_only(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        given = [*tensors, *(t for t in options.values() if isinstance(t, torch.Tensor))]
        out_bytes = tensors[0].nbytes
        return StandIn(Footprint(out_bytes, out_bytes, sum(t.nbytes for t in given)), keeps_inputs=[True] * len(given))(
            *given
        )

    def put_into(model: torch.nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, SparseAttention):
                module.rotate = module.function = outputs_only

    measurable = MeasurableStep(incident, load_config(incident, incident.config), stand_ins=StandIns(put_into))

    def build(device: str) -> Any:
        step, batch = measurable._built(device)
        assert step.parameter_bytes == 7_843_837_440

        def forward() -> object:
            with incident.asides(step.model, batch, measurable.asides):
                return incident.loss(step.model, batch)

        return forward

    found = {one.name: one for one in get_meter("simulated").measure(build, warmup=0).stages}
    assert found[EMBEDDING].added_bytes == 671_088_640
    assert found[FIRST_LAYER].added_bytes == 671_088_640
    assert found[LOGITS].added_bytes == 39_829_110_784
    assert found[ROPE_TABLES].added_bytes == 1_509_949_440
    held = found[REPORTED].end_bytes - found[REPORTED].start_bytes
    assert 39_829_110_784 <= held < 39_829_110_784 + (2 << 20)


def test_figures_of_the_report_stand_beside_its_own_step_only(tiny: Profile) -> None:
    assert all(row.reported is None for row in tiny.rows)

    def is_its_own(*overrides: str, world_size: int = 1) -> bool:
        return is_of_the_report(load_config(incident, incident.config, overrides), world_size)

    free = ("model.attention_type=dense", "training.gradient_checkpointing=false", "model.loss_form=recompute")
    assert is_its_own()
    assert is_its_own(*free)
    assert not is_its_own(world_size=2)
    for other in (
        "data.context_length=65536",
        "training.batch_size=2",
        "training.precision=autocast",
        "model.size=tiny",
    ):
        assert not is_its_own(other)


# ---------------------------------------------------------------- refusals
def test_a_world_of_no_ranks_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^world_size must be at least 1, got 0$"):
        tiny_profile(world_size=0)


def test_a_rank_without_the_others_is_simulated_only() -> None:
    with pytest.raises(
        UsageError, match="only the simulated meter can measure one rank of 2 without the others: use it"
    ):
        tiny_profile(world_size=2, meter="cuda")
    with pytest.raises(UsageError, match="nvml samples a process and sees no stages"):
        tiny_profile(meter="nvml")
