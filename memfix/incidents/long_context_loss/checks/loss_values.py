"""Checks of claims about the values and the time of the loss, with small tensors on the CPU, mostly in float64."""

# B batch, T tokens, N tokens of all sequences, D width, V vocabulary

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ....laws import NAIVE
from ....ops.linear_cross_entropy import chosen_form
from ....ops.linear_cross_entropy.reported import reported_linear_cross_entropy
from ....units import GiB
from ...claims import Quantity
from ...evidence import default_of
from ...judging import ON_CPU, ON_H200, CheckResult, as_recorded, check, holds_if
from ..model import next_labels
from . import Evidence

ON_SHAPES = "chosen_form on shapes alone"
REPORTED_SWITCH = "10 GiB"
"""The size of the logits up to which the report keeps torch's own operators."""
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
        """The loss as the report prints the old code."""
        logits = F.linear(self.hidden_BTD, self.weight_VD)
        shift_logits = logits[..., :-1, :].contiguous()
        shift_labels = self.labels_BT[..., 1:].contiguous()
        return F.cross_entropy(
            shift_logits.view(-1, shift_logits.size(-1)), shift_labels.view(-1), ignore_index=IGNORED
        )

    def loss_of(self, loss: Loss, **options: object) -> torch.Tensor:
        """The loss by the function ``loss``, on labels that were shifted once."""
        target_N = next_labels(self.labels_BT).flatten()
        return loss(self.hidden_BTD.flatten(0, 1), self.weight_VD, target_N, ignore_index=IGNORED, **options)

    def reported_loss(self, rows_per_chunk: int = CHUNK) -> torch.Tensor:
        return self.loss_of(reported_linear_cross_entropy, rows_per_chunk=rows_per_chunk)

    def gradients(self, loss: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(loss, (self.hidden_BTD, self.weight_VD))

    def is_equal(self, first: torch.Tensor, second: torch.Tensor) -> bool:
        """Whether both losses and their gradients are equal, but for the last digits of float64."""
        pairs = zip((first, *self.gradients(first)), (second, *self.gradients(second)), strict=True)
        return all(torch.allclose(one, other, rtol=1e-12, atol=1e-13) for one, other in pairs)

    def chunk_losses(self, reduction: str) -> list[torch.Tensor]:
        hidden_ND, target_N = self.hidden_BTD.flatten(0, 1), next_labels(self.labels_BT).flatten()
        return [
            F.cross_entropy(hidden_CD @ self.weight_VD.T, target_C, ignore_index=IGNORED, reduction=reduction)
            for hidden_CD, target_C in zip(hidden_ND.split(CHUNK), target_N.split(CHUNK), strict=True)
        ]


@check("LOG-09")
def old_code_is_naive(evidence: Evidence) -> CheckResult:
    """Compare the old code with naive; test whether its ``contiguous`` copies, for one and for two sequences."""
    batch = Batch.made()
    equal = batch.is_equal(batch.old_loss(), batch.loss_of(evidence.contract().function(NAIVE)))
    copies = {}
    for size in (1, 2):
        logits_BTV = torch.zeros(size, 5, 3)
        copies[size] = logits_BTV[..., :-1, :].contiguous().data_ptr() != logits_BTV.data_ptr()
    return holds_if(equal, ON_CPU, batch_1=_copied(copies[1]), batch_2=_copied(copies[2]))


def _copied(copies: bool) -> str:
    return "copies" if copies else "copies nothing"


@check("LOG-10")
def chunk_size_parameter(evidence: Evidence) -> CheckResult:
    """Read the default, and compare the loss and the gradients of every chunk size with the old code's."""
    default = default_of(reported_linear_cross_entropy, "rows_per_chunk")
    batch = Batch.made()
    num_rows = batch.labels_BT.numel()
    sizes = (1, 5, num_rows - 1, num_rows, num_rows + 1)
    equal = [size for size in sizes if batch.is_equal(batch.reported_loss(size), batch.old_loss())]
    holds = default == evidence.dims["C"] and len(equal) == len(sizes)
    return holds_if(holds, ON_CPU, default=default, equal=", ".join(map(str, equal)), rows=num_rows)


def _form_at(evidence: Evidence, batch: int, tokens: int, dtype: torch.dtype = torch.bfloat16) -> str:
    hidden_BTD = torch.empty(batch, tokens, evidence.dims["D"], device="meta", dtype=dtype)
    weight_VD = torch.empty(evidence.dims["V"], evidence.dims["D"], device="meta", dtype=dtype)
    chosen = chosen_form(hidden_BTD, weight_VD, standard_up_to=REPORTED_SWITCH)
    return "standard" if chosen == "standard" else "chunked"


def _first_chunked(evidence: Evidence, dtype: torch.dtype) -> int:
    """The length of the shortest sequence whose loss is chunked, by bisection."""
    lengths = range(1, evidence.dims["T"])
    return 1 + bisect.bisect_left(lengths, True, key=lambda tokens: _form_at(evidence, 1, tokens, dtype) == "chunked")


@check("LOG-13")
def switch_at_10(evidence: Evidence) -> CheckResult:
    """Find where ``form="auto"`` with the report's threshold starts to chunk, by length, batch size and dtype."""
    first = _first_chunked(evidence, torch.bfloat16)
    return holds_if(
        first == evidence.evaluate("10*GiB // (V*e) + 1"),
        ON_SHAPES,
        first_chunked=first,
        in_gb=evidence.evaluate("10000000000 // (V*e) + 1"),
        float32=_first_chunked(evidence, torch.float32),
        batch_8=_form_at(evidence, 8, 4096),
        batch_9=_form_at(evidence, 9, 4096),
    )


@check("LOG-20")
def method_by_length(evidence: Evidence) -> CheckResult:
    """Look at the form chosen for the three lengths of the report's table."""
    forms = [_form_at(evidence, 1, tokens) for tokens in (4096, 40_000, 131_072)]
    return holds_if(forms == ["standard", "chunked", "chunked"], ON_SHAPES, forms=", ".join(forms))


@check("LOG-14")
def sum_over_tokens(evidence: Evidence) -> CheckResult:
    """Compare the reported sum over tokens with the old loss, and three other readings of the report's sketch."""
    batch = Batch.made()
    old = batch.old_loss()
    sums, means = torch.stack(batch.chunk_losses("sum")), torch.stack(batch.chunk_losses("mean"))
    num_counted = (batch.labels_BT[:, 1:] != IGNORED).sum()
    mutants = {
        "mean_of_means": means.nanmean(),
        "divided_twice": means.nansum() / num_counted,
        "all_positions": sums.sum() / batch.labels_BT.numel(),
    }
    holds = batch.is_equal(batch.reported_loss(), old)
    figures = {name: f"{float(value.detach()):.3f}" for name, value in {"old": old, **mutants}.items()}
    wrong = not any(torch.allclose(value, old, rtol=1e-3) for value in mutants.values())
    return holds_if(holds and wrong, ON_CPU, **figures)


@check("LOG-15")
def shift_before_chunks(evidence: Evidence) -> CheckResult:
    """Count the predictions with one shift before all chunks, and with a shift in each chunk."""
    labels_BT = torch.arange(evidence.dims["T"])[None]
    target_BT, chunk = next_labels(labels_BT), evidence.dims["C"]
    counted = sum(int((part != IGNORED).sum()) for part in target_BT.split(chunk, dim=1))
    shifted_in_each = sum(part.shape[1] - 1 for part in labels_BT.split(chunk, dim=1))
    holds = counted == labels_BT.shape[1] - 1
    return holds_if(holds, ON_CPU, predictions=counted, lost=counted - shifted_in_each)


@check("LOG-16")
def all_ignored(evidence: Evidence) -> CheckResult:
    """Compare the loss with torch's where all labels are ignored, and where those of one chunk are."""
    some, none = Batch.made(), Batch.made()
    none.labels_BT.fill_(IGNORED)
    of_none = none.reported_loss()
    gradients = none.gradients(of_none)
    as_in_torch = torch.equal(of_none.isnan(), none.old_loss().isnan()) and not any(g.any() for g in gradients)
    equal = some.is_equal(some.reported_loss(), some.old_loss())
    means = torch.stack(some.chunk_losses("mean")).detach()
    figures = {"none": str(float(of_none.detach())), "mean_of_chunks": str(float(means.mean()))}
    return holds_if(as_in_torch and equal, ON_CPU, **figures)


@check("LOG-56")
def no_impact_on_quality(evidence: Evidence) -> CheckResult:
    """Compare the losses in float64; in bfloat16, add the chunks up in float32 and in bfloat16."""
    batch = Batch.made(8, 800)
    chunked = batch.reported_loss()
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
    return holds_if(
        batch.is_equal(chunked, old),
        ON_CPU,
        old=f"{float(old.detach()):.3f}",
        float32_sums=f"{added_in[torch.float32]:.3f}",
        bfloat16_sums=f"{added_in[torch.bfloat16]:.3f}",
    )


# ---------------------------------------------------------------- the report's own test of its loss
@check("LOG-52", number=1, tokens=4096)
@check("LOG-53", number=2, tokens=40_000)
def printed_lines(evidence: Evidence, number: int, tokens: int) -> CheckResult:
    """Print what ``verify_chunked_loss.py`` prints for a length, byte for byte; it prints GiB as GB."""
    chunked = _form_at(evidence, 1, tokens) == "chunked"
    logits_gib = evidence.evaluate("T*V*e", T=tokens) / GiB
    used = "Chunked loss used (memory efficient)" if chunked else "Standard loss used"
    printed = f"Test {number}: seq_len={tokens}, logits={logits_gib:.2f}GB, should_chunk={chunked}\n  ✓ {used}"
    return as_recorded("printed anew", printed=printed)


@check("LOG-51")
def own_test_of_the_loss(evidence: Evidence) -> CheckResult:
    """Do both halves of the report's test: the threshold by shapes, and the values of a small batch."""
    batch = Batch.made()
    equal = batch.is_equal(batch.reported_loss(), batch.old_loss())
    parts = {"threshold": method_by_length(evidence).holds, "values": equal}
    figures = {name: "passes" if holds else "fails" for name, holds in parts.items()}
    return holds_if(all(parts.values()), ON_CPU, **figures)


# ---------------------------------------------------------------- its time, measured on an H200
@check("LOG-54")
def slower_by_5_to_10_percent(evidence: Evidence) -> CheckResult:
    """Compare the times of the reported loop and of naive, at each case that was timed."""
    slower = {case: ratio - 1 for case, ratio in evidence.speed_ratios("reported").items()}
    figures = {case: f"{100 * share:+.0f} %" for case, share in slower.items()}
    return holds_if(
        all(map(Quantity.parsed("5-10 %").is_met_by, slower.values())), ON_H200, **figures, cases=len(slower)
    )
