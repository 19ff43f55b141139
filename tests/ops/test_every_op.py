"""Every op that the registry finds, held to its contract on a GPU. Nothing here is written for one op.

Without a GPU ``ci/gate`` proves every form: equality, bad inputs, budgets, growth, leaks, kernels and the lock.
``ci/gpu time`` holds the times: 16 workers that compile kernels beside a timed step slow it down.
"""

from __future__ import annotations

import importlib
import math

import memfix
from memfix import Contract
from memfix.registry import all_contracts, source_of


def _longest_first(op: Contract) -> tuple[bool, int]:
    """Ops with kernels, which are compiled for a minute a form, then those whose first case is large: while a long test
    runs on one worker, the others run the rest."""
    has_kernels = any(form.has_kernels for form in op.forms.values())
    return not has_kernels, -math.prod(next(iter(op.cases.values())).dims.values())


IN_ORDER = sorted(all_contracts().values(), key=_longest_first)
test_op = memfix.suite(*IN_ORDER, only="gpu", speed=False)


def test_the_package_of_a_contract_offers_a_function_named_like_the_op() -> None:
    """Or by the first words of it: ``kda_wide`` is ``kda`` of wide keys."""
    for name in all_contracts():
        package = importlib.import_module(source_of(name).module.rpartition(".")[0])
        words = name.split("_")
        offered = [getattr(package, "_".join(words[:n]), None) for n in range(1, len(words) + 1)]
        assert any(map(callable, offered)), f"{package.__name__} must offer the function {name}"
