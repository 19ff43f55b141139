"""Corrects for what the autograd engine does differently under a dispatch mode.

Without a mode, the engine adds a second gradient in place into the first if nothing else refers to the first. A tracked
tensor has one more reference, so the engine makes a new tensor instead. The ledger lets the new tensor take over the
old tensor's bytes if the old tensor is freed next.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import platform
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch

from ...errors import ON_A_GPU, MeasurementError
from .patches import applied
from .running_phase import is_in_backward
from .workspace.layout import is_dense
from .workspace.rules import tensors_in

aten = torch.ops.aten

_NODE_KEY = "memfix_node"
_IN_ORDER = platform.machine() not in ("x86_64", "AMD64")
"""Whether libtorch's C++ compiler evaluates function arguments in order. On x86, where the tables were measured, it
begins with the last argument."""
_STACK_BYTES_PER_NODE = 280  # measured: 240 to 280
_STACK_BYTES_OF_OTHERS = 256 << 10  # for all other frames
_STACK_BYTES_OF_THREADS = 8 << 20  # glibc's default for a thread


LAST_GRADIENTS = (
    "gradients that torch.autograd.grad returned: autograd's thread may drop them late, at the latest before the next"
    " backward; the bounds are at once and then"
)


class EngineWatch:
    """Watches backward passes, to tell an ``add`` that a node runs from the engine's accumulation after a node.

    ``begins`` and ``returned`` are called before a backward pass that is not inside another one, and with the gradients
    that ``torch.autograd.grad`` returned.
    """

    def __init__(
        self,
        note: Callable[[str], None],
        begins: Callable[[], None] = lambda: None,
        returned: Callable[[list[torch.Tensor]], None] = lambda gradients: None,
    ) -> None:
        self._note = note
        self._begins, self._returned = begins, returned
        self._numbers_of_gradients: list[range] = []
        self._num_nodes = 0
        self._finished_node: int | None = None
        self._is_batched = False
        """Whether the gradients are wrapped by a transform such as ``vmap``: the engine adds no such one in place."""
        self._casts: dict[int, tuple[CodeType, int]] = {}
        """The sequence number of a cast's autograd node, under autocast -> the Python instruction that called it."""

    def remember_cast(self, caller: FrameType) -> None:
        """Record under autocast that ``caller`` runs a cast, whose autograd node is the newest one."""
        if _IN_ORDER and torch.is_grad_enabled() and _is_in_autocast():
            self._casts[torch._C._autograd._get_sequence_nr() - 1] = caller.f_code, caller.f_lasti

    def _reverse_casts(self, nodes: Iterable[Any]) -> None:
        """Reverse, as on x86, the sequence numbers of the casts that autocast made for one operator's arguments. The
        engine runs the highest number first, so the order decides which gradients are alive meanwhile."""
        numbered = {node._sequence_nr(): node for node in nodes if node.name() == "ToCopyBackward0"}
        casts = sorted((number, self._casts.pop(number)) for number in numbered if number in self._casts)
        for _, call in itertools.groupby(enumerate(casts), key=lambda found: (found[1][0] - found[0], found[1][1])):
            numbers = [number for _, (number, _) in call]
            for number, reversed_number in zip(numbers, reversed(numbers), strict=True):
                numbered[number]._set_sequence_nr(reversed_number)

    def writes_in_place(self, operator: torch._ops.OpOverload, args: tuple[Any, ...]) -> bool:
        """Whether the engine would have added into ``args[0]`` without a dispatch mode."""
        return operator is aten.add.Tensor and self._is_accumulation(args)

    def _is_accumulation(self, args: tuple[Any, ...]) -> bool:
        if self._finished_node is None or self._is_batched or torch.is_grad_enabled():
            return False
        node = torch._C._current_autograd_node()
        metadata: Any = node.metadata if node is not None else {}
        if metadata.get(_NODE_KEY) != self._finished_node:
            return False
        total, added = args[:2]
        # a view made in backward keeps its base alive, so the engine is not the only owner of its memory
        return isinstance(added, torch.Tensor) and not total._is_view() and is_dense(total.shape, total.stride())

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Hook the graph of each backward that is called inside the block."""
        run = torch.autograd.graph._engine_run_backward

        def run_watched(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if is_in_backward():
                return run_hooked(outputs, *args, **kwargs)
            self._begins()
            result = run_hooked(outputs, *args, **kwargs)
            self._returned(tensors_in(result))
            return result

        def run_hooked(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            self._hook_nodes(outputs if isinstance(outputs, (tuple, list)) else (outputs,))
            outer, self._finished_node = self._finished_node, None
            outer_batched, self._is_batched = self._is_batched, any(map(_is_wrapped, tensors_in(args[0])))
            first = torch._C._autograd._get_sequence_nr()
            try:
                return run(outputs, *args, **kwargs)
            finally:
                self._finished_node, self._is_batched = outer, outer_batched
                if args[2]:  # create_graph
                    self._numbers_of_gradients.append(range(first, torch._C._autograd._get_sequence_nr()))

        holders = [m for m in (torch.autograd.graph, torch.autograd) if getattr(m, "_engine_run_backward", None) is run]
        with applied([(module, "_engine_run_backward", run_watched) for module in holders]):
            yield

    def _note_uncertain_order(self, numbers: list[int]) -> None:
        """Add a note if a GPU may run the nodes with these sequence numbers in another order: there, backward runs on a
        thread that numbers new nodes by itself, and a later backward pass orders nodes by their numbers."""
        of_gradients = [any(number in made for made in self._numbers_of_gradients) for number in numbers]
        if any(of_gradients) and not all(of_gradients):
            self._note("gradients of gradients: the engine may run their graph in another order on a GPU")

    def _hook_nodes(self, roots: Any) -> None:
        """Hook the nodes after which the engine may accumulate, because one of their targets gets several gradients."""
        given = [(getattr(root, "grad_fn", None) or getattr(root, "node", None), root.output_nr) for root in roots]
        num_gradients = Counter(given)
        waiting = [node for node, _ in given]
        edges: dict[Any, Any] = {}
        while waiting:
            node = waiting.pop()
            if node is not None and node not in edges:
                edges[node] = [edge for edge in node.next_functions if edge[0] is not None]
                num_gradients.update(edges[node])
                waiting.extend(following for following, _ in edges[node])
        _raise_stack_limit(len(edges))
        if self._casts:
            self._reverse_casts(edges)
        if self._numbers_of_gradients:
            self._note_uncertain_order([node._sequence_nr() for node, following in edges.items() if following])
        for node, following in edges.items():
            if any(num_gradients[edge] > 1 for edge in following) and _NODE_KEY not in node.metadata:
                self._num_nodes += 1
                node.metadata[_NODE_KEY] = self._num_nodes
                node.register_hook(functools.partial(self._node_finished, self._num_nodes))

    def _node_finished(self, number: int, _grad_inputs: Any, _grad_outputs: Any) -> None:
        self._finished_node = number


def _is_wrapped(tensor: torch.Tensor) -> bool:
    keys = str(torch._C._dispatch_keys(tensor))  # Python has no name for one of them, Batched
    return "Batched" in keys or "FuncTorchGradWrapper" in keys


def _is_in_autocast() -> bool:
    """Whether autocast is active. ``torch.is_autocast_enabled`` is always False inside a dispatch mode."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting() > 0


def _raise_stack_limit(num_nodes: int) -> None:
    """Raise the stack limit to what torch needs to free ``num_nodes`` nodes: it frees a chain of nodes that Python has
    seen by recursion, and crashes if the stack overflows."""
    if sys.platform == "win32":  # the executable fixes the size of the stack
        return
    import resource

    wanted = _STACK_BYTES_OF_OTHERS + num_nodes * _STACK_BYTES_PER_NODE
    limit = hard = _STACK_BYTES_OF_THREADS
    if threading.current_thread() is threading.main_thread():
        limit, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if limit == resource.RLIM_INFINITY or wanted <= limit:
        return
    most = 2 * wanted if hard == resource.RLIM_INFINITY else hard
    if wanted > most:
        raise MeasurementError(
            f"the step's graph has {num_nodes:,} nodes, and torch needs up to {wanted >> 20:,} MiB of stack to free"
            f" them, of {most >> 20:,}; raise ulimit -Hs and call memfix.peak from the main thread, or {ON_A_GPU}"
        )
    resource.setrlimit(resource.RLIMIT_STACK, (min(2 * wanted, most), hard))
