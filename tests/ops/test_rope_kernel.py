"""Rope's Triton kernel at calls that drawn ones seldom meet, in the interpreter; and where it is chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memfix.checks.interpreter import in_interpreter
from memfix.ops.rope import DISPATCHER, RotaryEmbedding, rope

pytest.importorskip("triton")
from ops import interpreted_rope as calls


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    return in_interpreter(calls.everything)


@pytest.mark.parametrize("name", calls.CALLS)
def test_kernel_is_as_near_to_the_truth_as_the_shared_table(answers: dict[str, Any], name: str) -> None:
    """Forward and gradient; the kernel rounds a sum once more or less than torch's operators."""
    found = answers[name]
    for ours, others, truth in zip(found["kernel"], found["shared_table"], found["truth"], strict=True):
        assert ours.dtype == others.dtype
        error, theirs = (float((got.double() - truth).norm() / truth.norm()) for got in (ours, others))
        assert error <= 1.05 * theirs + 1e-7


def test_the_result_has_the_strides_of_its_input(answers: dict[str, Any]) -> None:
    assert answers["strides"] == [(168, 8, 56, 1), (168, 24, 8, 1)]


def test_no_positions_no_heads_and_no_sequences_are_allowed(answers: dict[str, Any]) -> None:
    assert answers["empty"] == [(2, 0, 3, 8), (2, 5, 0, 8), (0, 2, 5, 3, 8)]


def test_first_and_second_derivatives(answers: dict[str, Any]) -> None:
    assert answers["derivatives"]
    torch.testing.assert_close(*answers["functional gradient"])


def test_nothing_but_the_table_is_saved_for_backward(answers: dict[str, Any]) -> None:
    assert answers["saved"] == 0


def test_the_cut_of_the_kernel_does_not_change_a_bit(answers: dict[str, Any]) -> None:
    usual, *others = answers["cuts"]
    assert others
    assert all(torch.equal(usual, other) for other in others)


def test_a_gpu_takes_the_kernel_and_a_compiled_graph_the_operators() -> None:
    with FakeTensorMode():
        assert DISPATCHER.chosen("auto", torch.empty(1, 1, 1, 2, device="cuda")) == "triton"
    assert DISPATCHER.chosen("auto", torch.empty(1, 1, 1, 2)) == "shared_table"


def test_compiled_rope_does_not_ask_for_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(type(DISPATCHER), "function", lambda self, form, x: asked.append(form) or (lambda x, **_: x))
    rope(torch.ones(1, 1, 1, 2))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert rope(torch.ones(1, 1, 1, 2)).sum() == 2
    assert asked == ["auto"]


def test_the_module_takes_the_kernel_on_a_gpu(peak_memory: Any) -> None:
    """Without scratch: the result alone."""
    x = torch.empty(2, 4096, 32, 128, dtype=torch.bfloat16, device="meta")
    assert peak_memory(RotaryEmbedding(128, max_positions=4096), x).peak_bytes == x.nbytes


def test_the_kernel_refuses_a_cpu() -> None:
    with pytest.raises(
        RuntimeError, match="form 'triton' runs on a GPU, and the tensors are on the CPU; take form='shared"
    ):
        rope(torch.randn(1, 2, 3, 4), form="triton")
