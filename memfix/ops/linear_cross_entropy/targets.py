"""The tokens that count: selected once, before any product, so that ignored tokens cost nothing."""

# N tokens, K tokens that count, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Counted:
    """The tokens whose target is not ignored: their targets, contiguous, and their row indices, None if all count."""

    target_K: torch.Tensor
    rows_K: torch.Tensor | None

    @property
    def number(self) -> int:
        return self.target_K.shape[0]


def start_counting(target_N: torch.Tensor, vocabulary: int, ignore_index: int) -> Callable[[], Counted]:
    """Launch the count of the tokens that count, and return a function that waits for the result.

    That function raises for a target out of range. It waits for the count alone, not for kernels launched since.
    """
    number, number_in_range = _launch_counts(target_N, vocabulary, ignore_index)
    wait = _copy_to_host(number_in_range)

    def answer() -> Counted:
        num_counted = wait()
        if num_counted == target_N.shape[0]:
            return Counted(target_N.contiguous(), None)
        if int(number) != num_counted:
            _refuse(target_N, vocabulary, ignore_index)
        rows_K = torch.nonzero_static(target_N != ignore_index, size=num_counted).squeeze(1)
        return Counted(target_N.index_select(0, rows_K), rows_K)

    return answer


def _copy_to_host(number: torch.Tensor) -> Callable[[], int]:
    """Start the copy of ``number`` to pinned memory; return a function that waits for it and returns the int.

    A CPU tensor or a tensor subclass (a fake tensor) is read at once: simulated memory is freed at the same point as on
    a GPU.
    """
    if type(number) is not torch.Tensor or not number.is_cuda or torch.compiler.is_compiling():
        known = int(number)
        return lambda: known
    copy = torch.empty((), dtype=number.dtype, pin_memory=True).copy_(number, non_blocking=True)
    event = torch.cuda.current_stream(number.device).record_event()

    def wait() -> int:
        event.synchronize()
        return int(copy)

    return wait


def require_targets_in_range(target_N: torch.Tensor, vocabulary: int, ignore_index: int) -> None:
    """Raise for a target out of range on the CPU. On a GPU, where the check would wait, torch's kernels assert it."""
    if target_N.device.type == "cpu":
        number, number_in_range = _launch_counts(target_N, vocabulary, ignore_index)
        if int(number_in_range) != int(number):
            _refuse(target_N, vocabulary, ignore_index)


def _launch_counts(target_N: torch.Tensor, vocabulary: int, ignore_index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch both counts, of the tokens that count and of those in range, before either is read."""
    is_counted_N = target_N != ignore_index
    in_range_N = is_counted_N & (target_N >= 0) & (target_N < vocabulary)
    return is_counted_N.sum(), in_range_N.sum()


def _refuse(target_N: torch.Tensor, vocabulary: int, ignore_index: int) -> None:
    wrong_N = (target_N != ignore_index) & ((target_N < 0) | (target_N >= vocabulary))
    index = int(wrong_N.nonzero()[0])
    raise ValueError(
        f"target must be at least 0 and below the vocabulary of {vocabulary}, or ignore_index {ignore_index}; "
        f"got {int(target_N[index])} at index {index}"
    )
