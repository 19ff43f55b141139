"""Checks of the commands and switches that the report names, with the loop of ``memfix train``."""

from __future__ import annotations

from unittest import mock

import torch

from ....errors import MemfixError
from ...distributed import joined
from ...incident import load_config
from ...judging import ON_CPU, CheckResult, as_recorded, check, holds_if
from ..attention import dense_attention, window_attention
from ..incident import incident
from ..model import create_pythia_70m
from . import SHRUNKEN, Evidence

# the options of the report's command, and the config keys that replace them
KEYS = {
    "--dataset": "data.path=zipf",
    "--vocab_size": "model.vocab_size=10000",
    "--batch_size": "training.batch_size=32",
    "--seq_len": "data.context_length=128",
    "--epochs": "training.epochs=10",
    "--sparse": "model.use_sparse_attention=true",
    "--device": "training.device=cuda",
}


@check("PYT-15")
def trains(evidence: Evidence) -> CheckResult:
    """Train a small model of the same kind for 20 steps."""
    steps = evidence.train(*SHRUNKEN, "training.steps=20", "optimizer.learning_rate=0.01")
    losses = [step.loss for step in steps]
    falls = losses[-1] < losses[0]
    return holds_if(falls, "memfix train, shrunken", steps=len(losses), loss="falls" if falls else "does not fall")


@check("PYT-18")
def options(evidence: Evidence) -> CheckResult:
    """Compare the report's first command, key by key, with the shipped config."""
    of_command = {name: key for name, key in KEYS.items() if name != "--device"}
    given = load_config(incident, incident.config, of_command.values())
    return holds_if(
        given == evidence.config(),
        "configs/report.yaml",
        keys=", ".join(key.split("=")[0] for key in of_command.values()),
    )


@check("PYT-19")
def defaults(evidence: Evidence) -> CheckResult:
    """Read the defaults of what the shorter command leaves out, and ask for a GPU that is not there."""
    config = evidence.config("training.device=cuda")
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        try:
            with joined(config.training.device):
                refused = "taken"
        except MemfixError as error:
            refused = type(error).__name__
    return as_recorded(
        "configs/report.yaml",
        length=config.data.context_length,
        epochs=str(config.training.epochs),
        without_gpu=refused,
    )


@check("PYT-20")
def sparse(evidence: Evidence) -> CheckResult:
    """Compare windows as long as the text and longer with dense attention; and the parameters of both models."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 10, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    dense = dense_attention(q, k, v)
    equal = all(torch.equal(window_attention(q, k, v, window=window), dense) for window in (10, 11))
    narrow = torch.equal(window_attention(q, k, v, window=9), dense)
    counts = {create_pythia_70m(10_000, is_sparse, "meta")[1].get_total_params() for is_sparse in (False, True)}
    holds = equal and not narrow and len(counts) == 1
    return holds_if(holds, ON_CPU, parameters=counts.pop())
