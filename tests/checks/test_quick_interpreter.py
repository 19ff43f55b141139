"""The interpreter in a hurry: the same answers, and every shortcut is taken in the Triton that is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memfix.checks.interpreter import in_interpreter

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

ANSWERS = """
import hashlib, json, torch
from memfix.checks.mended_interpreter import mend
from memfix.checks.quick_interpreter import hurry
from memfix.ops.kda.triton import triton_kda
import triton.language as tl
from triton.runtime import interpreter

def answers():
    digests = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        q, k, v, g = (0.3 * torch.randn(1, 33, 1, 3) for _ in range(4))
        inputs = [t.to(dtype).requires_grad_() for t in (q, k, v, -g.abs(), torch.rand(1, 33, 1))]
        outputs = triton_kda(*inputs)
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        found = [*outputs, *(tensor.grad for tensor in inputs)]
        digests += [hashlib.sha256(t.detach().float().numpy().tobytes()).hexdigest() for t in found]
    return digests

def shortcuts():
    places = (interpreter._patch_lang, interpreter._get_np_dtype, tl.core.tuple.__init__, tl.core.block_type.__init__,
              tl.core.tensor.__init__, interpreter.TritonSemantic.binary_op_type_checking_impl,
              interpreter.TritonSemantic.broadcast_impl_value, interpreter._patch_attr,
              interpreter.TensorHandle.__post_init__)
    taken = [place.__module__ == "memfix.checks.quick_interpreter" for place in places]
    return [*taken, not interpreter.interpreter_builder.options.sanitize_overflow]

mend()  # without it Triton 3.6 gives no answers with numpy 2.4
as_it_is = answers(), shortcuts()
hurry()
print(json.dumps([as_it_is, (answers(), shortcuts())]))
"""


def test_the_answers_are_bit_by_bit_those_of_the_interpreter_as_it_is() -> None:
    root = str(Path(__file__).resolve().parents[2])
    environment: dict[str, Any] = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", ANSWERS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (as_it_is, untouched), (hurried, shortcuts) = json.loads(done.stdout.splitlines()[-1])
    assert hurried == as_it_is
    assert len(set(hurried)) > 10  # and they are answers
    assert not any(untouched)
    assert all(shortcuts), f"Triton has moved what is cut short: {shortcuts}"


def test_the_child_that_interprets_warns_of_nothing_that_a_gpu_is_silent_on() -> None:
    import numpy

    assert set(in_interpreter(numpy.geterr).values()) == {"ignore"}


def test_bfloat16_is_rounded_and_widened_as_torch_does_it() -> None:
    """The interpreter as it is cuts the lower half of a float32 off."""
    import torch

    from memfix.checks.mended_interpreter import _nearest_bfloat16

    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).int()
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 1e-40, -1e-45, 3.4e38, 1 + 2**-8, 1 + 3 * 2**-8])
    values = torch.cat([bits.view(torch.float32), special])
    rounded = torch.from_numpy(_nearest_bfloat16(values.numpy()).view("int16")).view(torch.bfloat16)
    expected = values.bfloat16()
    assert torch.equal(rounded.isnan(), values.isnan())
    assert torch.equal(rounded[~values.isnan()].view(torch.int16), expected[~values.isnan()].view(torch.int16))
