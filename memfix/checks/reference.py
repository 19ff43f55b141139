"""Run naive at a call: in float64, which is the truth, and in the working dtype, which shows its rounding error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from ..laws import NAIVE
from .comparing import Answer, Reference, sum_rounding
from .form_call import FormCall, Tensors
from .poison import poisoned_memory
from .running import copies_of, evaluate

_REMEMBERED: dict[tuple[object, ...], Reference] = {}
_MOST_REMEMBERED = 256


class NaiveFailed(Exception):
    """Naive itself raised, so no form can be judged."""


def reference_at(call: FormCall, device: str) -> Reference:
    """Return naive's results at a call. The last ones are cached, since all forms of an op have the same calls."""
    contract = call.contract
    key = (
        contract.name, contract.naive, tuple(contract.inputs), contract.tolerance, contract.repeats_backward,
        call.draw.spelled(), device,
    )  # fmt: skip
    if key not in _REMEMBERED:
        if len(_REMEMBERED) >= _MOST_REMEMBERED:
            del _REMEMBERED[next(iter(_REMEMBERED))]
        _REMEMBERED[key] = _run_naive(call.of(NAIVE), device)
    return _REMEMBERED[key]


def _run_naive(call: FormCall, device: str) -> Reference:
    run = partial(evaluate, call)
    with poisoned_memory(device):  # the gaps of a strided input hold NaN
        inputs = call.inputs(device)
    with blaming_naive():
        own = copies_of(inputs)
        wide = in_dtype(own, torch.float64)
        truth = run(wide)
        if call.draw.spoiled is not None:
            truth = _where_it_counts(call, run, own[call.draw.spoiled].isnan(), truth)
        if getattr(torch, call.draw.case.dtype) == torch.float64:
            naive = _off_as_in_float32(run, own, truth)
            if any(tensor.is_floating_point() and tensor.dtype != torch.float64 for tensor in own.values()):
                naive = _with_narrow_ones_of(run(own), naive)
        else:
            naive = run(own)
    nudge = sum_rounding(call.contract.tolerance, call.rounded_to)

    def make_nearby(nudge: float, number: int) -> list[Answer]:
        with blaming_naive():
            return [run(wide, _Nudge(nudge, seed)) for seed in range(1, 1 + number)]

    def make_others() -> list[Reference]:
        draws = (replace(call.draw, seed=call.draw.seed + 4 * number) for number in (1, 2, 3))  # in the same turn
        return [_run_naive(replace(call, draw=draw), device) for draw in draws]

    def make_largest() -> list[Answer]:
        with blaming_naive():
            return [run(each) for each in _with_largest(call, own)]

    finite = [t.detach()[t.isfinite()] for t in wide.values() if t.is_floating_point()]
    scale = max([1.0, *(t.abs().max().item() for t in finite if t.numel())])
    return Reference(inputs, naive, truth, make_nearby, nudge, scale, make_others, make_largest)


@dataclass(frozen=True)
class _Nudge:
    """Multiplies every value by ``1 + size`` or ``1 - size``, at random."""

    size: float
    seed: int

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator(tensor.device).manual_seed(self.seed)
        signs = torch.randint(0, 2, tensor.shape, generator=generator, device=tensor.device).to(tensor.dtype) * 2 - 1
        return tensor * (1 + self.size * signs)


@contextlib.contextmanager
def blaming_naive() -> Iterator[None]:
    """Turn whatever is raised into ``NaiveFailed``."""
    try:
        yield
    except Exception as error:
        raise NaiveFailed(f"{type(error).__name__}: {error}") from error


def _where_it_counts(call: FormCall, run: Callable[[Tensors], Answer], is_nan: torch.Tensor, truth: Answer) -> Answer:
    """Return the truth of a spoiled call, with NaN only in elements that depend on the spoiled values.

    Naive also gives NaN for a NaN times a weight of zero; a form that skips masked elements need not.
    """
    whole = in_dtype(replace(call, draw=replace(call.draw, spoiled=None)).inputs(str(is_nan.device)), torch.float64)
    halved = _changed(call, whole, lambda values: values * torch.where(is_nan, 0.5, 1.0))
    one, other = run(whole).tensors, run(halved).tensors
    counts = {key: torch.as_tensor(one[key] != other[key]) for key in truth.tensors}
    return Answer({key: t if t is None else t.where(counts[key], 0) for key, t in truth.tensors.items()}, truth.dtypes)


def _with_largest(call: FormCall, spoiled: Tensors) -> Iterator[Tensors]:
    """Yield the inputs in float64 twice, each time with another number above all others in place of the NaNs."""
    wide = in_dtype(spoiled, torch.float64)
    for above in (0.5, 1.0):

        def largest(values: torch.Tensor, above: float = above) -> torch.Tensor:
            finite = values[values.isfinite()]
            return values.nan_to_num(nan=above + (finite.max().item() if finite.numel() else 0.0))

        yield _changed(call, wide, largest)


def _changed(
    call: FormCall, tensors: Tensors, change: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return ``tensors`` with the spoiled one changed."""
    name = call.draw.spoiled
    assert name is not None
    return {**tensors, name: change(tensors[name].detach()).requires_grad_(tensors[name].requires_grad)}


def _off_as_in_float32(run: Callable[[Tensors], Answer], inputs: Tensors, truth: Answer) -> Answer:
    """Return the truth plus naive's error in float32, scaled to float64: in float64 naive is the truth itself."""
    narrow = in_dtype(inputs, torch.float32)
    rounded = run(narrow).tensors
    exact = run(in_dtype(narrow, torch.float64)).tensors
    finer = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    moved: dict[str, torch.Tensor | None] = {}
    for name, true in truth.tensors.items():
        wide, narrowed = exact[name], rounded[name]
        if true is not None and wide is not None and narrowed is not None and true.is_floating_point():
            lost = narrowed.double() - wide
            true = true + finer * lost.where(lost.isfinite(), 0)  # where float32 overflows nothing is known
        moved[name] = true
    return Answer(moved, truth.dtypes)


def _with_narrow_ones_of(rounded: Answer, answer: Answer) -> Answer:
    """Return ``answer`` with those tensors of ``rounded`` that are narrower than float64: gradients of such inputs."""
    narrow = {name: t for name, t in rounded.tensors.items() if t is not None and t.dtype != torch.float64}
    return Answer({**answer.tensors, **narrow}, rounded.dtypes)


def in_dtype(tensors: Tensors, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return copies of floating tensors in ``dtype``, with gradients where the originals have; others as they are."""
    return {
        name: tensor.detach().to(dtype).requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
