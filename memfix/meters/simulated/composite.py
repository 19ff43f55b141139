"""Finds the operators that CUDA runs as composites of other operators, so that the tracker sees their temporaries.

``logsumexp``, for example, copies its input, but the dispatcher shows only its result. A CPU wheel has no CUDA kernels
to query, so this module reads the operator list that every torch wheel ships.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

import torch

# composites whose decomposition would show no further allocations; they are not decomposed, for speed
_SEEN_WHOLE = frozenset(
    """_to_copy _unsafe_view clone copy detach lift lift_fresh alias zeros ones full empty rand randn randint
    arange linspace eye scalar_tensor zeros_like ones_like full_like rand_like randn_like empty_like new_empty
    new_zeros new_ones new_full new_empty_strided fill zero_ stack embedding repeat rsub native_dropout
    convolution _convolution sort argsort var_mean _local_scalar_dense is_pinned _pin_memory record_stream
    resize resize_as masked_fill index_fill triu tril floor_divide uniform normal bernoulli exponential
    random _linalg_check_errors""".split()
)
# composites with a CUDA kernel from dispatcher_overrides. Autograd's keys lead to it, but inference mode disables them
_OUR_OWN = frozenset(("aten::one_hot", "aten::scaled_dot_product_attention", "aten::_fused_sdp_choice"))
# overloads of composites that wrap a number in a tensor; the dispatcher unwraps it, and the parts accept no number
_WITH_A_NUMBER = frozenset(
    "Scalar Tensor_Scalar Scalar_Tensor Scalar_Other Scalar_Self other_scalar self_scalar n_scalar x_scalar".split()
)
# namespaces of torch.distributed's operators, which have a kernel written in terms of other operators
_OF_DISTRIBUTED = ("fsdp", "_dtensor")
_EXPLICIT_KEYS = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")


@functools.cache
def composite_key(operator: torch._ops.OpOverload) -> torch._C.DispatchKey | None:
    """The dispatch key of the composite kernel that CUDA tensors run; None if the operator is not to be decomposed."""
    name = operator.name()
    if not name.startswith("aten::"):
        return _first_with_kernel(name, ("CUDA", *_EXPLICIT_KEYS) if operator.namespace in _OF_DISTRIBUTED else ())
    if name in _OUR_OWN:
        return torch._C.DispatchKey.CUDA
    keys = _dispatch_keys().get(name, frozenset())
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
        return None if "CUDA" in keys else torch._C.DispatchKey.CompositeImplicitAutograd
    if not keys or "CUDA" in keys or operator.is_view or operator.overloadpacket.__name__ in _SEEN_WHOLE:
        return None
    if operator._overloadname in _WITH_A_NUMBER and torch.Tag.pointwise in operator.tags:
        return None
    if any(a.alias_info is not None and not a.is_out for a in operator._schema.arguments):
        return None
    return _first_with_kernel(name, (key for key in _EXPLICIT_KEYS if key in keys))


def _first_with_kernel(name: str, keys: Iterable[str]) -> torch._C.DispatchKey | None:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return next((getattr(torch._C.DispatchKey, key) for key in keys if has_kernel(name, key)), None)


@functools.cache
def native_on_cuda_only() -> tuple[str, ...]:
    """Operators that have a CUDA kernel but that a CPU wheel decomposes above autograd."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return tuple(
        name
        for name, keys in _dispatch_keys().items()
        if "CompositeImplicitAutograd" in keys and "CUDA" in keys and not has_kernel(name, "CUDA")
    )


def is_structured(operator: torch._ops.OpOverload) -> bool:
    """Whether the operator has a structured kernel, whose results torch makes before it runs."""
    return operator.name() in _structured()


@functools.cache
def _structured() -> frozenset[str]:
    return frozenset("aten::" + one.partition("(")[0] for one in _listed() if "\n  structured" in one)


def _listed() -> list[str]:
    """The operators as torch lists them: each begins with its schema."""
    listing = Path(torch.__file__).parent.parent / "torchgen/packaged/ATen/native/native_functions.yaml"
    return listing.read_text().split("\n- func: ")[1:] if listing.exists() else []


@functools.cache
def _dispatch_keys() -> dict[str, frozenset[str]]:
    """``aten::name.overload`` -> the dispatch keys that have a kernel."""
    found: dict[str, frozenset[str]] = {}
    for operator in _listed():
        keys: set[str] = set()
        in_dispatch = False
        for line in operator.split("\n  ")[1:]:
            if not line.startswith("  "):
                in_dispatch = line.startswith("dispatch:")
                if line.startswith("structured_delegate:"):
                    keys.add("CUDA")
            elif in_dispatch and not line.lstrip().startswith("#"):
                keys.update(key.strip() for key in line.partition(":")[0].split(","))
        found["aten::" + operator.partition("(")[0]] = frozenset(keys)
    return found
