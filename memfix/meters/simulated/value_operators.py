"""What operators do with values: what each writes, fills or counts, and how to run one on the CPU."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .workspace.rules import tensors_in

aten = torch.ops.aten

_CPU = torch.device("cpu")
UNKNOWN = object()
"""What stands for a result whose values are not known."""


@functools.cache
def can_be_known(operator: Any) -> bool:
    """Whether something can be known about an operator's results although nothing is known about its arguments."""
    packet = operator.overloadpacket
    from_nothing = not any("Tensor" in str(argument.type) for argument in operator._schema.arguments)
    return from_nothing or packet in _FROM_UNKNOWN


def healthy_results(operator: Any, args: Any) -> dict[int, int]:
    """The results of an operator that report failures: result number -> the value of its elements without a failure.

    A step is assumed to be healthy: all its numbers are finite, and all factorisations succeed.
    """
    packet = operator.overloadpacket
    if packet in (aten.ne, aten.eq):
        is_inf = isinstance(args[1], float) and math.isinf(args[1])
        if is_inf or args[0] is args[1]:  # x == inf, x != x
            return {0: (packet is aten.ne) == is_inf}
        return {}
    return _HEALTHY.get(packet, {})


def work_of(operator: Any, given: list[torch.Tensor]) -> float:
    """An operator's work: the elements that it reads; for a product its multiply-adds, as if matrices were square."""
    sizes = sorted((float(tensor.numel()) for tensor in given), reverse=True)
    return sizes[0] * math.sqrt(sizes[:2][-1]) if operator.overloadpacket in _PRODUCTS else sum(sizes)


def run_on_cpu(operator: Any, args: Any, kwargs: Any, real: dict[int, Any]) -> Any:
    """Run an operator on the CPU, with a real tensor in place of each fake one."""
    try:
        with torch._C._DisableTorchDispatch():
            named = {name: _on_cpu(value, real) for name, value in kwargs.items() if name != "pin_memory"}
            return operator(*_on_cpu(args, real), **named)
    except Exception:  # the CPU has no such kernel, or the user's values are invalid, which the fake kernel reports
        return UNKNOWN


def _on_cpu(value: Any, real: dict[int, Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return real[id(value)]
    if isinstance(value, (list, tuple)):
        return type(value)(_on_cpu(item, real) for item in value)
    return _CPU if isinstance(value, torch.device) else value


def written_tensors(operator: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operator writes into."""
    keys = writes(operator)
    if not keys:
        return []
    positional = [argument for place, argument in enumerate(args) if place in keys]
    return tensors_in([*positional, *(argument for name, argument in kwargs.items() if name in keys)])


@functools.cache
def has_out_arguments(operator: Any) -> bool:
    """Whether the operator writes its results into ``out=`` arguments."""
    return any(argument.is_out for argument in operator._schema.arguments)


def empty_outs(operator: Any, kwargs: dict[str, Any]) -> dict[int, Any]:
    """Empty real tensors in place of fake ``out=`` arguments, by ``id``: their old values do not matter."""
    if not has_out_arguments(operator):
        return {}
    names = [argument.name for argument in operator._schema.arguments if argument.is_out]
    with torch._C._DisableTorchDispatch():
        given = tensors_in([kwargs.get(name) for name in names])
        fakes = [tensor for tensor in given if isinstance(tensor, FakeTensor)]
        return {id(tensor): torch.empty(0, dtype=tensor.dtype, device=_CPU) for tensor in fakes}


@functools.cache
def writes(operator: Any) -> frozenset[int | str]:
    """The positions and names of the arguments that an operator writes into."""
    written = [
        (place, argument.name)
        for place, argument in enumerate(operator._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return frozenset(key for keys in written for key in keys)


def _packets(names: str) -> frozenset[Any]:
    return frozenset(getattr(aten, name) for name in names.split())


BLANK = _packets("empty empty_like empty_strided new_empty new_empty_strided empty_permuted")
"""Operators that allocate memory without writing it."""
OVERWRITES = _packets("fill_ zero_ copy_ random_ uniform_ normal_ bernoulli_ exponential_")
"""Operators that write every element of their first argument."""
ADD_PRODUCTS = _packets("addmv_ addmm_ addbmm_ baddbmm_ addr_")
"""Operators that overwrite their first argument if ``beta`` is 0."""
SHARES = _packets("fill_ zero_ copy_")
"""Operators after which all elements share one value if the source has one."""
FILLS: dict[Any, int | None] = {
    **dict.fromkeys(_packets("zeros zeros_like new_zeros"), 0),
    **dict.fromkeys(_packets("ones ones_like new_ones"), 1),
    **dict.fromkeys(_packets("full full_like new_full")),
}
"""Operators that fill a new tensor with one value -> the value; None if it is the last argument."""
COPIES = _packets("_to_copy clone")
_PRODUCTS = _packets(
    "mm addmm bmm baddbmm convolution convolution_backward _cdist_forward linalg_solve_triangular triangular_solve "
    "linalg_cholesky_ex linalg_lu_factor_ex linalg_inv_ex linalg_qr _linalg_solve_ex _linalg_svd _linalg_eigh "
    "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention"
)
"""Products and factorisations, whose work is the number of multiply-adds."""
DRAWS_UP_TO_1 = (aten.rand, aten.rand_like)
REDUCES = _packets("all any sum amax amin max min mean")
ADDS = _packets("sum count_nonzero")
COUNTS = _packets("all any") | ADDS
KEEPS_SHARE = _packets("_to_copy clone index index_select gather")
"""Operators that leave the share of a mask's elements that are set as it is."""
ALWAYS_HOLDS: dict[Any, Callable[[int, int, int], bool]] = {
    aten.ne: lambda low, high, number: not low <= number < high,
    aten.ge: lambda low, high, number: number <= low,
    aten.lt: lambda low, high, number: high <= number,
}
"""Comparisons with a number -> whether they hold for every element of a range."""
_HEALTHY: dict[Any, dict[int, int]] = {
    **{packet: {0: 0} for packet in _packets("isnan isinf isposinf isneginf")},
    **{packet: {1: 0} for packet in _packets("linalg_cholesky_ex linalg_inv_ex")},
    **{packet: {2: 0} for packet in _packets("linalg_lu_factor_ex linalg_ldl_factor_ex")},
    **{packet: {3: 0} for packet in _packets("_linalg_solve_ex")},
}
_FROM_UNKNOWN = frozenset((*OVERWRITES, *FILLS, *BLANK, *COUNTS, *KEEPS_SHARE, *ALWAYS_HOLDS, aten.eq, *_HEALTHY))
"""Operators whose results may be known although nothing is known about their arguments."""
