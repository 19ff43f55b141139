"""Attention as users call it; its forms are held by the contract."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from memfix.checks.measured import Growth
from memfix.checks.scaling import check_scaling
from memfix.laws import Scaling
from memfix.meters import get_meter
from memfix.meters.simulated.environment import simulated_gpu
from memfix.meters.simulated.gpus import get_gpu
from memfix.ops.attention import FORMS, attention, backend_for
from memfix.ops.attention.backends import BACKENDS
from memfix.ops.attention.contract import contract
from memfix.ops.attention.naive import naive_attention

BF16, F32 = torch.bfloat16, torch.float32
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def heads(
    batch: int = 2, heads: int = 4, groups: int = 2, queries: int = 7, keys: int = 9, width: int = 8,
    value_width: int | None = None, **made: Any,
) -> Heads:  # fmt: skip
    generator = torch.Generator(made.get("device", "cpu")).manual_seed(0)
    shapes = ((heads, queries, width), (groups, keys, width), (groups, keys, value_width or width))
    q, k, v = (torch.randn(batch, *shape, generator=generator, **made).requires_grad_() for shape in shapes)
    return q, k, v


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *masks: Any, **options: Any) -> torch.Tensor:
    """Naive with the heads of q in groups, for masks without heads."""
    out: torch.Tensor = naive_attention(q.unflatten(1, (k.shape[1], -1)), k, v, *masks, **options)  # type: ignore[assignment]
    return out.flatten(1, 2)


def with_gradients(function: Callable[..., Any], inputs: Heads, *more: Any, **options: Any) -> list[torch.Tensor]:
    out = function(*inputs, *more, **options)
    upstream = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype)
    return [out, *torch.autograd.grad(out, inputs, upstream)]


def close(ours: list[torch.Tensor], theirs: list[torch.Tensor], **how: Any) -> None:
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, **how)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(use="beside"))])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_bias_alone_may_want_a_gradient(device: str, dtype: torch.dtype) -> None:
    q, k, v = (tensor.detach() for tensor in heads(queries=40, keys=40, width=16, device=device, dtype=dtype))
    bias = torch.linspace(-1, 1, 1600, device=device, dtype=dtype).view(1, 1, 1, 40, 40).requires_grad_()
    results = attention(q, k, v, bias=bias[0], form="sdpa"), naive(q, k, v, None, bias)
    upstream = torch.linspace(-1, 1, v.shape[-1], device=device, dtype=dtype).expand_as(results[0])
    gradients = [torch.autograd.grad(result, bias, upstream) for result in results]
    close(*map(list, gradients), atol=2e-2, rtol=2e-2)


# ---------------------------------------------------------------- the same as torch
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(7, 9), (4, 7, 9), (4, 1, 9), (2, 1, 1, 9), (1, 4, 7, 1), (2, 4, 7, 9)])
def test_masks_of_every_shape_that_broadcasts_are_as_in_torch(form: str, shape: tuple[int, ...]) -> None:
    inputs = heads()
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.7
    mask[..., 0] = True  # torch hides queries that see no key
    bias = torch.randn(shape).masked_fill(~mask, -torch.inf)
    theirs = with_gradients(F.scaled_dot_product_attention, inputs, bias, enable_gqa=True)
    close(with_gradients(attention, inputs, None, bias, form=form), theirs)
    theirs = with_gradients(F.scaled_dot_product_attention, inputs, mask, enable_gqa=True)
    close(with_gradients(attention, inputs, mask, form=form), theirs)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "sizes",
    [
        {"queries": 1, "keys": 1, "heads": 1, "groups": 1},
        {"queries": 33, "keys": 8, "value_width": 5},
        {"heads": 16, "groups": 16, "width": 32},
        {"heads": 16, "groups": 1, "width": 128, "dtype": torch.float64},
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", [False, True])
def test_heads_and_widths_of_every_size_are_as_in_torch(form: str, sizes: dict[str, Any], causal: bool) -> None:
    inputs = heads(**sizes)
    theirs = with_gradients(F.scaled_dot_product_attention, inputs, is_causal=causal, scale=0.2, enable_gqa=True)
    close(with_gradients(attention, inputs, causal=causal, scale=0.2, form=form), theirs)


@pytest.mark.parametrize("form", ["query_chunks", "sdpa", "auto"])
def test_a_bias_gets_its_gradient(form: str) -> None:
    q, k, v = heads(groups=4)
    bias = torch.randn(4, 1, 9, requires_grad=True)
    ours, theirs = (
        torch.autograd.grad(out.square().sum(), bias)[0]
        for out in (
            attention(q, k, v, bias=bias, form=form, **({"queries_per_chunk": 2} if form == "query_chunks" else {})),
            F.scaled_dot_product_attention(q, k, v, bias),
        )
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(7, 9), (4, 7, 9), (2, 4, 7, 9)])
def test_autocast_takes_a_bias_of_every_shape_and_keeps_the_map_as_torch_does(
    form: str, shape: tuple[int, ...]
) -> None:
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", BF16):
        out, weights = attention(*heads(), bias=bias, keep_map=True, form=form)
        wanted = naive(*heads(), None, bias.view(-1, 2, 2, 7, 9) if len(shape) > 2 else bias)
    assert (out.dtype, weights.dtype) == (BF16, F32)
    torch.testing.assert_close(out, wanted, rtol=0.02, atol=0.02)


# ---------------------------------------------------------------- a query that sees no key
@pytest.mark.parametrize("form", [*FORMS, "naive"])
@pytest.mark.parametrize("kind", ["mask", "bias", "both"])
def test_a_query_that_sees_no_key_gets_zeros_and_gives_no_gradient(form: str, kind: str) -> None:
    inputs = heads(groups=4, queries=5, keys=6)
    seen = torch.ones(5, 6, dtype=torch.bool)
    seen[2] = False
    half = seen.clone()
    half[2, :3] = True  # mask and bias hide half of the keys each
    mask = {"mask": seen, "bias": None, "both": half}[kind]
    bias = {"mask": None, "bias": seen, "both": ~half | seen}[kind]
    bias = None if bias is None else torch.zeros(5, 6).masked_fill(~bias, -torch.inf)
    call = naive if form == "naive" else attention
    options = {} if form == "naive" else {"form": form}
    out, grad_q, grad_k, grad_v = with_gradients(call, inputs, mask, bias, **options)
    assert not out[:, :, 2].any()
    assert not grad_q[:, :, 2].any()
    others = [0, 1, 3, 4]
    q, k, v = inputs
    expected = F.scaled_dot_product_attention(q[:, :, others], k, v)
    torch.testing.assert_close(out[:, :, others], expected)
    upstream = torch.linspace(-1, 1, out.numel()).view(out.shape)[:, :, others]
    close([grad_k, grad_v], [*torch.autograd.grad(expected, (k, v), upstream)])


# ---------------------------------------------------------------- dropout
def dropped_weights(call: Callable[..., torch.Tensor], inputs: Heads) -> torch.Tensor:
    """The weights after dropout: what a call makes of values that name the keys."""
    q, k, _ = inputs
    names = torch.eye(k.shape[2], dtype=q.dtype, device=q.device).expand(*k.shape[:3], -1)
    return call(q, k, names).detach()


def with_one_mask(call: Callable[..., torch.Tensor], inputs: Heads) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A call with dropout and its gradients, and the same by a mask that is read from another forward."""
    q, k, _ = inputs
    torch.manual_seed(3)
    scaled_mask = dropped_weights(call, inputs) / (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1).detach()

    def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) * scaled_mask @ v

    torch.manual_seed(3)
    return with_gradients(call, inputs), with_gradients(masked, inputs)


@pytest.mark.parametrize(("form", "more"), [("query_chunks", {"queries_per_chunk": 3}), ("sdpa", {}), ("auto", {})])
def test_forward_and_backward_drop_the_same_weights(form: str, more: dict[str, int]) -> None:
    inputs = heads(groups=4, queries=16, keys=12, width=12)

    def call(*tensors: torch.Tensor) -> Any:
        return attention(*tensors, dropout=0.4, form=form, **more)

    ours, expected = with_one_mask(call, inputs)
    close(ours, expected, rtol=1e-4, atol=1e-5)
    dropped = dropped_weights(call, inputs) == 0
    assert 0.35 < dropped.float().mean() < 0.45
    assert not torch.equal(dropped_weights(call, inputs) == 0, dropped)


@pytest.mark.parametrize(("form", "more"), [("query_chunks", {"queries_per_chunk": 7}), ("sdpa", {"backend": "math"})])
def test_one_chunk_and_math_drop_what_naive_drops_with_the_same_seed(form: str, more: dict[str, Any]) -> None:
    inputs = heads()
    torch.manual_seed(5)
    ours = with_gradients(attention, inputs, dropout=0.3, form=form, **more)
    torch.manual_seed(5)
    close(ours, with_gradients(naive, inputs, dropout=0.3))


def test_the_backward_of_a_dropout_leaves_the_random_state_alone_and_can_be_repeated() -> None:
    inputs = heads()
    out = attention(*inputs, dropout=0.5, form="query_chunks", queries_per_chunk=2)
    before = torch.get_rng_state()
    first = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    close([*first], [*torch.autograd.grad(out.sum(), inputs)])


# ---------------------------------------------------------------- the map
@pytest.mark.parametrize("form", FORMS)
def test_the_map_is_kept_only_where_it_is_asked_for(form: str) -> None:
    inputs = heads()
    assert isinstance(attention(*inputs, form=form), torch.Tensor)
    out, weights = attention(*inputs, causal=True, dropout=0.5, keep_map=True, form=form)
    assert weights.shape == (2, 4, 7, 9)
    assert not weights.requires_grad
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 7))  # before dropout
    assert not weights.triu(1).any()
    assert out.requires_grad


# ---------------------------------------------------------------- memory
@pytest.mark.parametrize("form", ["naive", "reported"])
def test_naive_and_reported_grow_with_the_square_of_the_length(form: str) -> None:
    found = check_scaling(contract, Scaling(form, dim="Q K", case="small", doublings=3), get_meter("simulated"))
    assert found.status == "fail"
    assert isinstance(found.measured, Growth)
    assert 1.7 < found.measured.exponent <= 2


# ---------------------------------------------------------------- backends
@pytest.mark.parametrize(
    ("gpu", "sizes", "options", "backend"),
    [
        ("H200", {"dtype": BF16}, {}, "cudnn"),
        ("H200", {"dtype": torch.float16}, {"causal": True}, "cudnn"),
        ("A100", {"dtype": BF16}, {}, "flash"),
        ("H200", {"dtype": BF16, "groups": 4}, {"mask": (7, 9)}, "cudnn"),
        ("A100", {"dtype": BF16, "groups": 4}, {"mask": (7, 9)}, "efficient"),
        ("A100", {"dtype": BF16}, {"mask": (4, 7, 9)}, "efficient"),  # keys are copied for every head
        ("H200", {"dtype": BF16, "queries": 1}, {}, "flash"),
        ("H200", {"dtype": BF16, "value_width": 16}, {}, "efficient"),
        ("H200", {"dtype": BF16, "width": 13}, {}, "cudnn"),  # padded
        ("H200", {"dtype": F32}, {}, "efficient"),
        ("H200", {"dtype": F32, "width": 7}, {"dropout": 0.1}, "efficient"),
        ("H200", {"dtype": F32}, {"backend": "math"}, "math"),
        ("H200", {"dtype": BF16}, {"backend": "flash"}, "flash"),
        ("A100", {"dtype": BF16}, {"backend": "cudnn"}, "cudnn"),
        ("H200", {"dtype": torch.float64}, {}, "math"),
    ],
    ids=str,
)
def test_the_backend_follows_from_gpu_dtype_and_mask(
    gpu: str, sizes: dict[str, Any], options: dict[str, Any], backend: str
) -> None:
    with simulated_gpu(get_gpu(gpu), hides_modes=True):
        mask = torch.ones(options.pop("mask"), dtype=torch.bool, device="cuda") if "mask" in options else None
        inputs = _empty_heads(**sizes)
        assert backend_for(*inputs, mask, **options) == backend
        out = attention(*inputs, mask, form="sdpa", **options)
        assert isinstance(out, torch.Tensor)
        assert out.shape == (*inputs[0].shape[:3], inputs[2].shape[3])


def _empty_heads(
    heads: int = 4, groups: int = 2, queries: int = 7, width: int = 8, value_width: int | None = None, **made: Any
) -> Heads:
    shapes = ((heads, queries, width), (groups, 9, width), (groups, 9, value_width or width))
    q, k, v = (torch.empty(2, *shape, device="cuda", requires_grad=True, **made) for shape in shapes)
    return q, k, v


@pytest.mark.parametrize(
    ("gpu", "dtype", "masked", "asked", "message"),
    [
        ("H200", F32, False, "flash", "backend 'flash' cannot run this call: torch.float32 on cuda, heads 8 and 8 "
         "wide; leave backend out, or take one of efficient, math"),
        ("H200", F32, False, "cudnn", "take one of efficient, math"),
        ("H200", BF16, True, "flash", "heads 8 and 8 wide, with a mask; .* take one of cudnn, efficient, math"),
        ("H200", torch.float64, False, "efficient", "take one of math"),
    ],
)  # fmt: skip
def test_a_backend_that_cannot_run_the_call_is_refused(
    gpu: str, dtype: torch.dtype, masked: bool, asked: str, message: str
) -> None:
    with simulated_gpu(get_gpu(gpu), hides_modes=True):
        mask = torch.ones(7, 9, dtype=torch.bool, device="cuda") if masked else None
        with pytest.raises(ValueError, match=message):
            attention(*_empty_heads(dtype=dtype), mask, backend=asked)


@pytest.mark.parametrize("asked", ["cudnn", "efficient"])
def test_on_a_cpu_there_are_flash_and_math(asked: str) -> None:
    assert [backend_for(*heads(groups=groups, keys=19)) for groups in (4, 2)] == ["flash", "flash"]
    assert backend_for(*heads(keys=19), dropout=0.1) == "math"
    with pytest.raises(ValueError, match=f"backend '{asked}' cannot run .* on cpu, .* take one of flash, math"):
        attention(*heads(keys=19), backend=asked)


@pytest.mark.parametrize("keys", [1, 3, 5, 15, 16, 17, 33, 513])
def test_a_query_that_holds_nan_gives_nan_however_many_keys_there_are(keys: int) -> None:
    q, k, v = (tensor.detach() for tensor in heads(keys=keys))
    q[:, :, 2, 0] = math.nan
    is_nan = attention(q, k, v).isnan().all(-1)
    assert is_nan[:, :, 2].all()
    assert is_nan.sum() == is_nan[:, :, 2].numel()


def test_auto_takes_chunks_where_torch_would_make_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    for name in ("query_chunks", "sdpa"):
        module = __import__(f"memfix.ops.attention.{name}", fromlist=[name])
        form = getattr(module, f"{name}_attention")
        monkeypatch.setattr(
            module, f"{name}_attention", lambda *a, _name=name, _f=form, **k: taken.append(_name) or _f(*a, **k)
        )
    mask, bias = torch.ones(7, 9, dtype=torch.bool), torch.zeros(7, 9)
    attention(*heads(), mask)
    attention(*heads(), bias=bias)
    attention(*heads(), mask, bias)
    attention(*heads(), bias=bias.requires_grad_())
    attention(*heads(), dropout=0.1)
    attention(*heads(value_width=5))
    assert taken == ["sdpa", "sdpa", *["query_chunks"] * 4]
    with simulated_gpu(get_gpu("H200"), hides_modes=True):
        for dtype, dropout in ((BF16, 0.0), (F32, 0.1), (torch.float64, 0.0)):
            attention(*_empty_heads(dtype=dtype), dropout=dropout)
    assert taken[6:] == ["sdpa", "sdpa", "query_chunks"]


# ---------------------------------------------------------------- bad inputs in the user's layout
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 5, 7, 8)}, "the number of heads of q must be a multiple of k's, got 5 and 2"),
        ({"q": torch.zeros(2, 7, 8)}, r"q must be \[B, H, Q, D\], got shape \[2, 7, 8\]"),
        ({"k": torch.zeros(3, 2, 9, 8)}, "must have the same batch B, got 2, 3, 2"),
        ({"mask": torch.ones(3, 7, 9) > 0}, r"mask must broadcast to \[B, H, Q, K\] with H = 4, got shape \[3, 7, 9\]"),
        ({"bias": torch.zeros(1, 1, 1, 7, 9)}, r"bias must broadcast to \[B, H, Q, K\]"),
        ({"bias": torch.zeros(7, 9, dtype=BF16)}, "q and k and v and bias must have the same dtype"),
        (
            {"form": "sdpa", "queries_per_chunk": 4},
            "queries_per_chunk is for form 'query_chunks', and the form is 'sdpa'",
        ),
        ({"form": "query_chunks", "backend": "math"}, "backend is for form 'sdpa', and the form is 'query_chunks'"),
        ({"form": "query_chunks", "queries_per_chunk": 0}, "queries_per_chunk must be at least 1, got 0"),
        (
            {"backend": "flsh"},
            "backend must be one of cudnn, flash, efficient, math, got 'flsh'; did you mean 'flash'?",
        ),
        ({"form": "chunks"}, "form must be one of auto, query_chunks, sdpa, got 'chunks'"),
    ],
    ids=str,
)
def test_what_cannot_be_computed_is_refused_in_words(change: dict[str, Any], message: str) -> None:
    q, k, v = heads()
    with pytest.raises(ValueError, match=message):
        attention(**{"q": q, "k": k, "v": v, **change})


# ---------------------------------------------------------------- on a GPU
def _usable(inputs: Heads, *masks: Any, **options: Any) -> list[str]:
    def can_run(backend: str) -> bool:
        try:
            return backend_for(*inputs, *masks, backend=backend, **options) == backend
        except ValueError:
            return False

    return [backend for backend in BACKENDS if can_run(backend)]


@pytest.mark.gpu(use="beside")
@pytest.mark.parametrize(
    ("dtype", "expected"), [(BF16, ["cudnn", "flash", "efficient", "math"]), (F32, ["efficient", "math"])]
)
def test_a_gpu_has_the_backends_that_were_simulated(dtype: torch.dtype, expected: list[str]) -> None:
    inputs = heads(queries=64, keys=64, width=64, device="cuda", dtype=dtype)
    assert _usable(inputs) == expected
    assert backend_for(*inputs) == (expected[0] if torch.cuda.get_device_capability() == (9, 0) else expected[-3:][0])


@pytest.mark.gpu(use="beside")
@pytest.mark.parametrize("dtype", [BF16, torch.float16, F32])
@pytest.mark.parametrize("kind", ["plain", "causal", "mask", "blind", "bias"])
def test_every_backend_of_a_gpu_gives_naives_answer(dtype: torch.dtype, kind: str) -> None:
    inputs = heads(queries=130, keys=70, width=64, device="cuda", dtype=dtype)
    mask = torch.rand(130, 70, device="cuda") < 0.5 if kind in ("mask", "blind") else None
    if mask is not None and kind == "blind":
        mask[::3] = False
    bias = torch.randn(130, 70, device="cuda", dtype=dtype) if kind == "bias" else None
    wide = tuple(tensor.detach().double().requires_grad_() for tensor in inputs)
    options = {"causal": kind == "causal"}
    expected = with_gradients(naive, wide, mask, None if bias is None else bias.double(), **options)  # type: ignore[arg-type]
    for backend in _usable(inputs, mask, bias, **options):
        ours = with_gradients(attention, inputs, mask, bias, backend=backend, **options)
        for own, true in zip(ours, expected, strict=True):
            allowed = {BF16: 0.02, torch.float16: 0.004, F32: 2e-5}[dtype] * true.abs().max().item()
            assert (own.double() - true).abs().max().item() <= allowed, backend


@pytest.mark.gpu(use="beside")
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_every_backend_of_a_gpu_drops_the_same_weights_in_backward(dtype: torch.dtype) -> None:
    inputs = heads(groups=4, queries=128, keys=64, width=64, device="cuda", dtype=dtype)
    for options in ({"form": "query_chunks", "queries_per_chunk": 48}, *({"backend": b} for b in _usable(inputs))):

        def call(*tensors: torch.Tensor, _options: dict[str, Any] = options) -> Any:
            return attention(*tensors, dropout=0.25, **_options)

        ours, expected = with_one_mask(call, inputs)
        for own, true in zip(ours, expected, strict=True):
            allowed = (0.04 if dtype == BF16 else 1e-4) * true.abs().max().item()
            assert (own - true).abs().max().item() <= allowed, options
