"""The modulated linear layer as users call it; its forms are held by the contract."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ops.multiply_adds import MultiplyAdds

import memfix
from memfix.meters.base import Step
from memfix.ops.npt_linear import FORMS, npt_linear
from memfix.ops.npt_linear.naive import naive_npt_linear
from memfix.ops.npt_linear.reported import compute_weight_delta

B, S, D, F, R = 2, 3, 5, 7, 4
ON_A_CPU = [form for form in FORMS if form != "triton"]
NAMES = ("hidden", "weight", "a", "b", "modulation")


def inputs(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Leaves, by the names of the arguments."""
    torch.manual_seed(0)
    shapes = ((B, S, D), (D, F), (D, R), (R, F), (B, S, R))
    return {
        name: torch.randn(shape, dtype=dtype, requires_grad=True) for name, shape in zip(NAMES, shapes, strict=True)
    }


# ---------------------------------------------------------------- hidden states
@pytest.mark.parametrize("form", ON_A_CPU)
def test_a_tensor_and_tuples_that_start_with_it_give_the_same(form: str) -> None:
    hidden, *others = inputs().values()
    expected = naive_npt_linear(hidden, *others)
    for given in (hidden, (hidden,), (hidden, torch.ones(1)), (hidden, None)):
        torch.testing.assert_close(npt_linear(given, *others, form=form), expected)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((), ValueError, "got an empty tuple"),
        ([torch.ones(1)], TypeError, "got list"),
        ((None, torch.ones(1)), TypeError, "got a tuple that starts with NoneType"),
        (None, TypeError, "got NoneType"),
    ],
)
def test_other_hidden_states_are_refused(given: Any, error: type[Exception], message: str) -> None:
    _, *others = inputs().values()
    with pytest.raises(error, match=f"hidden must be a tensor or a tuple that starts with one, {message}"):
        npt_linear(given, *others)


@pytest.mark.parametrize("form", ON_A_CPU)
@pytest.mark.parametrize("leading", [(), (1,), (6,), (2, 1, 3)])
def test_hidden_may_have_any_leading_dims(form: str, leading: tuple[int, ...]) -> None:
    tensors = inputs()
    num_tokens = torch.Size(leading).numel()
    rows = {name: tensors[name].flatten(0, 1)[:num_tokens] for name in ("hidden", "modulation")}
    expected = naive_npt_linear(**_named(tensors | {name: row[None] for name, row in rows.items()}))
    shaped = {name: row.reshape(*leading, row.shape[-1]) for name, row in rows.items()}
    torch.testing.assert_close(npt_linear(**tensors | shaped, form=form), expected.reshape(*leading, F))


def _named(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    suffixes = {"hidden": "BSD", "weight": "DF", "a": "DR", "b": "RF", "modulation": "BSR"}
    return {f"{name}_{suffixes[name]}": tensor for name, tensor in tensors.items()}


# ---------------------------------------------------------------- gradients
@pytest.mark.parametrize("form", ON_A_CPU)
@pytest.mark.parametrize("tanh", [False, True])
def test_modulation_through_the_same_a_gives_a_both_gradients(form: str, tanh: bool) -> None:
    found = []
    for function in (naive_npt_linear, lambda *tensors: npt_linear(*tensors, form=form)):
        hidden, weight, a, b, _ = inputs().values()
        attention = torch.randn(B, S, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        modulation = attention @ a
        function(hidden, weight, a, b, 0.1 * modulation.tanh() if tanh else modulation).square().sum().backward()
        found.append([tensor.grad for tensor in (hidden, weight, a, b)])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("form", ON_A_CPU)
def test_backward_under_autocast_keeps_the_dtype_of_forward(form: str) -> None:
    found = []
    for enabled in (False, True):
        tensors = inputs(torch.float32)
        result = npt_linear(**tensors, form=form)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            result.backward(torch.ones_like(result))
        found.append([tensor.grad for tensor in tensors.values()])
    torch.testing.assert_close(found[1], found[0])


# multiply-adds of one token, by the gradient that is asked for
PRODUCTS = {"hidden": D * F + R * F + R * D, "weight": D * F, "a": R * F + D * R, "b": R * F, "modulation": R * F}


@pytest.mark.parametrize("name", NAMES)
def test_factored_computes_no_gradient_that_is_not_asked_for(name: str) -> None:
    tensors = {key: tensor.requires_grad_(key == name) for key, tensor in inputs().items()}
    result = npt_linear(**tensors)
    with MultiplyAdds() as counted:
        result.sum().backward()
    assert counted.total == B * S * PRODUCTS[name]
    assert [key for key, tensor in tensors.items() if tensor.grad is not None] == [name]


def test_overflow_in_rank_r_is_naives_where_the_result_fits_and_where_it_does_not() -> None:
    hidden = torch.full((1, 2, 8), 200.0, dtype=torch.float16)
    weight, b = torch.zeros(8, 1, dtype=torch.float16), torch.ones(1, 1, dtype=torch.float16)
    a = torch.full((8, 1), 100.0, dtype=torch.float16)  # hidden @ a is 160,000
    modulation = torch.tensor([0.1, 1.0], dtype=torch.float16).reshape(1, 2, 1)
    naives = naive_npt_linear(hidden, weight, a, b, modulation)
    assert naives.isinf().flatten().tolist() == [False, True]
    for form in ON_A_CPU:
        torch.testing.assert_close(npt_linear(hidden, weight, a, b, modulation, form=form), naives)


# ---------------------------------------------------------------- memory
def held_bytes(num_columns: int) -> int:
    """What a layer of so many columns holds for backward where the model drops hidden, modulation and result."""

    def build(device: str) -> Step:
        weight = torch.empty(64, num_columns, device=device)
        a, b = (torch.empty(shape, device=device, requires_grad=True) for shape in ((64, 4), (4, num_columns)))
        hidden, modulation = (torch.empty(2, 16, width, device=device, requires_grad=True) for width in (64, 4))
        # made by an operator, and named nowhere; a sum keeps nothing of what it adds up
        return lambda: npt_linear(hidden * 1, weight, a, b, modulation * 1).sum()

    return memfix.peak(build, warmup=0).held_bytes


def test_held_bytes_of_factored_do_not_depend_on_the_number_of_columns() -> None:
    hidden, modulation, rank_products, loss = 32 * 64 * 4, 32 * 4 * 4, 32 * 4 * 4, 4
    assert held_bytes(96) == held_bytes(1000) == hidden + modulation + rank_products + loss


# ---------------------------------------------------------------- the report's function, and bad arguments
def test_weight_delta_of_every_position_together_is_naives_delta() -> None:
    tensors = inputs()
    modulation, a, b = tensors["modulation"], tensors["a"], tensors["b"]
    deltas = torch.stack([compute_weight_delta(modulation, token_idx, a, b) for token_idx in range(S)], dim=1)
    torch.testing.assert_close(deltas, torch.einsum("bsr,dr,rf->bsdf", modulation, a, b))


@pytest.mark.parametrize(
    ("token_idx", "error", "message"),
    [
        (-1, ValueError, "token_idx must be at least 0, got -1"),
        (S, ValueError, f"token_idx must be below the number of tokens, {S}, got {S}"),
        (0.0, TypeError, "token_idx must be an int, got 0.0"),
    ],
)
def test_weight_delta_of_a_position_that_is_not_there_is_refused(
    token_idx: Any, error: type[Exception], message: str
) -> None:
    tensors = inputs()
    with pytest.raises(error, match=message):
        compute_weight_delta(tensors["modulation"], token_idx, tensors["a"], tensors["b"])


def test_chunk_size_is_taken_by_the_form_that_has_chunks() -> None:
    tensors = inputs()
    torch.testing.assert_close(
        npt_linear(**tensors, form="token_chunks", tokens_per_chunk=4), npt_linear(**tensors, form="token_chunks")
    )
    with pytest.raises(
        ValueError, match="tokens_per_chunk is for form 'token_chunks' or 'offload', and the form is 'factored'"
    ):
        npt_linear(**tensors, tokens_per_chunk=4)


def test_unknown_form_is_refused() -> None:
    with pytest.raises(
        ValueError, match="form must be one of auto, token_chunks, factored, triton, offload, got 'factor'"
    ):
        npt_linear(**inputs(), form="factor")
