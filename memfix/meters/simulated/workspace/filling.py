"""Deterministic algorithms: torch then fills memory that it makes by resizing a tensor.

It fills through a view, for which it first makes a tensor of one element. Kernels in C++ that resize an empty result
take that element beside their results; structured kernels, and those that make their results at once, do not.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.utils.deterministic

from ..composite import is_structured
from .rules import Call, Range, tensors_in

_LARGEST_ELEMENT = 16
_RESIZING = frozenset("index_select embedding arange kthvalue resize_".split())
"""Operators that resize an empty result, by torch's source and as measured."""
_MADE_AT_ONCE = frozenset(
    """clone _to_copy copy_ empty empty_like empty_strided empty_permuted new_empty new_empty_strided zeros zeros_like
    new_zeros ones ones_like new_ones full full_like new_full rand rand_like randn randn_like scalar_tensor convolution
    convolution_backward native_dropout native_dropout_backward native_layer_norm native_layer_norm_backward
    native_group_norm native_group_norm_backward native_batch_norm native_batch_norm_backward cudnn_batch_norm
    cudnn_batch_norm_backward _batch_norm_impl_index _fused_rms_norm _fused_rms_norm_backward embedding_dense_backward
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward _scaled_dot_product_cudnn_attention
    _scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention
    _scaled_dot_product_efficient_attention_backward _local_scalar_dense record_stream""".split()
)
_COUNTING = frozenset(
    """sort argsort topk multinomial index_put index_put_ _index_put_impl_ _unsafe_index_put masked_scatter_
    put_ nonzero""".split()
)
"""Operators whose kernel numbers rows by ``arange``, which resizes."""
_NOTE = "deterministic algorithms: torch may fill what {operator} resizes, by a tensor of one element"


def is_filling() -> bool:
    """Whether torch fills new memory now."""
    settings: Any = torch.utils.deterministic
    return torch.are_deterministic_algorithms_enabled() and bool(settings.fill_uninitialized_memory)


@functools.cache
def may_resize(operator: torch._ops.OpOverload) -> bool:
    """Whether the operator may resize a tensor to make a result."""
    name = operator.overloadpacket.__name__
    if operator.namespace != "aten" or name in _RESIZING or name in _COUNTING:
        return True
    in_place = name.endswith("_") and not name.startswith(("resize_", "set_"))
    of_lists = name.startswith(("_foreach_", "_fused_", "_amp_"))
    return not (operator.is_view or in_place or of_lists or name in _MADE_AT_ONCE or _is_structured(operator))


def _is_structured(operator: torch._ops.OpOverload) -> bool:
    """Whether the kernel is structured, or that for two tensors of which this is the one for a tensor and a number."""
    packet = operator.overloadpacket
    of_two = getattr(packet, "Tensor", operator) if operator._overloadname in ("Scalar", "Tensor_Scalar") else operator
    return is_structured(operator) or is_structured(of_two)


def filled(call: Call) -> Range:
    """The bytes beside the results by which a call fills what it resizes."""
    if not (is_filling() and may_resize(call.operator)):
        return Range.of(0)
    if call.operator.overloadpacket.__name__ in _RESIZING:
        return Range.of(max((tensor.element_size() for tensor in tensors_in(call.outputs)), default=0))
    return Range(0, 0, _LARGEST_ELEMENT)


def note_of(call: Call) -> str:
    return _NOTE.format(operator=call.operator)
