"""The gated feed-forward layer as users call it; its forms are held by the contract."""

from __future__ import annotations

import pytest
import torch
from ops.multiply_adds import MultiplyAdds

import memfix
from memfix.meters.base import Step
from memfix.ops.geglu_feed_forward import ACTIVATIONS, FORMS, geglu_feed_forward, gelu_feed_forward
from memfix.ops.geglu_feed_forward.naive import naive_geglu_feed_forward

N, D, F = 6, 5, 7
NAMES = ("hidden", "up_weight", "down_weight", "up_bias", "down_bias", "norm_weight", "norm_bias")
CHUNKED = ("token_chunks", "fused")


def inputs(dtype: torch.dtype = torch.float64, *, activation: str = "geglu") -> dict[str, torch.Tensor]:
    """Leaves, by the names of the arguments."""
    torch.manual_seed(0)
    H = F if activation == "gelu" else 2 * F
    shapes = ((N, D), (H, D), (D, F), (H,), (D,), (D,), (D,))
    return {
        name: torch.randn(shape, dtype=dtype, requires_grad=True) for name, shape in zip(NAMES, shapes, strict=True)
    }


# ---------------------------------------------------------------- what is computed
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_is_torchs_own(form: str, activation: str) -> None:
    hidden, up, down, *_ = inputs(activation=activation).values()
    value, *gates = (hidden @ up.T).split(F, 1)
    modules = {"geglu": torch.nn.GELU(), "swiglu": torch.nn.SiLU(), "gelu": torch.nn.GELU()}
    activated = value * modules[activation](gates[0]) if gates else modules[activation](value)
    torch.testing.assert_close(
        geglu_feed_forward(hidden, up, down, activation=activation, form=form), activated @ down.T
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("leading", [(), (1,), (6,), (2, 1, 3)])
def test_hidden_may_have_any_leading_dims(form: str, leading: tuple[int, ...]) -> None:
    hidden, *others = inputs().values()
    rows = hidden[: torch.Size(leading).numel()]
    expected = naive_geglu_feed_forward(rows, *others, residual=True)
    shaped = geglu_feed_forward(rows.reshape(*leading, D), *others, residual=True, form=form)
    torch.testing.assert_close(shaped, expected.reshape(*leading, D))


def test_plain_gelu_is_the_layer_without_a_gate() -> None:
    tensors = inputs(activation="gelu")
    expected = naive_geglu_feed_forward(**tensors, activation="gelu", norm_eps=1e-2)
    torch.testing.assert_close(gelu_feed_forward(**tensors, norm_eps=1e-2, tokens_per_chunk=4), expected)


@pytest.mark.parametrize("norm", ["norm_weight", "norm_bias"])
def test_a_norm_comes_first_where_one_of_its_parameters_is_given(norm: str) -> None:
    hidden, up, down, *_ = tensors = inputs().values()
    given = {norm: dict(zip(NAMES, tensors, strict=True))[norm]}
    normed = torch.nn.functional.layer_norm(hidden, (D,), given.get("norm_weight"), given.get("norm_bias"))
    torch.testing.assert_close(geglu_feed_forward(hidden, up, down, **given), geglu_feed_forward(normed, up, down))


# ---------------------------------------------------------------- gradients
@pytest.mark.parametrize("form", CHUNKED)
def test_backward_under_autocast_keeps_the_dtype_of_forward(form: str) -> None:
    found = []
    for enabled in (False, True):
        tensors = inputs(torch.float32)
        result = geglu_feed_forward(**tensors, form=form)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            result.backward(torch.ones_like(result))
        found.append([tensor.grad for tensor in tensors.values()])
    torch.testing.assert_close(found[1], found[0])


UP, DOWN = 2 * F * D, F * D
# multiply-adds of one token, by the gradient that is asked for; the first product is made again
PRODUCTS = {
    "hidden": UP + DOWN + UP,
    "up_weight": UP + DOWN + UP,
    "down_weight": UP + DOWN,
    "up_bias": UP + DOWN,
    "down_bias": 0,
    "norm_weight": UP + DOWN + UP,
    "norm_bias": UP + DOWN + UP,
}


@pytest.mark.parametrize("name", NAMES)
def test_backward_computes_no_gradient_that_is_not_asked_for(name: str) -> None:
    tensors = {key: tensor.requires_grad_(key == name) for key, tensor in inputs().items()}
    result = geglu_feed_forward(**tensors, tokens_per_chunk=4)
    with MultiplyAdds() as counted:
        result.sum().backward()
    assert counted.total == N * PRODUCTS[name]
    assert [key for key, tensor in tensors.items() if tensor.grad is not None] == [name]


@pytest.mark.parametrize("kept", [0, 2, 3, 6, 7])
def test_a_first_product_is_made_once_for_each_token_that_keeps_it_and_twice_for_the_others(kept: int) -> None:
    tensors = inputs()
    with MultiplyAdds() as counted:
        geglu_feed_forward(**tensors, tokens_per_chunk=3, tokens_kept=kept).sum().backward()
    assert counted.total == 3 * N * (UP + DOWN) + (N - min(kept, N)) * UP


@pytest.mark.parametrize("kept", [2, 6])
def test_every_backward_gives_the_same_though_the_first_writes_over_what_was_kept(kept: int) -> None:
    tensors = list(inputs().values())
    result = geglu_feed_forward(*tensors, tokens_per_chunk=2, tokens_kept=kept)
    first, second, third = (torch.autograd.grad(result.sum(), tensors, retain_graph=True) for _ in range(3))
    torch.testing.assert_close(second, first)
    torch.testing.assert_close(third, first)


# ---------------------------------------------------------------- memory
def held_bytes(hidden_width: int, kept: int) -> int:
    """What a layer of this width holds for backward where the model drops its input and its result."""

    def build(device: str) -> Step:
        up, down = torch.empty(2 * hidden_width, 64, device=device), torch.empty(64, hidden_width, device=device)
        hidden = torch.empty(32, 64, device=device, requires_grad=True)
        return lambda: geglu_feed_forward(hidden * 1, up, down, tokens_per_chunk=8, tokens_kept=kept).sum()

    return memfix.peak(build, warmup=0).held_bytes


def test_held_bytes_are_those_of_the_input_and_of_the_products_that_are_kept() -> None:
    hidden, loss = 32 * 64 * 4, 4
    assert held_bytes(96, 0) == held_bytes(1000, 0) == hidden + loss
    assert held_bytes(96, 5) == hidden + loss + 5 * 2 * 96 * 4


def test_products_that_are_kept_go_through_the_hooks_of_saved_tensors() -> None:
    packed: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.shape)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = geglu_feed_forward(**inputs(), tokens_per_chunk=2, tokens_kept=3)
    result.sum().backward()
    assert torch.Size([3, 2 * F]) in packed


# ---------------------------------------------------------------- forms, and bad arguments
def test_checkpoint_refuses_chunks() -> None:
    with pytest.raises(ValueError, match="tokens_per_chunk and tokens_kept: form 'checkpoint' makes no chunks"):
        geglu_feed_forward(**inputs(), tokens_per_chunk=4, tokens_kept=0, form="checkpoint")


def test_unknown_form_is_refused() -> None:
    with pytest.raises(ValueError, match="form must be one of auto, checkpoint, token_chunks, fused, got 'fuse'"):
        geglu_feed_forward(**inputs(), form="fuse")


def test_autocast_takes_weights_of_another_dtype() -> None:
    tensors = inputs(torch.float32)
    tensors["hidden"] = tensors["hidden"].detach().bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        expected = naive_geglu_feed_forward(**tensors, residual=True)
        for form in CHUNKED:
            got = geglu_feed_forward(**tensors, residual=True, form=form)
            assert got.dtype == expected.dtype
            torch.testing.assert_close(got, expected, rtol=0.03, atol=0.03)
    with pytest.raises(ValueError, match="must have the same dtype"):
        geglu_feed_forward(**tensors)
