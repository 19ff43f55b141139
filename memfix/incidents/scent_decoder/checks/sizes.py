"""Checks of claims about counts: positions, attention matrices, layers and their bytes."""

# B batch, N positions, M latent tokens, D width, H heads

from __future__ import annotations

import torch

from ...decoder_parts import num_parameters
from ...judging import ARITHMETIC, CheckResult, check, decimal, holds_if, matches_figure, sizes
from ..layers import Attention, FeedForward, ResidualBlock
from . import Evidence, count, decoder_blocks, naive_attention, naive_feed_forward

SAVED = "saved tensors, counted"
COUNTED = "counted over the model"
MATRIX = "B*H*N*N*e"


@check("SCN-01")
def positions(evidence: Evidence) -> CheckResult:
    found = evidence.dims["N"]
    return holds_if(found == 1024, "configs/config.yaml", positions=found)


@check("SCN-02")
def squares(evidence: Evidence) -> CheckResult:
    """Compare the matrix, and all that a layer holds, at 1,024 and at 512 positions."""
    matrix = evidence.evaluate(MATRIX) / evidence.evaluate(MATRIX, N=512)
    layer = evidence.held(naive_attention) / evidence.held(naive_attention, N=512)
    return holds_if(matrix == 4, f"{ARITHMETIC}; {SAVED}", matrix=f"{matrix:.0f}x", layer=f"{layer:.2f}x")


@check("SCN-03")
def attentions_of_an_encoder(evidence: Evidence) -> CheckResult:
    """Count the attentions of an encoder, with 2 layers, as the report's code prints it, and with 3."""
    printed, three = (
        count(evidence.model(f"model.num_layers={layers}").bandwidth_lins[0], Attention) for layers in (2, 3)
    )
    return holds_if(printed == 2, COUNTED, printed=printed, three=three)


@check("SCN-05")
def projections(evidence: Evidence) -> CheckResult:
    """Make the queries of all heads, without values, and read their shape and their bytes."""
    dims = evidence.dims
    with torch.device("meta"):
        layer = Attention(dims["D"], heads=dims["H"])
        q = layer.to_q(torch.empty(dims["B"], dims["N"], dims["D"])).unflatten(-1, (dims["H"], -1))
    shape = tuple(q.transpose(1, 2).flatten(0, 1).shape)
    return holds_if(shape == (512, 1024, 64), "on the meta device", shape=str(shape), bytes=q.nbytes)


@check("SCN-06")
def elements(evidence: Evidence) -> CheckResult:
    found = evidence.evaluate("B*H*N*N")
    return holds_if(found == 512 * 2**20, ARITHMETIC, count=found)


@check("SCN-07")
def one_attention(evidence: Evidence) -> CheckResult:
    """Measure what the layer holds, the matrix included, and the peak of a train step of attention alone."""
    held = evidence.held(naive_attention)
    figures = sizes(matrix=evidence.evaluate(MATRIX), held=held, step=evidence.peak("naive", "train", op="attention"))
    return matches_figure(SAVED, held, decimal=decimal(held), **figures)


@check("SCN-08", part="bandwidth_lins")
@check("SCN-09", part="modulation_lins")
@check("SCN-10", part="hv_lins")
@check("SCN-11", part="")
def matrices_of_a_part(evidence: Evidence, part: str) -> CheckResult:
    """Count the matrices of a part, or of all, with the 3 layers of the report's sum and the 2 of its code."""
    models = [evidence.model(f"model.num_layers={layers}") for layers in (3, 2)]
    summed, printed = (count(getattr(model, part) if part else decoder_blocks(model), Attention) for model in models)
    size = summed * evidence.evaluate(MATRIX)
    figures = sizes(binary=size, as_printed=printed * evidence.evaluate(MATRIX))
    width = models[0].hv_lins[0].layers[0].fn.dim_head
    how = f"{COUNTED}; {ARITHMETIC}"
    return matches_figure(how, size, attentions=summed, decimal=decimal(size), dim_head=width, **figures)


@check("SCN-14")
def other_activations(evidence: Evidence) -> CheckResult:
    number, one = count(decoder_blocks(evidence.model()), FeedForward), evidence.held(naive_feed_forward)
    return matches_figure(SAVED, number * one, feed_forwards=number, held=decimal(number * one), **sizes(one=one))


@check("SCN-16")
def share_of_matrices(evidence: Evidence) -> CheckResult:
    """Compute the shares of the matrices and of the feed-forwards in what a forward holds for backward."""
    held, model = evidence.held_by_model(), decoder_blocks(evidence.model())
    matrices = count(model, Attention) * evidence.evaluate(MATRIX)
    feed_forwards = count(model, FeedForward) * evidence.held(naive_feed_forward)
    shares = {"matrices": f"{matrices / held:.0%}", "feed_forwards": f"{feed_forwards / held:.0%}"}
    return holds_if(matrices > held / 2, SAVED, **shares, **sizes(held=held))


@check("SCN-17")
def residual_blocks(evidence: Evidence) -> CheckResult:
    few, many = (evidence.held(ResidualBlock, N=positions) for positions in (1024, 2048))
    attentions = count(decoder_blocks(evidence.model("model.decoder=residual")), Attention)
    holds = many == 2 * few and not attentions
    return holds_if(holds, SAVED, times=f"{many / few:.0f}x", attentions=attentions, **sizes(held=few))


@check("SCN-24")
def latent_matrix(evidence: Evidence) -> CheckResult:
    """Compute the matrix of the latent processor, which has attention whatever the decoder is."""
    size, whole = evidence.evaluate("B*H*M*M*e"), evidence.evaluate(MATRIX)
    attentions = count(evidence.model("model.decoder=ff").latent_blocks, Attention)
    holds = evidence.dims["M"] == 256 and attentions > 0
    return holds_if(holds, f"{ARITHMETIC}; {COUNTED}", times=whole // size, **sizes(matrix=size))


@check("SCN-26")
def cross_matrix(evidence: Evidence) -> CheckResult:
    size = evidence.evaluate("B*H*N*M*e")
    return matches_figure(ARITHMETIC, evidence.evaluate(MATRIX) / size, bytes=size, **sizes(matrix=size))


@check("SCN-35")
def crossover(evidence: Evidence) -> CheckResult:
    """Test that a feed-forward holds memory linear in the positions, and where attention holds as much."""
    one, two = (evidence.held(naive_feed_forward, N=positions) for positions in (1024, 2048))
    equal_at = 12 * evidence.dims["D"] // evidence.dims["H"]
    both = {evidence.held(layer, N=equal_at) for layer in (naive_feed_forward, naive_attention)}
    return holds_if(two == 2 * one and len(both) == 1, SAVED, times=f"{two / one:.0f}x", equal_at=equal_at)


@check("SCN-40")
def quick_fix(evidence: Evidence) -> CheckResult:
    """Count the feed-forwards of the recommended decoder, for several numbers of layers."""
    counts = [
        count(decoder_blocks(evidence.model("model.decoder=ff", f"model.num_layers={layers}")), FeedForward)
        for layers in (1, 2, 3)
    ]
    return holds_if(counts[1:] == [10, 18], COUNTED, at_1=counts[0], at_2=counts[1], at_3=counts[2])


@check("SCN-41")
def two_feed_forwards(evidence: Evidence) -> CheckResult:
    """Count the modules of a block, and the parameters of its layers and of the models."""
    before, after = evidence.model(), evidence.model("model.decoder=ff")
    attention, feed_forward = (layer.fn for layer in before.hv_lins[0].layers)
    block = after.hv_lins[0]
    holds = (count(block, FeedForward), count(block, Attention)) == (2, 0)
    figures = {"attention": num_parameters(attention), "feed_forward": num_parameters(feed_forward)}
    return holds_if(holds, COUNTED, **figures, before=num_parameters(before), after=num_parameters(after))


@check("SCN-42")
def twenty_times(evidence: Evidence) -> CheckResult:
    """Compare what both layers hold with closed forms, which count two statistics of the norm per position."""
    attention, feed_forward = evidence.held(naive_attention), evidence.held(naive_feed_forward)
    closed = evidence.evaluate("B*N*(5*D + H*N)*e + 8*B*N"), evidence.evaluate("B*N*17*D*e + 8*B*N")
    exact = (attention, feed_forward) == closed
    return matches_figure(
        SAVED, attention / feed_forward, ratio=f"{attention / feed_forward:.2f}x", closed_form=str(exact),
        **sizes(attention=attention, feed_forward=feed_forward, tensor=evidence.evaluate("B*N*D*e")),
    )  # fmt: skip


@check("SCN-44")
def half_in_bf16(evidence: Evidence) -> CheckResult:
    """Compare what both layers hold in bfloat16 and in float32."""
    layers = {"attention": naive_attention, "feed_forward": naive_feed_forward}
    narrow = {name: evidence.held(layer, torch.bfloat16) for name, layer in layers.items()}
    ratios = [evidence.held(layer) / narrow[name] for name, layer in layers.items()]
    return holds_if(all(abs(ratio - 2) < 0.01 for ratio in ratios), SAVED, **sizes(**narrow))
