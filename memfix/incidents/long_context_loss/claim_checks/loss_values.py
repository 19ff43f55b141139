"""Checks of what the report's loss computes: run for real on the CPU, small, in float64 unless said."""

# B batch, T tokens, N tokens of all sequences, D width, V vocabulary

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ....laws import NAIVE
from ....ops.linear_cross_entropy import chosen_form
from ....ops.linear_cross_entropy.reported import reported_linear_cross_entropy
from ...claims import Found
from ..model import next_labels
from .evidence import Evidence

ON_CPU = "run on the CPU"
CHUNK = 8
IGNORED = -100

Loss = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Batch:
    """Hidden states and labels of a small batch; every seventh label is ignored, and so is the whole of one chunk."""

    hidden_BTD: torch.Tensor
    weight_VD: torch.Tensor
    labels_BT: torch.Tensor

    @staticmethod
    def made(batch: int = 2, tokens: int = 37) -> Batch:
        generator = torch.Generator().manual_seed(0)
        labels_BT = torch.randint(50, (batch, tokens), generator=generator)
        labels_BT[:, ::7] = IGNORED
        labels_BT.flatten()[2 * CHUNK : 3 * CHUNK + 1] = IGNORED
        hidden_BTD = torch.randn(batch, tokens, 16, generator=generator, dtype=torch.float64).requires_grad_()
        weight_VD = torch.randn(50, 16, generator=generator, dtype=torch.float64).requires_grad_()
        return Batch(hidden_BTD, weight_VD, labels_BT)

    def old_loss(self) -> torch.Tensor:
        """As the report prints the old code."""
        logits = F.linear(self.hidden_BTD, self.weight_VD)
        shift_logits = logits[..., :-1, :].contiguous()
        shift_labels = self.labels_BT[..., 1:].contiguous()
        return F.cross_entropy(
            shift_logits.view(-1, shift_logits.size(-1)), shift_labels.view(-1), ignore_index=IGNORED
        )

    def loss_of(self, loss: Loss, **options: object) -> torch.Tensor:
        """A form of ours, on labels that were shifted once."""
        target_N = next_labels(self.labels_BT).flatten()
        return loss(self.hidden_BTD.flatten(0, 1), self.weight_VD, target_N, ignore_index=IGNORED, **options)

    def gradients(self, loss: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(loss, (self.hidden_BTD, self.weight_VD))

    def is_equal(self, first: torch.Tensor, second: torch.Tensor) -> bool:
        """Both losses and both their gradients, to the last digits of float64."""
        pairs = zip((first, *self.gradients(first)), (second, *self.gradients(second)), strict=True)
        return all(torch.allclose(one, other, rtol=1e-12, atol=1e-13) for one, other in pairs)

    def chunk_losses(self, reduction: str) -> list[torch.Tensor]:
        hidden_ND, target_N = self.hidden_BTD.flatten(0, 1), next_labels(self.labels_BT).flatten()
        return [
            F.cross_entropy(hidden_CD @ self.weight_VD.T, target_C, ignore_index=IGNORED, reduction=reduction)
            for hidden_CD, target_C in zip(hidden_ND.split(CHUNK), target_N.split(CHUNK), strict=True)
        ]


def old_code_is_naive(evidence: Evidence) -> Found:
    """LOG-09: the old code equals naive; its ``contiguous`` copies only where there is more than one sequence."""
    batch = Batch.made()
    equal = batch.is_equal(batch.old_loss(), batch.loss_of(evidence.contract.function(NAIVE)))
    copies = {}
    for size in (1, 2):
        logits_BTV = torch.zeros(size, 5, 3)
        copies[size] = logits_BTV[..., :-1, :].contiguous().data_ptr() != logits_BTV.data_ptr()
    figures = {"batch_1": _copied(copies[1]), "batch_2": _copied(copies[2])}
    return Found(equal, ON_CPU, figures)


def _copied(copies: bool) -> str:
    return "copies" if copies else "copies nothing"


def chunk_size_parameter(evidence: Evidence) -> Found:
    """LOG-10: the default, and that every chunk size gives the same loss and gradients."""
    default = inspect.signature(reported_linear_cross_entropy).parameters["rows_per_chunk"].default
    batch = Batch.made()
    num_rows = batch.labels_BT.numel()
    sizes = (1, 5, num_rows - 1, num_rows, num_rows + 1)
    equal = [
        size
        for size in sizes
        if batch.is_equal(batch.loss_of(reported_linear_cross_entropy, rows_per_chunk=size), batch.old_loss())
    ]
    figures: dict[str, int | str] = {"default": default, "equal": ", ".join(map(str, equal)), "rows": num_rows}
    return Found(default == evidence.dims["C"] and len(equal) == len(sizes), ON_CPU, figures)


def _form_at(evidence: Evidence, batch: int, tokens: int, dtype: torch.dtype = torch.bfloat16) -> str:
    hidden_BTD = torch.empty(batch, tokens, evidence.dims["D"], device="meta", dtype=dtype)
    weight_VD = torch.empty(evidence.dims["V"], evidence.dims["D"], device="meta", dtype=dtype)
    return "standard" if chosen_form(hidden_BTD, weight_VD) == "standard" else "chunked"


def _first_chunked(evidence: Evidence, dtype: torch.dtype) -> int:
    """The shortest sequence whose loss is chunked."""
    low, high = 1, evidence.dims["T"]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _form_at(evidence, 1, middle, dtype) == "chunked" else (middle + 1, high)
    return low


def switch_at_10(evidence: Evidence) -> Found:
    """LOG-13: where ``form="auto"`` leaves the standard path, by length, batch and dtype."""
    first = _first_chunked(evidence, torch.bfloat16)
    in_gb = evidence.bytes("10000000000 // (V*e) + 1")
    in_gib = evidence.bytes("10*GiB // (V*e) + 1")
    figures: dict[str, int | str] = {
        "first_chunked": first,
        "in_gb": in_gb,
        "float32": _first_chunked(evidence, torch.float32),
        "batch_8": _form_at(evidence, 8, 4096),
        "batch_9": _form_at(evidence, 9, 4096),
    }
    return Found(first == in_gib, "chosen_form on shapes alone", figures)


def method_by_length(evidence: Evidence) -> Found:
    """LOG-20: the table's three lengths."""
    forms = [_form_at(evidence, 1, tokens) for tokens in (4096, 40_000, 131_072)]
    figures = {"forms": ", ".join(forms)}
    return Found(forms == ["standard", "chunked", "chunked"], "chosen_form on shapes alone", figures)


def sum_over_tokens(evidence: Evidence) -> Found:
    """LOG-14: sums over the tokens that count are right; three readings of the sketch are not."""
    batch = Batch.made()
    old = batch.old_loss()
    sums, means = torch.stack(batch.chunk_losses("sum")), torch.stack(batch.chunk_losses("mean"))
    num_counted = (batch.labels_BT[:, 1:] != IGNORED).sum()
    mutants = {
        "mean_of_means": means.nanmean(),
        "divided_twice": means.nansum() / num_counted,
        "all_positions": sums.sum() / batch.labels_BT.numel(),
    }
    holds = batch.is_equal(batch.loss_of(reported_linear_cross_entropy, rows_per_chunk=CHUNK), old)
    figures = {name: f"{float(value.detach()):.3f}" for name, value in {"old": old, **mutants}.items()}
    wrong = not any(torch.allclose(value, old, rtol=1e-3) for value in mutants.values())
    return Found(holds and wrong, ON_CPU, figures)


def shift_before_chunks(evidence: Evidence) -> Found:
    """LOG-15: predictions that count with one shift before all chunks, and with a shift in each."""
    labels_BT = torch.arange(evidence.dims["T"])[None]
    target_BT, chunk = next_labels(labels_BT), evidence.dims["C"]
    counted = sum(int((part != IGNORED).sum()) for part in target_BT.split(chunk, dim=1))
    shifted_in_each = sum(part.shape[1] - 1 for part in labels_BT.split(chunk, dim=1))
    figures = {"predictions": counted, "lost": counted - shifted_in_each}
    return Found(counted == labels_BT.shape[1] - 1, ON_CPU, figures)


def all_ignored(evidence: Evidence) -> Found:
    """LOG-16: with every label ignored, NaN as in torch; one chunk of ignored labels harms nothing."""
    some, none = Batch.made(), Batch.made()
    none.labels_BT.fill_(IGNORED)
    of_none = none.loss_of(reported_linear_cross_entropy, rows_per_chunk=CHUNK)
    gradients = none.gradients(of_none)
    as_in_torch = torch.equal(of_none.isnan(), none.old_loss().isnan()) and not any(g.any() for g in gradients)
    equal = some.is_equal(some.loss_of(reported_linear_cross_entropy, rows_per_chunk=CHUNK), some.old_loss())
    means = torch.stack(some.chunk_losses("mean"))
    figures = {"none": str(float(of_none.detach())), "mean_of_chunks": str(float(means.detach().mean()))}
    return Found(as_in_torch and equal, ON_CPU, figures)


def no_impact_on_quality(evidence: Evidence) -> Found:
    """LOG-56: equal in float64; in bfloat16 it matters what the chunks are added up in."""
    batch = Batch.made(8, 800)
    chunked = batch.loss_of(reported_linear_cross_entropy, rows_per_chunk=CHUNK)
    old = batch.old_loss()
    hidden_ND, weight_VD = batch.hidden_BTD.detach().flatten(0, 1), batch.weight_VD.detach()
    target_N = next_labels(batch.labels_BT).flatten()
    narrow = reported_linear_cross_entropy(
        hidden_ND.bfloat16(), weight_VD.bfloat16(), target_N, ignore_index=IGNORED, reduction="none"
    )
    added_in = {torch.float32: 0.0, torch.bfloat16: 0.0}
    for dtype in added_in:
        total = torch.zeros((), dtype=dtype)
        for losses_C in narrow.split(CHUNK):
            total += losses_C.sum().to(dtype)
        added_in[dtype] = float(total) / int((target_N != IGNORED).sum())
    figures = {
        "old": f"{float(old.detach()):.3f}",
        "float32_sums": f"{added_in[torch.float32]:.3f}",
        "bfloat16_sums": f"{added_in[torch.bfloat16]:.3f}",
    }
    return Found(batch.is_equal(chunked, old), ON_CPU, figures)


# ---------------------------------------------------------------- the report's own test of its loss
def printed_lines(evidence: Evidence, number: int, tokens: int) -> str:
    """What the report's ``verify_chunked_loss.py`` prints of a length, GiB under the name of GB and all."""
    chunked = _form_at(evidence, 1, tokens) == "chunked"
    logits_gib = tokens * evidence.dims["V"] * evidence.dims["e"] / 2**30
    used = "Chunked loss used (memory efficient)" if chunked else "Standard loss used"
    return f"Test {number}: seq_len={tokens}, logits={logits_gib:.2f}GB, should_chunk={chunked}\n  ✓ {used}"


def first_printed_lines(evidence: Evidence) -> Found:
    """LOG-52, byte for byte."""
    printed = printed_lines(evidence, 1, 4096)
    first, second = "Test 1: seq_len=4096, logits=1.16GB, should_chunk=False", "  ✓ Standard loss used"
    return Found(printed == f"{first}\n{second}", "printed anew", {"printed": printed})


def second_printed_lines(evidence: Evidence) -> Found:
    """LOG-53, byte for byte."""
    printed = printed_lines(evidence, 2, 40_000)
    same = (
        printed == "Test 2: seq_len=40000, logits=11.32GB, should_chunk=True\n  ✓ Chunked loss used (memory efficient)"
    )
    return Found(same, "printed anew", {"printed": printed})


def own_test_of_the_loss(evidence: Evidence) -> Found:
    """LOG-51: the threshold by shapes, the values by a small batch: both halves of the report's test."""
    batch = Batch.made()
    equal = batch.is_equal(batch.loss_of(reported_linear_cross_entropy, rows_per_chunk=CHUNK), batch.old_loss())
    parts = {"threshold": method_by_length(evidence).holds, "values": equal}
    return Found(all(parts.values()), ON_CPU, {name: "passes" if holds else "fails" for name, holds in parts.items()})


CHECKS = {
    check.__name__: check
    for check in (
        old_code_is_naive,
        chunk_size_parameter,
        switch_at_10,
        method_by_length,
        sum_over_tokens,
        shift_before_chunks,
        all_ignored,
        no_impact_on_quality,
        first_printed_lines,
        second_printed_lines,
        own_test_of_the_loss,
    )
}
