"""Checks of what the report says of its model: sizes by shapes, and stages of a profile, tiny or whole."""

from __future__ import annotations

import inspect

import torch

from ....meters.stages import Stage
from ....units import GiB, format_bytes
from ...claims import Found, decimal
from ...config import load_config
from ...decoder_parts import FeedForward
from ...profile import BACKWARD, GRADIENTS, LATER_STEP, OPTIMIZER, PARAMETERS, REST, STATES, Profile, Row
from ..incident import LOGITS, REPORTED, STANDARD, WHOLE_LAYER, incident
from ..model import EMBEDDING, FIRST_LAYER, OTHER_LAYERS, SIZES, build_model
from .evidence import AFTER_FIRST_LAYER_BYTES, AFTER_FORWARD_BYTES, SIZE, TINY_ITEM_BYTES, TINY_TOKENS, Evidence

ON_SHAPES = "the model, by shapes"
TINY_PROFILE, WHOLE_PROFILE = "profile of the tiny model", "memfix profile long_context_loss"
ARITHMETIC = "arithmetic"


def _rows(found: Profile) -> dict[str, Row]:
    return {row.stage.name: row for row in found.rows}


def _stages(found: Profile) -> dict[str, Stage]:
    return {row.stage.name: row.stage for row in found.rows}


# ---------------------------------------------------------------- by shapes
def parameters_and_tables(evidence: Evidence) -> Found:
    """LOG-29: bytes of the parameters, and of a RoPE table in every layer."""
    parameters, tables = evidence.parameter_bytes, evidence.table_bytes
    figures = {
        "parameters_decimal": decimal(parameters),
        "parameters": format_bytes(parameters),
        "tables": format_bytes(tables),
        "both": format_bytes(parameters + tables),
        "shared_saves": format_bytes(tables - tables // SIZE.layers),
    }
    return Found.sized(ON_SHAPES, figures, parameters)


def parameter_count(evidence: Evidence) -> Found:
    """LOG-30: how many parameters the rebuilt model has."""
    count = sum(parameter.numel() for parameter in evidence.model.parameters())
    return Found(f"{count / 10**9:.2f}" == "3.92", ON_SHAPES, {"parameters": count})


def attention_types(evidence: Evidence) -> Found:
    """LOG-50: both kinds can be built, and sparse attention has its gates and its places on top."""
    dense = build_model("4B", attention_type="dense", device="meta", dtype=torch.bfloat16)
    more = sum(p.numel() for p in evidence.model.parameters()) - sum(p.numel() for p in dense.parameters())
    gates_and_places = 2 * SIZE.width * SIZE.heads + SIZE.sparse.compress_block * SIZE.head_width
    figures = {"more": more, "a_layer": more // SIZE.layers}
    return Found(more == SIZE.layers * gates_and_places, ON_SHAPES, figures)


def batch_is_one_already(evidence: Evidence) -> Found:
    """LOG-40: logits and layer inputs at the report's batch, less those at batch 1."""
    formula = "B*T*V*e + L*B*T*D*e"
    saved = evidence.bytes(formula) - evidence.bytes(formula.replace("B", "1"))
    return Found(saved > 0, ARITHMETIC, {"batch": evidence.dims["B"], "saved": format_bytes(saved)})


def recommended_settings(evidence: Evidence) -> Found:
    """LOG-43: the five flags of the recommended command, as keys of the config that stands for it."""
    config = load_config(incident, "131k.yaml")
    found = {
        "model_size": config.model.size,
        "context_length": config.data.context_length,
        "gradient_checkpointing": config.training.gradient_checkpointing,
        "batch_size": config.training.batch_size,
        "gradient_accumulation_steps": config.training.gradient_accumulation_steps,
    }
    wanted = dict(zip(found, ("4B", 131_072, True, 1, 4), strict=True))
    return Found(found == wanted, "configs/131k.yaml", {"settings": sum(found[key] == wanted[key] for key in wanted)})


# ---------------------------------------------------------------- a profile of the tiny model
def sharding_leaves_activations(evidence: Evidence) -> Found:
    """LOG-39: what one rank of two keeps of parameters, and of the activations of its layers, beside a single GPU."""
    alone, rank = _rows(evidence.tiny), _rows(evidence.tiny_sharded)
    parameters, activations = (
        (rank[PARAMETERS].kinds[PARAMETERS], alone[PARAMETERS].kinds[PARAMETERS]),
        (rank[OTHER_LAYERS].stage.added_bytes, alone[OTHER_LAYERS].stage.added_bytes),
    )
    figures = {
        "parameters": f"{parameters[0] / parameters[1]:.2f}",
        "activations": f"{activations[0] / activations[1]:.2f}",
    }
    return Found(activations[0] < activations[1], "FSDP2 on one simulated rank of two", figures)


def checkpointing_flag(evidence: Evidence) -> Found:
    """LOG-41: the flag keeps of a layer its input alone, and changes no gradient."""
    stages, size = _stages(evidence.tiny), SIZES["tiny"]
    kept = stages[FIRST_LAYER].end_bytes - stages[EMBEDDING].end_bytes
    gradients = []
    for checkpointing in (False, True):
        with torch.random.fork_rng(devices=()):  # whoever asks for claims may be drawing numbers of their own
            torch.manual_seed(0)
            model = build_model(
                "tiny", gradient_checkpointing=checkpointing, loss_form="recompute", dtype=torch.float64
            )
            ids_BT = torch.randint(size.vocabulary, (1, 48))
        model(ids_BT, ids_BT).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    equal = all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    layer_bytes = TINY_TOKENS * size.width * TINY_ITEM_BYTES
    figures = {
        "at_full_size": format_bytes(evidence.bytes("B*T*D*e")),
        "all_layers": format_bytes(evidence.layer_inputs_bytes),
        "gradients": "equal" if equal else "different",
    }
    return Found(kept == layer_bytes and equal, f"{TINY_PROFILE}, and on the CPU", figures)


def gradients_and_states(evidence: Evidence) -> Found:
    """LOG-46: what a train step has beside the table's rows: as much as the parameters again, and states of AdamW."""
    kinds = _rows(evidence.tiny)[OPTIMIZER].kinds
    parameters = evidence.parameter_bytes
    states = round(kinds[STATES] / kinds[PARAMETERS])  # one number a parameter tensor counts the steps
    figures: dict[str, int | str] = {
        "gradients": format_bytes(parameters),
        "states_in_bfloat16": format_bytes(states * parameters),
        "states_in_float32": format_bytes(states * parameters * 2),
        "states": states,
    }
    return Found(kinds[GRADIENTS] == kinds[PARAMETERS] and states > 0, TINY_PROFILE, figures)


def finds_the_bottleneck(evidence: Evidence) -> Found:
    """LOG-49: what the report's table calls the step by the logits' size, and what a profile by tensors calls it."""
    stage, size = _stages(evidence.tiny)[LOGITS], SIZES["tiny"]
    largest = max(stage.alive_at_end, key=lambda row: row.bytes)
    logits = TINY_TOKENS * size.vocabulary * TINY_ITEM_BYTES
    named = largest.bytes == logits and "head(" in largest.code
    is_the_logits = _is_the_step_to_the_full_forward(evidence)
    figures = {
        "step": format_bytes(AFTER_FORWARD_BYTES - AFTER_FIRST_LAYER_BYTES),
        "logits": format_bytes(evidence.logits_bytes),
    }
    figures["ours"] = "the head" if named else f"{largest.what} {largest.place}"
    return Found(not is_the_logits, TINY_PROFILE, figures)


def _is_the_step_to_the_full_forward(evidence: Evidence) -> bool:
    """Whether what the table adds after its first layer is the logits, to the two digits of both rows."""
    return abs(AFTER_FORWARD_BYTES - AFTER_FIRST_LAYER_BYTES - evidence.logits_bytes) < 0.011 * GiB


# ---------------------------------------------------------------- slow: the whole model at 131,072 tokens
def full_forward(evidence: Evidence) -> Found:
    """LOG-33: what the step to the full forward is, beside what 36 layers keep."""
    stages = _stages(evidence.profile)
    figures = {
        "step": format_bytes(AFTER_FORWARD_BYTES - AFTER_FIRST_LAYER_BYTES),
        "logits": format_bytes(stages[LOGITS].added_bytes),
        "checkpointed": format_bytes(SIZE.layers * stages[FIRST_LAYER].added_bytes),
        "all_kept": format_bytes(SIZE.layers * stages[WHOLE_LAYER].added_bytes),
    }
    is_the_logits = _is_the_step_to_the_full_forward(evidence) and stages[LOGITS].added_bytes == evidence.logits_bytes
    return Found(not is_the_logits, WHOLE_PROFILE, figures)


def first_layer(evidence: Evidence) -> Found:
    """LOG-34: what a layer keeps, and how much of it lines of the feed-forward made."""
    kept = _stages(evidence.profile)[WHOLE_LAYER]
    feed_forward = sum(row.bytes for row in kept.alive_at_end if _is_of_the_feed_forward(row.code))
    figures = {
        "said": format_bytes(AFTER_FIRST_LAYER_BYTES - int(9.35 * GiB)),
        "kept": format_bytes(kept.added_bytes),
        "feed_forward": format_bytes(feed_forward),
    }
    return Found(feed_forward < kept.added_bytes / 2, WHOLE_PROFILE, figures)


def _is_of_the_feed_forward(code: str) -> bool:
    return bool(code) and code in inspect.getsource(FeedForward.forward)


def activations_when_checkpointed(evidence: Evidence) -> Found:
    """LOG-38: activations and temporaries at the highest point of the step, and with the reported loss."""
    rows = _rows(evidence.profile)
    highest, reported = rows[BACKWARD].kinds[REST], rows[REPORTED].kinds[REST]
    forward = rows[OTHER_LAYERS].kinds[REST]
    figures = {"forward": format_bytes(forward), "highest": format_bytes(highest), "reported": format_bytes(reported)}
    return Found.sized(WHOLE_PROFILE, figures, highest)


def half_on_each_of_two(evidence: Evidence) -> Found:
    """LOG-44: the report's sum with half of its parameters; and a step of ours on one rank of two and alone."""
    alone, rank = _stages(evidence.profile)[LATER_STEP].peak_bytes, evidence.sharded
    on_rank = rank.base_bytes + rank.peak_bytes
    by_the_table = int((68 - 8.72 / 2) * GiB)
    figures = {
        "by_the_table": format_bytes(by_the_table),
        "alone": format_bytes(alone),
        "on_rank": format_bytes(on_rank),
    }
    return Found.sized("FSDP2 on one simulated rank of two", figures, by_the_table, on_rank)


def profiler_runs(evidence: Evidence) -> Found:
    """LOG-48: every stage of the report's table, from one command, at its size."""
    stages = _stages(evidence.profile)
    wanted = (PARAMETERS, EMBEDDING, FIRST_LAYER, OTHER_LAYERS, STANDARD, REPORTED, BACKWARD, OPTIMIZER)
    there = [name for name in wanted if stages[name].peak_bytes > 0]
    figures: dict[str, int | str] = {"stages": len(there), "peak": format_bytes(evidence.profile.peak_bytes)}
    return Found(len(there) == len(wanted), WHOLE_PROFILE, figures)


CHECKS = {
    check.__name__: check
    for check in (
        parameters_and_tables,
        parameter_count,
        attention_types,
        batch_is_one_already,
        recommended_settings,
        sharding_leaves_activations,
        checkpointing_flag,
        gradients_and_states,
        finds_the_bottleneck,
        full_forward,
        first_layer,
        activations_when_checkpointed,
        half_on_each_of_two,
        profiler_runs,
    )
}
