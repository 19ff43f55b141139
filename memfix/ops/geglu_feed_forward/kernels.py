"""The Triton kernels of the gate: ``value * act(gate)`` in one pass, and its backward in place."""

# C tokens of a chunk, F hidden width, H columns of the first product: 2F, or F without a gate

from __future__ import annotations

import triton
import triton.language as tl

INVERSE_ROOT_2 = tl.constexpr(0.7071067811865476)
INVERSE_ROOT_2_PI = tl.constexpr(0.3989422804014327)


@triton.jit
def _wide(values):
    """Convert to the dtype in which the gate is computed: float64 for float64 tensors, else float32."""
    return values if values.dtype == tl.float64 else values.to(tl.float32)


@triton.jit
def _activation(gate, IS_SILU: tl.constexpr):
    """Return the activation of a gate, and its derivative."""
    if IS_SILU:
        share = 1.0 / (1.0 + tl.exp(-gate))
        return gate * share, share * (1.0 + gate * (1.0 - share))
    share = 0.5 + 0.5 * tl.erf(gate * INVERSE_ROOT_2)
    return gate * share, share + gate * (INVERSE_ROOT_2_PI * tl.exp(-0.5 * gate * gate))


@triton.jit
def activate(
    product_CH, product_stride, out_CF, out_stride, num_tokens, hidden_width,
    IS_GATED: tl.constexpr, IS_SILU: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write ``value * act(gate)``, or ``act(value)`` without a gate; ``out`` may be the memory of the values."""
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (tokens < num_tokens) & (columns < hidden_width)
    at_value = product_CH + tokens * product_stride + columns
    value = _wide(tl.load(at_value, mask=inside, other=0.0))
    if IS_GATED:
        gate = _wide(tl.load(at_value + hidden_width, mask=inside, other=0.0))
        activated, _ = _activation(gate, IS_SILU)
        activated *= value
    else:
        activated, _ = _activation(value, IS_SILU)
    tl.store(out_CF + tokens * out_stride + columns, activated.to(out_CF.dtype.element_ty), mask=inside)


@triton.jit
def activate_backward(
    product_CH, product_stride, gradient_CF, gradient_stride, parts_PH, num_tokens, hidden_width, product_width,
    HAS_SUMS: tl.constexpr, IS_GATED: tl.constexpr, IS_SILU: tl.constexpr,
    TOKENS: tl.constexpr, STEPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Replace the product by its gradient, and the gradient of the activated values by those values.

    A program visits ``STEPS`` consecutive blocks of tokens and stores the sums of the product's gradient over them: the
    parts of the gradient of the bias.
    """
    block = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    value_sums = _wide(tl.zeros((TOKENS, COLUMNS), product_CH.dtype.element_ty))
    gate_sums = value_sums
    for step in range(STEPS):
        tokens = (block.to(tl.int64) * STEPS + step) * TOKENS + tl.arange(0, TOKENS)[:, None]
        inside = (tokens < num_tokens) & (columns < hidden_width)
        at_value = product_CH + tokens * product_stride + columns
        at_gradient = gradient_CF + tokens * gradient_stride + columns
        value = _wide(tl.load(at_value, mask=inside, other=0.0))
        gradient = _wide(tl.load(at_gradient, mask=inside, other=0.0))
        if IS_GATED:
            gate = _wide(tl.load(at_value + hidden_width, mask=inside, other=0.0))
            activated, slope = _activation(gate, IS_SILU)
            grad_value = gradient * activated
            grad_gate = gradient * value * slope
            tl.store(at_value + hidden_width, grad_gate.to(product_CH.dtype.element_ty), mask=inside)
            gate_sums += grad_gate
            activated *= value
        else:
            activated, slope = _activation(value, IS_SILU)
            grad_value = gradient * slope
        tl.store(at_value, grad_value.to(product_CH.dtype.element_ty), mask=inside)
        tl.store(at_gradient, activated.to(gradient_CF.dtype.element_ty), mask=inside)
        value_sums += grad_value
    if HAS_SUMS:
        at_part = parts_PH + block.to(tl.int64) * product_width + columns
        tl.store(at_part, tl.sum(value_sums, 0, keep_dims=True), mask=columns < hidden_width)
        if IS_GATED:
            tl.store(at_part + hidden_width, tl.sum(gate_sums, 0, keep_dims=True), mask=columns < hidden_width)
