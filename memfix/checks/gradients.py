"""Compute the gradients of a call, for each kind of upstream gradient that the rest of a model gives.

- ``dense``: random values, contiguous;
- ``transposed``: the same with transposed strides and a storage offset, like a slice of a product's result;
- ``expanded``: one value expanded to all elements, as from ``.sum()`` and ``.mean()``;
- ``masked``: zero in half of the rows, as from a loss that ignores tokens;
- ``partial``: of several results one is used, and the others get no gradient.

A form must not write into the upstream gradient, since another node may still read it. A second derivative must equal
naive's or be refused with an error: if a gradient silently had no graph, a penalty on it would vanish.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..laws import NAIVE
from .comparing import Unequal, same_bits
from .form_call import FormCall, Tensors, refusing_exit
from .inputs import Draw, laid_out

Change = Callable[[torch.Tensor], torch.Tensor]
Gradients = dict[str, torch.Tensor | None]
_SEED = 1000
_REFUSALS = ("second derivative", "differentiate twice", "is not implemented")
"""Words of a refusal that does not name the op; torch's for ``once_differentiable`` and for its own operators."""


def gradients_of(call: FormCall, outputs: Sequence[torch.Tensor], wanted: Tensors, change: Change) -> Gradients:
    """Return the gradients of ``wanted`` by name, each None where no output has a graph. ``change`` is applied to the
    upstream gradients."""
    differentiable = [output for output in outputs if output.requires_grad]
    if not differentiable:
        return {f"gradient of {name}": None for name in wanted}
    if call.draw.mode == "twice":
        try:
            return _second_derivatives(differentiable, wanted, call.draw, change)
        except RuntimeError as error:
            if not _may_refuse_second_derivative(call, error):
                raise
            return {}
    found: Gradients = {}
    for number, title in enumerate(("gradient of", "second gradient of")[: call.num_backwards]):
        try:
            _backward(outputs, call.draw, number, change, is_last=number + 1 == call.num_backwards)
        except RuntimeError as error:
            if not _may_refuse_backward(call, number, error):
                raise
            break
        found |= {f"{title} {name}": _taken(tensor) for name, tensor in wanted.items()}
    return found


def _backward(outputs: Sequence[torch.Tensor], draw: Draw, number: int, change: Change, *, is_last: bool) -> None:
    """Run the backward with this number. Of several outputs, the used one need not depend on the wanted inputs."""
    arriving = zip(outputs, upstream_gradients(outputs, draw, number), strict=True)
    used = [(output, gradient) for output, gradient in arriving if output.requires_grad and gradient is not None]
    upstream = [change(gradient) for _, gradient in used]
    before = [gradient.clone() for gradient in upstream]
    if used:
        with refusing_exit():
            torch.autograd.backward([output for output, _ in used], upstream, retain_graph=not is_last)
    if not all(map(same_bits, before, upstream)):
        raise Unequal("writes into the gradient that arrives for its result")


def _second_derivatives(outputs: Sequence[torch.Tensor], wanted: Tensors, draw: Draw, change: Change) -> Gradients:
    """Return the gradients of ``wanted``, and the derivatives of a random sum of them by ``wanted`` and by the upstream
    gradients. A derivative is None where no gradient has a graph, or where none depends on the tensor.
    """
    upstream = [change(gradient) for gradient in upstream_gradients(outputs, draw, 0) if gradient is not None]
    upstream = [gradient.requires_grad_() for gradient in upstream]
    gradients = torch.autograd.grad(outputs, list(wanted.values()), upstream, create_graph=True, allow_unused=True)
    found: Gradients = {
        f"gradient of {name}": None if gradient is None else gradient.detach()
        for name, gradient in zip(wanted, gradients, strict=True)
    }
    named = {f"second derivative by {name}": tensor for name, tensor in wanted.items()}
    named |= {f"second derivative by the gradient of output {i}": tensor for i, tensor in enumerate(upstream)}
    again = [gradient for gradient in gradients if gradient is not None and gradient.requires_grad]
    if not again:
        return found | dict.fromkeys(named)
    arriving = [gradient for gradient in upstream_gradients(again, draw, 1) if gradient is not None]
    torch.autograd.backward(again, arriving)  # torch.autograd.grad would skip the error of ``once_differentiable``
    return found | {name: _taken(tensor) for name, tensor in named.items()}


def _taken(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of the gradient that the tensor has got, and leave it without one."""
    gradient, tensor.grad = tensor.grad, None
    return None if gradient is None else gradient.clone()


def _may_refuse_backward(call: FormCall, number: int, error: RuntimeError) -> bool:
    """Whether a second backward may fail: where the contract does not promise repeats, and by the name of the op in a
    form that is an exception to the promise."""
    contract = call.contract
    is_exception = not contract.repeats_backward_of(call.form) and contract.name in str(error)
    return number > 0 and (is_exception or not contract.repeats_backward)


def _may_refuse_second_derivative(call: FormCall, error: RuntimeError) -> bool:
    """Whether a second derivative may fail: with words that say so. If naive has none, there is nothing to compare."""
    return call.form == NAIVE or any(words in str(error) for words in (call.contract.name, *_REFUSALS))


# ---------------------------------------------------------------- upstream gradients
def upstream_gradients(outputs: Sequence[torch.Tensor], draw: Draw, number: int) -> list[torch.Tensor | None]:
    """Return a random gradient for each output, None for an unused one. Another ``number`` gives others.

    They are the same for every form and precision: they are rounded to the working dtype before they are widened.
    """
    gradients = [_gradient(output, draw, _SEED + draw.seed + number) for output in outputs]
    if draw.upstream != "partial" or len(outputs) == 1:
        return [*gradients]
    used = draw.seed % len(outputs)
    return [gradient if place == used else None for place, gradient in enumerate(gradients)]


def real_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor's real and imaginary parts along one more axis, and any other tensor as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _gradient(output: torch.Tensor, draw: Draw, seed: int) -> torch.Tensor:
    if output.is_complex():
        return torch.view_as_complex(_gradient(real_view(output.detach()), draw, seed).contiguous())
    generator = torch.Generator(output.device).manual_seed(seed)
    shape = () if draw.upstream == "expanded" else output.shape
    values = torch.randn(shape, generator=generator, device=output.device, dtype=torch.float32)
    values = values.to(getattr(torch, draw.case.dtype)).to(output.dtype)
    if draw.upstream == "masked" and output.dim():
        rows_shape = (*output.shape[:-1], 1) if output.dim() > 1 else output.shape
        rows = torch.rand(rows_shape, generator=generator, device=output.device)
        values = values.where(rows < 0.5, 0)
    if draw.upstream == "transposed" and output.dim():
        one_row_more = (output.shape[0] + 1, *output.shape[1:])
        return laid_out(one_row_more, output.dtype, output.device, "transposed")[1:].copy_(values)
    return values.expand(output.shape)
