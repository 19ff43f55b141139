"""Checks of what the report says can be set: the chunk, from YAML to the op, and the run that it is set in."""

from __future__ import annotations

import functools
import inspect
import tempfile
import warnings
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ....ops.kda import kda
from ....ops.kda.reported import precompute_updates, reported_kda
from ....units import format_bytes
from ...claims import Found
from ...config import RunConfig, find_config, load_config
from ...distributed import World
from ...training import train
from .. import block as blocks
from ..block import KDABlock
from ..chunk_size import RECOMMENDED, validated_chunk_size
from ..incident import ModelConfig, build_model, incident
from ..model import LanguageModel
from .evidence import SUBTRACTION, Evidence

ON_CPU = "run on the CPU"
SIGNATURES, CONFIGS = "signatures", "configs/hn_xs.yaml and hn_s.yaml"
KEY = "kda_memory_chunk_size"

# hn_xs, but small: seconds on a CPU
SHRUNKEN = (
    "model.layers=2", "model.width=16", "model.heads=2", "model.head_width=8", "model.ffn_width=24",
    "model.vocabulary=64", "data.context_length=20", "data.states=16", "training.batch_tokens=40", "training.steps=2",
    "training.device=cpu",
)  # fmt: skip


def _config(name: str, *overrides: str) -> RunConfig:
    return load_config(incident, name, overrides)


def _default(function: Callable[..., object], name: str) -> object:
    return inspect.signature(function).parameters[name].default


def the_reports_shape(evidence: Evidence) -> Found:
    """KDA-07: of the config, and of the case that the op is measured at."""
    run, dims = _config("hn_xs.yaml"), evidence.dims
    shape = (run.batch_size, run.data.context_length, run.model.heads, run.model.head_width)
    same = shape == tuple(dims[name] for name in "BTHK") == (16, 256, 8, 64)
    return Found(same, "configs/hn_xs.yaml, the incident's case", {"tokens": run.batch_size * run.data.context_length})


def chunks_by_default(evidence: Evidence) -> Found:
    """KDA-13: the default of the reported function, and how often its loop goes round at the incident."""
    default = _default(precompute_updates, "memory_chunk_size")
    rounds = len(evidence.made_by("reported", SUBTRACTION))
    figures: dict[str, int | str] = {"default": str(default), "chunks": rounds}
    return Found(default == 64 and rounds == evidence.bytes("ceil_div(T, C)"), SIGNATURES, figures)


def chunk_parameter(evidence: Evidence) -> Found:
    """KDA-15: it is there, and what is no number of tokens is refused."""
    tensors = evidence.tensors(3)
    no_sizes: tuple[Any, ...] = (0, -1, 1.5)
    refused = [_raised(functools.partial(reported_kda, *tensors, chunk_size=size)) for size in no_sizes]
    there = "memory_chunk_size" in inspect.signature(precompute_updates).parameters
    figures = {"parameter": "memory_chunk_size" if there else "none", "refused": ", ".join(refused)}
    return Found(there and refused == ["ValueError", "ValueError", "TypeError"], SIGNATURES, figures)


def _raised(function: Callable[[], object]) -> str:
    try:
        function()
    except (TypeError, ValueError) as error:
        return type(error).__name__
    return "nothing"


def block_parameter(evidence: Evidence) -> Found:
    """KDA-16: with its default, and kept by the block."""
    default = _default(KDABlock, "memory_chunk_size")
    kept = KDABlock(8, 2, 4, memory_chunk_size=32, device="meta").memory_chunk_size
    return Found((default, kept) == (64, 32), SIGNATURES, {"default": str(default), "kept": kept})


def block_passes_it_on(evidence: Evidence) -> Found:
    """KDA-17: 17 into the block, and what the op is called with."""
    with warnings.catch_warnings(action="ignore"), mock.patch.object(blocks, "kda", wraps=kda) as op:
        KDABlock(8, 2, 4, memory_chunk_size=17)(torch.zeros(1, 20, 8))
    seen = op.call_args.kwargs["chunk_size"]
    return Found(seen == 17, ON_CPU, {"seen": seen})


def model_reads_it(evidence: Evidence) -> Found:
    """KDA-18: a value of a file in the blocks of the model; without the key, and without a config, the default."""
    text = find_config(incident, Path("hn_xs.yaml")).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text("\n".join(line for line in text.splitlines() if KEY not in line), encoding="utf-8")
        without = load_config(incident, path, SHRUNKEN)
    found = {}
    for name, config in (("given", _config("hn_xs.yaml", *SHRUNKEN, f"model.{KEY}=32")), ("missing", without)):
        sizes = {block.memory_chunk_size for block in build_model(config.model, device="meta").blocks}
        found[name] = ", ".join(map(str, sizes))
    found["of_the_model"] = str(_default(LanguageModel, KEY))
    return Found(found == {"given": "32", "missing": "64", "of_the_model": "64"}, "configs/hn_xs.yaml", found)


def configs_carry_it(evidence: Evidence) -> Found:
    """KDA-19: the key as written in both files, and the default at every level."""
    folder = resources.files(__package__.rsplit(".", 1)[0]) / "configs"
    written = [
        line.split("#")[0].split(":")[1].strip()
        for name in ("hn_xs.yaml", "hn_s.yaml")
        for line in (folder / name).read_text(encoding="utf-8").splitlines()
        if line.strip().startswith(f"{KEY}:")
    ]
    defaults = {
        ModelConfig.__dataclass_fields__[KEY].default,
        _default(LanguageModel, KEY),
        _default(KDABlock, "memory_chunk_size"),
        _default(kda, "chunk_size"),
    }
    read = {getattr(_config(name).model, KEY) for name in ("hn_xs.yaml", "hn_s.yaml")}
    figures = {"written": ", ".join(written), "defaults": ", ".join(map(str, defaults))}
    return Found(written == ["64", "64"] and read == defaults == {64}, CONFIGS, figures)


def range_of_chunks(evidence: Evidence) -> Found:
    """KDA-22: what is taken as it is, with a warning, and not at all."""
    answers: dict[str, list[str]] = {"silent": [], "warned": [], "refused": []}
    for size in (-1, 0, 16, 31, 32, 64, 128, 129, 256):
        with warnings.catch_warnings(record=True, action="always") as said:
            is_refused = _raised(functools.partial(validated_chunk_size, size)) == "ValueError"
        answers["refused" if is_refused else "warned" if said else "silent"].append(str(size))
    figures = {name: ", ".join(sizes) for name, sizes in answers.items()}
    wanted = {"silent": "32, 64, 128", "warned": "16, 31, 129, 256", "refused": "-1, 0"}
    return Found(figures == wanted, ON_CPU, figures)


def sixteen_is_in_the_range(evidence: Evidence) -> Found:
    """KDA-30: whether the advice is within the range that the same report gives."""
    with warnings.catch_warnings(record=True, action="always") as said:
        validated_chunk_size(16)
    figures = {
        "range": f"{RECOMMENDED[0]}-{RECOMMENDED[-1]}",
        "answer": "a warning" if said else "silence",
        "peak": format_bytes(evidence.peak("streamed", "forward", chunk_size=16)),
    }
    return Found(16 in RECOMMENDED, ON_CPU, figures)


def training_runs(evidence: Evidence) -> Found:
    """KDA-27: steps of hn_xs, shrunken, on the loop behind ``memfix train``."""
    config = _config("hn_xs.yaml", *SHRUNKEN)
    alone = World(0, 1, torch.device("cpu"))
    with torch.random.fork_rng(devices=()):  # whoever asks for claims may be drawing numbers of their own
        done = list(train(incident, config, alone))
    return Found(len(done) == config.training.steps, "memfix train, shrunken", {"steps": len(done)})


def architecture_unchanged(evidence: Evidence) -> Found:
    """KDA-12: parameters by name and shape, and the loss, for chunk sizes and forms."""
    ids_BT = torch.arange(80).reshape(2, 40) % 64
    shapes, losses = set(), []
    settings = [("reported", 64), ("reported", 7), ("naive", 64), ("streamed", 16), ("wy", 32)]
    for form, size in settings:
        config = _config("hn_xs.yaml", *SHRUNKEN, f"model.{KEY}={size}", f"model.kda_form={form}")
        with torch.random.fork_rng(devices=()), warnings.catch_warnings(action="ignore"):
            torch.manual_seed(0)
            model = build_model(config.model, dtype=torch.float64)
        shapes.add(tuple((name, tuple(tensor.shape)) for name, tensor in model.state_dict().items()))
        losses.append(model(ids_BT, ids_BT).detach())
    spread = float(torch.stack(losses).std() / losses[0])
    figures: dict[str, int | str] = {
        "parameters": sum(tensor.numel() for tensor in model.parameters()),
        "sets": len(shapes),
        "losses": "equal" if spread < 1e-12 else f"apart by {spread:.0e}",
    }
    return Found(len(shapes) == 1 and spread < 1e-12, ON_CPU, figures)


CHECKS = {
    check.__name__: check
    for check in (
        the_reports_shape,
        chunks_by_default,
        chunk_parameter,
        block_parameter,
        block_passes_it_on,
        model_reads_it,
        configs_carry_it,
        range_of_chunks,
        sixteen_is_in_the_range,
        training_runs,
        architecture_unchanged,
    )
}
