"""Every op that the registry finds, held to its contract on a GPU. Nothing here is written for one op.

Without a GPU ``ci/gate`` proves every form: equality, bad inputs, budgets, growth, leaks, kernels and the lock.
``ci/gate --time`` holds the times.
"""

from __future__ import annotations

import memfix
from memfix.registry import all_contracts

test_op = memfix.suite(*all_contracts().values(), only="gpu")


def test_product_functions_are_named_like_their_folder() -> None:
    import importlib

    for name in all_contracts():
        module = importlib.import_module(f"memfix.ops.{name}")
        assert callable(getattr(module, name)), f"memfix.ops.{name} must offer the function {name}"
