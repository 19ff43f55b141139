"""A contract may name a floor: called like a form, and never a form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memfix.checks.form_call import StepOf
from memfix.checks.inputs import Draw, make_inputs
from memfix.contract import FLOOR, Contract, Dim, TensorSpec
from memfix.errors import ContractError
from memfix.registry import contracts


def a_contract(**changed: Any) -> Contract:
    given: dict[str, Any] = {"naive": abs, "forms": {"same": abs}, **changed}
    return Contract("own", dims={"N": Dim(1, 9)}, inputs=[TensorSpec("x", "N")], cases={"a": {"N": 4}}, **given)


def test_the_floor_takes_the_inputs_and_the_settings_of_a_case() -> None:
    seen = []

    def floor(x: torch.Tensor, *, N: int) -> None:
        seen.append((tuple(x.shape), N, torch.is_grad_enabled()))

    contract = a_contract(floor=floor)
    StepOf(contract, FLOOR, Draw(contract.cases["a"]), "forward")("cpu")()
    assert seen == [((4,), 4, False)]
    assert FLOOR not in contract.forms


def test_without_a_floor_there_is_none() -> None:
    with pytest.raises(ContractError, match="own has no form 'floor'"):
        a_contract().function(FLOOR)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"forms": {"floor": abs}}, "own: 'floor' is the work below all forms and cannot be the name of a form"),
        ({"forms": {"naive": abs}}, "own: 'naive' is the reference and cannot be the name of a form"),
        ({"floor": lambda x, chunk: x}, "own: floor takes 'chunk', which is no input, dim or choice"),
        ({"floor": 3}, "own: floor must be callable, got 3"),
    ],
)
def test_a_floor_that_cannot_be_called_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        a_contract(**changed)


@pytest.mark.parametrize("rows_per_piece", [None, 8, 16, 5])
def test_the_floor_of_the_loss_is_three_products_of_the_whole_size(rows_per_piece: int | None) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    (contract,) = contracts(["linear_cross_entropy"])
    case = contract.case_of("here", {"N": 16, "D": 32, "V": 500, "rows_per_chunk": 4})
    tensors = make_inputs(contract, Draw(case), "cpu")
    with FlopCounterMode(display=False) as counter:
        contract.function(FLOOR)(*tensors.values(), rows_per_piece=rows_per_piece)
    assert counter.get_total_flops() == 3 * 2 * 16 * 32 * 500
