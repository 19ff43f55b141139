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
    """Ask the device which they are. The answer refuses a target that is no class; the host waits for it once, and not
    for what the device is given to do in between.
    """
    number, number_in_range = _questions(target_N, vocabulary, ignore_index)
    arrived = _sent(number_in_range)

    def answer() -> Counted:
        num_counted = arrived()
        if num_counted == target_N.shape[0]:
            return Counted(target_N.contiguous(), None)
        if int(number) != num_counted:
            _refuse(target_N, vocabulary, ignore_index)
        rows_K = torch.nonzero_static(target_N != ignore_index, size=num_counted).squeeze(1)
        return Counted(target_N.index_select(0, rows_K), rows_K)

    return answer


def _sent(number: torch.Tensor) -> Callable[[], int]:
    """``int(number)``, sent to the host at once. The CPU, and tensors that stand for others, are asked at once as well,
    so that the number is freed where it is on a GPU."""
    if type(number) is not torch.Tensor or not number.is_cuda or torch.compiler.is_compiling():
        known = int(number)
        return lambda: known
    copy = torch.empty((), dtype=number.dtype, pin_memory=True).copy_(number, non_blocking=True)
    event = torch.cuda.current_stream(number.device).record_event()

    def arrived() -> int:
        event.synchronize()
        return int(copy)

    return arrived


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
