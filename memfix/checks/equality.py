"""Equal: a form gives naive's answer, outputs and every gradient, at any shape, chunk size, dtype and layout.

Naive runs in float64 (the truth) and in the working dtype (what rounding alone costs). The form must be as near to
the truth as a small factor of naive's own error. Hypothesis draws the calls and shrinks a failure to
the smallest shape; the finding carries a line that reproduces it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..contract import Contract
from ..laws import NAIVE, Tolerance
from .draws import equality_draws, smallest_failure
from .finding import Finding
from .inputs import Draw, call_form, make_inputs, output_tensors
from .interpreter import SHARE, CannotInterpret, in_interpreter, is_interpreting


class NaiveFailed(Exception):
    """The reference itself raised: nothing can be said of any form."""


class Unequal(AssertionError):
    """The form's answer differs from naive's; the message says where and by how much."""


def check_equality(
    contract: Contract,
    form: str,
    *,
    dtype: str,
    device: str = "cpu",
    examples: int = 50,
    random: bool = False,
) -> Finding:
    """Draw ``examples`` calls in ``dtype`` and compare. ``random``: other draws every time, rather than the same.

    A reported form that is known to be unequal in this dtype must be shown unequal. Kernels are interpreted on the CPU,
    in a child, and fewer calls are drawn for them.
    """
    if device == "cpu" and contract.forms[form].has_kernels and not is_interpreting():
        again = partial(
            check_equality, _portable(contract), form, dtype=dtype, examples=max(2, examples // SHARE), random=random
        )
        return _interpreted(again, contract, form)
    failure = smallest_failure(
        equality_draws(contract, dtype),
        lambda draw: compare_once(contract, form, draw, device),
        examples=examples,
        random=random,
    )
    if failure is not None:
        return _failed(contract, form, *failure)
    message = f"{dtype}: equal in {examples} drawn calls on {device}"
    known = contract.forms[form].known_unequal.get(dtype)
    if known is not None:
        message += f" (a reported form suddenly is equal; known unequal: {known})"
    return Finding("equality", contract.name, form, "pass" if known is None else "fail", message)


def check_equality_at(contract: Contract, form: str, draw: Draw, *, device: str = "cpu") -> Finding:
    """The comparison at one given call."""
    if device == "cpu" and contract.forms[form].has_kernels and not is_interpreting():
        return _interpreted(partial(check_equality_at, _portable(contract), form, draw), contract, form)
    try:
        compare_once(contract, form, draw, device)
    except Exception as error:
        return _failed(contract, form, draw, error)
    message = f"equal at {draw.spelled()}"
    if draw.case.dtype in contract.forms[form].known_unequal:  # it need not be unequal everywhere
        message += f"; known unequal at other calls in {draw.case.dtype}"
    return Finding("equality", contract.name, form, "pass", message)


def _interpreted(check: Callable[[], Finding], contract: Contract, form: str) -> Finding:
    try:
        return in_interpreter(check)
    except CannotInterpret as reason:
        message = f"not compared on the CPU, where its kernels must be interpreted: {reason}"
        return Finding("equality", contract.name, form, "note", message)


def _portable(contract: Contract) -> Contract:
    """What equality needs of the contract; the changes that make bad inputs do not travel to a child."""
    return replace(contract, bad_inputs=())


def _failed(contract: Contract, form: str, draw: Draw, error: Exception) -> Finding:
    if isinstance(error, NaiveFailed):
        message = f"naive itself fails at {draw.spelled()}: {error}"
        return Finding("equality", contract.name, form, "error", message)
    what = str(error) if isinstance(error, Unequal) else f"raises {type(error).__name__}: {error}"
    first, *more = what.splitlines() or [""]
    # only a wrong answer is what is known of it: a form that raises is broken in a new way
    known = contract.forms[form].known_unequal.get(draw.case.dtype) if isinstance(error, Unequal) else None
    return Finding(
        check="equality",
        op=contract.name,
        form=form,
        status="fail" if known is None else "pass",
        message=f"{draw.case.dtype}: {first}" + (f" (known unequal: {known})" if known else ""),
        details=(f"  smallest call found: {draw.spelled()}", *(f"  {line}" for line in more[:7])),
        reproduce=f"memfix check {contract.name} --form {form} --at {draw.spelled()}",
    )


def compare_once(contract: Contract, form: str, draw: Draw, device: str = "cpu") -> None:
    """One call, held against naive. Raises ``Unequal`` or whatever the form raises."""
    reference = _Reference.at(contract, draw, device)
    # another call of the same shape goes first: an answer that is remembered is then the wrong one
    with _PoisonFreshMemory():
        _evaluate(contract, form, draw, make_inputs(contract, replace(draw, seed=draw.seed + 1), device))
        tensors = make_inputs(contract, draw, device)
        before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        answer = _evaluate(contract, form, draw, tensors)
    for name, tensor in tensors.items():
        if not _same_bits(before[name], tensor.detach()):
            raise Unequal(f"writes into its input {name}")
    _compare(answer, reference, contract.tolerance_of(form), getattr(torch, draw.case.dtype))


# ---------------------------------------------------------------- running a form
@dataclass(frozen=True)
class _Answer:
    """Outputs and gradients by name; ``None`` for a gradient that did not arrive."""

    tensors: Mapping[str, torch.Tensor | None]
    dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True)
class _Reference:
    """What naive says of one call."""

    naive: _Answer
    """In the working dtype: what rounding alone costs."""
    truth: _Answer
    """In float64."""
    nearby: tuple[_Answer, ...]
    """In float64, of inputs that are off by what sums are allowed."""

    @staticmethod
    def at(contract: Contract, draw: Draw, device: str) -> _Reference:
        """The last ones are remembered: the forms of an op are held against the same calls, one after the other."""
        key = (
            contract.name, contract.naive, tuple(contract.inputs), contract.tolerance, contract.repeats_backward,
            draw.spelled(), device,
        )  # fmt: skip
        if key not in _REMEMBERED:
            if len(_REMEMBERED) >= _MOST_REMEMBERED:
                del _REMEMBERED[next(iter(_REMEMBERED))]
            _REMEMBERED[key] = _Reference._made(contract, draw, device)
        return _REMEMBERED[key]

    @staticmethod
    def _made(contract: Contract, draw: Draw, device: str) -> _Reference:
        try:
            inputs = make_inputs(contract, draw, device)
            wide = _in_dtype(inputs, torch.float64)
            truth = _evaluate(contract, NAIVE, draw, wide)
            if getattr(torch, draw.case.dtype) == torch.float64:
                naive = _off_as_in_float32(contract, draw, inputs, truth)
            else:
                naive = _evaluate(contract, NAIVE, draw, inputs)
            nearby = tuple(_evaluate(contract, NAIVE, draw, wide, nudge) for nudge in _nudges(contract, draw))
        except Exception as error:
            raise NaiveFailed(f"{type(error).__name__}: {error}") from error
        return _Reference(naive, truth, nearby)


_REMEMBERED: dict[tuple[object, ...], _Reference] = {}
_MOST_REMEMBERED = 256


@dataclass(frozen=True)
class _Nudge:
    """Every value off by a factor of ``1 + size`` or ``1 - size``, at random."""

    size: float
    seed: int

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator(tensor.device).manual_seed(self.seed)
        signs = torch.randint(0, 2, tensor.shape, generator=generator, device=tensor.device).to(tensor.dtype) * 2 - 1
        return tensor * (1 + self.size * signs)


def _nudges(contract: Contract, draw: Draw) -> list[_Nudge]:
    size = _sum_rounding(contract.tolerance, getattr(torch, draw.case.dtype))
    return [_Nudge(size, seed) for seed in (1, 2)]


def _sum_rounding(tolerance: Tolerance, dtype: torch.dtype) -> float:
    """The relative error that sums are given, in the dtype that they are kept in."""
    return tolerance.sum_ulps * torch.finfo(torch.promote_types(dtype, torch.float32)).eps


def _evaluate(
    contract: Contract,
    form: str,
    draw: Draw,
    tensors: Mapping[str, torch.Tensor],
    nudge: _Nudge | None = None,
) -> _Answer:
    """Call the form, and its backward with a random upstream gradient, twice over where the op promises it."""
    if nudge is not None:
        tensors = {
            name: nudge(tensor.detach()).requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
        }
    outputs = output_tensors(call_form(contract, form, draw, tensors))
    found: dict[str, torch.Tensor | None] = {
        f"output {i}" if len(outputs) > 1 else "output": output.detach().clone() for i, output in enumerate(outputs)
    }
    wanted = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    differentiable = [output for output in outputs if output.requires_grad]
    if wanted and not differentiable:
        found |= {f"gradient of {name}": None for name in wanted}
    elif wanted:
        rounds = ("gradient of", "second gradient of") if contract.repeats_backward else ("gradient of",)
        for number, title in enumerate(rounds):
            upstream = [_upstream(output, draw, number) for output in differentiable]
            if nudge is not None:
                upstream = [nudge(gradient) for gradient in upstream]
            try:
                torch.autograd.backward(differentiable, upstream, retain_graph=number + 1 < len(rounds))
            except RuntimeError as error:
                if number == 0 or contract.repeats_backward_of(form) or contract.name not in str(error):
                    raise
                break  # refused by name, as the form may; where it is not refused it must be right
            found |= {f"{title} {name}": None if t.grad is None else t.grad.clone() for name, t in wanted.items()}
            for tensor in wanted.values():
                tensor.grad = None
    return _Answer(found, tuple(output.dtype for output in outputs))


def _upstream(output: torch.Tensor, draw: Draw, number: int) -> torch.Tensor:
    """A random gradient, the same for every form and precision: rounded to the working dtype before it is widened."""
    generator = torch.Generator(output.device).manual_seed(1000 + draw.seed + number)
    gradient = torch.randn(output.shape, generator=generator, device=output.device, dtype=torch.float32)
    return gradient.to(getattr(torch, draw.case.dtype)).to(output.dtype)


def _off_as_in_float32(contract: Contract, draw: Draw, inputs: Mapping[str, torch.Tensor], truth: _Answer) -> _Answer:
    """Naive in float64, which is the truth itself, off by what naive loses in float32, as much finer as float64 is."""
    narrow = _in_dtype(inputs, torch.float32)
    rounded = _evaluate(contract, NAIVE, draw, narrow).tensors
    exact = _evaluate(contract, NAIVE, draw, _in_dtype(narrow, torch.float64)).tensors
    finer = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    moved: dict[str, torch.Tensor | None] = {}
    for name, true in truth.tensors.items():
        wide, narrowed = exact[name], rounded[name]
        if true is not None and wide is not None and narrowed is not None and true.is_floating_point():
            lost = narrowed.double() - wide
            true = true + finer * lost.where(lost.isfinite(), 0)  # where float32 overflows nothing is known
        moved[name] = true
    return _Answer(moved, truth.dtypes)


def _in_dtype(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {
        name: tensor.detach().to(dtype).requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


class _PoisonFreshMemory(TorchDispatchMode):
    """Fills every new uninitialised tensor with NaN, or the largest integer, so that what is not written shows."""

    _FRESH = frozenset(["empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (
            func.overloadpacket.__name__ in self._FRESH
            and isinstance(result, torch.Tensor)
            and result.dtype != torch.bool
        ):
            floating = result.is_floating_point() or result.is_complex()
            result.fill_(float("nan") if floating else torch.iinfo(result.dtype).max)
        return result


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    return torch.equal(a.nan_to_num(nan=0.0), b.nan_to_num(nan=0.0)) and torch.equal(a.isnan(), b.isnan())


# ---------------------------------------------------------------- comparing
_ENOUGH_FOR_AN_AVERAGE = 16
_ROUNDINGS_WHERE_NAIVE_OVERFLOWS = 32  # naive gives no error of its own to compare with there


def _compare(answer: _Answer, reference: _Reference, tolerance: Tolerance, dtype: torch.dtype) -> None:
    naive, truth = reference.naive, reference.truth
    if len(answer.dtypes) != len(naive.dtypes):
        raise Unequal(f"returns {len(answer.dtypes)} tensors, naive {len(naive.dtypes)}")
    if answer.dtypes != naive.dtypes:
        raise Unequal(f"returns {answer.dtypes[0]}, naive {naive.dtypes[0]}")
    for name, true in truth.tensors.items():
        if name not in answer.tensors:  # of a second backward that the form refuses
            continue
        got, rounded = answer.tensors[name], naive.tensors[name]
        if true is None or rounded is None:
            if got is not None and bool(got.ne(0).any()):
                raise Unequal(f"gives a {name}, naive gives none")
            continue
        if got is None:
            raise Unequal(f"gives no {name}")
        if got.shape != true.shape:
            raise Unequal(f"{name} has shape {list(got.shape)}, naive's {list(true.shape)}")
        moved = [t for near in reference.nearby if (t := near.tensors[name]) is not None]
        _compare_tensor(name, got, rounded, true, moved, tolerance, dtype)


def _compare_tensor(
    name: str,
    got: torch.Tensor,
    rounded: torch.Tensor,
    true: torch.Tensor,
    moved: list[torch.Tensor],
    tolerance: Tolerance,
    dtype: torch.dtype,
) -> None:
    got, rounded = got.double(), rounded.double()
    # where naive overflows in the working dtype a form may do the same, or be right where naive is not
    as_naive = (got == rounded) | (got.isnan() & rounded.isnan())
    as_truth = (got - true).abs() <= _ROUNDINGS_WHERE_NAIVE_OVERFLOWS * torch.finfo(dtype).eps * true.abs()
    finite = rounded.isfinite() & true.isfinite()
    if not bool((as_naive | as_truth)[~finite].all()):
        raise Unequal(f"{name} is neither naive's nor the truth where naive is not finite")
    if not finite.any():
        return
    error = (got - true)[finite].abs()
    own_error = (rounded - true)[finite].abs().max().item()
    magnitude = true[finite].abs().max().item()
    sum_error = max((near - true)[finite].abs().max().item() for near in moved)
    sum_error += _sum_rounding(tolerance, dtype) * magnitude
    allowed = tolerance.factor * own_error + tolerance.ulps * torch.finfo(dtype).eps * magnitude + sum_error
    worst = error.max().item()
    if not worst <= allowed:
        flat = (got - true).nan_to_num(nan=float("inf")).abs().masked_fill(~finite, -1).argmax()
        index = [int(i) for i in torch.unravel_index(flat, got.shape)]
        raise Unequal(
            f"{name} is off by {worst:.3g} at {index}: {got.flatten()[flat]:.6g}, "
            f"truth {true.flatten()[flat]:.6g}; "
            f"allowed {allowed:.3g} (naive's own error {own_error:.3g})"
        )
    # where a few elements outweigh the rest, naive's average can be right by luck as one element can
    if _num_that_matter(true[finite]) >= _ENOUGH_FOR_AN_AVERAGE:
        _compare_on_average(name, got[finite], rounded[finite], true[finite], sum_error, tolerance, dtype)


def _compare_on_average(
    name: str,
    got: torch.Tensor,
    rounded: torch.Tensor,
    true: torch.Tensor,
    sum_error: float,
    tolerance: Tolerance,
    dtype: torch.dtype,
) -> None:
    average, own_average, size = _rms(got - true), _rms(rounded - true), _rms(true)
    rounding = torch.finfo(dtype).eps / 4 * size  # about what one rounding of the result costs
    allowed = tolerance.rms_factor * (own_average + rounding) + sum_error
    if not average <= allowed:
        raise Unequal(
            f"{name} is off by {average:.3g} on average, naive by {own_average:.3g}, allowed {allowed:.3g}: "
            "it rounds more often than naive"
        )
    if tolerance.rms_ulps is not None and dtype in (torch.bfloat16, torch.float16):
        # what is below the normal numbers of the dtype has fewer digits than a rounding leaves
        allowed = tolerance.rms_ulps * torch.finfo(dtype).eps * size + torch.finfo(dtype).tiny + sum_error
        if not average <= allowed:
            raise Unequal(
                f"{name} is off by {average:.3g} on average, allowed {allowed:.3g}: "
                "it rounds what the form promises to keep in float32"
            )


def _num_that_matter(values: torch.Tensor) -> float:
    """How many equal elements would spread as much: all of them where they are alike, one where one outweighs all."""
    squares = values.pow(2)
    return (squares.sum().pow(2) / squares.pow(2).sum()).nan_to_num(nan=0.0).item()


def _rms(values: torch.Tensor) -> float:
    return values.pow(2).mean().sqrt().item()
