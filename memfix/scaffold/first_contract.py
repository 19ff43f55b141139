"""Makes the first contract of an op: drafts it from an example call, checks equality, and adds laws that hold today."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..checks.effort import Effort
from ..checks.examine import Examination, Tools, put_together, run_checks
from ..checks.finding import Finding, exit_code_of
from ..checks.plan import gate_plan
from ..contract import WORKING_DTYPES, Contract
from ..errors import MemfixError, UsageError, did_you_mean
from ..meters.base import Meter
from ..progress import Say, silent
from .budgets import laws_that_hold, widened
from .example import CASE, arguments_of, contract_of_example
from .probing import with_sizes_that_run
from .references import function_named


class FormsDoNotPass(MemfixError):
    """The forms do not pass: nothing is written."""

    def __init__(self, what: str, finding: Finding) -> None:
        super().__init__(f"{what}, so nothing was written:\n{replace(finding, reproduce='').text()}")
        self.exit_code = exit_code_of([finding])


@dataclass(frozen=True)
class Request:
    """The op's name, dtypes and references to functions from the command line."""

    name: str
    naive: str
    forms: Mapping[str, str]
    example: str
    dtypes: tuple[str, ...] = WORKING_DTYPES

    @staticmethod
    def of(name: str, naive: str, forms: Sequence[str], example: str, dtypes: str | None) -> Request:
        """Parse the options, such as ``--form chunked=pkg.losses:chunked_loss``."""
        if not name.isidentifier():
            raise UsageError(f"the name of an op must be a Python name, got {name!r}")
        named = {}
        for form in forms:
            word, equals, reference = form.partition("=")
            if not equals or word in named:
                raise UsageError(f"--form must be NAME=MODULE:FUNCTION, with a different NAME each time, got {form!r}")
            named[word] = reference
        chosen = tuple(dtypes.split(",")) if dtypes else WORKING_DTYPES
        for dtype in chosen:
            if dtype not in WORKING_DTYPES:
                raise UsageError(f"--dtypes: no dtype {dtype!r}{did_you_mean(dtype, WORKING_DTYPES)}")
        return Request(name, naive, named, example, chosen)


@dataclass(frozen=True)
class FirstContract:
    """A contract that passes, notes about it, and its examination."""

    contract: Contract
    notes: tuple[str, ...]
    examination: Examination


def first_contract(request: Request, meter: Meter, effort: Effort, say: Say = silent) -> FirstContract:
    naive = function_named("--naive", request.naive)
    forms = {name: function_named(f"--form {name}", reference) for name, reference in request.forms.items()}
    arguments = arguments_of(function_named("--example", request.example), request.example, naive)
    say("the example call")
    draft = with_sizes_that_run(
        contract_of_example(request.name, naive, forms, arguments, request.dtypes), _tensors(arguments)
    )
    say("equality with naive")
    tools = Tools(meter, effort, say)
    found = run_checks(draft, gate_plan(draft, meter), tools, {})
    require_pass(put_together(draft, gate_plan(draft, meter), found).findings, request)
    say("budgets")
    measured = laws_that_hold(draft, meter, num_samples=4 * effort.memory_examples)
    notes = [*_shared_sizes(draft), *measured.notes]

    def judged(contract: Contract) -> Examination:
        """Reuse what was found for the draft; run only the checks of the laws."""
        plan = gate_plan(contract, meter)
        every = run_checks(contract, [check for check in plan if check not in found], tools, {**found})
        return put_together(contract, plan, every)

    contract = replace(draft, budgets=measured.budgets, scaling=measured.scaling)
    examination = judged(contract)
    if exit_code_of(examination.findings):
        contract = widened(contract)
        notes.append("  a formula did not hold at every drawn shape: all formulas were multiplied by 1.5")
        examination = judged(contract)
        require_pass(examination.findings, request)
    return FirstContract(contract, tuple(notes), examination)


def _tensors(arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}


def require_pass(findings: Sequence[Finding], request: Request) -> None:
    bad = [finding for finding in findings if finding.status in ("fail", "error")]
    if not bad:
        return
    first = min(bad, key=lambda finding: finding.status != "fail")
    if first.check == "equality" and first.form in request.forms:
        what = f"{request.forms[first.form]} is not equal to {request.naive}"
        only = "  if it has to be equal only in some dtypes, name them: --dtypes float32,bfloat16"
        first = replace(first, details=(*first.details, only))
    else:
        what = f"{first.check} fails" if first.status == "fail" else f"{first.check} could not be judged"
    raise FormsDoNotPass(what, first)


def _shared_sizes(contract: Contract) -> list[str]:
    """Return a note for each dim that lists the inputs with such an axis: equal sizes in the example are one dim."""
    case = contract.cases[CASE]
    notes = []
    for dim in contract.shape_dims():
        named = [spec.name for spec in contract.inputs if dim in spec.axes]
        if not named:
            continue
        low, high = contract.dims[dim].low, contract.dims[dim].high
        only = f"; naive runs with {low} only" if low == high else ""
        notes.append(f"{dim} = {case.dims[dim]}: an axis of {', '.join(named)}{only}")
    return notes
