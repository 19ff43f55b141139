"""The loss without one-hot rows as users call it; its forms are held by the contract."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from memfix.ops.one_hot_loss import FORMS, one_hot_loss


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_leading_dims_and_ignored_targets_are_as_in_torch(form: str, reduction: str) -> None:
    logits = torch.randn(3, 5, 7, requires_grad=True)
    target = torch.randint(0, 7, (3, 5))
    target[1, 2:] = 6
    ours = one_hot_loss(logits, target, ignore_index=6, reduction=reduction, form=form)
    torchs = F.cross_entropy(logits.transpose(1, 2), target, ignore_index=6, reduction=reduction)
    torch.testing.assert_close(ours, torchs)
    got, expected = (torch.autograd.grad(loss.sum(), logits)[0] for loss in (ours, torchs))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("form", FORMS)
def test_all_targets_ignored_is_nan_with_zero_gradients(form: str) -> None:
    logits = torch.randn(4, 9, requires_grad=True)
    loss = one_hot_loss(logits, torch.full((4,), -100), form=form)
    loss.backward()
    assert loss.isnan()
    assert logits.grad is not None
    assert not logits.grad.any()


def test_logits_of_hundreds_do_not_overflow() -> None:
    logits = torch.tensor([[800.0, 0.0, -800.0]], requires_grad=True)
    loss = one_hot_loss(logits, torch.tensor([2]))
    loss.backward()
    assert loss.item() == 1600.0
    assert logits.grad is not None
    assert logits.grad.tolist() == [[1.0, 0.0, -1.0]]


def test_target_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"target must have the shape of logits without its last dim, got \[6\] for"):
        one_hot_loss(torch.zeros(2, 3, 5), torch.zeros(6, dtype=torch.int64))


def test_unknown_form_is_refused() -> None:
    with pytest.raises(ValueError, match="form must be one of auto, gather, index, got 'idx'"):
        one_hot_loss(torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64), form="idx")
