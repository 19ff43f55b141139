"""Forms that are wrong on purpose. Each file names the check that must catch it; the honest form must pass."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from memfix import Contract
from memfix.checks import equality
from memfix.checks.draws import smallest_failure
from memfix.checks.effort import PROFILES, Effort
from memfix.checks.examine import examine
from memfix.meters import get_meter
from memfix.registry import all_contracts

WRONG_ANSWERS = Effort("wrong answers", equality_examples=32, memory_examples=0)
# one that gives the right answer, and takes too much memory for it, need not be asked often whether it does
TOO_MUCH_MEMORY = Effort("too much memory", equality_examples=4, memory_examples=8)
CHEATS = sorted(path for path in Path(__file__).parent.glob("*.py") if not path.name.startswith("test_"))


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"cheat_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def held_to(op: str, like: str, *, to_answers_only: bool = False) -> Contract:
    """The op's contract with the one honest form, and without the incident: a cheat must be caught far below it.

    Without laws of memory, where ``to_answers_only``: nobody needs to know how much a wrong answer takes.
    """
    whole = all_contracts()[op]
    cases = {name: case for name, case in whole.cases.items() if name != "incident"}
    if to_answers_only:
        cases = {"small": cases["small"]}

    def kept(laws: Sequence[Any]) -> list[Any]:
        return [law for law in laws if law.form == like and law.case in (None, *cases) and not to_answers_only]

    return replace(
        whole,
        forms={like: whole.forms[like]},
        cases=cases,
        budgets=kept(whole.budgets),
        scaling=kept(whole.scaling),
        speed=(),
    )


@pytest.fixture(autouse=True)
def any_failure_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simplest is looked for in ``tests/checks``."""
    monkeypatch.setattr(equality, "smallest_failure", partial(smallest_failure, shrinks=0))


@pytest.mark.parametrize("path", CHEATS, ids=lambda path: path.stem)
def test_cheat_is_caught_by_the_check_it_names(path: Path) -> None:
    cheat = load(path)
    gives_wrong_answers = cheat.CAUGHT_BY == "equality"
    honest = held_to(cheat.OP, cheat.LIKE, to_answers_only=gives_wrong_answers)
    contract = honest.with_form("cheat", cheat.form, like=cheat.LIKE)
    effort = WRONG_ANSWERS if gives_wrong_answers else TOO_MUCH_MEMORY
    findings = examine(contract, get_meter("simulated"), effort, forms=["cheat"]).findings
    failed = {finding.check for finding in findings if finding.status == "fail"}
    assert not any("raises TypeError" in finding.message for finding in findings), "it was not even called"
    assert cheat.CAUGHT_BY in failed, "\n".join(finding.text() for finding in findings if finding.status != "pass")


@pytest.mark.parametrize(("op", "form"), sorted({(load(path).OP, load(path).LIKE) for path in CHEATS}))
def test_honest_form_beside_the_cheats_passes(op: str, form: str) -> None:
    """Under the laws as they are cut down here; ``tests/ops`` looks at the whole of them, and harder."""
    findings = examine(held_to(op, form), get_meter("simulated"), PROFILES["dev"], forms=[form]).findings
    assert [finding.text() for finding in findings if finding.status in ("fail", "error")] == []


def test_there_are_cheats_for_every_kind_of_check() -> None:
    assert {load(path).CAUGHT_BY for path in CHEATS} >= {"equality", "budget", "leak", "scaling", "bad input"}
