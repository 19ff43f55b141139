"""A failure without a line of its own points to the form that failed, or to its contract."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from memfix.checks.finding import Finding
from memfix.contract import Contract
from memfix.gate.definitions import with_definitions
from memfix.gate.judge import Verdict
from memfix.registry import all_contracts

EMBEDDING = all_contracts()["embedding"]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2


def plain(x: Any, factor: int) -> Any:
    return x * factor


class Object:
    def __call__(self, x: Any) -> Any:
        return x


def with_own_form(function: Any) -> Contract:
    own = replace(EMBEDDING.forms["gather"], function=function)
    return replace(EMBEDDING, forms={"own": own}, budgets=[], scaling=[], speed=[])


def source_of(finding: Finding, contract: Any = EMBEDDING) -> str:
    (found,) = with_definitions(Verdict((), (finding,), "simulated"), [contract]).findings
    return found.source.replace("\\", "/")


def failure(op: str = "embedding", form: str = "gather", **more: Any) -> Finding:
    return Finding("equality", op, form, "fail", "off", **more)


def test_a_form_is_where_its_function_is() -> None:
    assert source_of(failure()).startswith("memfix/ops/embedding/gather.py:")


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (Doubled.apply, Doubled.forward.__code__.co_firstlineno),
        (functools.partial(plain, factor=2), plain.__code__.co_firstlineno),
        (functools.wraps(plain)(lambda x: x), plain.__code__.co_firstlineno),
    ],
    ids=["an autograd function", "a partial", "a wrapper"],
)
def test_wrappers_are_looked_through(function: Any, line: int) -> None:
    contract = with_own_form(function)
    assert source_of(failure(form="own"), contract) == f"tests/gate/test_definitions.py:{line}"


def test_a_finding_about_the_whole_op_and_a_form_without_code_point_to_the_contract() -> None:
    line = source_of(failure(form=""))
    assert line.startswith("memfix/ops/embedding/contract.py:")
    assert not line.endswith(":1"), "the line of the contract, and not of the file"
    assert source_of(failure(form="own"), with_own_form(Object())) == line


def test_a_line_that_is_known_stays_and_passes_and_unknown_ops_have_none() -> None:
    assert source_of(failure(source="loss.py:41")) == "loss.py:41"
    assert source_of(replace(failure(), status="pass")) == ""
    assert source_of(failure(op="gate")) == ""
    assert source_of(failure(op="own", form=""), replace(EMBEDDING, name="own")) == ""
