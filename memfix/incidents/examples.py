"""The examples of a forward. Each example depends only on the data's seed and its number.

So one int is the position of a run in its data, and any process can make any example.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Examples:
    """The examples of one forward on one process."""

    numbers: range
    seed: int

    def __len__(self) -> int:
        return len(self.numbers)

    def generators(self) -> Iterator[torch.Generator]:
        """A generator for each example, for data that are drawn."""
        return (seeded("example", self.seed, number) for number in self.numbers)


def seeded(*key: object) -> torch.Generator:
    """A generator seeded by ``key``, the same on every machine."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
