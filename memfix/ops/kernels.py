"""What the Triton kernels of several ops share."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether kernels run in Triton's interpreter, which has no 16-bit dot and cuts bfloat16 off."""


@triton.jit
def rounded(values, dtype: tl.constexpr):
    """``values.to(dtype)``, to the nearest in the interpreter too."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = values.to(tl.float32).to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        kept = tl.where(values == values, nearest, 0x7FC0)
        return kept.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return values.to(dtype)


@triton.jit
def product(left, right, COARSE: tl.constexpr = False):
    """``left @ right`` in float32. Float32 operands keep their digits, or with ``COARSE`` the first ten of them.

    ``left`` should have fewer than 64 rows. From 64 on Triton takes Hopper's asynchronous products, for which the
    assembler that it ships, ptxas 12.8, makes wrong code where a kernel has several
    (triton-lang/triton#11366, fla-org/flash-linear-attention#1262).
    """
    if INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    if COARSE:
        return tl.dot(left, right, input_precision="tf32")
    return tl.dot(left, right, input_precision="tf32x3")
