"""The functions that users call: leading dims, defaults, and what torch's own op answers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from memfix.ops.embedding import embedding
from memfix.ops.linear_cross_entropy import linear_cross_entropy


def loss_inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(2, 7, 5, dtype=dtype, requires_grad=True)
    weight = torch.randn(11, 5, dtype=dtype, requires_grad=True)
    return hidden, weight, torch.randint(0, 11, (2, 7))


@pytest.mark.parametrize("form", ["auto", "recompute", "checkpoint"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_takes_leading_dims_as_torch_does(reduction: str, form: str) -> None:
    hidden, weight, target = loss_inputs()
    expected = F.cross_entropy((hidden @ weight.T).flatten(0, 1), target.flatten(), reduction=reduction)
    loss = linear_cross_entropy(hidden, weight, target, reduction=reduction, rows_per_chunk=4, form=form)
    torch.testing.assert_close(loss, expected.reshape(loss.shape))
    assert loss.shape == (target.shape if reduction == "none" else ())


@pytest.mark.parametrize("form", ["auto", "recompute"])
def test_all_targets_ignored_gives_nan_and_zero_gradients(form: str) -> None:
    hidden, weight, target = loss_inputs()
    loss = linear_cross_entropy(hidden, weight, torch.full_like(target, -100), form=form)
    loss.backward()
    assert loss.isnan()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_loss_scaling_does_not_underflow_in_float16() -> None:
    """A gradient of 1/N in float16 would lose its digits before the scale of the loss could lift it."""
    torch.manual_seed(0)
    hidden = torch.randn(4096, 8, dtype=torch.float16, requires_grad=True)
    weight = torch.randn(16, 8, dtype=torch.float16, requires_grad=True)
    target = torch.randint(0, 16, (4096,))
    loss = linear_cross_entropy(hidden, weight, target, form="recompute")
    loss.backward(torch.tensor(4096.0, dtype=torch.float16))
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    F.cross_entropy(wide[0] @ wide[1].T, target).backward(torch.tensor(4096.0))
    for narrow, true in zip((hidden, weight), wide, strict=True):
        assert narrow.grad is not None
        assert true.grad is not None
        assert (narrow.grad - true.grad).norm() / true.grad.norm() < 2e-3


def test_second_derivative_is_refused_in_words() -> None:
    hidden, weight, target = loss_inputs()
    loss = linear_cross_entropy(hidden, weight, target, form="recompute")
    with pytest.raises(RuntimeError, match="linear_cross_entropy has no second derivative"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_embedding_takes_ids_of_any_shape() -> None:
    weight = torch.randn(9, 4, requires_grad=True)
    ids = torch.randint(0, 9, (2, 3, 5))
    rows = embedding(ids, weight)
    torch.testing.assert_close(rows, F.embedding(ids, weight))


@pytest.mark.parametrize("call", [lambda: embedding(torch.tensor([0]), torch.ones(1, 1), form="hash")])
def test_unknown_form_is_refused(call: object) -> None:
    with pytest.raises(ValueError, match="form must be one of auto, gather, got 'hash'"):
        call()  # type: ignore[operator]
