"""Which kernel attention runs on which GPU, and what the whole step then takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import memfix
from memfix.meters.simulated import attention
from memfix.meters.simulated.attention import Choice, Kernel, Request, choose
from memfix.meters.simulated.environment import simulated_gpu
from memfix.meters.simulated.gpus import H200, get_gpu

BF16 = torch.bfloat16
A100, L4 = get_gpu("A100"), get_gpu("L4")
EVERY_KERNEL = (
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
)  # fmt: skip


def meta(*shape: int, dtype: torch.dtype = BF16, grad: bool = True) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def request(*shape: int, dtype: torch.dtype = BF16, grad: bool = True, **options: Any) -> Request:
    return Request(*(meta(*shape, dtype=dtype, grad=grad) for _ in range(3)), **options)


def chosen(asked: Request, gpu: Any = H200) -> Kernel:
    with attention.preferences_of(gpu):
        return choose(gpu, asked).kernel


# ---------------------------------------------------------------- the choice
@pytest.mark.parametrize(("gpu", "kernel"), [("H200", "CUDNN"), ("H100", "CUDNN"), ("A100", "FLASH"), ("L4", "FLASH")])
def test_hopper_prefers_cudnn_and_others_flash(gpu: str, kernel: str) -> None:
    assert chosen(request(2, 8, 128, 64), get_gpu(gpu)).name == kernel


def test_cudnn_can_be_deprioritized_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert chosen(request(2, 8, 128, 64)) is Kernel.FLASH


def test_float32_is_efficient_and_float64_is_not_fused() -> None:
    assert chosen(request(2, 8, 128, 64, dtype=torch.float32)) is Kernel.EFFICIENT
    assert chosen(request(2, 8, 128, 64, dtype=torch.float64)) is Kernel.MATH


@pytest.mark.parametrize(
    ("width", "kernel"),
    [(36, "FLASH"), (64, "CUDNN"), (128, "CUDNN"), (256, "CUDNN"), (264, "EFFICIENT"), (257, "MATH")],
)
def test_the_width_of_a_head_decides_on_hopper(width: int, kernel: str) -> None:
    assert chosen(request(2, 8, 128, width)).name == kernel


@pytest.mark.parametrize(("width", "dropout", "kernel"), [
    (192, 0.0, "FLASH"), (200, 0.0, "EFFICIENT"), (256, 0.0, "FLASH"), (256, 0.5, "EFFICIENT"),
])  # fmt: skip
def test_wide_heads_are_not_trained_by_flash_on_ada(width: int, dropout: float, kernel: str) -> None:
    assert chosen(request(2, 8, 128, width, dropout=dropout), L4).name == kernel
    assert chosen(request(2, 8, 128, width, dropout=dropout, grad=False), L4) is Kernel.FLASH
    assert chosen(request(2, 8, 128, width, dropout=dropout), A100) is Kernel.FLASH


def test_a_mask_rules_out_flash() -> None:
    mask = meta(128, 128, dtype=torch.bool, grad=False)
    assert chosen(request(2, 8, 128, 64, mask=mask), A100) is Kernel.EFFICIENT
    assert chosen(request(2, 8, 128, 64, mask=mask)) is Kernel.CUDNN


@pytest.mark.parametrize("shape", [(8, 128, 128), (3, 1, 128, 128), (1, 1, 128, 64)])
def test_cudnn_takes_masks_of_its_shapes_only(shape: tuple[int, ...]) -> None:
    assert chosen(request(2, 8, 128, 64, mask=meta(*shape, grad=False))) is Kernel.EFFICIENT


def test_a_mask_that_is_trained_is_not_given_to_cudnn() -> None:
    assert chosen(request(2, 8, 128, 64, mask=meta(128, 128))) is Kernel.EFFICIENT


def test_flash_refuses_a_causal_mask_that_is_not_square() -> None:
    asked = Request(meta(2, 8, 16, 64), meta(2, 8, 32, 64), meta(2, 8, 32, 64), is_causal=True)
    assert chosen(asked, A100) is Kernel.EFFICIENT
    assert chosen(replace(asked, is_causal=False), A100) is Kernel.FLASH


def test_grouped_heads_are_run_by_flash_and_cudnn_only() -> None:
    asked = Request(meta(2, 8, 16, 64), meta(2, 2, 16, 64), meta(2, 2, 16, 64), enable_gqa=True)
    assert chosen(asked) is Kernel.CUDNN
    assert chosen(asked, A100) is Kernel.FLASH
    assert chosen(replace(asked, mask=meta(16, 16, grad=False)), A100) is Kernel.MATH


@pytest.mark.parametrize("keys", [0, 1])
def test_cudnn_refuses_no_or_one_key(keys: int) -> None:
    asked = Request(meta(2, 8, 16, 64), meta(2, 8, keys, 64), meta(2, 8, keys, 64))
    assert chosen(asked) is (Kernel.FLASH if keys else Kernel.MATH)


def test_three_dims_and_strided_heads_are_not_fused() -> None:
    assert chosen(request(8, 128, 64)) is Kernel.MATH
    strided = [meta(2, 8, 128, 128)[..., ::2] for _ in range(3)]
    assert chosen(Request(*strided)) is Kernel.MATH


def test_deterministic_mode_rules_out_cudnn() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert chosen(request(2, 8, 128, 64)) is Kernel.FLASH
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dropout", [0.1, 0.125])
def test_cudnn_takes_any_dropout_except_of_one_query(dropout: float) -> None:
    assert chosen(request(2, 8, 128, 64, dropout=dropout)) is Kernel.CUDNN
    key = meta(2, 8, 128, 64)
    assert chosen(Request(meta(2, 8, 1, 64), key, key)) is Kernel.CUDNN
    assert chosen(Request(meta(2, 8, 1, 64), key, key, dropout=dropout)) is Kernel.FLASH


def test_another_flash_attention_is_in_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4", raising=False)
    doubt = "attention by another FlashAttention than torch's own, whose workspace is not known"
    assert choose(A100, request(2, 8, 128, 64)) == Choice(Kernel.FLASH, doubt)
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA2", raising=False)
    assert choose(A100, request(2, 8, 128, 64)) == Choice(Kernel.FLASH, None)


def test_an_order_set_by_the_user_is_followed_and_restored() -> None:
    before = torch._C._get_sdp_priority_order()
    order = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]
    with attention.preferences_of(H200):
        with sdpa_kernel(order, set_priority=True):
            assert choose(H200, request(2, 8, 128, 64)).kernel is Kernel.MATH
        assert choose(H200, request(2, 8, 128, 64)).kernel is Kernel.CUDNN
    assert torch._C._get_sdp_priority_order() == before


# ---------------------------------------------------------------- errors
def test_no_kernel_left_is_torchs_own_error() -> None:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match=r"^No available kernel\. Aborting"):
        chosen(request(2, 8, 128, 64, dtype=torch.float32))
    with sdpa_kernel([]), pytest.raises(RuntimeError, match=r"^No viable backend for scaled_dot_product_attention"):
        chosen(request(2, 8, 128, 64))


def test_dtypes_that_differ_are_torchs_own_error() -> None:
    with simulated_gpu(H200, hides_modes=True):
        query, key = torch.empty(2, 4, 8, 8, device="cuda"), torch.empty(2, 4, 8, 8, device="cuda", dtype=BF16)
        with pytest.raises(RuntimeError, match=r"same dtype, but got query\.dtype: torch\.float32"):
            F.scaled_dot_product_attention(query, key, key)


# ---------------------------------------------------------------- whole steps, as measured on an H200
def step_of(
    backend: SDPBackend | None, shape: tuple[int, ...], dtype: torch.dtype, key_heads: int, masked: bool
) -> Any:
    def build(device: str) -> Any:
        B, H, L, D = shape
        query, key, value = (
            torch.randn(B, heads, L, D, device=device, dtype=dtype, requires_grad=True)
            for heads in (H, key_heads or H, key_heads or H)
        )
        mask = torch.ones(L, L, dtype=torch.bool, device=device).tril() if masked else None

        def step() -> None:
            query.grad = key.grad = value.grad = None
            with sdpa_kernel([backend] if backend is not None else list(EVERY_KERNEL)):
                out = F.scaled_dot_product_attention(
                    query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=bool(key_heads)
                )
            out.sum().backward()

        return step

    return build


COMMON, WIDE = (2, 16, 4096, 64), (1, 16, 8192, 128)
FLASH, EFFICIENT = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
CUDNN, MATH = SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH


@pytest.mark.parametrize(
    ("backend", "shape", "dtype", "key_heads", "masked", "peak_bytes"),
    [
        (FLASH, COMMON, BF16, 0, False, 84_934_684),
        (FLASH, COMMON, BF16, 4, False, 118_489_116),
        (FLASH, WIDE, BF16, 0, False, 168_820_764),
        (EFFICIENT, COMMON, BF16, 0, False, 68_190_212),
        (EFFICIENT, COMMON, torch.float32, 0, False, 102_236_168),
        (EFFICIENT, COMMON, BF16, 0, True, 101_744_644),
        (EFFICIENT, WIDE, BF16, 0, False, 135_282_692),
        (CUDNN, COMMON, BF16, 0, False, 68_157_716),
        (CUDNN, COMMON, BF16, 4, False, 101_712_148),
        (CUDNN, WIDE, BF16, 0, False, 135_266_580),
        (MATH, COMMON, BF16, 0, False, 8_657_043_460),
        (MATH, COMMON, torch.float32, 0, False, 8_623_489_032),
        (MATH, COMMON, torch.float32, 0, True, 8_623_489_032),
        (None, COMMON, BF16, 0, False, 68_157_716),
        (None, COMMON, torch.float32, 0, False, 102_236_168),
    ],
)
def test_a_step_peaks_where_an_h200_does(
    backend: SDPBackend | None, shape: Any, dtype: torch.dtype, key_heads: int, masked: bool, peak_bytes: int
) -> None:
    assert memfix.peak(step_of(backend, shape, dtype, key_heads, masked)).peak_bytes == peak_bytes


# ---------------------------------------------------------------- what a call leaves on the GPU
@pytest.mark.parametrize(
    ("backend", "grad", "left_bytes"),
    [
        (FLASH, True, 16_777_216 + 524_288 + 24),  # output, row sums, the state of a generator
        (EFFICIENT, True, 16_777_216 + 524_288),  # the generator's state is in host memory
        (CUDNN, True, 17_301_520),
        (CUDNN, False, 16_777_216),  # held is the output alone
        (EFFICIENT, False, 16_777_216),
    ],
)
def test_a_call_leaves_what_an_h200_shows(backend: SDPBackend, grad: bool, left_bytes: int) -> None:
    def build(device: str) -> Any:
        heads = [torch.empty(COMMON, device=device, dtype=BF16, requires_grad=grad) for _ in range(3)]

        def step() -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*heads, is_causal=True)

        return step

    assert memfix.peak(build).held_bytes == left_bytes


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_does_not_fall_back_to_math(mode: Any) -> None:
    def build(device: str) -> Any:
        heads = [torch.empty(COMMON, device=device, dtype=BF16) for _ in range(3)]

        def step() -> torch.Tensor:
            with mode():
                return F.scaled_dot_product_attention(*heads)

        return step

    assert memfix.peak(build).peak_bytes == 16_777_216 + 16 + 256


def test_padded_heads_are_cut_again() -> None:
    with simulated_gpu(A100, hides_modes=True):
        query = torch.empty(2, 4, 16, 33, device="cuda", dtype=BF16)
        assert F.scaled_dot_product_attention(query, query, query).shape == (2, 4, 16, 33)


def test_attention_on_the_host_is_left_alone() -> None:
    with simulated_gpu(H200, hides_modes=True), torch.inference_mode():
        query = torch.empty(2, 4, 16, 64, device="cpu")
        assert F.scaled_dot_product_attention(query, query, query).device.type == "cpu"


def test_the_choice_can_be_asked_for() -> None:
    with simulated_gpu(H200, hides_modes=True):
        query = torch.empty(2, 4, 16, 64, device="cuda", dtype=BF16)
        assert torch._fused_sdp_choice(query, query, query) == Kernel.CUDNN
        on_host = torch.empty(2, 4, 16, 64, device="cpu")
        assert torch._fused_sdp_choice(on_host, on_host, on_host) == Kernel.FLASH


@pytest.mark.parametrize(
    ("dtype", "mask_heads", "usable"),
    [
        (BF16, None, ["flash", "efficient", "cudnn"]),
        (BF16, 4, ["efficient", "cudnn"]),
        (torch.float32, None, ["efficient"]),
        (torch.float64, None, []),
    ],
)
def test_torch_says_which_kernels_can_run(dtype: torch.dtype, mask_heads: int | None, usable: list[str]) -> None:
    cuda = torch.backends.cuda
    with simulated_gpu(H200, hides_modes=True):
        query = torch.empty(2, 4, 16, 64, device="cuda", dtype=dtype)
        mask = None if mask_heads is None else torch.empty(2, mask_heads, 16, 16, device="cuda", dtype=dtype)
        params = cuda.SDPAParams(query, query, query, mask, 0.0, False, False)
        answers = {name: getattr(cuda, f"can_use_{name}_attention") for name in ("flash", "efficient", "cudnn")}
        assert [name for name, can_use in answers.items() if can_use(params)] == usable
        with sdpa_kernel(SDPBackend.MATH):
            assert [name for name, can_use in answers.items() if can_use(params, debug=True)] == []
        on_host = torch.empty(2, 4, 16, 64, device="cpu", dtype=dtype)
        params = cuda.SDPAParams(on_host, on_host, on_host, None, 0.0, False, False)
        assert [name for name, can_use in answers.items() if can_use(params)] == []
