"""Everybody's KDA: ours, form by form, and flash-linear-attention's.

Each is a function of ``(q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH)`` that gives ``(o_BTHV, final_state_BHKV)``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from memfix.ops.kda import FORMS, kda

from .contenders import Contender, Peer, forms_of, those_that_load


def our_forms() -> list[Contender]:
    return forms_of("kda", kda, FORMS)


def peers(device: str) -> tuple[list[Contender], dict[str, str]]:
    """The peers that run on ``device``, and for each that does not, why."""
    return those_that_load(_PEERS, device)


def _fla(*, safe_gate: bool) -> Callable[..., Any]:
    """Its final state is asked for, as ours is always given. ``safe_gate`` promises g in [-5, 0]: with g given, rather
    than made in the kernel from a raw gate, there is no bound to set."""
    from fla.ops.kda import chunk_kda

    return functools.partial(chunk_kda, output_final_state=True, safe_gate=safe_gate)


_PEERS = {
    "fla": Peer("flash-linear-attention", functools.partial(_fla, safe_gate=False), "fla"),
    "fla_safe_gate": Peer("flash-linear-attention", functools.partial(_fla, safe_gate=True), "fla"),
}
