"""Checks of claims about the model: sizes by shapes, and profiles of the tiny and of the whole model."""

from __future__ import annotations

import torch

from ....units import GiB
from ...decoder_parts import EMBEDDING, num_parameters
from ...evidence import fixed_seed
from ...judging import ARITHMETIC, CheckResult, check, decimal, holds_if, matches_figure, sizes
from ...profile import ACTIVATIONS, BACKWARD, GRADIENTS, LATER_STEP, OPTIMIZER, PARAMETERS, STATES
from ..incident import LOGITS, REPORTED, STANDARD, WHOLE_LAYER, feed_forward_bytes
from ..model import FIRST_LAYER, OTHER_LAYERS, Decoder
from . import AFTER_FIRST_LAYER_BYTES, AFTER_FORWARD_BYTES, SIZE, TINY, Evidence
from .loss_memory import one_chunk_at_a_time
from .rope import frequencies_keep_their_dtype

ON_SHAPES = "the model, by shapes"
TINY_PROFILE, WHOLE_PROFILE = "profile of the tiny model", "memfix profile long_context_loss"
ONE_RANK = "FSDP2 on one simulated rank of two"


# ---------------------------------------------------------------- by shapes
@check("LOG-29")
def parameters_and_tables(evidence: Evidence) -> CheckResult:
    """Compute the bytes of the parameters, and of a RoPE table in every layer."""
    parameters, tables = evidence.parameter_bytes, evidence.table_bytes
    figures = sizes(
        parameters=parameters, tables=tables, both=parameters + tables, shared_saves=tables - tables // SIZE.layers
    )
    return matches_figure(ON_SHAPES, parameters, parameters_decimal=decimal(parameters), **figures)


@check("LOG-30")
def parameter_count(evidence: Evidence) -> CheckResult:
    """Count the parameters of the rebuilt model."""
    count = num_parameters(evidence.model())
    return matches_figure(ON_SHAPES, count, parameters=count)


@check("LOG-50")
def attention_types(evidence: Evidence) -> CheckResult:
    """Build the model with both kinds of attention, and count the parameters that sparse attention adds."""
    more = num_parameters(evidence.model()) - num_parameters(evidence.model("model.attention_type=dense"))
    gates_and_places = 2 * SIZE.width * SIZE.heads + SIZE.sparse.compress_block * SIZE.head_width
    return holds_if(more == SIZE.layers * gates_and_places, ON_SHAPES, more=more, a_layer=more // SIZE.layers)


@check("LOG-40")
def batch_is_one_already(evidence: Evidence) -> CheckResult:
    """Compute logits and layer inputs at the report's batch, less those at batch 1."""
    formula = "B*T*V*e + L*B*T*D*e"
    saved = evidence.evaluate(formula) - evidence.evaluate(formula, B=1)
    return holds_if(saved > 0, ARITHMETIC, batch=evidence.dims["B"], **sizes(saved=saved))


@check("LOG-43")
def recommended_settings(evidence: Evidence) -> CheckResult:
    """Compare the five flags of the recommended command with the keys of ``131k.yaml``."""
    config = evidence.config(file="131k.yaml")
    training = config.training
    found = (
        config.model.size,
        config.data.context_length,
        training.gradient_checkpointing,
        training.batch_size,
        training.gradient_accumulation_steps,
    )
    wanted = ("4B", 131_072, True, 1, 4)
    same = sum(one == other for one, other in zip(found, wanted, strict=True))
    return holds_if(same == len(wanted), "configs/131k.yaml", settings=same)


# ---------------------------------------------------------------- a profile of the tiny model
@check("LOG-39")
def sharding_leaves_activations(evidence: Evidence) -> CheckResult:
    """Compare the parameters and the layers' activations on one rank of two with those on a single GPU."""
    alone, rank = evidence.rows(*TINY), evidence.rows(*TINY, world_size=2)
    parameters = rank[PARAMETERS].kinds[PARAMETERS] / alone[PARAMETERS].kinds[PARAMETERS]
    activations = rank[OTHER_LAYERS].stage.added_bytes / alone[OTHER_LAYERS].stage.added_bytes
    return holds_if(activations < 1, ONE_RANK, parameters=f"{parameters:.2f}", activations=f"{activations:.2f}")


@check("LOG-41")
def checkpointing_flag(evidence: Evidence) -> CheckResult:
    """Measure what a checkpointed layer keeps, and compare the gradients with and without the flag."""
    rows, tiny = evidence.rows(*TINY), evidence.tiny_dims
    kept = rows[FIRST_LAYER].stage.end_bytes - rows[EMBEDDING].stage.end_bytes
    gradients = []
    for checkpointing in ("false", "true"):
        with fixed_seed():
            model = Decoder(evidence.config(*TINY, f"training.gradient_checkpointing={checkpointing}")).double()
            ids_BT = torch.randint(tiny["V"], (1, 48))
        model(ids_BT, ids_BT).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    equal = all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    figures = sizes(at_full_size=evidence.evaluate("B*T*D*e"), all_layers=evidence.layer_inputs_bytes)
    return holds_if(
        kept == evidence.evaluate("T*D*e", **tiny) and equal,
        f"{TINY_PROFILE}, and on the CPU",
        **figures,
        gradients="equal" if equal else "different",
    )


@check("LOG-46")
def gradients_and_states(evidence: Evidence) -> CheckResult:
    """Measure what the report's table leaves out of a train step: gradients and the states of AdamW."""
    kinds = evidence.rows(*TINY)[OPTIMIZER].kinds
    parameters = evidence.parameter_bytes
    states = round(kinds[STATES] / kinds[PARAMETERS])  # one number a parameter tensor counts the steps
    figures = sizes(
        gradients=parameters, states_in_bfloat16=states * parameters, states_in_float32=states * parameters * 2
    )
    return holds_if(kinds[GRADIENTS] == kinds[PARAMETERS] and states > 0, TINY_PROFILE, **figures, states=states)


@check("LOG-49")
def finds_the_bottleneck(evidence: Evidence) -> CheckResult:
    """Compare the step that the report's table blames on layers with the logits, and find what our profile blames."""
    largest = max(evidence.rows(*TINY)[LOGITS].stage.alive_at_end, key=lambda row: row.bytes)
    named = largest.bytes == evidence.evaluate("T*V*e", **evidence.tiny_dims) and "head(" in largest.code
    figures = sizes(step=AFTER_FORWARD_BYTES - AFTER_FIRST_LAYER_BYTES, logits=evidence.logits_bytes)
    ours = "the head" if named else f"{largest.what} {largest.place}"
    return holds_if(not _is_the_step_to_the_full_forward(evidence), TINY_PROFILE, **figures, ours=ours)


def _is_the_step_to_the_full_forward(evidence: Evidence) -> bool:
    """Whether what the table adds after its first layer equals the logits, to the two decimals of both rows."""
    return abs(AFTER_FORWARD_BYTES - AFTER_FIRST_LAYER_BYTES - evidence.logits_bytes) < 0.011 * GiB


# ---------------------------------------------------------------- slow: the whole model at 131,072 tokens
@check("LOG-33")
def full_forward(evidence: Evidence) -> CheckResult:
    """Compare what the table adds for the full forward with the logits, and with what 36 layers keep."""
    added = {name: row.stage.added_bytes for name, row in evidence.rows().items()}
    logits = added[LOGITS]
    figures = sizes(
        step=AFTER_FORWARD_BYTES - AFTER_FIRST_LAYER_BYTES,
        logits=logits,
        checkpointed=SIZE.layers * added[FIRST_LAYER],
        all_kept=SIZE.layers * added[WHOLE_LAYER],
    )
    is_the_logits = _is_the_step_to_the_full_forward(evidence) and logits == evidence.logits_bytes
    return holds_if(not is_the_logits, WHOLE_PROFILE, **figures)


@check("LOG-34")
def first_layer(evidence: Evidence) -> CheckResult:
    """Measure what a layer keeps, and how much of that the feed-forward made."""
    stage = evidence.rows()[WHOLE_LAYER].stage
    kept, feed_forward = stage.added_bytes, feed_forward_bytes(stage)
    said = AFTER_FIRST_LAYER_BYTES - int(9.35 * GiB)
    return holds_if(feed_forward < kept / 2, WHOLE_PROFILE, **sizes(said=said, kept=kept, feed_forward=feed_forward))


@check("LOG-38")
def activations_when_checkpointed(evidence: Evidence) -> CheckResult:
    """Measure activations and temporaries in the forward, at the step's highest stage, and with the reported loss."""
    rows = evidence.rows()
    names = {"forward": OTHER_LAYERS, "highest": BACKWARD, "reported": REPORTED}
    taken = {name: rows[stage].kinds[ACTIVATIONS] for name, stage in names.items()}
    return matches_figure(WHOLE_PROFILE, taken["highest"], **sizes(**taken))


@check("LOG-44")
def half_on_each_of_two(evidence: Evidence) -> CheckResult:
    """Compute the report's sum with half of its parameters; measure our step on one rank of two, and on one GPU."""
    by_the_table, on_rank = int((68 - 8.72 / 2) * GiB), evidence.later_step_bytes(world_size=2)
    alone = evidence.rows()[LATER_STEP].stage.peak_bytes
    figures = sizes(by_the_table=by_the_table, alone=alone, on_rank=on_rank)
    return matches_figure(ONE_RANK, by_the_table, on_rank, **figures)


@check("LOG-48")
def profiler_runs(evidence: Evidence) -> CheckResult:
    """Count the stages of the report's table that one profile of the whole model measures."""
    rows = evidence.rows()
    wanted = (PARAMETERS, EMBEDDING, FIRST_LAYER, OTHER_LAYERS, STANDARD, REPORTED, BACKWARD, OPTIMIZER)
    there = sum(rows[name].stage.peak_bytes > 0 for name in wanted)
    return holds_if(there == len(wanted), WHOLE_PROFILE, stages=there, **sizes(peak=evidence.profile().peak_bytes))


# ---------------------------------------------------------------- the report's summary
@check("LOG-57")
def two_bugs_both_fixed(evidence: Evidence) -> CheckResult:
    """Judge again the loss in training, positions in 16 bits, and the RoPE tables taken for parameters."""
    loss, positions = one_chunk_at_a_time(evidence), frequencies_keep_their_dtype(evidence)
    tables = parameters_and_tables(evidence)
    still_there = sum(not found.holds for found in (loss, positions, tables))
    return holds_if(
        not still_there,
        "LOG-12, LOG-27 and LOG-29",
        still_there=still_there,
        held=loss.figures["held"],
        distinct=positions.figures["distinct"],
        tables=tables.figures["tables"],
    )
