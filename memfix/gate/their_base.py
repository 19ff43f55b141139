"""Judge today's forms of other packages by the laws of another commit, and compare the bytes of the two.

The package as it was is imported beside today's, under another name, as the time gate does. Its contract with today's
functions for its forms is examined where the laws may differ: where a file changed that the contract or naive uses.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checks.examine import Examination, Tools, put_together, run_checks
from ..checks.finding import Finding
from ..checks.plan import MEASURED, gate_plan
from ..contract import Contract
from ..laws import NAIVE
from ..meters.base import Reading
from ..registry import Source, all_contracts, source_of
from .base import law_changes
from .commit import is_tracked
from .definitions import definition_of
from .judge import judge_against_base, lockable_readings
from .module_graph import files_used, package_of
from .timing.base_checkout import BaseCheckouts
from .timing.import_base import NotAtBase, contract_at_base, ops_at_base


def under_their_laws(base: BaseCheckouts, contracts: Sequence[Contract], tools: Tools) -> Iterator[Finding]:
    """Note how the laws of ``contracts`` differ from the base's, and judge today's forms by the base's."""
    sources = {contract.name: source_of(contract.name) for contract in contracts if contract.name in base.folders}
    for contract in contracts:
        source = sources.get(contract.name)
        if source is None or not _laws_may_differ(base, contract, source):
            continue
        then = _at_base(base, contract.name)
        if isinstance(then, Finding):
            yield then
            continue
        if contract.laws() != then.laws() or _source(contract) != _source(then):
            yield from law_changes(contract, then.laws(), base.ref)
        tools.say(f"{contract.name}: today's forms under the laws of {base.ref}")
        yield from _under_laws(base.ref, _with_forms_of(then, contract), tools)
    folders = {source: base.folders[op] for op, source in sources.items()}
    then_there = {op for source, folder in folders.items() for op in _ops_then(folder, source)}
    for op in sorted(then_there - all_contracts().keys()):
        yield Finding("law", op, "", "note", f"the op is there at {base.ref} and gone now")


def bytes_against_base(
    base: BaseCheckouts, contracts: Sequence[Contract], examinations: Sequence[Examination], tools: Tools
) -> Iterator[Finding]:
    """Compare today's bytes with those of the base's forms, measured now: where no lock holds them, growth fails."""
    today = lockable_readings(examinations)
    for contract in contracts:
        if contract.name not in base.folders or isinstance(then := _at_base(base, contract.name), Finding):
            continue  # reported where the laws are compared
        tools.say(f"{contract.name}: the bytes of its forms at {base.ref}")
        before = _readings(then, [form for form in then.forms if form in contract.forms], tools)
        for key, reading in before.items():
            if key in today:
                yield judge_against_base(key, today[key], reading, base.ref)


def under_laws_of(ref: str, found: Sequence[Finding]) -> list[Finding]:
    """Return the findings under the base's laws, without their commands, which would run under today's laws."""
    return [
        replace(f, check="base law", message=f"under the laws of {ref}: {f.check}: {f.message}", reproduce="")
        for f in found
        if f.status != "note"
    ]


def _laws_may_differ(base: BaseCheckouts, contract: Contract, source: Source) -> bool:
    """Whether a file has changed that the contract or naive uses, files of forms aside."""
    laws = {source.module, definition_of(contract.naive)[0]}
    forms = {definition_of(form.function)[0] for form in contract.forms.values()} - laws
    package, top = package_of(source.module), source.module.partition(".")[0]
    assert package is not None
    changed = base.commits[package].changed_files()
    return not files_used(laws, lambda name: name == top, forms).isdisjoint(changed)


def _at_base(base: BaseCheckouts, op: str) -> Contract | Finding:
    """Return the contract at the base, or a finding that says why there is none."""
    try:
        then: Contract = contract_at_base(base.folders[op], source_of(op), op)
    except NotAtBase as reason:
        return Finding("law", op, "", "note", f"no law at {base.ref}: {reason}")
    except Exception as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        return Finding("base law", op, "", "error", f"the package cannot be used as it was at {base.ref}: {what}")
    if shared := _shared_function(base, all_contracts()[op], then):
        message = f"{shared} is one and the same at {base.ref}: declare the contract in the package of its functions"
        return Finding("base law", op, "", "error", message)
    return then


def _shared_function(base: BaseCheckouts, today: Contract, then: Contract) -> str:
    """Name a function that both contracts share: one from another package of the checkout, which is not exported."""
    for name in (NAIVE, *(form for form in then.forms if form in today.forms)):
        module, function = definition_of(today.function(name))
        package = package_of(module) if then.function(name) is today.function(name) else None
        if any(is_tracked(commit.root, package) for commit in base.commits.values()):
            return f"{module}.{function}"
    return ""


def _ops_then(folder: Path, source: Source) -> list[str]:
    try:
        return ops_at_base(folder, source)
    except Exception:  # reported where its laws are compared
        return []


def _source(contract: Contract) -> str:
    try:
        return inspect.getsource(contract.naive)
    except (OSError, TypeError):
        return ""


def _with_forms_of(then: Contract, today: Contract) -> Contract:
    """Return the contract ``then`` with today's functions, for the forms that still exist."""
    forms = {
        name: replace(form, function=today.forms[name].function)
        for name, form in then.forms.items()
        if name in today.forms
    }

    def kept(laws: Sequence[Any]) -> list[Any]:
        return [law for law in laws if law.form in forms]

    return replace(
        then, forms=forms, budgets=kept(then.budgets), scaling=kept(then.scaling), speed=kept(then.speed)
    )  # fmt: skip


def _under_laws(ref: str, contract: Contract, tools: Tools) -> Iterator[Finding]:
    """Judge today's forms by the contract of the commit ``ref``."""
    plan = gate_plan(contract, tools.meter)
    # the process that interprets kernels cannot import the base's package
    left_out = [check for check in plan if check.place == "interpreter"]
    for form in dict.fromkeys(check.form for check in left_out):
        message = f"without a GPU its kernels are compared with today's naive, and not with that of {ref}"
        yield Finding("law", contract.name, form, "note", message)
    here = [check for check in plan if check not in left_out]
    found = run_checks(contract, here, tools, {})
    yield from under_laws_of(ref, put_together(contract, plan, found).findings)


def _readings(contract: Contract, forms: Sequence[str], tools: Tools) -> dict[tuple[str, str, str, str], Reading]:
    plan = [check for check in gate_plan(contract, tools.meter) if check.kind in MEASURED and check.form in forms]
    found = run_checks(contract, plan, tools, {})
    return {
        (contract.name, check.form, check.case, phase): reading
        for check, outcome in found.items()
        for phase, reading in outcome.readings.items()
    }
