"""One op at one shape: inputs, the steps of every form and peer on them, and the errors of their answers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memfix.checks.form_call import HELD, output_tensors
from memfix.checks.inputs import Draw, make_inputs
from memfix.checks.reference import in_dtype
from memfix.contract import FLOOR, Contract, Form
from memfix.errors import UsageError, did_you_mean
from memfix.laws import NAIVE
from memfix.meters.base import Step, StepBuilder
from memfix.meters.stages import stage
from memfix.units import MiB

from .peers import Comparison, Tensors

ROTATED_BYTES, MOST_COPIES = 256 * MiB, 8  # several times what a GPU's L2 cache holds
_SEED_OF_VALUES, _SEED_OF_UPSTREAM = 1_000_000, 2_000_000


def with_peers(contract: Contract, comparison: Comparison, peers: Mapping[str, Callable[..., object]]) -> Contract:
    """Return ``contract`` with the peers among its forms, and with the comparison's own forms."""
    forms = dict(contract.forms)
    for name, function in comparison.forms.items():
        new = function if isinstance(function, Form) else Form(function)
        forms[name] = replace(forms[name], function=new.function) if name in forms else new
    forms |= {name: Form(function) for name, function in peers.items()}
    return replace(contract, forms=forms)


def draw_of(contract: Contract, case: str | None, settings: Iterable[str]) -> Draw:
    """Return a case of the contract (by default the first), changed by ``settings`` such as ``T=8192``."""
    name = case if case is not None else next(iter(contract.cases))
    if name not in contract.cases:
        raise UsageError(f"{contract.name} has no case {name!r}{did_you_mean(name, contract.cases)}")
    try:
        return Draw.parsed(contract, ",".join([contract.cases[name].spelled(), *settings]))
    except UsageError as error:
        raise UsageError(str(error).replace("--at", "DIM=VALUE")) from None


@dataclass(frozen=True)
class Workload:
    """One op at one shape. ``contract`` includes peers as forms; ``values`` names an entry of ``comparison.values``."""

    contract: Contract
    comparison: Comparison
    draw: Draw
    values: str | None = None
    calls: int = 1
    """The number of calls in a timed step."""

    def at_error_size(self) -> Workload:
        """Return the same call at a size small enough for naive in float64."""
        dims, sizes = self.contract.dims, self.draw.case.dims
        cut = self.comparison.error_at
        if cut is None:
            small = {dim: dims[dim].nearest(size) for dim, size in sizes.items()}
        else:
            small = {dim: min(size, cut.get(dim, size)) for dim, size in sizes.items()}
        return replace(self, draw=replace(self.draw, case=replace(self.draw.case, dims=small)))

    # ------------------------------------------------------------ inputs
    def inputs(self, device: str, *, seed: int = 0) -> Tensors:
        is_fake = isinstance(torch.empty(0, device=device), FakeTensor)
        tensors = make_inputs(self.contract, replace(self.draw, seed=seed), device, values=not is_fake)
        if self.values is not None and not is_fake:
            with torch.no_grad():
                change = self.comparison.values[self.values]
                change(tensors, torch.Generator(device).manual_seed(_SEED_OF_VALUES + seed))
        return tensors

    def rotated_inputs(self, device: str) -> list[Tensors]:
        """Make several sets of inputs, enough to overflow a GPU's L2 cache; one set if it is large."""
        first = self.inputs(device)
        copies = min(ROTATED_BYTES // max(1, sum(tensor.nbytes for tensor in first.values())), MOST_COPIES)
        return [first, *(self.inputs(device, seed=seed) for seed in range(1, copies))]

    # ------------------------------------------------------------ steps
    def builder(self, form: str, phase: str) -> StepBuilder:
        """Return the builder of the step that a meter measures, with one call."""
        return lambda device: replace(self, calls=1).step(form, phase, [self.inputs(device)])

    def step(self, form: str, phase: str, inputs: Sequence[Tensors]) -> Step:
        """Return a step of ``calls`` calls, each on the next of ``inputs``. The floor has no backward."""
        function, options = self._function(form, phase)
        leaves = [own_leaves(inputs[place % len(inputs)]) for place in range(max(len(inputs), self.calls))]
        in_turn = itertools.cycle([(self._arguments(tensors), tensors) for tensors in leaves])

        def forward() -> object:
            result: object = None
            for _ in range(self.calls):
                arguments, _ = next(in_turn)
                with torch.no_grad():
                    result = function(*arguments, **options)
            return result

        if phase == "forward" or form == FLOOR:
            return forward
        upstreams = self._upstreams(self._differentiable(function(*self._arguments(inputs[0]), **options)))

        def train() -> None:
            asked = [next(in_turn) for _ in range(self.calls)]
            outputs = [
                output for arguments, _ in asked for output in self._differentiable(function(*arguments, **options))
            ]
            stage(HELD)
            try:
                torch.autograd.backward(outputs, upstreams * self.calls)
            finally:
                for tensor in (tensor for _, tensors in asked for tensor in tensors.values()):
                    tensor.grad = None

        return train

    def _function(self, form: str, phase: str) -> tuple[Callable[..., object], dict[str, object]]:
        if form == FLOOR and phase in self.comparison.floors:
            return self.comparison.floors[phase], {}
        return self.contract.function(form), self.contract.options(form, self.draw.case)

    def _arguments(self, tensors: Tensors) -> list[torch.Tensor | None]:
        return [tensors.get(spec.name) for spec in self.contract.inputs]

    def _differentiable(self, result: object) -> list[torch.Tensor]:
        outputs = output_tensors(result)
        chosen = self.comparison.gradient_of
        return [out for i, out in enumerate(outputs) if out.requires_grad and (chosen is None or i in chosen)]

    @staticmethod
    def _upstreams(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return a random upstream gradient for every output; 1 for a scalar, which is a loss."""
        return [torch.ones_like(out) if out.numel() == 1 else torch.randn_like(out) for out in outputs]

    # ------------------------------------------------------------ errors
    def errors(self, form: str, device: str, truth: Tensors) -> dict[str, float]:
        """Return the relative errors in norm of every output and gradient, and of the comparison's ``parts``."""
        tensors = self.inputs(device)
        answer = self._answer(form, tensors)
        absent = [name for name in truth if name not in answer]
        if absent:
            raise ValueError(f"no {absent[0]}")
        parts = self.comparison.parts
        if parts is not None:
            answer, truth = ({**found, **parts(tensors, found)} for found in (answer, truth))
        return {name: relative_error(answer[name], true) for name, true in truth.items() if true.numel()}

    def truth(self, device: str) -> Tensors:
        """Compute the answer of naive in float64, on the same values."""
        return self._answer(NAIVE, in_dtype(self.inputs(device), torch.float64))

    def _answer(self, form: str, tensors: Tensors) -> Tensors:
        """Return outputs and gradients by name."""
        function, options = self._function(form, "train")
        outputs = output_tensors(function(*self._arguments(tensors), **options))
        names = ["output"] if len(outputs) == 1 else [f"output {i}" for i in range(len(outputs))]
        found = {name: output.detach() for name, output in zip(names, outputs, strict=True)}
        differentiable = self._differentiable(outputs)
        if differentiable:
            generator = torch.Generator("cpu").manual_seed(_SEED_OF_UPSTREAM)
            working = getattr(torch, self.draw.case.dtype)
            upstreams = [
                torch.randn(out.shape, generator=generator).to(working).to(out)
                if out.numel() > 1
                else torch.ones_like(out)
                for out in differentiable
            ]
            torch.autograd.backward(differentiable, upstreams)
        found |= {f"gradient of {name}": t.grad for name, t in tensors.items() if t.grad is not None}
        return found


def relative_error(found: torch.Tensor, true: torch.Tensor) -> float:
    """Return the norm of the difference over that of ``true``, which is float64. If ``true`` is zero: 0 or infinity."""
    off, size = float((found.double() - true).norm()), float(true.double().norm())
    return off / size if size else (0.0 if off == 0 else float("inf"))


def own_leaves(tensors: Tensors) -> Tensors:
    """Return leaves that share the tensors' memory, so that each call has its own ``.grad`` fields."""
    return {name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in tensors.items()}
