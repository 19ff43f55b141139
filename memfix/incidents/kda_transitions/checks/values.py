"""Checks of claims about the values that the fix computes: the reported form beside naive, on the CPU."""

from __future__ import annotations

import torch

from ....laws import NAIVE
from ....ops.kda.reported import precompute_updates
from ...evidence import raised
from ...judging import ON_CPU, CheckResult, check, holds_if
from . import Evidence

TOKENS = 100
CHUNK_SIZES = (1, 7, 16, 32, 64, 99, 100, 128, 1000)


@check("KDA-29")
def bitwise_equal(evidence: Evidence) -> CheckResult:
    """Compare transitions, writes, output and final state of every chunk size with those of one chunk and of naive."""
    _, k, v, g, beta = (tensor.detach() for tensor in evidence.tensors(TOKENS))
    whole = precompute_updates(k, v, g, beta, memory_chunk_size=TOKENS)
    dense = evidence.computed(NAIVE, TOKENS)
    bitwise, gradients = [], []
    for size in CHUNK_SIZES:
        parts = precompute_updates(k, v, g, beta, memory_chunk_size=size)
        o, state, *grads = evidence.computed("reported", TOKENS, chunk_size=size)
        same = [torch.equal(*pair) for pair in zip((*parts, o, state), (*whole, *dense[:2]), strict=True)]
        bitwise.append(all(same))
        gradients.append(
            all(torch.allclose(*pair, rtol=1e-10, atol=1e-12) for pair in zip(grads, dense[2:], strict=True))
        )
    return holds_if(
        all(bitwise) and all(gradients),
        ON_CPU,
        sizes=", ".join(str(size) for size, same in zip(CHUNK_SIZES, bitwise, strict=True) if same),
        tokens=TOKENS,
        gradients="equal within rounding" if all(gradients) else "different",
    )


@check("KDA-33")
def any_remainder(evidence: Evidence) -> CheckResult:
    """Try lengths that no chunk divides, chunks longer than the sequence, one token, and no tokens."""
    right: list[str] = []
    wrong: list[str] = []
    for form in ("reported", "streamed", "wy"):
        for tokens, size in ((1, 1), (1, 64), (5, 2), (5, 5), (5, 7), (65, 64)):
            found = zip(evidence.computed(form, tokens, chunk_size=size), evidence.computed(NAIVE, tokens), strict=True)
            same = all(torch.allclose(*pair, rtol=1e-9, atol=1e-11) for pair in found)
            (right if same else wrong).append(f"{form} {tokens}/{size}")
    empty = [tensor[:, :0] for tensor in evidence.tensors(1)]
    is_refused = raised(evidence.contract().function("reported"), *empty) == "ValueError"
    return holds_if(
        not wrong and is_refused,
        ON_CPU,
        right=len(right),
        wrong=", ".join(wrong) or "none",
        no_tokens="refused" if is_refused else "taken",
    )
