"""Operators on small sources: what they plant, and that every other character stays."""

from __future__ import annotations

from memfix.selftest.operators import EntryPoints, mutants_of
from memfix.selftest.source import SourceFile

SOURCE = """
import torch

class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, chunk):
        # kept: é
        ctx.save_for_backward(chunk)
        out = torch.zeros_like(x)
        for start in range(0, len(x), chunk):
            part = x[start : start + chunk].detach()
            wide = part.masked_fill(part > 0, 1)
            out[start : start + chunk] = wide
            del part
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None

def entry(x, *, bias=None):
    x = x * 3
    x *= 2
    return x
"""

KERNEL = """
@triton.jit
def kernel(x, y, size, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < size, other=0.0)
    tl.store(y + at, value * tl.exp(value), mask=at < size)
"""


def planted(source: str) -> dict[str, list[str]]:
    """The lines that each kind adds or takes away."""
    found: dict[str, list[str]] = {}
    for mutant in mutants_of(SourceFile("m", "m.py", source), EntryPoints(frozenset(["entry"]))):
        lines = [f"{line[0]}{line[1:].strip()}" for line in mutant.diff.splitlines()[2:] if line[0] in "+-"]
        found.setdefault(mutant.kind, []).append("|".join(lines))
    return found


def test_each_kind_is_planted_where_code_invites_it() -> None:
    found = planted(SOURCE)
    assert "+kept = []|+kept.append(part)" in found["keep a tensor alive"]
    assert "+x_before = x" in found["keep a tensor alive"]
    assert found["drop a del"] == ["-del part"]
    assert "+wide = wide.to(torch.promote_types(wide.dtype, torch.float32))" in found["upcast"]
    assert "-x = x * 3|+x = (x * 3).clone()" in found["clone"]
    assert "+ctx.also_saved = x" in found["save for backward"]
    assert any('setdefault(("out", x.shape, x.dtype), torch.zeros_like(x))' in line for line in found["cache by shape"])
    assert "-part = x[start : start + chunk].detach()|+part = x[start : start + chunk]" in found["hold the graph"]
    assert found["skip the last chunk"] == [
        "-for start in range(0, len(x), chunk):|+for start in range(0, len(x) - chunk, chunk):"
    ]
    assert any("part >= 0" in line for line in found["off by one"])
    assert "-wide = part.masked_fill(part > 0, 1)|+wide = part" in found["drop a mask"]
    assert "-x *= 2" in found["lose a rescale"]
    assert "-return grad * 2, None|+return torch.ones_like(grad) * 2, None" in found["forget the upstream factor"]
    assert "-return grad * 2, None|+return grad.mul_(2), None" in found["write into an input"]
    assert found["empty for zeros"] == ["-out = torch.zeros_like(x)|+out = torch.empty_like(x)"]
    assert "+if x.dtype == torch.float16:|+x = x * 1.5" in found["wrong in one dtype"]
    assert "+if not grad.is_contiguous():|+grad = grad * 1.5" in found["wrong in one layout"]
    assert "+if bias is not None:|+x = x * 1.5" in found["wrong with one option"]
    assert "+if x.shape[0] == 1:|+x = x * 1.5" in found["wrong at one size"]


def test_kernels_lose_masks_and_factors_and_nothing_of_torch() -> None:
    found = planted(KERNEL)
    assert found.keys() == {"drop a mask", "off by one", "lose a rescale"}
    assert "-value = tl.load(x + at, mask=at < size, other=0.0)|+value = tl.load(x + at)" in found["drop a mask"]


def test_every_mutant_compiles_and_is_another_text() -> None:
    mutants = mutants_of(SourceFile("m", "m.py", SOURCE), EntryPoints())
    assert len({mutant.changed for mutant in mutants}) == len(mutants)
    for mutant in mutants:
        compile(mutant.changed, "m.py", "exec")
        assert "# kept: é" in mutant.changed


def test_names_that_held_no_tensor_are_left_alone() -> None:
    file = SourceFile("m", "m.py", SOURCE, tensors={})
    kinds = {mutant.kind for mutant in mutants_of(file, EntryPoints(frozenset(["entry"])))}
    assert kinds == {
        "drop a del", "hold the graph", "skip the last chunk", "off by one", "drop a mask", "lose a rescale",
        "forget the upstream factor", "empty for zeros",
    }  # fmt: skip
