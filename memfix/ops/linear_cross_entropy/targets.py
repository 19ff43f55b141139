"""Which tokens count: found once, before any product, so that ignored ones cost nothing."""

# N tokens, K tokens that count, V vocabulary

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Counted:
    """The tokens whose target is not ignored: their targets, contiguous, and their rows, or None where all count."""

    target_K: torch.Tensor
    rows_K: torch.Tensor | None

    @property
    def number(self) -> int:
        return self.target_K.shape[0]


def counted_targets(target_N: torch.Tensor, vocabulary: int, ignore_index: int) -> Counted:
    """Find them, and refuse a target that is no class. The host waits for the device once, for two numbers."""
    counts_N, number, number_in_range = _questions(target_N, vocabulary, ignore_index)
    num_counted = int(number)
    if int(number_in_range) != num_counted:
        _refuse(target_N, vocabulary, ignore_index)
    if num_counted == target_N.shape[0]:
        return Counted(target_N.contiguous(), None)
    rows_K = torch.nonzero_static(counts_N, size=num_counted).squeeze(1)
    return Counted(target_N.index_select(0, rows_K), rows_K)


def require_targets_in_range(target_N: torch.Tensor, vocabulary: int, ignore_index: int) -> None:
    """The same refusal where it costs no wait for a device: on the CPU. Elsewhere the device finds out by itself."""
    if target_N.device.type == "cpu":
        _, number, number_in_range = _questions(target_N, vocabulary, ignore_index)
        if int(number_in_range) != int(number):
            _refuse(target_N, vocabulary, ignore_index)


def _questions(
    target_N: torch.Tensor, vocabulary: int, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both numbers are on their way before the first is asked for."""
    counts_N = target_N != ignore_index
    in_range_N = counts_N & (target_N >= 0) & (target_N < vocabulary)
    return counts_N, counts_N.sum(), in_range_N.sum()


def _refuse(target_N: torch.Tensor, vocabulary: int, ignore_index: int) -> None:
    wrong_N = (target_N != ignore_index) & ((target_N < 0) | (target_N >= vocabulary))
    index = int(wrong_N.nonzero()[0])
    raise ValueError(
        f"target must be at least 0 and below the vocabulary of {vocabulary}, or ignore_index {ignore_index}; "
        f"got {int(target_N[index])} at index {index}"
    )
