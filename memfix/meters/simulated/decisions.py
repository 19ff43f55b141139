"""Values that the user supplies by ``memfix.peak(build, assume={...})`` where a simulated step reads unknown ones.

A key names a place: a line such as ``moe.py:12``, as in the notes, or a function or module that runs there. A function
name may include its class: ``Mixture.forward``. A module is named by its attribute, with as many parents as needed:
``router``, ``layers.0.mlp.router``.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ...errors import UsageError
from .choices import assumed_indices, chooses, chosen_indices
from .source_lines import Site, line_of
from .values import MOST_INTEGERS, is_small
from .workspace.rules import Call, tensors_in

Decision = torch.Tensor | float | Callable[[torch.Tensor], torch.Tensor | None] | Literal["even", "worst"]
"""The values at a place; a function that maps each unknown tensor there to its values or to None; or how indices that
an operator such as ``topk`` chooses are spread."""

HOWS = ("even", "worst")
_MOST_SHOWN = 4


class Decisions:
    """The values that the user supplied, and which of them one run of a step used."""

    def __init__(self, assume: Mapping[str, Decision]) -> None:
        if not isinstance(assume, Mapping):
            raise UsageError(f"assume must have values by their places, such as {{'router': 'even'}}, got {assume!r}")
        for key, decision in assume.items():
            if isinstance(decision, str) and decision not in HOWS:
                raise UsageError(f"assume[{key!r}] must be values, a function, 'even' or 'worst', got {decision!r}")
        self._assume = assume
        self._modules: list[tuple[torch.nn.Module, str]] = []
        self._places: dict[tuple[Any, str], str | None] = {}
        self._missed: dict[str, dict[str, None]] = {}
        """Key of a place that ran -> the unknown tensors there that the user's value did not fit."""
        self._decided: set[str] = set()
        self._seen: dict[str, None] = {}

    def __bool__(self) -> bool:
        return bool(self._assume)

    # ---------------------------------------------------------------- deciding
    def of_results(self, results: Any, site: Site | None, call: Call | None = None) -> list[tuple[Any, Any]]:
        """The results of a ``call``, or tensors that the step reads, that the user decided, each with its values."""
        key = self._key_at(site)
        if key is None:
            return []
        decision, decided = self._assume[key], []
        for tensor in tensors_in(results):
            value: torch.Tensor | None
            if isinstance(decision, str):
                is_choice = call is not None and chooses(call.operator) and tensor is chosen_indices(call)
                value = assumed_indices(call, decision) if call is not None and is_choice else None
            elif callable(decision):
                value = None if tensor.dtype.is_floating_point else self._call(key, decision, tensor)
            else:
                value = decision if isinstance(decision, torch.Tensor) and _is_alike(decision, tensor) else None
            if value is not None:
                if not is_small(tensor):
                    raise UsageError(
                        f"assume[{key!r}] has {tensor.numel():,} values; at most {MOST_INTEGERS:,} are kept"
                    )
                decided.append((tensor, value))
                self._decided.add(key)
            elif not tensor.dtype.is_floating_point:
                self._missed.setdefault(key, {})[f"{tuple(tensor.shape)} of {tensor.dtype}"] = None
        return decided

    def of_number(self, dtype: torch.dtype, site: Site | None) -> float | None:
        """The user's value for a single number that the step reads at a place, or None."""
        key = self._key_at(site)
        decision = None if key is None else self._assume[key]
        if key is None or not isinstance(decision, (int, float)):
            return None
        self._decided.add(key)
        return bool(decision) if dtype == torch.bool else decision

    def of_mask(self, mask: torch.Tensor, site: Site | None) -> int | str | None:
        """How many elements a mask picks at a place, or "even" or "worst"; None if the user did not decide it."""
        key = self._key_at(site)
        if key is None:
            return None
        decision = self._assume[key]
        if callable(decision):
            decision = self._call(key, decision, mask)  # type: ignore[assignment]
        if isinstance(decision, torch.Tensor):
            if decision.shape != mask.shape:
                self._missed.setdefault(key, {})[f"{tuple(mask.shape)} of {mask.dtype}"] = None
                return None
            with torch._C._DisableTorchDispatch():
                decision = int(decision.count_nonzero())
        if isinstance(decision, (int, float)) and not 0 <= decision <= mask.numel():
            raise UsageError(f"assume[{key!r}] must pick 0 to {mask.numel():,} elements there, got {decision}")
        self._decided.add(key)
        return decision  # type: ignore[return-value]

    def _call(self, key: str, function: Callable[[Any], Any], tensor: torch.Tensor) -> torch.Tensor | None:
        with _disable_current_modes():  # the user's own values are real
            value = function(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
        if value is not None and not _is_alike(value, tensor):
            wanted = f"{tuple(tensor.shape)} of {tensor.dtype}"
            raise UsageError(f"assume[{key!r}] must return values on the CPU, {wanted}, got {_described(value)}")
        return value

    # ---------------------------------------------------------------- places
    def _key_at(self, site: Site | None) -> str | None:
        if not self._assume or site is None:
            return None
        module = self._modules[-1][1] if self._modules else ""
        place = (site, module)
        if place not in self._places:
            line = line_of(site)
            assert line is not None
            # a comprehension or a lambda belongs to the function around it
            function = ".".join(name for name in site[0].co_qualname.split(".") if not name.startswith("<"))
            names = (line.place, function, module)
            self._seen |= dict.fromkeys(filter(None, names))
            self._places[place] = next((key for key in self._assume if _names(key, *names)), None)
        key = self._places[place]
        if key is not None:
            self._missed.setdefault(key, {})
        return key

    def require_used(self) -> None:
        """Raise for a key that matches no place of the step, or whose value fits no unknown tensor there."""
        for key, decision in self._assume.items():
            if key in self._decided:
                continue
            if key not in self._missed:
                close = _close(key, self._seen)
                raise UsageError(f"assume: the step has no place {key!r}{close}; notes name the lines that matter")
            shown = ", ".join(list(self._missed[key])[:_MOST_SHOWN]) or "none"
            what = f"assume[{key!r}], {_described(decision)}, decides nothing there"
            raise UsageError(f"{what}; the undecided tensors there: {shown}")

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, record which module is running, if the user decided anything."""
        if not self._assume:
            yield
            return
        hooks = torch.nn.modules.module
        entered = hooks.register_module_forward_pre_hook(self._enter)
        left = hooks.register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            entered.remove()
            left.remove()

    def _enter(self, module: torch.nn.Module, _args: Any) -> None:
        self._modules.append((module, self._name_of(module)))

    def _leave(self, module: torch.nn.Module, _args: Any, _result: Any) -> None:
        while self._modules and self._modules.pop()[0] is not module:
            pass

    def _name_of(self, module: torch.nn.Module) -> str:
        """The dotted name of a module below the running modules; empty if it is the outermost."""
        for parent, name in reversed(self._modules):
            own = next((own for own, child in parent.named_modules() if child is module), None)
            if own:
                return f"{name}.{own}".lstrip(".")
        return ""


def _close(key: str, names: Iterable[str]) -> str:
    found = difflib.get_close_matches(key, names, n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""


def _names(key: str, place: str, function: str, module: str) -> bool:
    if ":" in key:
        return place == key or place.endswith("/" + key)
    return f".{function}".endswith(f".{key}") or f".{key}." in f".{module}."


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    return f"{tuple(value.shape)} of {value.dtype}" + (f" on {value.device}" if value.device.type != "cpu" else "")


def _is_alike(value: Any, tensor: torch.Tensor) -> bool:
    is_real = isinstance(value, torch.Tensor) and value.device.type == "cpu"
    return is_real and value.shape == tensor.shape and value.dtype == tensor.dtype
