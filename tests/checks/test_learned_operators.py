"""Operators that are learned from the interpreter give its answers, also at values that were not there when they were
learned."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

ANSWERS = '''
import itertools, json, sys
import torch, triton
import triton.language as tl
from memfix.checks.mended_interpreter import mend
from memfix.checks.quick_interpreter import hurry
from triton.runtime import interpreter

@triton.jit
def arithmetic(a, b, out, count, N: tl.constexpr):
    at = tl.arange(0, N)
    is_there = at < count
    x, y = tl.load(a + at, mask=is_there, other=1), tl.load(b + at, mask=is_there, other=3.0)
    tiles = x[:, None] * 3 + y[None, :] - 2
    tiles = tl.where(tiles > y[None, :], tiles, 0)
    here = (at[:, None] < at[None, :]) & (at >= 1)[:, None] | (at == 7)[None, :]
    tiles = tl.where(here, 5 * tiles, 1 + tiles)
    tiles = tl.where(x[:, None] < y[None, :], tiles, tl.where(y[None, :] <= 1, 2 * tiles, tiles))
    tiles = tl.where(x[:, None] != 2, tiles.to(tl.float32) / 7, 0.1)
    tiles += (at // 2 + at.to(tl.int64) % 3)[:, None]
    tl.store(out + at[:, None] * N + at[None, :], tiles, mask=is_there[:, None])

@triton.jit
def tenths(a, out, N: tl.constexpr):
    """A number beside a comparison is a float32 first, and beside a product it has the dtype of the tensor."""
    at = tl.arange(0, N)
    x = tl.load(a + at, mask=at < N)
    chosen = tl.where(x < 1, 0.1, x.to(tl.float64)) + tl.where(condition=x < 1, x=x.to(tl.float64), y=0.1)
    there = tl.load(a + at, other=0.1, mask=at < 0 * x)
    tl.store(out + at, chosen + there + x * 0.1 + tl.where(x == 0.1, 1.0, 0.0) + tl.where(0.1 <= x, 2.0, 0.0))

N = 8
DTYPES = (torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)

def answers():
    found = []
    for seed, (one, other) in itertools.product(range(3), itertools.product(DTYPES, DTYPES)):
        torch.manual_seed(seed)
        a, b = (torch.randint(-9, 9, (N,)).to(one), (4 * torch.randn(N)).to(other))
        out = torch.zeros(N, N)
        arithmetic[(1,)](a, b, out, N - seed, N)
        found += out.flatten().view(torch.int32).tolist()
    for dtype in DTYPES[2:]:
        for value in (1.0, 0.1, float(torch.tensor(0.1)), float(torch.tensor(0.1, dtype=torch.float16))):
            a, out = torch.full((N,), value, dtype=dtype), torch.zeros(N, dtype=torch.float64)
            tenths[(1,)](a, out, N)
            found += out.view(torch.int64).tolist()
    return found

mend()
as_it_is = answers()
hurry()
hurried = answers()
where = {getattr(tl.tensor, name).__module__ for name in ("__add__", "__lt__", "__getitem__", "to")}
where |= {tl.load.__module__, tl.where.__module__}
print(json.dumps([as_it_is, hurried, sorted(where)]))
'''


def test_learned_operators_answer_as_the_interpreter_does(tmp_path: Path) -> None:
    root = str(Path(__file__).resolve().parents[2])
    environment: dict[str, Any] = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": root}
    script = tmp_path / "answers.py"  # Triton reads the source of a kernel
    script.write_text(ANSWERS)
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    as_it_is, hurried, where = json.loads(done.stdout.splitlines()[-1])
    assert hurried == as_it_is
    assert len(set(hurried)) > 150  # and they are answers
    assert where == ["memfix.checks.learned_operators"]
