"""The assumptions about unknown values: fake tensors have no values, but a step may read some.

A reading is taken under the usual answers. If the step read an answer, it is measured again under other answers. If all
readings agree, the values do not matter and the reading is exact; otherwise the readings are its bounds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from .choices import How, assumed_indices
from .watched_numbers import Outcomes
from .workspace.rules import Call

aten = torch.ops.aten

# the answers of one run: the usual ones, or those that make masks pick most or least, and numbers large or small
Scenario = Literal["usual", "most", "least"]
SCENARIOS: tuple[Scenario, ...] = ("usual", "most", "least")
# which values are followed: those that follow from known ones; also floats of large tensors, if that is little work; or
# also those that follow from indices that operators choose by unknown values, which are assumed
Followed = Literal["known", "computed", "chosen"]

DRAWN = "random numbers decide what the step reads: they are drawn on the CPU, and a GPU draws others"
DRAWN_ONCE = "a single random number decides what the step reads: the least and the largest are tried"
OTHER_DRAWS = "a few random draws took different amounts, and others may take more or less: there are no bounds"
COPIED = "the step copies unknown values to the CPU: any values are assumed"
COUNTED = "the step counts the elements of a mask: assumed that all take part"
ALL_SET = "the step asks whether all of a mask is set: assumed that it is"
NONE_SET = "the step asks whether any of a mask is set: assumed that none is"
ALL_CHOSEN = "the step picks elements by a mask: assumed that all are picked, which is the most there can be"
EVEN = "the step shares elements out by an index that is not known: assumed even shares"
NO_BOUNDS = "a loop reads unknown values, and how often it runs is not known: there are no bounds"
ANY_COUNT = "an unknown count decides what the step takes, and it may be any number: there are no bounds"
ONE_SIDED = (
    "the step raises where its masks have the fewest or the most elements, but not where they have half: no bounds"
)
ONE_OUTCOME = (
    "the step compares unknown numbers, and some comparison came out one way under all that were tried: no bounds"
)
COMPUTED = "numbers that were computed on the CPU decide how often a loop runs, and a GPU rounds them differently"
UNDECIDED = "an unknown number"
"""The mark of values that were computed from an assumed number. Their note names the line that reads them."""
CHOSEN = "a choice"
"""The mark of values that follow from choices, such as those of a router, which the user or a note assumes."""
ORDER = "an order"
"""The mark of values that follow from the assumed order of unknown values."""
READ_ORDER = "Python code reads the order of unknown values: a few orders were tried, and another may take more or less"
NO_LARGER_ID = "the step counts ids by torch.bincount: assumed that none is above its minlength"
AS_MANY_AS_IDS = "the step counts ids by torch.bincount without a minlength: assumed as many bins as ids"
EQUAL = "the step compares tensors by torch.equal: assumed that they are equal"

_NO_ZEROS = "no element is zero"
_IN_BACKWARD_OF = {"ProdBackward": _NO_ZEROS, "CumprodBackward": _NO_ZEROS}
"""The name of a backward node that reads values -> what is assumed about them."""
_NUMBERS: dict[Scenario, float] = {"usual": 0.5, "most": 4096.0, "least": -2.0}
_PATIENCE = 64  # reads at one place before the answer changes
_ONCE_OR_TWICE = 2  # more reads at one place are taken for a loop
ONE_ELEMENT, HALF = 2.0**-40, 0.5
"""Shares of a mask to try as the fewest."""
_INTEGERS: dict[Scenario, int] = {"usual": 1, "most": 2, "least": 0}
_CHOICES: dict[Scenario, How] = {"usual": "even", "most": "worst", "least": "last"}


class NumberNote(str):
    """The note for a single unknown value."""

    __slots__ = ()


def number(place: str, dtype: torch.dtype) -> NumberNote:
    kind = "number" if dtype.is_floating_point else "flag or count"
    return NumberNote(f"the step reads an unknown {kind} at {place}: any value is assumed")


def are_numbers(notes: Iterable[str]) -> bool:
    """Whether all assumptions are about single values."""
    return all(isinstance(note, NumberNote) for note in notes)


def at(note: str, place: str) -> str:
    """The note with its place, written as in a key of ``assume``."""
    return f"{note} (at {place})"


@dataclass
class Pool:
    """The number of set elements of a one-hot mask, shared out among the views of the mask that pick elements."""

    left: int
    _taken: dict[Hashable, int] = field(default_factory=dict)

    def taken_by(self, part: Hashable, num_elements: int) -> int:
        """How many elements the view ``part`` picks, always the same, if earlier views took all that they could."""
        if part not in self._taken:
            self._taken[part] = min(num_elements, self.left)
            self.left -= self._taken[part]
        return self._taken[part]


class Answers:
    """The assumed values that one run of a step reads."""

    def __init__(self, scenario: Scenario = "usual") -> None:
        self.scenario: Scenario = scenario
        self.of_numbers: Scenario = scenario
        """The scenario for single values, such as a loss. A step may raise for one of them, but run on other masks."""
        self.fewest = 0.0
        """The share of a mask's elements that are set under "least"; more than 0 if the step raises without any."""
        self.are_most = True
        """Whether every answer would have been the same under "most", which then need not be tried."""
        self.makes_choices = False
        """Whether the indices that ``topk`` and others choose by unknown values are assumed."""
        self.has_choices = False
        """Whether such an operator ran."""
        self.reads_counts = False
        """Whether an unknown integer was read, such as how many elements an expert gets."""
        self.outcomes = Outcomes()
        """What came out of the flags and the comparisons of numbers that the step read."""
        self._is_warming_up = True
        self._num_asked: Counter[str] = Counter()
        self._asked_before: frozenset[str] = frozenset()
        self._num_made = 0

    @property
    def in_a_loop(self) -> bool:
        """Whether a place of the step read values more than twice, so that a loop there may depend on the answers."""
        return any(number > _ONCE_OR_TWICE for number in self._num_asked.values())

    @property
    def has_answered(self) -> bool:
        """Whether the running step has read a number."""
        return bool(self._num_asked)

    @property
    def asked_again(self) -> bool:
        """Whether the step read numbers at every place where the warm-up did, so that another call will do so too."""
        return self._asked_before <= self._num_asked.keys()

    def begin_step(self) -> None:
        """End the warm-up and begin the measured step."""
        self._is_warming_up = False
        self._asked_before = frozenset(self._num_asked)
        self._num_asked.clear()

    def next_number(self) -> float:
        """The assumed value of a new scalar. No two are equal, so that comparisons are decided: each is a little larger
        than the last one under "usual", much larger under "most" and much smaller under "least"."""
        self._num_made += 1
        return _NUMBERS[self.of_numbers] * (1 + self._num_made * (2**-20 if self.of_numbers == "usual" else 2**-3))

    def replace_draw(self, drawn: torch.Tensor) -> None:
        """Replace a single random number, by which a step may skip layers, by 0 or the largest number below 1.

        The warm-up gets the opposite number: an optimizer allocates the state of a layer when the layer first runs, so
        a step needs most if the warm-up skipped it.
        """
        if self.scenario != "usual":
            is_large = (self.scenario == "most") != self._is_warming_up
            with torch._C._DisableTorchDispatch():
                drawn.fill_(1 - torch.finfo(drawn.dtype).eps if is_large else 0)

    def number(self, dtype: torch.dtype, place: str, computed: Any = None) -> float | int | bool:
        """The answer for a single value that is unknown, or that was ``computed`` from assumed numbers.

        A computed flag is replaced under "most" and "least", so that both its values are tried. After many reads at one
        place the answer changes, so that a loop which waits for a change ends.
        """
        self.are_most = False
        is_integer = not (dtype == torch.bool or dtype.is_floating_point or dtype.is_complex)
        self.reads_counts |= is_integer
        self._num_asked[place] += 1
        number = self._num_asked[place] - _PATIENCE
        if computed is not None and number <= 0 and dtype != torch.bool:
            return computed
        scenario = self.of_numbers if number <= 0 else SCENARIOS[number % len(SCENARIOS)]
        if dtype == torch.bool:
            is_computed = computed is not None and number <= 0 and scenario == "usual"
            return self.outcomes.decided(place, bool(computed) if is_computed else scenario == "most")
        return _INTEGERS[scenario] if is_integer else _NUMBERS[scenario]

    def count(self, num_elements: int, share: float) -> int:
        """How many of a mask's elements are set. Under "usual" it is the given ``share`` of them."""
        if self.scenario == "usual":
            self.are_most &= share == 1
            return math.ceil(num_elements * share)
        return num_elements if self.scenario == "most" else math.ceil(num_elements * self.fewest)

    def shares(self, num_elements: int, num_shares: int, most_each: int | None = None) -> torch.Tensor:
        """How many elements each share has: evenly many; under "most" the first ones, and under "least" the last ones
        have all that they can, ``most_each``."""
        self.are_most = False
        each = num_elements if most_each is None else most_each
        with torch._C._DisableTorchDispatch():
            if self.scenario == "usual":
                even, rest = divmod(num_elements, num_shares)
                return torch.tensor([even + 1] * rest + [even] * (num_shares - rest))
            ends = (each * torch.arange(1, num_shares + 1)).clamp(max=num_elements)
            first = torch.diff(ends, prepend=torch.zeros(1, dtype=ends.dtype))
            return first if self.scenario == "most" else first.flip(0)

    def choices(self, call: Call) -> torch.Tensor:
        """The indices that an operator such as ``topk`` chooses: "even", "worst" or "last" by the scenario."""
        self.are_most = False
        return assumed_indices(call, _CHOICES[self.scenario])

    def of_mask(self, packet: Any, num_elements: int, share: float) -> tuple[str, float | int | bool]:
        """The note and the assumed value of a sum, ``all`` or ``any`` over ``num_elements`` of a mask."""
        if packet is aten.all:
            return ALL_SET, self.scenario != "least"
        if packet is aten.any:
            self.are_most = False
            return NONE_SET, self.scenario == "most" or (self.scenario == "least" and self.fewest > 0)
        return COUNTED if share == 1 else EVEN, self.count(num_elements, share)


def formula_that_reads() -> str | None:
    """The name of the running backward node if its formula in libtorch reads values: whether a product has zeros."""
    node = torch._C._current_autograd_node()
    return next((name for name in _IN_BACKWARD_OF if node is not None and node.name().startswith(name)), None)


def in_backward(operator: Any, tensor: torch.Tensor) -> tuple[str, Any] | None:
    """The note and the answer for an operator that reads values inside a formula of ``formula_that_reads``."""
    if operator not in (aten._local_scalar_dense.default, aten.nonzero.default):
        return None
    name = formula_that_reads()
    if name is None:
        return None
    note = f"{name} looks at values: assumed that {_IN_BACKWARD_OF[name]}"
    if operator is aten.nonzero.default:
        return note, torch.empty((0, tensor.dim()), dtype=torch.int64, device=tensor.device)
    return note, False if tensor.dtype == torch.bool else 0
