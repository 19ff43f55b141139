"""Lower the constants of a form's modules while it is compared, as its contract says, so that small calls exceed them.

A tile of 1024 columns, or a sum in parts of 512 rows, is one tile and one part in every call that is small enough to
compare. The code for the second one would never run.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator

from ..contract import Contract
from ..errors import ContractError
from ..meters.simulated.patches import Patch, applied


@contextlib.contextmanager
def lowered_constants(contract: Contract, form: str) -> Iterator[None]:
    """Inside, the constants that ``Form.compared_with`` names have its values."""
    with applied([_patch(contract, form, name, value) for name, value in contract.forms[form].compared_with.items()]):
        yield


def _patch(contract: Contract, form: str, dotted: str, value: object) -> Patch:
    module_name, _, name = dotted.rpartition(".")
    try:
        module = importlib.import_module(module_name)
        type_now = type(getattr(module, name))
    except (ImportError, AttributeError, ValueError):
        raise ContractError(f"{contract.name}/{form}: compared_with names {dotted!r}, which is not there") from None
    if type_now is not type(value):
        types = f"is of type {type_now.__name__}, and compared_with has a {type(value).__name__}"
        raise ContractError(f"{contract.name}/{form}: {dotted} {types}")
    return module, name, value
