"""Check that a form gives naive's outputs and gradients at any shape, chunk size, dtype and layout.

``calls`` draws the calls, ``running`` runs a form and ``reference`` runs naive at each of them, and ``comparing``
compares the two. The form must be as near to the truth as a small factor of naive's own error. A failure is shrunk to
the smallest shape, and the finding carries a line that reproduces it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from ..contract import Contract
from ..cuda_kernels.emulated import cannot_emulate
from ..errors import ContractError
from ..meters.gpu_sharing import gpu_beside_others, make_way_on_gpu
from .calls import Place, equality_calls
from .comparing import Unequal, compare, require_same_nans
from .compiling import compile_ahead
from .draws import smallest_failure
from .finding import Finding
from .form_call import FormCall, phases_of
from .inputs import AUTOCASTS, Draw
from .interpreter import CannotInterpret, InterpreterEnded, in_interpreter
from .interpreter_faults import interpreter_fault
from .long_calls import LONG
from .objects import compare_objects
from .reference import NaiveFailed, reference_at
from .running import run_form

_WIDER = 16
"""Extreme values make every rounding error larger. They must show what overflows, not what is rounded once more."""


def check_equality(
    contract: Contract,
    form: str,
    *,
    dtype: str,
    place: Place = "cpu",
    examples: int = 50,
    seed: int = 0,
    shrinks: int = 200,
) -> Finding:
    """Draw ``examples`` calls in ``dtype`` and compare at ``place``. Another ``seed`` draws other ones.

    A reported form that is known to be unequal in this dtype must be shown unequal, if not by these calls then by many
    more. ``shrinks`` limits the search for the smallest call that fails.
    """
    compared = partial(_compared, form=form, dtype=dtype, place=place, examples=examples, seed=seed, shrinks=shrinks)
    return _at_place(compared, contract, form, place)


def check_equality_at(contract: Contract, form: str, draw: Draw, *, place: Place = "cpu") -> Finding:
    return _at_place(partial(_compared_at, form=form, draw=draw, place=place), contract, form, place)


def compare_once(contract: Contract, form: str, draw: Draw, place: Place = "cpu") -> None:
    """Compare one call with naive. Raises ``Unequal`` or whatever the form raises."""
    call = FormCall(contract, form, draw)
    if contract.has_objects:
        compare_objects(call)
        return
    device = "cuda" if place == "cuda" else "cpu"
    if place == "cuda":
        make_way_on_gpu()  # compiling kernels for every call holds the GPU for a minute
    try:
        reference = reference_at(call, device)
    except NaiveFailed:
        if draw.case.name == LONG:
            return
        raise
    if draw.mode == "twice" and len(reference.naive.tensors) == len(reference.naive.dtypes):
        return  # outputs alone: naive has no second derivative here, so the form need not have one
    answer = run_form(call, reference.inputs, device)
    if draw.mode in AUTOCASTS:
        answer = answer.with_dtypes_of(reference.naive, instead_of=getattr(torch, draw.case.dtype))
    if draw.spoiled is not None:
        require_same_nans(answer, reference)
    else:
        tolerance = contract.tolerance_of(form).times(_WIDER if draw.is_extreme else 1)
        compare(answer, reference, tolerance, call.rounded_to)


# ---------------------------------------------------------------- where
def _at_place(compared: Callable[[Contract], Finding], contract: Contract, form: str, place: Place) -> Finding:
    if place != "interpreter":
        reason = cannot_emulate() if place == "cpu" and contract.forms[form].language == "cuda" else None
        if reason is None:
            return compared(contract)
        message = f"not compared on the CPU, where its kernels must be emulated: {reason}"
        return Finding("equality", contract.name, form, "note", message)
    try:
        # the functions that make bad inputs of good ones cannot be pickled
        return in_interpreter(partial(compared, replace(contract, bad_inputs=())))
    except InterpreterEnded as ended:
        return Finding("equality", contract.name, form, "fail" if ended.is_crash else "error", str(ended))
    except CannotInterpret as reason:
        message = f"not compared on the CPU, where its kernels must be interpreted: {reason}"
        return Finding("equality", contract.name, form, "note", message)


@contextlib.contextmanager
def _without_known_warnings() -> Iterator[None]:
    """Hide harmless warnings: oneDNN fell back to BLAS (with a backtrace from torch), numpy saw only NaN in a row."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed, switching to BLAS")
        warnings.filterwarnings("ignore", message="All-NaN slice encountered")
        yield


# ---------------------------------------------------------------- from calls to a finding
@_without_known_warnings()
def _compared(
    contract: Contract, *, form: str, dtype: str, place: Place, examples: int, seed: int, shrinks: int
) -> Finding:
    known = contract.forms[form].known_unequal.get(dtype)
    for number in (examples, 10 * examples) if known else (examples,):
        calls = equality_calls(contract, form, dtype, number, place=place, seed=seed)
        if place == "cuda" and contract.forms[form].is_interpreted:
            compile_ahead([FormCall(contract, form, call.draw).step(phases_of(contract)[-1]) for call in calls])
        with gpu_beside_others() if place == "cuda" else contextlib.nullcontext():
            failure = smallest_failure(
                lambda draw: compare_once(contract, form, draw, place),
                calls,
                shrinks=0 if known else shrinks,  # a known failure need not be the simplest
            )
        if failure is not None:
            return _failed(contract, form, *failure, place)
    message = f"{dtype}: equal in {number} drawn calls on {'cuda' if place == 'cuda' else 'cpu'}"
    if known is not None:
        message += f" (a reported form suddenly is equal; known unequal: {known})"
    return Finding("equality", contract.name, form, "pass" if known is None else "fail", message)


@_without_known_warnings()
def _compared_at(contract: Contract, *, form: str, draw: Draw, place: Place) -> Finding:
    try:
        compare_once(contract, form, draw, place)
    except Exception as error:
        return _failed(contract, form, draw, error, place)
    message = f"equal at {draw.spelled()}"
    if draw.case.dtype in contract.forms[form].known_unequal:  # it need not be unequal everywhere
        message += f"; known unequal at other calls in {draw.case.dtype}"
    return Finding("equality", contract.name, form, "pass", message)


def _failed(contract: Contract, form: str, draw: Draw, error: Exception, place: Place) -> Finding:
    if isinstance(error, NaiveFailed):
        message = f"naive itself fails at {draw.spelled()}: {error}"
        return Finding("equality", contract.name, form, "error", message)
    if isinstance(error, ContractError):  # raised by the function that makes an input's values
        return Finding("equality", contract.name, form, "error", f"no call can be made at {draw.spelled()}: {error}")
    if fault := interpreter_fault(error):
        return Finding("equality", contract.name, form, "error", f"{draw.case.dtype}: could not be compared: {fault}")
    what = str(error) if isinstance(error, Unequal) else f"raises {type(error).__name__}: {error}"
    first, *more = what.splitlines() or [""]
    call = FormCall(contract, form, draw)
    if call.left_to_defaults:
        more = [f"called without {', '.join(call.left_to_defaults)}, whose values are naive's defaults", *more]
    # only a wrong answer is known of the form: one that raises is broken in a new way
    reason = contract.forms[form].known_unequal.get(draw.case.dtype)
    known = reason if isinstance(error, Unequal) else None
    return Finding(
        check="equality",
        op=contract.name,
        form=form,
        status="fail" if known is None else "pass",
        message=f"{draw.case.dtype}: {first}" + (f" (known unequal: {known})" if known else ""),
        details=(f"  {'' if reason else 'smallest '}call found: {draw.spelled()}", *(f"  {line}" for line in more[:7])),
        reproduce=call.command + (" --device cuda" if place == "cuda" else ""),
        known="not equal" if known else "",
    )
