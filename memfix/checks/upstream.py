"""The gradient that arrives for a call's results, as the rest of a model makes it.

- ``dense``: a number of its own for every element, one after the other in memory;
- ``transposed``: the same in another order, and behind other numbers, in memory: a part of what a product made;
- ``expanded``: one number that stands for all of them, as from ``.sum()`` and ``.mean()``;
- ``masked``: zero in half of the rows, as from a loss that leaves tokens out;
- ``partial``: of several results one is used, and nothing arrives for the others.

It belongs to whoever made it: another node may be about to read it, so nobody may write into it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .inputs import Draw, laid_out

_SEED = 1000


def upstream_gradients(outputs: Sequence[torch.Tensor], draw: Draw, number: int) -> list[torch.Tensor | None]:
    """One for each output, None where nothing arrives; others for another ``number``.

    The same for every form and precision: random, and rounded to the working dtype before it is widened.
    """
    gradients = [_gradient(output, draw, _SEED + draw.seed + number) for output in outputs]
    if draw.upstream != "partial" or len(outputs) == 1:
        return [*gradients]
    used = draw.seed % len(outputs)
    return [gradient if place == used else None for place, gradient in enumerate(gradients)]


def _gradient(output: torch.Tensor, draw: Draw, seed: int) -> torch.Tensor:
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
