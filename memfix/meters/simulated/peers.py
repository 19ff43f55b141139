"""The values that other ranks send. The ranks are fake, so each is assumed to have the values of this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .workspace.rules import tensors_in

NAMESPACES = ("c10d", "_c10d_functional")
SAME = "the step reads what other ranks send: assumed that each has the values of this rank"

_GATHERS = ("allgather_", "_allgather_base_", "all_gather_into_tensor")
_SWAPS = ("alltoall_base_", "all_to_all_single")


def returned_argument(operator: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
    """The argument that a functional collective returns on a GPU, where torch's fake kernel returns a new tensor."""
    if operator.namespace != NAMESPACES[1]:
        return None
    is_wait = operator.overloadpacket.__name__ == "wait_tensor"
    returned: torch.Tensor | None = args[0] if is_wait else kwargs.get("out")
    return returned


def received(
    operator: Any, args: Any, results: list[Any], values_of: Callable[[torch.Tensor], torch.Tensor | None]
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Each tensor that a collective writes, and its values; None if they are not known."""
    name = operator.overloadpacket.__name__
    is_functional = operator.namespace == NAMESPACES[1]
    if name in ("broadcast_", "wait_tensor"):  # these change no values: the sender has the same, or nothing is sent
        return
    written = results if is_functional else tensors_in(args[0])
    sent = None
    if name in _GATHERS or (name in _SWAPS and _are_even(*(args[1:3] if is_functional else args[3:5]))):
        (source,) = tensors_in(args[0] if is_functional else args[1])
        sent = values_of(source)
    for tensor in written:
        yield tensor, None if sent is None else _spread(sent, tensor, swaps=name in _SWAPS)


def _are_even(*splits: list[int]) -> bool:
    return all(len(set(sizes)) <= 1 for sizes in splits)


def _spread(sent: torch.Tensor, received: torch.Tensor, *, swaps: bool) -> torch.Tensor | None:
    """The values that this rank receives if all ranks send ``sent``; None if they are not known."""
    with torch._C._DisableTorchDispatch():
        if swaps:
            num_ranks = torch.distributed.get_world_size()
            if sent.shape != received.shape or sent.numel() % num_ranks:
                return None
            own = sent.reshape(num_ranks, -1)[torch.distributed.get_rank()]
            return own.repeat(num_ranks).reshape(received.shape)
        return sent.flatten().repeat(received.numel() // max(1, sent.numel())).reshape(received.shape)
