"""Finds budgets that hold today, with the simulated meter: a ratio to naive, formulas of the dims, and bytes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from ..checks.draws import memory_calls
from ..checks.form_call import FormCall
from ..checks.measuring import measure_phases
from ..checks.memory import bytes_of
from ..checks.scaling import check_scaling
from ..contract import Contract
from ..formula import Formula
from ..laws import NAIVE, Budget, Phase, Scaling
from ..meters.base import Meter
from ..units import format_bytes
from .example import CASE

HEADROOM = 1.05
_WORTH_A_RATIO = 1.2
_MAX_SLACK_RATIO = 1.35
"""If a formula allows more than this multiple of the example's bytes, the example gets a budget in bytes too."""
_MOST_TERMS = 6
_ROUNDS = 12
_UNDERESTIMATE_WEIGHT = 30.0
"""The weight of a sample that the fit is below, relative to one that it is above."""
_SLACK = 4096
"""Bytes that a formula allows in addition to its terms, for scalars and the like."""


@dataclass
class Measured:
    """The laws that hold today, and notes about each form."""

    budgets: list[Budget] = field(default_factory=list)
    scaling: list[Scaling] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def laws_that_hold(contract: Contract, meter: Meter, *, num_samples: int) -> Measured:
    found = Measured()
    for form in contract.forms:
        _add_laws(found, contract, form, meter, num_samples)
    return found


def _add_laws(found: Measured, contract: Contract, form: str, meter: Meter, num_samples: int) -> None:
    phases: list[Phase] = ["train", "held"] if any(spec.grad for spec in contract.inputs) else ["forward"]
    peak, notes = phases[0], found.notes
    naive, used = (_bytes(FormCall.at_case(contract, name, CASE), phases, meter) for name in (NAIVE, form))
    ratio = naive[peak] / max(1, used[peak])
    notes.append(
        f"{form}: {format_bytes(used[peak])} in {peak}, {ratio:.2g}x below naive's {format_bytes(naive[peak])}"
    )
    if ratio >= _WORTH_A_RATIO:
        times = _round_down_two_digits(ratio / HEADROOM)
        found.budgets.append(Budget(form, phase=peak, case=CASE, times_below_naive=times))
    else:
        notes.append("  it saves little at these sizes; a larger example may show more")
    samples = _samples(contract, form, phases, meter, num_samples)
    for phase in phases:
        formula = formula_above(samples[phase], _terms(contract))
        allowed = Formula(formula).evaluate(contract.formula_values(contract.cases[CASE]))
        found.budgets.append(Budget(form, phase=phase, bytes=formula))
        above = f"{allowed / used[phase] - 1:.0%} above today" if used[phase] >= _SLACK else ""
        today = above or f"today {format_bytes(used[phase])}"
        notes.append(f"  {phase}: at most {formula} at every shape, {today} at the example")
        if allowed > _MAX_SLACK_RATIO * used[phase] + _SLACK:  # other layouts or dtypes take more
            size = math.ceil(used[phase] * HEADROOM)
            found.budgets.append(Budget(form, phase=phase, case=CASE, bytes=size))
            notes.append(f"  {phase}: at most {format_bytes(size)} at the example, 5 % above today")
    for dim in contract.shape_dims():
        law = Scaling(form, dim=dim, at_most=1, case=CASE, phase=peak)
        grows = contract.dims[dim].low < contract.dims[dim].high
        if grows and check_scaling(contract, law, meter).status == "pass":
            found.scaling.append(law)


def _round_down_two_digits(ratio: float) -> float:
    unit = 10 ** (math.floor(math.log10(ratio)) - 1)
    return float(f"{math.floor(ratio / unit) * unit:.2g}")


def _bytes(call: FormCall, phases: Sequence[Phase], meter: Meter) -> dict[Phase, int]:
    return {phase: bytes_of(reading, phase) for phase, reading in measure_phases(call, phases, meter).items()}


@dataclass(frozen=True)
class Sample:
    """The values of a formula's names, and the bytes measured there. ``is_whole``: no input is frozen."""

    values: dict[str, int]
    bytes: int
    is_whole: bool = True


def _samples(
    contract: Contract, form: str, phases: Sequence[Phase], meter: Meter, num_samples: int
) -> dict[Phase, list[Sample]]:
    draws = [call.draw for call in memory_calls(contract, num_samples)]
    samples: dict[Phase, list[Sample]] = {phase: [] for phase in phases}
    for call in (FormCall.at_case(contract, form, CASE), *(FormCall(contract, form, draw) for draw in draws)):
        values = contract.formula_values(call.draw.case)
        for phase, size in _bytes(call, phases, meter).items():
            samples[phase].append(Sample(values, size, not call.draw.frozen))
    return samples


def _terms(contract: Contract) -> list[str]:
    """The terms that a formula may have: products of up to three dims, times the item size, 1 byte, or at least 4."""
    most = min(3, max(len(spec.axes) for spec in contract.inputs) + 1)
    names = [dim for dim, spec in contract.dims.items() if spec.low < spec.high]
    products = ["*".join(some) for n in range(1, most + 1) for some in itertools.combinations(names, n)]
    return [f"{product}{unit}" for product in products for unit in ("*e", "", "*max(e, 4)")]


def formula_above(samples: Sequence[Sample], terms: Sequence[str]) -> str:
    """Return a formula that no sample exceeds: the shortest that is near the first sample, or else the nearest to it.

    A peak is often the larger of two sums, so the fit is an upper bound of the samples, not their average.
    """
    measured = torch.tensor([sample.bytes for sample in samples], dtype=torch.float64).clamp(min=1)
    columns = torch.tensor(
        [[Formula(term).evaluate(sample.values) for term in terms] for sample in samples], dtype=torch.float64
    )
    whole = torch.tensor([sample.is_whole for sample in samples])
    shares = (columns / measured[:, None])[whole]
    chosen: list[int] = []
    found: list[tuple[float, str]] = []
    for _ in range(min(_MOST_TERMS, len(terms))):
        left = [index for index in range(len(terms)) if index not in chosen]
        chosen.append(min(left, key=lambda index: _fitted(shares[:, [*chosen, index]])[1]))
        some = columns[:, chosen]
        factors = _rounded(_fitted(shares[:, chosen])[0])
        missing = ((measured - _SLACK) / (some @ factors).clamp(min=1)).max()
        if missing > 1:
            factors = _rounded(factors * missing + 0.02)
        pairs = [(factor, terms[index]) for factor, index in zip(factors.tolist(), chosen, strict=True) if factor]
        text = " + ".join([*(f"{factor:g}*{term}" if factor != 1 else term for factor, term in pairs), str(_SLACK)])
        found.append((float(some[0] @ factors), text))
        if found[-1][0] <= _MAX_SLACK_RATIO * measured[0]:
            return text
    return min(found)[1]


def _fitted(shares: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return factors with which the terms sum to 1 or slightly more, and the squared error; sums below 1 weigh more."""
    weights = torch.ones(len(shares), 1, dtype=shares.dtype)
    for _ in range(_ROUNDS):
        factors = _least_squares(weights * shares, weights)
        off = shares @ factors - 1
        weights = 1 + (_UNDERESTIMATE_WEIGHT - 1) * (off < -1e-3).to(shares.dtype)[:, None]
    return factors, float((weights[:, 0] * off).square().sum())


def _least_squares(columns: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the least-squares factors; columns whose factor would be negative are left out, with factor 0."""
    kept = list(range(columns.shape[1]))
    found = torch.zeros(columns.shape[1], dtype=columns.dtype)
    while kept:
        factors = torch.linalg.lstsq(columns[:, kept], wanted).solution[:, 0]
        if bool((factors >= 0).all()):
            return found.index_copy(0, torch.tensor(kept), factors)
        del kept[int(factors.argmin())]
    return found


def _rounded(factors: torch.Tensor) -> torch.Tensor:
    """Round up to a multiple of 1/4, after subtracting 0.02: this drops terms that hardly count."""
    return ((factors - 0.02) * 4).ceil().clamp(min=0) / 4


def widened(contract: Contract) -> Contract:
    """Return the contract with 1.5 times as much in its formulas, for formulas that fail at some drawn shape."""
    wider = [
        budget if budget.case is not None else replace(budget, bytes=f"1.5*({budget.bytes})")
        for budget in contract.budgets
    ]
    return replace(contract, budgets=wider)
