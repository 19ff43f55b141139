"""Finds which of torch's backends for scaled dot product attention can run a call, and chooses one of them."""

# B batch, G key-value heads, R query heads of each, H = G*R, Q queries, K keys, D width of a head, V width of a value

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..alignment import with_aligned_rows
from .arguments import AttentionOptions, AttentionTensors
from .visible import Visible, causal_mask, visible

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_HOPPER = (9, 0)
_KEYS_OF_A_VECTOR = 16
"""With fewer keys, torch's flash kernel for CPUs returns zeros for a query that holds a NaN: it compares one score
after the other, which drops NaN, and takes all keys for masked. The CPU's vectors have 4 to 16 numbers."""


@dataclass(frozen=True)
class SdpaCall:
    """The arguments of torch's ``scaled_dot_product_attention``. ``q`` has H heads, ``k`` and ``v`` have H or G."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    is_causal: bool

    @property
    def is_grouped(self) -> bool:
        return self.q.shape[1] != self.k.shape[1]

    def can_run(self, backend: str) -> bool:
        if backend == "math":
            return True
        arguments = (self.q, self.k, self.v, self.mask, self.dropout, self.is_causal)
        if self.q.is_cuda:
            is_possible = getattr(torch.backends.cuda, f"can_use_{backend}_attention")
            return bool(is_possible(torch.backends.cuda.SDPAParams(*arguments, self.is_grouped)))
        if backend != "flash" or self.k.shape[2] < _KEYS_OF_A_VECTOR:
            return False
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            number = torch._fused_sdp_choice(*arguments, enable_gqa=self.is_grouped)
        return bool(number == SDPBackend.FLASH_ATTENTION.value)

    def run(self, backend: str, scale: float) -> torch.Tensor:
        arguments = (self.q, self.k, self.v, self.mask, self.dropout, self.is_causal)
        kernel = BACKENDS[backend]
        is_torchs_choice = torch._fused_sdp_choice(*arguments, scale=scale, enable_gqa=self.is_grouped) == kernel.value
        # entering sdpa_kernel takes longer than a small call
        with contextlib.nullcontext() if is_torchs_choice else sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(*arguments, scale=scale, enable_gqa=self.is_grouped)

    def with_every_head(self) -> SdpaCall:
        """Return this call with keys and values copied for every head of q."""
        ratio = self.q.shape[1] // self.k.shape[1]
        return replace(self, k=self.k.repeat_interleave(ratio, dim=1), v=self.v.repeat_interleave(ratio, dim=1))


def prepared(tensors: AttentionTensors, options: AttentionOptions) -> tuple[SdpaCall, Visible]:
    """Return the call for torch, and which of its queries see a key.

    On a GPU the kernels need rows whose size and addresses are multiples of 16 bytes: other tensors are copied, and
    padded with zeros, which add nothing to a product.
    """
    q, k, v, mask, bias = tensors
    q_BHQD = q.flatten(1, 2)
    seen = Visible()
    if mask is not None or bias is not None:
        causal_QK = causal_mask(slice(0, q.shape[3]), k.shape[2], q.device) if options.causal else None
        seen = visible(mask, bias, causal_QK)
    given = None if seen.mask is None else _four_dims(seen.mask, q.shape[1:3])
    if q.is_cuda:
        q_BHQD, k, v = (_padded(tensor) for tensor in (q_BHQD, k, v))
        given = given if given is None or given.stride(-1) == 1 else given.contiguous()
        wants_gradient = given is not None and given.requires_grad and torch.is_grad_enabled()
        if wants_gradient and not any(tensor.requires_grad for tensor in (q_BHQD, k, v)):
            # torch's kernel keeps the sums that the mask's backward reads only if q, k or v wants a gradient
            q_BHQD = q_BHQD.detach().requires_grad_()
    return SdpaCall(q_BHQD, k, v, given, options.dropout, options.causal and given is None), seen


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    missing = -tensor.shape[-1] % (16 // tensor.element_size())
    return F.pad(tensor, (0, missing)) if missing else with_aligned_rows(tensor)


def _four_dims(mask_BGRQK: torch.Tensor, heads: torch.Size) -> torch.Tensor:
    """Return the mask as ``[B, H, Q, K]``, where each size may be 1."""
    if mask_BGRQK.shape[1:3].numel() > 1:
        mask_BGRQK = mask_BGRQK.expand(-1, *heads, -1, -1)
    return mask_BGRQK.flatten(1, 2)


def runnable(call: SdpaCall) -> Iterator[tuple[str, SdpaCall]]:
    """Yield the backends that can run a call, the fastest first, each with the call that it runs."""
    without_groups = "efficient" if call.q.is_cuda else "flash"
    for backend in BACKENDS:
        if call.can_run(backend):
            yield backend, call
        elif backend == without_groups and call.is_grouped and (every := call.with_every_head()).can_run(backend):
            yield backend, every


def chosen(call: SdpaCall, asked: str | None) -> tuple[str, SdpaCall]:
    """Return the backend for a call, the one ``asked`` for or else the fastest, and the call that it runs."""
    for backend, its_call in runnable(call):
        if backend == asked or (asked is None and _is_preferred(backend, call)):
            return backend, its_call
    usable = ", ".join(backend for backend, _ in runnable(call))
    masked = "" if call.mask is None else ", with a mask"
    raise ValueError(
        f"backend {asked!r} cannot run this call: {call.q.dtype} on {call.q.device.type}, heads {call.q.shape[-1]} and "
        f"{call.v.shape[-1]} wide{masked}; leave backend out, or take one of {usable}"
    )


def _is_preferred(backend: str, call: SdpaCall) -> bool:
    """Whether a backend may be chosen unasked. cuDNN may be on Hopper, where it is the fastest, but not where its
    workspace is unknown: for one query, and for values of another width."""
    if backend != "cudnn":
        return True
    is_hopper = torch.cuda.get_device_capability(call.q.device) == _HOPPER
    return is_hopper and call.q.shape[2] > 1 and call.q.shape[3] == call.v.shape[3]
