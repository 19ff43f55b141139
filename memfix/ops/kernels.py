"""Triton functions that the kernels of several ops share."""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether kernels run in Triton's interpreter, which has no 16-bit dot."""


@triton.jit
def product(left, right, COARSE: tl.constexpr = False):
    """Return ``left @ right`` in float32. Float32 operands keep their digits, or with ``COARSE`` the ten of TF32.

    ``left`` should have fewer than 64 rows. From 64 on Triton emits Hopper's asynchronous products (wgmma), for which
    the ptxas 12.8 that it ships generates wrong code where a kernel has several of them
    (triton-lang/triton#11366, fla-org/flash-linear-attention#1262).
    """
    if INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    if COARSE:
        return tl.dot(left, right, input_precision="tf32")
    return tl.dot(left, right, input_precision="tf32x3")


@triton.jit
def power_of_two(exponent):
    """Return ``2 ** exponent`` in float32, in one instruction; a subnormal result is flushed to 0."""
    if INTERPRETED:
        return tl.exp2(exponent)
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [exponent], dtype=tl.float32, is_pure=True, pack=1
    )
