"""Which tokens count: found once, before any product, so that ignored ones cost nothing."""

# N tokens, K tokens that count, V vocabulary

from __future__ import annotations

from collections.abc import Callable
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


def ask_targets(target_N: torch.Tensor, vocabulary: int, ignore_index: int) -> Callable[[], Counted]:
    """Ask the device which they are. The answer refuses a target that is no class; the host waits for it once."""
    number, number_in_range = _questions(target_N, vocabulary, ignore_index)

    def answer() -> Counted:
        num_counted = int(number_in_range)
        if num_counted == target_N.shape[0]:
            return Counted(target_N.contiguous(), None)
        if int(number) != num_counted:
            _refuse(target_N, vocabulary, ignore_index)
        rows_K = torch.nonzero_static(target_N != ignore_index, size=num_counted).squeeze(1)
        return Counted(target_N.index_select(0, rows_K), rows_K)

    return answer


def require_targets_in_range(target_N: torch.Tensor, vocabulary: int, ignore_index: int) -> None:
    """The same refusal where it costs no wait for a device: on the CPU. Elsewhere the device finds out by itself."""
    if target_N.device.type == "cpu":
        number, number_in_range = _questions(target_N, vocabulary, ignore_index)
        if int(number_in_range) != int(number):
            _refuse(target_N, vocabulary, ignore_index)


def _questions(target_N: torch.Tensor, vocabulary: int, ignore_index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Both numbers are on their way before the first is asked for."""
    counts_N = target_N != ignore_index
    in_range_N = counts_N & (target_N >= 0) & (target_N < vocabulary)
    return counts_N.sum(), in_range_N.sum()


def _refuse(target_N: torch.Tensor, vocabulary: int, ignore_index: int) -> None:
    wrong_N = (target_N != ignore_index) & ((target_N < 0) | (target_N >= vocabulary))
    index = int(wrong_N.nonzero()[0])
    raise ValueError(
        f"target must be at least 0 and below the vocabulary of {vocabulary}, or ignore_index {ignore_index}; "
        f"got {int(target_N[index])} at index {index}"
    )
