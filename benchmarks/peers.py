"""Everybody's linear cross entropy: ours, form by form, the public peers, and the floor below all of them.

A peer that is not installed, or needs a GPU where there is none, is left out by name with the reason.
"""

# N tokens, D width, V vocabulary, C tokens of a chunk

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import memfix
from memfix.laws import NAIVE
from memfix.ops.linear_cross_entropy import FORMS, linear_cross_entropy
from memfix.registry import contracts
from memfix.surroundings import installed_version

from .rounds import LossOf, trouble_of

FLOOR = "floor"


@dataclass(frozen=True)
class Contender:
    """``loss_of(hidden, weight, target)`` is the mean over targets that are not -100."""

    name: str
    source: str
    """The package and version that it comes from."""
    loss_of: LossOf


def our_forms() -> list[Contender]:
    """Naive and every form of the contract, by the function that users call where it offers the form."""
    (contract,) = contracts(["linear_cross_entropy"])
    source = f"memfix {memfix.__version__}"
    return [
        Contender(
            form,
            source,
            functools.partial(linear_cross_entropy, form=form) if form in FORMS else contract.function(form),
        )
        for form in (NAIVE, *contract.forms)
    ]


def peers(device: str) -> tuple[list[Contender], dict[str, str]]:
    """The peers that run on ``device``, and for each that does not, why."""
    found, left_out = [], {}
    for name, peer in _PEERS.items():
        reason = peer.left_out(device)
        if reason is None:
            try:
                found.append(Contender(name, f"{peer.distribution} {peer.version}", peer.load()))
            except Exception as error:  # a package for another torch or triton fails in its own way
                reason = f"cannot be loaded: {trouble_of(error)}"
        if reason is not None:
            left_out[name] = reason
    return found, left_out


def three_products(rows_per_chunk: int | None) -> LossOf:
    """The floor: ``x W^T``, ``G W`` and ``G^T x``, which no train step of this loss can do without.

    ``G`` is the product itself, of the size of its gradient. With ``rows_per_chunk`` the ``[N, V]`` product is made
    in pieces, and ``G^T x`` is summed in place.
    """

    @torch.no_grad()
    def products(hidden_ND: torch.Tensor, weight_VD: torch.Tensor, target_N: torch.Tensor) -> None:
        if rows_per_chunk is None:
            product_NV = torch.mm(hidden_ND, weight_VD.T)
            torch.mm(product_NV, weight_VD)
            torch.mm(product_NV.T, hidden_ND)
            return
        grad_hidden_ND, grad_weight_VD = torch.empty_like(hidden_ND), torch.empty_like(weight_VD)
        for start in range(0, hidden_ND.shape[0], rows_per_chunk):
            hidden_CD = hidden_ND[start : start + rows_per_chunk]
            product_CV = torch.mm(hidden_CD, weight_VD.T)
            torch.mm(product_CV, weight_VD, out=grad_hidden_ND[start : start + rows_per_chunk])
            torch.addmm(grad_weight_VD, product_CV.T, hidden_CD, beta=float(start > 0), out=grad_weight_VD)

    return products


@dataclass(frozen=True)
class _Peer:
    distribution: str
    load: Callable[[], LossOf]
    package: str | None = None
    """What must be importable; None for torch itself."""

    @property
    def version(self) -> str:
        return torch.__version__ if self.package is None else installed_version(self.distribution)

    def left_out(self, device: str) -> str | None:
        if self.package is None:
            return None if hasattr(torch.nn, "LinearCrossEntropyOptions") else f"not in torch {torch.__version__}"
        absent = [name for name in (self.package, "triton") if importlib.util.find_spec(name) is None]
        if absent:
            return f"{' and '.join(absent)} not installed"
        return "its kernels need a GPU" if device == "cpu" else None


def _liger() -> LossOf:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss_of = LigerFusedLinearCrossEntropyLoss()
    return lambda hidden, weight, target: loss_of(weight, hidden, target)


def _cut_cross_entropy() -> LossOf:
    from cut_cross_entropy import linear_cross_entropy as loss_of

    return lambda hidden, weight, target: loss_of(hidden, weight, target)


def _torch_own(rows_per_chunk: int | None) -> LossOf:
    """Without options torch takes the naive path; with them it goes in chunks, of its own choice or of a given size."""
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows_per_chunk)
    return functools.partial(F.linear_cross_entropy, options=options)


_PEERS = {
    "liger": _Peer("liger-kernel", _liger, "liger_kernel"),
    "cce": _Peer("cut-cross-entropy", _cut_cross_entropy, "cut_cross_entropy"),
    "torch": _Peer("torch", lambda: _torch_own(None)),
    "torch_4096": _Peer("torch", lambda: _torch_own(4096)),
}
