"""Run a form at one call: return its outputs and gradients, and refuse a form that writes into its inputs.

Meanwhile uninitialised memory holds NaN, constants have the values of ``Form.compared_with``, and CUDA kernels are
emulated on the CPU.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import replace

import torch

from ..contract import Contract
from ..cuda_kernels.emulated import emulated
from .comparing import Answer, Unequal, same_bits
from .form_call import FormCall, Tensors
from .gradients import Gradients, gradients_of, real_view
from .inputs import WITHOUT_GRAPH, Draw
from .lowered import lowered_constants
from .poison import poisoned_memory
from .saved import require_saved, share_memory
from .settings import settings_watched


def run_form(call: FormCall, inputs: Tensors, device: str) -> Answer:
    """Return a form's answer for copies of ``inputs``. Raise ``Unequal`` where it writes into them, and whatever the
    form raises."""
    lowered = lowered_constants(call.contract, call.form) if device == "cpu" else contextlib.nullcontext()
    with poisoned_memory(device), lowered, emulated():
        before = call.before() if call.comes_second else None
        tensors = copies_of(inputs if before is None else before.inputs(device, other=True))
        if before is not None:
            evaluate(before, tensors)
            with torch.no_grad():
                for name, tensor in tensors.items():
                    tensor.copy_(inputs[name])
        answer = evaluate(call, tensors)
    for name, tensor in tensors.items():
        if not same_bits(inputs[name].detach(), tensor.detach()):
            raise Unequal(f"writes into its input {name}")
    return answer


def copies_of(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Return leaf tensors with storages of their own and the strides of ``tensors``, gaps included."""
    return {
        name: tensor.new_empty(0)
        .set_(tensor.untyped_storage().clone(), tensor.storage_offset(), tensor.shape, tensor.stride())
        .requires_grad_(tensor.requires_grad)
        for name, tensor in tensors.items()
    }


def answer_at(contract: Contract, form: str, draw: Draw) -> Answer:
    """Return a form's answer at one call on the CPU, after another call of the same shape."""
    with poisoned_memory("cpu"), emulated():
        for each in (replace(draw, seed=draw.seed + 1), draw):
            call = FormCall(contract, form, each)
            answer = evaluate(call, call.inputs("cpu"))
    return answer


def evaluate(call: FormCall, tensors: Tensors, nudge: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Answer:
    """Call the form and its backward, with a random upstream gradient. ``nudge`` changes that and all ``tensors``."""
    if nudge is not None:
        tensors = {
            name: nudge(tensor.detach()).requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
        }
    wanted = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    with settings_watched() as changes:
        # as in a model, where most inputs are results of other operators
        passed = tensors if call.takes_leaves else {name: t.view_as(t) for name, t in tensors.items()}
        outputs = call.outputs(passed)
        named = {f"output {i}" if len(outputs) > 1 else "output": output for i, output in enumerate(outputs)}
        found: Gradients = {name: real_view(output.detach()).clone() for name, output in named.items()}
        titled = {**{f"input {name}": tensor for name, tensor in passed.items()}, **named}
        pairs = itertools.combinations(titled, 2)
        views = frozenset((b, a) for a, b in pairs if b in named and share_memory(titled[a], titled[b]))
        if wanted and call.draw.mode not in WITHOUT_GRAPH:
            require_saved(call, named, passed)
            found |= gradients_of(call, outputs, wanted, nudge or (lambda gradient: gradient))
    return Answer(found, tuple(output.dtype for output in outputs), frozenset(changes), views)
