"""Answers for steps that read values: simulated tensors have none, but training data often has one usual answer.

Each assumption is a note in the reading, which is then an estimate. A step that reads any other value is refused. If
the builder of the step stated the range of its integers, a count that follows from it is exact, without a note.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten

_NO_ZEROS = "no element is zero"
_IN_BACKWARD_OF = {"ProdBackward": _NO_ZEROS, "CumprodBackward": _NO_ZEROS}
"""The name of a backward node that reads values -> what is assumed about them."""
_ANSWER, _MASK = "_memfix_answer", "_memfix_mask"
_RANGE, _ALL_SET = "_memfix_range", "_memfix_all_set"
_MARKS = frozenset((_ANSWER, _MASK, _RANGE, _ALL_SET))


def state_range(tensor: torch.Tensor, low: int, high: int) -> None:
    """State that every element of ``tensor`` is at least ``low`` and below ``high``, as in real inputs of the step."""
    setattr(tensor, _RANGE, (low, high))


def remember_question(operator: Any, args: tuple[Any, ...], result: Any) -> None:
    """Attach the usual value to a result that is one number about a mask, in case the step reads it."""
    for mark in _MARKS.intersection(getattr(result, "__dict__", ())):
        delattr(result, mark)  # the operator wrote in place, so the old value no longer holds
    packet = operator.overloadpacket
    if packet not in _SAYS_SOMETHING:
        return
    first: Any = args[0] if args else None
    if _is_all_set(packet, args):
        setattr(result, _ALL_SET, True)
    if packet in _CASTS and _is_mask(first):
        setattr(result, _MASK, True)
    elif packet in _CASTS or packet in (aten.clamp, aten.clamp_min):
        _pass_on(packet, args, result)
    elif packet in (aten.sum, aten.all, aten.any) and _is_mask(first) and result.numel() == 1:
        setattr(result, _ANSWER, _usual_answer(packet, first))


_ALL_CHOSEN = "the step picks elements by a mask: assumed that all are picked, which is the most there can be"


def _without_masks(indices: list[Any]) -> list[Any]:
    """Replace each mask by index tensors, one for each of its dimensions, as indexing does."""
    places: list[Any] = []
    for index in indices:
        if _is_boolean(index):
            found = torch.empty((index.numel(), index.dim()), dtype=torch.int64, device=index.device)
            places += found.unbind(1)
        else:
            places.append(index)
    return places


_CASTS = (aten._to_copy, aten.clone, aten.detach)


_ALWAYS_HOLDS: dict[Any, Callable[[int, int, int], bool]] = {
    aten.ne: lambda low, high, number: not low <= number < high,
    aten.ge: lambda low, high, number: number <= low,
    aten.lt: lambda low, high, number: high <= number,
}


_SAYS_SOMETHING = frozenset(
    (*_CASTS, *_ALWAYS_HOLDS, aten.bitwise_and, aten.clamp, aten.clamp_min, aten.sum, aten.all, aten.any)
)


def _is_all_set(packet: Any, args: tuple[Any, ...]) -> bool:
    """Whether the stated ranges make every element of this mask true."""
    if packet is aten.bitwise_and:
        return all(hasattr(mask, _ALL_SET) for mask in args)
    stated = getattr(args[0], _RANGE, None) if packet in _ALWAYS_HOLDS else None
    if stated is None or not isinstance(args[1], int):
        return False
    low, high = stated
    return _ALWAYS_HOLDS[packet](low, high, args[1])


def _is_boolean(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool


def _is_mask(value: Any) -> bool:
    """Whether ``value`` is a boolean tensor, or was cast from one."""
    return _is_boolean(value) or hasattr(value, _MASK)


def _usual_answer(packet: Any, mask: torch.Tensor) -> tuple[str | None, Any]:
    """The note, or None if the answer is known, and the answer."""
    if hasattr(mask, _ALL_SET):
        return None, mask.numel() if packet is aten.sum else True
    if packet is aten.sum:
        return "the step counts the elements of a mask: assumed that all take part", mask.numel()
    if packet is aten.all:
        return "the step asks whether all of a mask is set: assumed that it is", True
    return "the step asks whether any of a mask is set: assumed that none is", False


def _pass_on(packet: Any, args: tuple[Any, ...], result: Any) -> None:
    """Keep a number known after a cast or a lower bound, as in ``count.clamp(min=1)``."""
    answer = getattr(args[0], _ANSWER, None)
    if answer is None:
        return
    note, value = answer
    if packet not in _CASTS:
        if len(args) != 2 or not isinstance(args[1], (int, float)):
            return
        value = max(value, args[1])
    setattr(result, _ANSWER, (note, value))


_READS_VALUES = frozenset(
    (
        aten.equal.default, aten.index.Tensor, aten.masked_select.default, aten._local_scalar_dense.default,
        aten.nonzero.default,
    )
)  # fmt: skip


def assumed_answer(operator: Any, args: tuple[Any, ...]) -> tuple[str | None, Callable[[], Any]] | None:
    """The note and a function that makes the answer, for an operator that reads values; None if there is no answer."""
    if operator not in _READS_VALUES:
        return None
    if operator is aten.equal.default:
        return "the step compares tensors by torch.equal: assumed that they are equal", lambda: True
    if operator is aten.index.Tensor and any(_is_boolean(index) for index in args[1]):
        return _ALL_CHOSEN, lambda: operator(args[0], _without_masks(args[1]))
    if operator is aten.masked_select.default:
        return _ALL_CHOSEN, lambda: torch.empty_like(args[0]).view(-1)
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
