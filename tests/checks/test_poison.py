"""Memory that nobody wrote shows, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from memfix.checks.poison import poisoned_memory

FRESH: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda like: torch.empty(3, dtype=like.dtype),
    torch.empty_like,
    lambda like: torch.empty_strided((2, 2), (1, 4), dtype=like.dtype),
    lambda like: torch.empty_permuted((2, 3), (1, 0), dtype=like.dtype),
    lambda like: like.new_empty(3),
    lambda like: like.new_empty_strided((2,), (3,)),
]


@pytest.mark.parametrize("make", FRESH)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_new_floating_memory_is_nan(make: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> None:
    like = torch.ones(3, dtype=dtype)
    with poisoned_memory("cpu"):
        assert make(like).isnan().all()


@pytest.mark.parametrize("make", FRESH)
def test_new_integers_are_as_large_as_can_be(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with poisoned_memory("cpu"):
        assert (make(torch.ones(3, dtype=torch.int64)) == torch.iinfo(torch.int64).max).all()


def test_memory_of_a_backward_is_poisoned_too() -> None:
    class Unwritten(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return torch.empty_like(gradient)

    leaf = torch.ones(3, requires_grad=True)
    with poisoned_memory("cpu"):
        Unwritten.apply(leaf).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.isnan().all()


@pytest.mark.parametrize("on", [False, True])
def test_whoever_asks_hears_what_the_caller_had_set(on: bool) -> None:
    torch.use_deterministic_algorithms(on, warn_only=on)
    try:
        with poisoned_memory("cpu"):
            assert torch.are_deterministic_algorithms_enabled() == on
            assert torch.is_deterministic_algorithms_warn_only_enabled() == on
        assert torch.are_deterministic_algorithms_enabled() == on
        assert torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)


def test_everything_is_put_back_when_the_form_raises() -> None:
    with pytest.raises(ValueError, match="broken"), poisoned_memory("cpu"):
        raise ValueError("broken")
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch._C._get_deterministic_algorithms()


def test_operators_without_a_deterministic_way_do_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    with poisoned_memory("cpu"):
        torch.zeros(4).put_(torch.tensor([0]), torch.ones(1))
    assert not list(recwarn)
