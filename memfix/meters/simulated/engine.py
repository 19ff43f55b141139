"""What the autograd engine does differently while a mode watches it, and how to see past that.

Without a mode the engine adds a second gradient into the first one's memory when nobody else refers to it,
and a few backward formulas write into a fresh buffer in place. With a mode active each of these makes a new
tensor instead. The new one then takes over the old one's bytes, provided the old one dies at once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

aten = torch.ops.aten

# operator -> the backward nodes that would have called its in-place twin
_IN_PLACE_INSIDE = {
    aten.index_put.default: ("IndexBackward",),
    aten.scatter_add.default: ("GatherBackward",),
    aten.index_add.default: ("IndexSelectBackward",),
    aten.scatter.src: ("SortBackward", "TopkBackward", "MaxBackward", "MinBackward", "KthvalueBackward"),
}
_NODE_KEY = "memfix_node"


class EngineWatch:
    """Knows, while backward runs, whether an ``add`` is a node's own or the engine's accumulation after it."""

    def __init__(self) -> None:
        self._num_nodes = 0
        self._finished_node: int | None = None

    def writes_in_place(self, operator: torch._ops.OpOverload, args: tuple[Any, ...]) -> bool:
        """Would libtorch have written into ``args[0]``, were no mode active?"""
        if operator is aten.add.Tensor:
            return self._is_accumulation(args)
        nodes = _IN_PLACE_INSIDE.get(operator)
        if nodes is None or torch.is_grad_enabled():
            return False
        node = torch._C._current_autograd_node()
        return node is not None and node.name().startswith(nodes)

    def _is_accumulation(self, args: tuple[Any, ...]) -> bool:
        if self._finished_node is None or torch.is_grad_enabled():
            return False
        node = torch._C._current_autograd_node()
        metadata: Any = node.metadata if node is not None else {}
        if metadata.get(_NODE_KEY) != self._finished_node:
            return False
        total, added = args[:2]
        # a view made in backward keeps its base alive, so the engine does not own its memory alone
        return isinstance(added, torch.Tensor) and not total._is_view() and is_dense(total)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Hook every node of each graph that backward is called on, from here on."""
        run = torch.autograd.graph._engine_run_backward

        def run_watched(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            self._hook_nodes(outputs if isinstance(outputs, (tuple, list)) else (outputs,))
            outer, self._finished_node = self._finished_node, None
            try:
                return run(outputs, *args, **kwargs)
            finally:
                self._finished_node = outer

        holders = [m for m in (torch.autograd.graph, torch.autograd) if getattr(m, "_engine_run_backward", None) is run]
        for module in holders:
            module._engine_run_backward = run_watched  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for module in holders:
                module._engine_run_backward = run  # type: ignore[attr-defined]

    def _hook_nodes(self, roots: Any) -> None:
        waiting = [getattr(root, "grad_fn", None) or getattr(root, "node", None) for root in roots]
        seen = set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node.next_functions and _NODE_KEY not in node.metadata:  # AccumulateGrad has none and returns nothing
                self._num_nodes += 1
                node.metadata[_NODE_KEY] = self._num_nodes
                node.register_hook(functools.partial(self._node_finished, self._num_nodes))
            waiting.extend(following for following, _ in node.next_functions)

    def _node_finished(self, number: int, _grad_inputs: Any, _grad_outputs: Any) -> None:
        self._finished_node = number


def is_dense(tensor: torch.Tensor) -> bool:
    """Non-overlapping and dense: some order of its dims is contiguous."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
