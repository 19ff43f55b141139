"""One argument of an op that is no tensor, such as a list or a path to a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .tensor_spec import Layout, Pattern, TensorSpec
from .values import FromFunction


@dataclass(frozen=True)
class ObjectSpec(TensorSpec):
    """One argument that is no tensor. ``make(dims, seed)`` returns it, such as a list or a path to a file.

    It is read several times, so an iterator is refused. ``shape`` names the dims on which it depends. Results of a form
    with such an input are compared by ``==``; arrays and tensors must have equal dtypes, shapes and values. A form
    may return an iterator: checks read it to its end, one item at a time.
    """

    dtype: str = "int64"
    layouts: tuple[Layout, ...] = ("contiguous",)
    patterns: tuple[Pattern, ...] = ("even",)
    make: Callable[[Mapping[str, int], int], Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.make is None or not callable(self.make):
            self._refuse("an ObjectSpec needs make=, a function of dims and a seed")
        default = {f.name: f.default for f in dataclasses.fields(self)}
        for option in ("dtype", "grad", "values", "sometimes", "layouts", "patterns", "optional", "also_in"):
            if getattr(self, option) != default[option]:
                self._refuse(f"{option}= is for tensors; drop it from the ObjectSpec")
        object.__setattr__(self, "values", FromFunction(self.make))

    def made(self, dims: Mapping[str, int], seed: int) -> Any:
        """Return the object at these dims. Refuse an iterator, which can be read only once."""
        assert self.make is not None
        value = self.make(dims, seed)
        if isinstance(value, Iterator):
            self._refuse(
                "make returned an iterator, which can be read once; return a list, a path, or an object with __iter__"
            )
        return value

    def spelled(self) -> str:
        """The spec on one line: its dims and the function that makes it."""
        return f"shape={self.shape}, an object made by {getattr(self.make, '__qualname__', type(self.make).__name__)}"
