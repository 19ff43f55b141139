"""Equal: a form gives naive's answer, outputs and every gradient, at any shape, chunk size, dtype and layout.

Naive runs in float64 (the truth) and in the working dtype (what rounding alone costs). The form must be as near to
the truth as a small factor of naive's own error. Hypothesis draws the calls and shrinks a failure to
the smallest shape; the finding carries a line that reproduces it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from ..contract import Contract
from ..errors import ContractError
from ..laws import NAIVE
from ..meters.cuda import gpu_beside_others, gpu_unavailable_reason, make_way_on_gpu
from .comparing import Answer, Reference, Unequal, compare, require_same_nans, sum_rounding
from .compiling import compile_ahead
from .draws import Drawn, drawn, equality_draws, in_mode, smallest_failure, spoiled, usual, usual_draws
from .finding import Finding
from .inputs import Draw, call_form, make_inputs, output_tensors
from .interpreter import LEAST, SHARE, CannotInterpret, InterpreterEnded, in_interpreter, is_interpreting
from .interpreter_faults import interpreter_fault
from .kernel_calls import calls_for_kernels
from .kernel_coverage import WATCH
from .lowered import lowered_constants
from .mended_interpreter import mend
from .modes import autocast_of, is_refusal, known_dtypes, second_derivatives
from .objects import compare_objects, naive_result
from .poison import poisoned_memory
from .upstream import upstream_gradients


@contextlib.contextmanager
def _no_word_of_detours() -> Iterator[None]:
    """A CPU without instructions for a dtype takes another way, which torch says with the whole stack of its C++."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed, switching to BLAS")
        yield


def usual_device(contract: Contract, form: str) -> str:
    """Where a form is compared unless the caller says: kernels on the GPU that is there, all else on the CPU."""
    return "cuda" if contract.forms[form].has_kernels and gpu_unavailable_reason() is None else "cpu"


class NaiveFailed(Exception):
    """The reference itself raised: nothing can be said of any form."""


@_no_word_of_detours()
def check_equality(
    contract: Contract,
    form: str,
    *,
    dtype: str,
    device: str = "cpu",
    examples: int = 50,
    seed: int = 0,
) -> Finding:
    """Draw ``examples`` calls in ``dtype`` and compare. Another ``seed`` draws other ones.

    A reported form that is known to be unequal in this dtype must be shown unequal, if not by these calls then by many
    more. Kernels are interpreted on the CPU, in a child, and fewer calls are drawn for them.
    """
    if device == "cpu" and contract.forms[form].has_kernels and not is_interpreting():
        again = partial(check_equality, _portable(contract), form, dtype=dtype, examples=examples, seed=seed)
        return _interpreted(again, contract, form)
    known = contract.forms[form].known_unequal.get(dtype)
    for number in (examples, 10 * examples) if known else (examples,):
        calls = equality_calls(contract, form, dtype, number, device=device, seed=seed)
        if device == "cuda" and contract.forms[form].has_kernels:
            compile_ahead(contract, form, [call.draw for call in calls])
        with gpu_beside_others() if device == "cuda" else contextlib.nullcontext():
            shrinks = _SHRINKS // 8 if known else _SHRINKS  # what is known need not be the simplest
            failure = smallest_failure(lambda draw: compare_once(contract, form, draw, device), calls, shrinks=shrinks)
        if failure is not None:
            return _failed(contract, form, *failure, device)
    message = f"{dtype}: equal in {number} drawn calls on {device}"
    if known is not None:
        message += f" (a reported form suddenly is equal; known unequal: {known})"
    return Finding("equality", contract.name, form, "pass" if known is None else "fail", message)


def equality_calls(
    contract: Contract, form: str, dtype: str, examples: int, *, device: str = "cpu", seed: int = 0
) -> list[Drawn]:
    """Where a form is compared: at the calls that are drawn for every form. Of kernels at half of them on a GPU, which
    compiles some for most calls; on the CPU at fewer, and as many others as it takes for every two options to meet in
    every kernel."""
    if not contract.forms[form].has_kernels:
        return drawn_calls(contract, dtype, examples, seed=seed)
    if device != "cpu":
        return drawn_calls(contract, dtype, max(LEAST, examples // 2), seed=seed)
    examples = max(LEAST, examples // SHARE)
    calls = drawn_calls(contract, dtype, examples, seed=seed)
    return calls + _calls_for_kernels(contract, form, examples, seed).get(dtype, [])


def drawn_calls(contract: Contract, dtype: str, examples: int, *, seed: int = 0) -> list[Drawn]:
    """The simplest and a usual one in every dtype, and others in each: what an option breaks shows in any of them.
    Beside them some with a NaN in one input, under autocast, or differentiated twice, each kind in one dtype.

    The same ones for every form, and drawn once.
    """
    draws, num_others = equality_draws(contract, dtype), max(0, examples - 2)
    name = _name_of_draws(contract, examples, seed)
    if name not in _DRAWN:
        several = drawn(draws, contract, 1 + num_others * len(contract.dtypes), seed=seed)
        _DRAWN[name] = [*several, usual(draws, contract, seed=seed)]
    simplest, *others, the_usual = _DRAWN[name]
    start = contract.dtypes.index(dtype) * num_others if dtype in contract.dtypes else 0
    plain = [(call, draws) for call in (simplest, *others[start : start + num_others])]
    calls = [*plain, (the_usual, usual_draws(draws, contract))][:examples]
    made = [
        Drawn(replace(call.draw, case=replace(call.draw.case, dtype=dtype)), call.made_of, its_draws)
        for call, its_draws in calls
    ]
    return [*made, *_beside(contract, dtype, made)]


def _beside(contract: Contract, dtype: str, made: Sequence[Drawn]) -> Iterator[Drawn]:
    """Calls of one dtype that show what does not follow from the dtype: hidden NaNs in the last one, what autocast does
    in float32, and second derivatives in float64, where those have most digits.
    """
    dtypes, some = contract.dtypes, made[1 : 1 + len(made) // 6] or made[:1]
    if dtype == dtypes[-1]:
        floating = [spec for spec in contract.inputs if spec.is_floating]
        yield from (spoiled(made[0], contract, spec) for spec in floating[: max(1, len(made) // 4)])
    if dtype == "float32":
        yield from (in_mode(call, contract, "autocast") for call in some)
    if dtype == ("float64" if "float64" in dtypes else dtypes[-1]) and any(spec.grad for spec in contract.inputs):
        yield from (in_mode(call, contract, "twice") for call in some)


def _calls_for_kernels(contract: Contract, form: str, examples: int, seed: int) -> dict[str, list[Drawn]]:
    name = (form, _name_of_draws(contract, examples, seed))
    if name not in _FOR_KERNELS:
        given = {dtype: drawn_calls(contract, dtype, examples, seed=seed) for dtype in contract.dtypes}
        _FOR_KERNELS[name] = calls_for_kernels(contract, form, given)
    return _FOR_KERNELS[name]


def _name_of_draws(contract: Contract, examples: int, seed: int) -> str:
    return repr((contract.name, contract.dims, contract.choices, contract.inputs, contract.dtypes, examples, seed))


_SHRINKS = 200
_DRAWN: dict[str, list[Drawn]] = {}
_FOR_KERNELS: dict[tuple[str, str], dict[str, list[Drawn]]] = {}


@_no_word_of_detours()
def check_equality_at(contract: Contract, form: str, draw: Draw, *, device: str = "cpu") -> Finding:
    """The comparison at one given call."""
    if device == "cpu" and contract.forms[form].has_kernels and not is_interpreting():
        return _interpreted(partial(check_equality_at, _portable(contract), form, draw), contract, form)
    try:
        compare_once(contract, form, draw, device)
    except Exception as error:
        return _failed(contract, form, draw, error, device)
    message = f"equal at {draw.spelled()}"
    if draw.case.dtype in contract.forms[form].known_unequal:  # it need not be unequal everywhere
        message += f"; known unequal at other calls in {draw.case.dtype}"
    return Finding("equality", contract.name, form, "pass", message)


def _interpreted(check: Callable[[], Finding], contract: Contract, form: str) -> Finding:
    try:
        return in_interpreter(check)
    except InterpreterEnded as ended:
        return Finding("equality", contract.name, form, "fail" if ended.is_crash else "error", str(ended))
    except CannotInterpret as reason:
        message = f"not compared on the CPU, where its kernels must be interpreted: {reason}"
        return Finding("equality", contract.name, form, "note", message)


def _portable(contract: Contract) -> Contract:
    """What equality needs of the contract; the changes that make bad inputs do not travel to a child."""
    return replace(contract, bad_inputs=())


def _failed(contract: Contract, form: str, draw: Draw, error: Exception, device: str) -> Finding:
    if isinstance(error, NaiveFailed):
        message = f"naive itself fails at {draw.spelled()}: {error}"
        return Finding("equality", contract.name, form, "error", message)
    if isinstance(error, ContractError):  # from a function that makes the values of an input
        return Finding("equality", contract.name, form, "error", f"no call can be made at {draw.spelled()}: {error}")
    if fault := interpreter_fault(error):
        return Finding("equality", contract.name, form, "error", f"{draw.case.dtype}: could not be compared: {fault}")
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
        reproduce=f"memfix check {contract.name} --form {form} --at {draw.spelled()}"
        + (" --device cuda" if device == "cuda" else ""),
        known="not equal" if known else "",
    )


def compare_once(contract: Contract, form: str, draw: Draw, device: str = "cpu") -> None:
    """One call, held against naive. Raises ``Unequal`` or whatever the form raises."""
    if contract.has_objects:
        with _blaming_naive():
            expected = naive_result(contract, draw)
        compare_objects(contract, form, draw, expected)
        return
    if device == "cuda":
        make_way_on_gpu()  # kernels are compiled for every call, a minute for a form
    elif contract.forms[form].has_kernels and is_interpreting():
        mend()  # a child has done so; a process in which the user set TRITON_INTERPRET has not
        WATCH.turn_to(contract.forms[form].function)
    reference = _reference(contract, draw, device)
    extra = _extra_of(contract, draw)
    with poisoned_memory(device), lowered_constants(contract, form) if device == "cpu" else contextlib.nullcontext():
        if extra == "another call first":
            other = make_inputs(contract, replace(draw, seed=draw.seed + 1), device)
            _evaluate(contract, form, draw, other, repeats=False)
        tensors = make_inputs(contract, draw, device)
        before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        answer = _evaluate(contract, form, draw, tensors, repeats=extra == "backward twice")
    for name, tensor in tensors.items():
        if not _same_bits(before[name], tensor.detach()):
            raise Unequal(f"writes into its input {name}")
    if draw.mode == "autocast":
        answer = replace(answer, dtypes=known_dtypes(answer.dtypes, reference.naive.dtypes, draw))
    if draw.spoiled is not None:
        require_same_nans(answer, reference)
    else:
        compare(answer, reference, contract.tolerance_of(form), _rounded_to(draw))


def answer_at(contract: Contract, form: str, draw: Draw) -> Answer:
    """What a form gives at one call on the CPU, after another call of the same shape."""
    with poisoned_memory("cpu"):
        for call in (replace(draw, seed=draw.seed + 1), draw):
            answer = _evaluate(contract, form, call, make_inputs(contract, call, "cpu"), repeats=False)
    return answer


def _extra_of(contract: Contract, draw: Draw) -> Literal["another call first", "backward twice", ""]:
    """What a comparison does besides: a quarter of the calls of a dtype come after another one of the same shape, so
    that an answer that is remembered is the wrong one; a quarter repeats backward, where the op promises that.

    Each drawn call does both in turn, in other dtypes.
    """
    dtypes = [*contract.dtypes]
    turn = draw.seed + (dtypes.index(draw.case.dtype) if draw.case.dtype in dtypes else 0)
    return ("another call first", "backward twice", "", "")[turn % 4]


# ---------------------------------------------------------------- running a form
def _reference(contract: Contract, draw: Draw, device: str) -> Reference:
    """What naive says. The last ones are remembered: the forms of an op are held against the same calls in turn."""
    key = (
        contract.name, contract.naive, tuple(contract.inputs), contract.tolerance, contract.repeats_backward,
        draw.spelled(), device,
    )  # fmt: skip
    if key not in _REMEMBERED:
        if len(_REMEMBERED) >= _MOST_REMEMBERED:
            del _REMEMBERED[next(iter(_REMEMBERED))]
        _REMEMBERED[key] = _reference_made(contract, draw, device)
    return _REMEMBERED[key]


def _reference_made(contract: Contract, draw: Draw, device: str) -> Reference:
    run_naive = partial(_evaluate, contract, NAIVE, draw, repeats=_extra_of(contract, draw) == "backward twice")
    inputs = make_inputs(contract, draw, device)
    with _blaming_naive():
        wide = _in_dtype(inputs, torch.float64)
        truth = run_naive(wide)
        if getattr(torch, draw.case.dtype) == torch.float64:
            naive = _off_as_in_float32(run_naive, inputs, truth)
            if any(tensor.is_floating_point() and tensor.dtype != torch.float64 for tensor in inputs.values()):
                naive = _with_narrow_ones_of(run_naive(inputs), naive)
        else:
            naive = run_naive(inputs)

    nudge = sum_rounding(contract.tolerance, _rounded_to(draw))

    def make_nearby() -> list[Answer]:
        with _blaming_naive():
            return [run_naive(wide, nudge=_Nudge(nudge, seed)) for seed in (1, 2)]

    floating = [t.detach() for t in wide.values() if t.is_floating_point() and t.numel()]
    return Reference(naive, truth, make_nearby, nudge, scale=max([1.0, *(t.abs().max().item() for t in floating)]))


def _rounded_to(draw: Draw) -> torch.dtype:
    """The dtype whose roundings a form may make."""
    dtype: torch.dtype = torch.bfloat16 if draw.mode == "autocast" else getattr(torch, draw.case.dtype)
    return dtype


@contextlib.contextmanager
def _blaming_naive() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise NaiveFailed(f"{type(error).__name__}: {error}") from error


_REMEMBERED: dict[tuple[object, ...], Reference] = {}
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


def _evaluate(
    contract: Contract,
    form: str,
    draw: Draw,
    tensors: Mapping[str, torch.Tensor],
    *,
    repeats: bool,
    nudge: _Nudge | None = None,
) -> Answer:
    """Call the form, and its backward with a random upstream gradient; twice, if it ``repeats`` and the op promises
    that."""
    if nudge is not None:
        tensors = {
            name: nudge(tensor.detach()).requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else tensor
            for name, tensor in tensors.items()
        }
    random_before = _random_state(tensors)
    with autocast_of(draw, tensors):
        outputs = output_tensors(call_form(contract, form, draw, tensors))
    found: dict[str, torch.Tensor | None] = {
        f"output {i}" if len(outputs) > 1 else "output": output.detach().clone() for i, output in enumerate(outputs)
    }
    wanted = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    differentiable = [output for output in outputs if output.requires_grad]
    if wanted and not differentiable:
        found |= {f"gradient of {name}": None for name in wanted}
    elif wanted and draw.mode == "twice":
        try:
            found |= second_derivatives(differentiable, wanted, draw, nudge)
        except RuntimeError as error:
            # naive may have none that torch knows: then there is nothing to compare with
            if form != NAIVE and not is_refusal(error, contract.name):
                raise
    elif wanted:
        rounds = ("gradient of", "second gradient of") if repeats and contract.repeats_backward else ("gradient of",)
        for number, title in enumerate(rounds):
            arriving = zip(outputs, upstream_gradients(outputs, draw, number), strict=True)
            used = [
                (output, gradient) for output, gradient in arriving if output.requires_grad and gradient is not None
            ]
            upstream = [gradient if nudge is None else nudge(gradient) for _, gradient in used]
            before = [gradient.clone() for gradient in upstream]
            try:
                if used:  # of several outputs the one that is used need not depend on what is wanted
                    again = number + 1 < len(rounds)
                    torch.autograd.backward([output for output, _ in used], upstream, retain_graph=again)
            except RuntimeError as error:
                if number == 0 or contract.repeats_backward_of(form) or contract.name not in str(error):
                    raise
                break  # refused by name, as the form may; where it is not refused it must be right
            if not all(map(_same_bits, before, upstream)):
                raise Unequal("writes into the gradient that arrives for its result")
            found |= {f"{title} {name}": None if t.grad is None else t.grad.clone() for name, t in wanted.items()}
            for tensor in wanted.values():
                tensor.grad = None
    moves_generator = not torch.equal(random_before, _random_state(tensors))
    return Answer(found, tuple(output.dtype for output in outputs), moves_generator)


def _random_state(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Of the generator that a call with these would use."""
    return torch.cuda.get_rng_state() if any(t.is_cuda for t in tensors.values()) else torch.get_rng_state()


def _off_as_in_float32(
    run_naive: Callable[[Mapping[str, torch.Tensor]], Answer], inputs: Mapping[str, torch.Tensor], truth: Answer
) -> Answer:
    """Naive in float64, which is the truth itself, off by what naive loses in float32, as much finer as float64 is."""
    narrow = _in_dtype(inputs, torch.float32)
    rounded = run_naive(narrow).tensors
    exact = run_naive(_in_dtype(narrow, torch.float64)).tensors
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
    """``answer``, with those tensors of ``rounded`` that are narrower than float64: gradients of narrower inputs."""
    narrow = {name: t for name, t in rounded.tensors.items() if t is not None and t.dtype != torch.float64}
    return Answer({**answer.tensors, **narrow}, rounded.dtypes)


def _in_dtype(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {
        name: tensor.detach().to(dtype).requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    return torch.equal(a.nan_to_num(nan=0.0), b.nan_to_num(nan=0.0)) and torch.equal(a.isnan(), b.isnan())
