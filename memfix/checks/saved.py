"""What an autograd function may keep of its inputs and results: only what it passes to ``ctx.save_for_backward``.

An attribute of ``ctx`` keeps a tensor as well, but autograd does not know of it: after a change in place, backward
gives wrong gradients instead of an error; hooks on saved tensors, which move them to the CPU, do not see it; and a kept
result is in a cycle with its graph, which only Python's collector frees.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from ..laws import NAIVE
from .comparing import Unequal
from .form_call import FormCall, Tensors


def require_saved(call: FormCall, outputs: Tensors, inputs: Tensors) -> None:
    """Raise ``Unequal`` where a node of the form's graph has one of these tensors, or a view of it, as an attribute."""
    if call.form == NAIVE:
        return
    titles = {f"its {name}": tensor for name, tensor in outputs.items()}
    titles |= {f"its input {name}": tensor for name, tensor in inputs.items()}
    for attribute, tensor in _attributes(outputs.values()):
        for title, known in titles.items():
            # another tensor that requires a gradient is of a graph inside the function, which notices changes itself
            if share_memory(tensor, known) and (tensor is known or not tensor.requires_grad):
                why = "backward then fails if it was changed in place"
                raise Unequal(f"keeps {title} as ctx.{attribute}; pass it to ctx.save_for_backward: {why}")


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _attributes(outputs: Iterable[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that autograd functions behind these outputs have as attributes, or in a list or tuple there."""
    for node in _nodes(outputs):
        if isinstance(node, BackwardCFunction):
            for attribute, value in vars(node).items():
                several = value if isinstance(value, (tuple, list)) else (value,)
                yield from ((attribute, tensor) for tensor in several if isinstance(tensor, torch.Tensor))


def _nodes(outputs: Iterable[torch.Tensor]) -> Iterator[Any]:
    """The nodes of the graph behind these outputs."""
    seen: set[Any] = set()
    ahead = [output.grad_fn for output in outputs]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            ahead += [before for before, _ in node.next_functions]
