"""Checks of claims about what can be set: the chunk size, from YAML to the op, and the run that it is set in."""

from __future__ import annotations

import inspect
import re
import tempfile
import warnings
from pathlib import Path
from unittest import mock

import torch

from ....ops.kda import kda
from ....ops.kda.reported import precompute_updates, reported_kda
from ...decoder_parts import num_parameters
from ...evidence import default_of, fixed_seed, raised
from ...incident import find_config, load_config
from ...judging import ON_CPU, CheckResult, as_recorded, check, holds_if, sizes
from .. import block as blocks
from ..block import RECOMMENDED, KDABlock, validated_chunk_size
from ..incident import incident
from ..model import KDAModel, ModelConfig
from . import SUBTRACTION, Evidence

SIGNATURES, CONFIGS = "signatures", "configs/hn_xs.yaml and hn_s.yaml"
KEY = "kda_memory_chunk_size"

# overrides that make hn_xs small enough to train on a CPU in seconds
SHRUNKEN = (
    "model.layers=2", "model.width=16", "model.heads=2", "model.head_width=8", "model.ffn_width=24",
    "model.vocabulary=64", "data.context_length=20", "data.states=16", "training.batch_tokens=40", "training.steps=2",
    "training.device=cpu",
)  # fmt: skip


@check("KDA-07")
def the_reports_shape(evidence: Evidence) -> CheckResult:
    """Compare the shape in the config with that of the case at which the op is measured."""
    run, dims = evidence.config(), evidence.dims
    shape = (run.batch_size, run.data.context_length, run.model.heads, run.model.head_width)
    same = shape == tuple(dims[name] for name in "BTHK") == (16, 256, 8, 64)
    tokens = run.batch_size * run.data.context_length
    return holds_if(same, "configs/hn_xs.yaml, the incident's case", tokens=tokens)


@check("KDA-13")
def chunks_by_default(evidence: Evidence) -> CheckResult:
    """Read the default of the reported function, and count the iterations of its loop at the incident's dims."""
    default = default_of(precompute_updates, "memory_chunk_size")
    rounds = len(evidence.made_by("reported", SUBTRACTION))
    holds = default == 64 and rounds == evidence.evaluate("ceil_div(T, C)")
    return holds_if(holds, SIGNATURES, default=str(default), chunks=rounds)


@check("KDA-15")
def chunk_parameter(evidence: Evidence) -> CheckResult:
    """Look for the parameter, and try sizes that are no number of tokens."""
    tensors = evidence.tensors(3)
    refused = [raised(reported_kda, *tensors, chunk_size=size) for size in (0, -1, 1.5)]
    there = "memory_chunk_size" in inspect.signature(precompute_updates).parameters
    parameter = "memory_chunk_size" if there else "none"
    return as_recorded(SIGNATURES, parameter=parameter, refused=", ".join(refused))


@check("KDA-16")
def block_parameter(evidence: Evidence) -> CheckResult:
    """Read the parameter's default, and build a block with another value."""
    default = default_of(KDABlock, "memory_chunk_size")
    kept = KDABlock(8, 2, 4, memory_chunk_size=32).memory_chunk_size
    return as_recorded(SIGNATURES, default=str(default), kept=kept)


@check("KDA-17")
def block_passes_it_on(evidence: Evidence) -> CheckResult:
    """Build a block with a chunk size of 17, and see with which chunk size it calls the op."""
    with warnings.catch_warnings(action="ignore"), mock.patch.object(blocks, "kda", wraps=kda) as op:
        KDABlock(8, 2, 4, memory_chunk_size=17)(torch.zeros(1, 20, 8))
    seen = op.call_args.kwargs["chunk_size"]
    return holds_if(seen == 17, ON_CPU, seen=seen)


@check("KDA-18")
def model_reads_it(evidence: Evidence) -> CheckResult:
    """Build models from a config with the key and from one without it, and read the chunk sizes of their blocks."""
    text = find_config(incident, Path("hn_xs.yaml")).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text("\n".join(line for line in text.splitlines() if KEY not in line), encoding="utf-8")
        without = load_config(incident, path, SHRUNKEN)
    found = {}
    for name, config in (("given", evidence.config(*SHRUNKEN, f"model.{KEY}=32")), ("missing", without)):
        sizes = {block.memory_chunk_size for block in KDAModel(config).blocks}
        found[name] = ", ".join(map(str, sizes))
    found["of_the_model"] = str(default_of(ModelConfig, KEY))
    return as_recorded("configs/hn_xs.yaml", **found)


@check("KDA-19")
def configs_carry_it(evidence: Evidence) -> CheckResult:
    """Compare the values written in both files with the defaults at every level."""
    names = ("hn_xs.yaml", "hn_s.yaml")
    texts = [find_config(incident, Path(name)).read_text(encoding="utf-8") for name in names]
    written = [value for text in texts for value in re.findall(rf"^ *{KEY}: *(\w+)", text, re.MULTILINE)]
    defaults = {
        default_of(ModelConfig, KEY),
        default_of(KDABlock, "memory_chunk_size"),
        default_of(kda, "chunk_size"),
    }
    read = {getattr(evidence.config(file=name).model, KEY) for name in names}
    holds = written == ["64", "64"] and read == defaults == {64}
    return holds_if(holds, CONFIGS, written=", ".join(written), defaults=", ".join(map(str, defaults)))


@check("KDA-22")
def range_of_chunks(evidence: Evidence) -> CheckResult:
    """Find which sizes are accepted silently, accepted with a warning, and refused."""
    answers: dict[str, list[str]] = {"silent": [], "warned": [], "refused": []}
    for size in (-1, 0, 16, 31, 32, 64, 128, 129, 256):
        with warnings.catch_warnings(record=True, action="always") as said:
            is_refused = raised(validated_chunk_size, size) == "ValueError"
        answers["refused" if is_refused else "warned" if said else "silent"].append(str(size))
    return as_recorded(ON_CPU, **{name: ", ".join(given) for name, given in answers.items()})


@check("KDA-30")
def sixteen_is_in_the_range(evidence: Evidence) -> CheckResult:
    """Test whether the advised 16 is within the range that the same report gives."""
    with warnings.catch_warnings(record=True, action="always") as said:
        validated_chunk_size(16)
    return holds_if(
        16 in RECOMMENDED,
        ON_CPU,
        range=f"{RECOMMENDED[0]}-{RECOMMENDED[-1]}",
        answer="a warning" if said else "silence",
        **sizes(peak=evidence.peak("streamed", "forward", chunk_size=16)),
    )


@check("KDA-27")
def training_runs(evidence: Evidence) -> CheckResult:
    """Train a shrunken hn_xs with the loop of ``memfix train``."""
    done = len(evidence.train(*SHRUNKEN))
    return holds_if(done == 2, "memfix train, shrunken", steps=done)


@check("KDA-12")
def architecture_unchanged(evidence: Evidence) -> CheckResult:
    """Compare the parameters' names and shapes, and the loss, for several chunk sizes and forms."""
    ids_BT = torch.arange(80).reshape(2, 40) % 64
    shapes, losses = set(), []
    settings = [("reported", 64), ("reported", 7), ("naive", 64), ("streamed", 16), ("wy", 32)]
    for form, size in settings:
        config = evidence.config(*SHRUNKEN, f"model.{KEY}={size}", f"model.kda_form={form}")
        with fixed_seed(), warnings.catch_warnings(action="ignore"):
            model = KDAModel(config).double()
        shapes.add(tuple((name, tuple(tensor.shape)) for name, tensor in model.state_dict().items()))
        losses.append(model(ids_BT, ids_BT).detach())
    spread = float(torch.stack(losses).std() / losses[0])
    return holds_if(
        len(shapes) == 1 and spread < 1e-12,
        ON_CPU,
        parameters=num_parameters(model),
        sets=len(shapes),
        losses="equal" if spread < 1e-12 else f"apart by {spread:.0e}",
    )
