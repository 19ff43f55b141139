"""A hash of 64-bit integers, elementwise: random numbers as a function of a position, without a generator state."""

from __future__ import annotations

import torch

GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: its multiples modulo 2**64 are spread evenly
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # factors and shifts of SplitMix64
_SHIFTS = (30, 27)
_LAST_SHIFT = 31


def int64(number: int) -> int:
    """Return ``number`` modulo 2**64 as the signed integer with the same bits."""
    return (number + 2**63) % 2**64 - 2**63


def shifted(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift ``numbers`` right as unsigned integers: torch's own shift keeps the sign."""
    return (numbers >> bits).bitwise_and_(2 ** (64 - bits) - 1)


def hash_(numbers: torch.Tensor) -> torch.Tensor:
    """Apply the finalizer of SplitMix64 to an int64 tensor, in place."""
    for bits, factor in zip(_SHIFTS, _FACTORS, strict=True):
        numbers.bitwise_xor_(shifted(numbers, bits)).mul_(int64(factor))
    return numbers.bitwise_xor_(shifted(numbers, _LAST_SHIFT))


def hash_int(number: int) -> int:
    """Apply the finalizer of SplitMix64 to one number; return a signed integer."""
    return int(hash_(torch.tensor([int64(number)])))
