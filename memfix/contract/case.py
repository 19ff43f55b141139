"""The sizes of a call: dims are ranges from which sizes are drawn, cases fix all sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ContractError
from .dtypes import DTYPE_BYTES


@dataclass(frozen=True)
class Dim:
    """The range from which a dimension or a chunk size is drawn for equality; cases may lie above it.

    ``multiple_of``: the op takes only multiples of it, such as the even widths of a rotation.
    """

    low: int
    high: int
    multiple_of: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high:
            raise ContractError(f"a Dim needs 0 <= low <= high, got low={self.low}, high={self.high}")
        if self.multiple_of < 1 or self.low % self.multiple_of or self.high % self.multiple_of:
            raise ContractError(
                f"a Dim needs low and high that are multiples of multiple_of, got low={self.low}, high={self.high}, "
                f"multiple_of={self.multiple_of}"
            )

    def nearest(self, size: int) -> int:
        """The largest size of this dim that is at most ``size``, or the smallest there is."""
        return max(self.low, min(self.high, size) // self.multiple_of * self.multiple_of)

    def spelled(self) -> str:
        return f"{self.low} to {self.high}" + (f", multiples of {self.multiple_of}" if self.multiple_of > 1 else "")


def is_variant(name: str) -> bool:
    """Whether a name is that of a variant of a case, such as ``reduction=sum``. Names of cases have no such sign."""
    return "=" in name


@dataclass(frozen=True)
class Case:
    """One fixed shape of an op: every dim, every choice, the dtype it works in, and the optional inputs it has."""

    name: str
    dims: Mapping[str, int]
    choices: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    present: tuple[str, ...] = ()

    @property
    def formula_values(self) -> dict[str, int]:
        """The names that a budget formula may use; ``e`` is the item size of the working dtype."""
        return {**self.dims, "e": DTYPE_BYTES[self.dtype]}

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that a form may take as a keyword."""
        return {**self.dims, **self.choices}

    def spelled(self) -> str:
        """``N=3,D=1,dtype=float32``: what ``--at`` reads back."""
        parts = [f"{key}={value}" for key, value in {**self.settings, "dtype": self.dtype}.items()]
        return ",".join([*parts, *(f"present={name}" for name in self.present)])
