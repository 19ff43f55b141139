"""What a form promises: closeness to naive, budgets on memory, growth, and time. Plain frozen data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .errors import ContractError, did_you_mean
from .formula import Formula
from .units import format_bytes, is_size, parse_bytes

Phase = Literal["forward", "train", "held", "saved", "results", "kept"]
PHASES: tuple[Phase, ...] = ("forward", "train", "held")
"""The phases that a step runs. ``saved`` and ``results`` are the inputs and the results that stay alive for backward
after the caller has dropped them, and ``kept`` is what a first call leaves behind for good."""

NAIVE = "naive"


@dataclass(frozen=True)
class Tolerance:
    """How far a form may be from naive in float64, tensor by tensor: the largest error allowed is the sum of

    - ``factor`` times what naive itself loses by working in the same dtype;
    - ``ulps`` roundings at the size of the tensor's largest element: naive can be right by luck;
    - ``sum_ulps`` roundings of the dtype that sums are kept in, float32 for 16-bit tensors, of the result and of
      every input: a sum may be taken in another order, and where its terms cancel that shows.

    On average (root mean square, from 16 elements that matter on) less is allowed: ``rms_factor`` times naive's own
    error. One rounding more than naive's shows there, as in a sum over many chunks that is kept in 16 bits.

    ``operand_ulps`` is for a form that rounds the operands of its products to a working dtype of 16 bits, where naive
    keeps them wider: its error may be as large as this many roundings of every input change the truth.

    ``absolute_ulps`` is for results that may be small differences of larger numbers, such as a confident token's loss
    and its gradient ``1 - p``: they may be off by this many roundings at the size of the largest input, or of 1.

    ``rms_ulps`` is for a form that promises more than naive: in 16 bits its average error is at most this many
    roundings of the result, however much naive loses on the way, as by rounding logits before a softmax.
    """

    factor: float = 4.0
    rms_factor: float = 3.0
    ulps: float = 1.0
    sum_ulps: float = 32.0
    operand_ulps: float = 0.0
    absolute_ulps: float = 0.0
    rms_ulps: float | None = None

    def times(self, number: float) -> Tolerance:
        """Allow ``number`` times as large errors."""
        return Tolerance(**{name: value and value * number for name, value in vars(self).items()})

    def spelled(self) -> str:
        """Return ``(factor=4.0, ...)``, without rare options that are not given."""
        text = str(self).removeprefix("Tolerance")
        for unless_given in (", operand_ulps=0.0", ", absolute_ulps=0.0", ", rms_ulps=None"):
            text = text.replace(unless_given, "")
        return text


@dataclass(frozen=True, kw_only=True)
class Budget:
    """An upper bound on a form's peak above its inputs. Exactly one of the three limits is given.

    ``bytes``: a number, ``"5 GiB"``, or a formula of the dims. ``times_below_naive``: at least this many times
    smaller than naive. ``times_below``: the same against another form, ``{"reported": 8}``.
    Without ``case`` it holds for every case and for every drawn shape. A form keeps nothing for good unless a budget of
    the phase ``kept`` says how much: a table that all calls share.
    """

    form: str = field(kw_only=False)
    phase: Phase = "train"
    case: str | None = None
    bytes: int | str | None = None
    times_below_naive: float | None = None
    times_below: Mapping[str, float] | None = None
    known_broken: bool = False

    def __post_init__(self) -> None:
        given = [limit for limit in (self.bytes, self.times_below_naive, self.times_below) if limit is not None]
        if len(given) != 1:
            raise ContractError(
                f"budget of {self.form!r}: give exactly one of bytes, times_below_naive, times_below; got {len(given)}"
            )
        _require_phase(self.form, self.phase, (*PHASES, "saved", "results", "kept"))
        if self.times_below is not None and len(self.times_below) != 1:
            raise ContractError(
                f"budget of {self.form!r}: times_below names one other form, got {dict(self.times_below)}"
            )
        if self.factor is not None and not self.factor > 0:
            raise ContractError(f"budget of {self.form!r}: a factor must be above 0, got {self.factor}")
        self.formula  # noqa: B018 - a broken formula is refused here, where it is written

    @property
    def reference(self) -> str | None:
        """The form it is measured against, where the limit is a ratio."""
        return next(iter(self._ratio), None)

    @property
    def factor(self) -> float | None:
        return next(iter(self._ratio.values()), None)

    @property
    def _ratio(self) -> Mapping[str, float]:
        return self.times_below or {} if self.times_below_naive is None else {NAIVE: self.times_below_naive}

    @property
    def formula(self) -> Formula | None:
        """The byte limit as a formula; a plain size is a formula without names."""
        if self.bytes is None:
            return None
        if isinstance(self.bytes, int) or is_size(self.bytes):
            try:
                return Formula(str(parse_bytes(self.bytes)))
            except ValueError as error:
                raise ContractError(f"budget of {self.form!r}: {error}") from None
        return Formula(self.bytes)

    def applies_to(self, case: str) -> bool:
        return self.case is None or self.case == case

    def spelled(self) -> str:
        """The law in words, for a table row."""
        if self.formula is not None:
            limit = (
                f"at most {format_bytes(int(self.formula.text)) if self.formula.text.isdigit() else self.formula.text}"
            )
        else:
            limit = f"{self.factor:g}x below {self.reference}"
        return f"{self.form} [{self.case or 'every shape'}, {self.phase}] {limit}" + (
            ", known broken" if self.known_broken else ""
        )


def at_most(form: str, case: str | None = None, **bytes_of_phase: int | str) -> list[Budget]:
    """A budget a phase: ``at_most("chunked", held="T*D*e", train="3*T*D*e")``."""
    return [Budget(form, phase=phase, case=case, bytes=limit) for phase, limit in bytes_of_phase.items()]  # type: ignore[arg-type]


def below_naive(form: str, case: str, **times_of_phase: float) -> list[Budget]:
    """A budget a phase: ``below_naive("chunked", "incident", forward=20, train=8)``."""
    phases = times_of_phase.items()
    return [Budget(form, phase=phase, case=case, times_below_naive=times) for phase, times in phases]  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """ "The peak grows at most like T^1": over the upper half of a series that doubles ``dim`` from ``case`` on.

    Several dims, as in ``dim="Q K"``, are doubled together.
    """

    form: str = field(kw_only=False)
    dim: str
    at_most: float = 1.0
    case: str
    phase: Phase = "train"
    doublings: int = 4

    def __post_init__(self) -> None:
        _require_phase(self.form, self.phase)
        if not self.dims:
            raise ContractError(f"scaling of {self.form!r}: dim must name a dim, got {self.dim!r}")
        if self.doublings < 3:
            raise ContractError(
                f"scaling of {self.form!r}: doublings must be at least 3 to show growth, got {self.doublings}"
            )

    @property
    def dims(self) -> tuple[str, ...]:
        return tuple(self.dim.split())

    def power(self, exponent: str) -> str:
        """``T^2``, or ``(Q K)^2`` where both are doubled."""
        return f"{self.dim if len(self.dims) == 1 else f'({self.dim})'}^{exponent}"

    def spelled(self) -> str:
        law = f"grows at most like {self.power(f'{self.at_most:g}')} over {self.doublings} doublings"
        return f"{self.form} [{self.case}, {self.phase}] {law}"


@dataclass(frozen=True, kw_only=True)
class SpeedBudget:
    """The form's time over naive's, interleaved in one process on ``device``, at a case that fits there."""

    form: str = field(kw_only=False)
    case: str
    times_naive: float
    phase: Phase = "train"
    device: Literal["cpu", "cuda"] = "cpu"

    def __post_init__(self) -> None:
        _require_phase(self.form, self.phase)

    def spelled(self) -> str:
        place = f"[{self.case}, {self.phase}, {self.device}]"
        return f"{self.form} {place} takes at most {self.times_naive:g}x naive's time"


def _require_phase(form: str, phase: str, allowed: Sequence[str] = PHASES) -> None:
    if phase not in allowed:
        raise ContractError(f"budget of {form!r}: unknown phase {phase!r}{did_you_mean(phase, allowed)}")
