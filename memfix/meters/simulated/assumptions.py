"""Values that a step asks for and simulated tensors do not have, where training data has one usual answer.

Each assumption is a note in the reading, which is then an estimate. Any other value is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten

_NO_ZEROS = "no element is zero"
_IN_BACKWARD_OF = {"ProdBackward": _NO_ZEROS, "CumprodBackward": _NO_ZEROS}
"""Backward node that looks at values -> what is assumed of them."""
_ANSWER = "_memfix_answer"


def remember_question(operator: Any, args: tuple[Any, ...], result: Any) -> None:
    """Mark a result that is one number about a mask with its usual value, in case that is asked for."""
    if hasattr(result, _ANSWER):
        delattr(result, _ANSWER)  # written in place: another number now
    packet = operator.overloadpacket
    if packet not in (aten.sum, aten.all, aten.any) or args[0].dtype != torch.bool or result.numel() != 1:
        return
    if packet is aten.sum:
        answer = "the step counts the elements of a mask: assumed that all take part", args[0].numel()
    elif packet is aten.all:
        answer = "the step asks whether all of a mask is set: assumed that it is", True
    else:
        answer = "the step asks whether any of a mask is set: assumed that none is", False
    setattr(result, _ANSWER, answer)


def assumed_answer(operator: Any, args: tuple[Any, ...]) -> tuple[str, Callable[[], Any]] | None:
    """For an operator that reads values in a known situation: what is assumed, and how to make the answer."""
    if operator is aten.equal.default:
        return "the step compares tensors by torch.equal: assumed that they are equal", lambda: True
    if operator not in (aten._local_scalar_dense.default, aten.nonzero.default):
        return None
    node = torch._C._current_autograd_node()
    known = next((name for name in _IN_BACKWARD_OF if node is not None and node.name().startswith(name)), None)
    if known is None:
        known_answer = getattr(args[0], _ANSWER, None)
        return None if known_answer is None else (known_answer[0], lambda: known_answer[1])
    note = f"{known} looks at values: assumed that {_IN_BACKWARD_OF[known]}"
    if operator is aten.nonzero.default:
        return note, lambda: torch.empty((0, args[0].dim()), dtype=torch.int64, device="cuda")
    return note, lambda: False if args[0].dtype == torch.bool else 0
