"""Torch's own database of operators, with sample inputs: each step is measured, or refused in one sentence.

All operators take half a minute: every fourth is tried, or all with ``--memfix-profile thorough``.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import memfix
from memfix.checks.effort import get_effort
from memfix.errors import MeasurementError

NOT_OF_A_GPU = {
    "tensor_split": "its sections must be on the CPU",
    "sgn": "torch itself fails at a second backward: the first gradient cannot be written to",
    "torch.ops.aten._efficient_attention_forward": "torch's fake kernel of its backward fails",
}


def smallest(samples: Iterator[Any]) -> Any:
    """The smallest of the first samples that has elements: numbers without a dim are where rules go wrong."""
    some = list(itertools.islice(samples, 8))
    return min(
        some, key=lambda each: each.input.numel() or math.inf if isinstance(each.input, torch.Tensor) else math.inf
    )


def moved(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to(device).requires_grad_(value.requires_grad)
    if type(value) in (list, tuple):
        return type(value)(moved(part, device) for part in value)
    return {name: moved(part, device) for name, part in value.items()} if type(value) is dict else value


def train(op: Any, call: list[Any]) -> None:
    given, args, kwargs = call
    result = op(given, *args, **kwargs)
    outputs = result if isinstance(result, (list, tuple)) else [result]
    wanted = [part for part in outputs if isinstance(part, torch.Tensor) and part.requires_grad]
    torch.autograd.backward(wanted, [torch.ones_like(part) for part in wanted])


def test_every_operator_is_measured_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("expecttest", reason="torch's test database needs it")
    # the import forbids to set torch's flags, which other tests of this process do; it is allowed again afterwards
    monkeypatch.setitem(torch.backends.flags_frozen.__globals__, "__allow_nonbracketed_mutation_flag", True)
    database: Any = importlib.import_module("torch.testing._internal.common_methods_invocations")  # takes five seconds
    failed = []
    for op in database.op_db[:: 1 if get_effort().name == "thorough" else 4]:
        if op.name in NOT_OF_A_GPU or op.name.startswith("jiterator") or not op.supports_dtype(torch.float32, "cpu"):
            continue
        sample = smallest(op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd))
        call = [sample.input, sample.args, sample.kwargs]

        def build(device: str, op: Any = op, call: Any = call) -> Any:
            there = moved(call, device)
            return lambda: train(op, there)

        try:
            with warnings.catch_warnings(), contextlib.suppress(MeasurementError):
                warnings.simplefilter("ignore")
                memfix.peak(build)
        except Exception as error:
            failed.append(f"{op.full_name}: {type(error).__name__}: {error}")
    assert failed == []
