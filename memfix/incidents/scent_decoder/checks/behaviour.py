"""Checks of claims about what the report's layers compute, on the CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...evidence import fixed_seed, raised
from ...examples import Examples
from ...judging import ON_CPU, CheckResult, check, holds_if
from ..images import image_batches
from ..incident import incident
from ..layers import Attention, FeedForward, PreNorm
from ..model import ScentModel
from . import SHRUNKEN, Evidence, count, decoder_blocks


def _built(evidence: Evidence, *overrides: str) -> ScentModel:
    with fixed_seed():
        built: Any = incident.build(evidence.config(*SHRUNKEN, *overrides)).double()
    return built


def gradients(evidence: Evidence, *overrides: str) -> list[torch.Tensor]:
    """The gradient of every parameter of a tiny model, in float64."""
    model, config = _built(evidence, *overrides), evidence.config(*SHRUNKEN, *overrides)
    batch = {name: tensor.double() for name, tensor in image_batches(config)(Examples(range(2), 0)).items()}
    with fixed_seed():
        return list(torch.autograd.grad(incident.loss(model, batch), list(model.parameters())))


@check("SCN-04")
def bandwidth_encoder(evidence: Evidence) -> CheckResult:
    """Compare the modules of an encoder with the report's, and test what a block passes on without residuals."""
    model = evidence.model("model.num_layers=2")
    encoder: Any = model.bandwidth_lins[0]
    first = encoder.first
    attention, feed_forward = encoder.blocks[0].layers
    shapes = (first.in_features, first.out_features, attention.fn.dim_head, feed_forward.fn.up.out_features)
    kinds = [type(layer.fn) for layer in (attention, feed_forward)]
    holds = shapes == (64, 512, 64, 4096) and kinds == [Attention, FeedForward] and len(model.bandwidth_lins) == 2
    block: Any = _built(evidence, "model.residual=false").hv_lins[0]
    nn.init.zeros_(block.layers[1].fn.down.weight)
    nn.init.zeros_(block.layers[1].fn.down.bias)
    literal = block(torch.randn(2, 3, 16, dtype=torch.float64))
    words = "nothing" if not literal.any() else "the input"
    return holds_if(holds, "module tree", scales=len(model.bandwidth_lins), passes=words)


@check("SCN-19")
def no_attention(evidence: Evidence) -> CheckResult:
    """Count the attentions of the decoder, and run it."""
    model = _built(evidence, "model.decoder=ff")
    out = model(torch.rand(2, 3, 4, 4).double(), torch.rand(2, 5, 2).double())
    attentions = count(decoder_blocks(model), Attention)
    return holds_if(
        attentions == 0 and out.shape == (2, 5, 3), ON_CPU, attentions=attentions, shape=str(tuple(out.shape))
    )


@check("SCN-21")
def expansion(evidence: Evidence) -> CheckResult:
    """Read the shapes of the weights of a feed-forward in the report's model."""
    layer = evidence.model().hv_lins[0].layers[1].fn
    up, down = tuple(layer.up.weight.shape), tuple(layer.down.weight.shape)
    return holds_if(down == (512, 2048), "module tree", first=str(up), second=str(down))


@check("SCN-22")
def gate(evidence: Evidence) -> CheckResult:
    """Compare every form of the feed-forward with two lines of torch."""
    with fixed_seed():
        layer, x = FeedForward(6).double(), torch.randn(2, 3, 6, dtype=torch.float64)
    value, gates = layer.up(x).chunk(2, -1)
    true = layer.down(value * F.gelu(gates))
    forms = ("naive", "checkpoint", "token_chunks")
    found = []
    for form in forms:
        layer.form = form
        found.append(torch.allclose(layer(x), true, rtol=1e-10))
    return holds_if(all(found), ON_CPU, forms=len(found))


@check("SCN-23")
def skips(evidence: Evidence) -> CheckResult:
    """Make all blocks give zeros, and test whether the result still depends on the coordinates, by the skips."""
    model = _built(evidence)
    for layer in [module for module in decoder_blocks(model).modules() if isinstance(module, PreNorm)]:
        last: Any = layer.fn.to_out if isinstance(layer.fn, Attention) else layer.fn.down
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
    with fixed_seed():
        latents, some = torch.randn(1, 4, 8).double(), torch.rand(1, 6, 2).double()
    out = model.decode(latents, some)
    spread = bool((out - out.mean(1, keepdim=True)).abs().max() > 1e-6)
    return holds_if(spread, ON_CPU, depends=str(spread))


@check("SCN-25")
def context(evidence: Evidence) -> CheckResult:
    """Attend to a context of 40 tokens and 96 features, then to one of another width and one of another batch size."""
    layer, x = PreNorm(32, Attention(32, context_dim=96, heads=4), 96), torch.randn(2, 10, 32)
    shape = tuple(layer(x, torch.randn(2, 40, 96)).shape)
    refused = {raised(layer.fn, x, torch.randn(*of)) for of in ((2, 96, 40), (1, 40, 96))}
    sequence = raised(nn.Sequential(layer), x, torch.randn(2, 40, 96))
    holds = shape == (2, 10, 32) and refused == {"ValueError"}
    return holds_if(holds, ON_CPU, refused=", ".join(refused), sequence=sequence)


@check("SCN-30")
def checkpoints(evidence: Evidence) -> CheckResult:
    """Compare the gradients with and without checkpointing, in decoders with and without context, and with dropout."""
    ways = ("model.decoder=self", "model.decoder=cross", "model.dropout=0.5")
    equal = [
        all(
            map(torch.equal, gradients(evidence, way), gradients(evidence, way, "training.gradient_checkpointing=true"))
        )
        for way in ways
    ]
    return holds_if(all(equal), ON_CPU, ways=len(equal), gradients="bitwise equal" if all(equal) else "different")
