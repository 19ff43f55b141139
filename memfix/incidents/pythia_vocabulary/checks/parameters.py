"""Checks of claims about the number of parameters, counted over models on the meta device."""

from __future__ import annotations

import itertools

from ...decoder_parts import num_parameters
from ...judging import CheckResult, check, decimal, holds_if, matches_figure
from ..model import LEARNED, ROTARY, Layer, create_pythia_70m
from . import ORIGINAL, ORIGINAL_WORDS, Evidence

COUNTED = "counted over the model's tensors"
REPORT_LAYER = 11_000_000  # parameters of a layer, by the report


@check("PYT-06")
def inflated_model(evidence: Evidence) -> CheckResult:
    """Count the parameters with 50,000 words, and with the layers as large as the report says."""
    model = evidence.model(*ORIGINAL)
    count = evidence.parameters(ORIGINAL_WORDS)
    of_layers = num_parameters(model.layers)
    own = count - of_layers + len(model.layers) * REPORT_LAYER
    return matches_figure(COUNTED, count, own, count=count, own=own)


@check("PYT-07", factor=4, words=ORIGINAL_WORDS)
@check("PYT-08", factor=12, words=ORIGINAL_WORDS)
@check("PYT-25", factor=16, words=10_000)
@check("PYT-31", factor=4, words=10_000)
def bytes_a_parameter(evidence: Evidence, factor: int, words: int) -> CheckResult:
    """Compute ``factor`` bytes a parameter: 4 for its value, 4 for its gradient, 8 for its two moments."""
    size = factor * evidence.parameters(words)
    return matches_figure(COUNTED, size, bytes=size, decimal=decimal(size))


@check("PYT-24", words=10_000)
@check("PYT-30", words=10_000)
@check("PYT-43", words=50_304)
def all_parameters(evidence: Evidence, words: int) -> CheckResult:
    count = evidence.parameters(words)
    return matches_figure(COUNTED, count, count=count, megabytes=decimal(4 * count, "MB"))


@check("PYT-28")
def six_layers(evidence: Evidence) -> CheckResult:
    layers = evidence.model().layers
    counts = [num_parameters(layer) for layer in layers]
    assert all(isinstance(layer, Layer) for layer in layers)
    size = 4 * sum(counts)
    return matches_figure(COUNTED, sum(counts), one=counts[0], count=sum(counts), megabytes=decimal(size, "MB"))


@check("PYT-36")
def counts_by_config(evidence: Evidence) -> CheckResult:
    """Compare ``get_total_params`` with the sum over tensors, for every combination of a few values."""
    tried = same = 0
    for words, layers, width, positions in itertools.product((1, 10_000), (1, 3), (8, 64), (LEARNED, ROTARY)):
        model, config = create_pythia_70m(
            words, False, "meta", layers=layers, width=width, heads=2, positions=positions, max_positions=7
        )
        tried += 1
        same += config.get_total_params() == num_parameters(model)
    return holds_if(same == tried, COUNTED, configs=tried, equal=same)


@check("PYT-37")
def printed_count(evidence: Evidence) -> CheckResult:
    """Print the last line of the report's check."""
    _, config = create_pythia_70m(vocab_size=10_000, use_sparse_attention=False, device="meta")
    line = f"Total params: {config.get_total_params() / 1e6:.1f}M"
    return holds_if("76" in line, "the report's own lines", printed=line)


@check("PYT-38")
def two_totals(evidence: Evidence) -> CheckResult:
    count = evidence.parameters()
    return holds_if(round(count / 1e6) in (70, 76), COUNTED, count=count)
