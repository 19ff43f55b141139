"""Measure one form at one call, in each phase. Warm-up calls are skipped where the form needs none."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch

from ..contract.case import is_variant
from ..laws import Phase
from ..meters import get_meter
from ..meters.base import Meter, Reading, Simulation, Step
from ..meters.timeline import Allocation, Timeline, rounded
from .form_call import FormCall, StepsOf, output_tensors
from .inputs import Draw

_IN_TURN: tuple[Phase, ...] = ("forward", "held", "train")


def measure(call: FormCall, phase: Phase, meter: Meter) -> Reading:
    """Measure one phase alone, with a warm-up."""
    return meter.measure(call.step(phase))


def measure_case(call: FormCall, meter: Meter) -> tuple[dict[Phase, Reading], dict[Phase, Exception]]:
    """Return the reading of every phase, and the error of each that could not be measured; of a variant only the last
    phase. A phase that does not fit the GPU is simulated."""
    if is_variant(call.draw.case.name):
        phase = call.phases[-1]
        try:
            return measure_phases(call, [phase], meter), {}
        except Exception as error:
            return {}, {phase: error}
    meter, readings = fitted(meter, call)
    errors: dict[Phase, Exception] = {}
    phases = [phase for phase in call.phases if phase not in readings]
    try:
        measured = measure_phases(call, [*phases, *phases_beside(phases)] if phases else [], meter)
        readings |= {phase: reading for phase, reading in measured.items() if phase in phases or reading.peak_bytes}
    except Exception:  # one phase failed, and the others may not
        for phase in phases:
            try:
                readings[phase] = measure(call, phase, meter)
            except Exception as error:
                errors[phase] = error
    return readings, errors


def phases_beside(phases: Sequence[Phase]) -> list[Phase]:
    """Return the phases that are read along with ``phases``, without a step of their own. Callers drop those of 0
    bytes."""
    return ["saved", "results", "kept"] if "train" in phases else ["kept"]


def measure_phases(call: FormCall, phases: Collection[Phase], meter: Meter) -> dict[Phase, Reading]:
    """Return a reading for each of ``phases``, which may include ``saved``, ``results`` and ``kept``.

    The simulated meter runs the phases one after the other on the same inputs, without warm-ups, if the form needs none
    and leaks nothing.
    """
    in_order = [phase for phase in _IN_TURN if phase in phases]
    if phases and not in_order:
        in_order = [call.phases[-1]]
    readings: dict[Phase, Reading] = {}
    simulation = meter.simulation
    if simulation is not None and _needs_no_warm_up(call, simulation):
        (readings,) = _in_turn(call, in_order, simulation) or ({},)
    if not readings or any(reading.leaked_bytes or reading.cyclic_bytes for reading in readings.values()):
        readings = {phase: measure(call, phase, meter) for phase in in_order}
    if "kept" in phases:
        of_kept = [reading.kept_reading() for reading in readings.values()]
        # of equal readings max takes the first: this simulation made it, so its line is known
        readings["kept"] = max(of_kept, key=lambda reading: reading.peak_bytes)
    if "saved" in phases:
        readings["saved"] = _reading_of(_saved_inputs(call), like=next(iter(readings.values())))
    if "results" in phases:
        readings["results"] = _reading_of(_saved_results(call), like=next(iter(readings.values())))
    return readings


def fitted(meter: Meter, call: FormCall) -> tuple[Meter, dict[Phase, Reading]]:
    """Return the meter for the phases that fit its GPU, and simulated readings of the others.

    All phases are tried where the meter has no capacity, and where a step cannot be simulated.
    """
    capacity = meter.capacity_bytes()
    if capacity is None:
        return meter, {}
    simulated, (*before, last) = get_meter("simulated"), call.phases
    try:
        readings = measure_phases(call, [last], simulated)
        if readings[last].total_bytes > capacity:  # train takes more than the phases before it
            readings |= measure_phases(call, before, simulated)
    except Exception:
        return meter, {}
    too_large = {phase: reading for phase, reading in readings.items() if reading.total_bytes > capacity}
    expected = max((reading.total_bytes for phase, reading in readings.items() if phase not in too_large), default=0)
    return meter.expecting(expected), {phase: too_large[phase] for phase in call.phases if phase in too_large}


# ---------------------------------------------------------------- several phases on the same inputs
_NEEDS_NO_WARM_UP: dict[tuple[str, Callable[..., object], str], bool] = {}


def _needs_no_warm_up(call: FormCall, meter: Simulation) -> bool:
    """Whether a first call takes exactly what a second takes, in every phase. Measured once, at a small shape."""
    contract = call.contract
    small = _shortened(replace(call, draw=Draw(contract.smallest_case)))
    key = (f"{contract.name} {small.draw.spelled()}", contract.function(call.form), meter.gpu.name)
    if key not in _NEEDS_NO_WARM_UP:
        rounds = _in_turn(small, call.phases, meter, rounds=2)
        _NEEDS_NO_WARM_UP[key] = rounds is not None and all(
            first == second and first.timeline == second.timeline
            for first, second in zip(rounds[0].values(), rounds[1].values(), strict=True)
        )
    return _NEEDS_NO_WARM_UP[key]


def _in_turn(
    call: FormCall, phases: Sequence[Phase], meter: Simulation, *, rounds: int = 1
) -> list[dict[Phase, Reading]] | None:
    """Return readings by phase, one dictionary for each round, all on the same inputs.

    None where a phase cannot be measured; measuring each phase alone then shows which one, and why.
    """
    run = [phase for phase in phases if phase != "held" or "train" not in phases]
    try:
        readings = meter.measure_first_calls(StepsOf(call, run * rounds))
    except Exception:
        return None
    by_round = [readings[first : first + len(run)] for first in range(0, len(readings), len(run))]
    return [_with_held(dict(zip(run, some, strict=True)), phases) for some in by_round]


def _with_held(readings: dict[Phase, Reading], phases: Sequence[Phase]) -> dict[Phase, Reading]:
    """Order readings by ``phases``. ``held`` comes from the train step, which marks the end of its forward."""
    found: dict[Phase, Reading] = dict(readings)
    train = readings.get("train")
    if train is not None:
        assert train.timeline is not None
        ((held_until, _),) = train.timeline.stages
        found["train"] = replace(train, stages=(), timeline=replace(train.timeline, stages=()))
        found["held"] = _held_in(train, train.timeline.before(held_until), readings.get("forward"))
    return {phase: found[phase] for phase in phases}


def _held_in(train: Reading, until_held: Timeline, forward: Reading | None) -> Reading:
    """Cut the train step's reading off after its forward. Its inputs are those of ``forward``: no upstream gradient."""
    if forward is not None and forward.timeline is not None:
        inputs = tuple(buffer for buffer in forward.timeline.buffers if not buffer.born)
        made = tuple(buffer for buffer in until_held.buffers if buffer.born)
        until_held = replace(until_held, buffers=inputs + made)
    allocated = until_held.with_sizes(rounded)
    return replace(
        train,
        base_bytes=until_held.base_bytes,
        peak_bytes=max(until_held.live_bytes) - until_held.base_bytes,
        held_bytes=until_held.live_bytes[-1] - until_held.base_bytes,
        allocated_bytes=max(allocated.live_bytes) - allocated.base_bytes,
        alive_at_peak=until_held.at_peak(),
        stages=(),
        timeline=until_held,
    )


# ---------------------------------------------------------------- inputs and results that a form keeps for backward
# They cost nothing in a check, whose caller keeps them too. In a model they are activations that nothing else may need,
# and saving them doubles what a layer holds. So a small call drops its inputs after the forward, and then its results:
# those whose memory is then still in use were saved.
def _reading_of(rows: Sequence[Allocation], like: Reading) -> Reading:
    """Return a reading of these saved tensors. Meter, device and everything else are those of ``like``."""
    total = sum(row.bytes for row in rows)
    return replace(
        like, peak_bytes=total, held_bytes=total, leaked_bytes=0, cyclic_bytes=0, allocated_bytes=total,
        alive_at_peak=tuple(sorted(rows, key=lambda row: -row.bytes)), kept=(), stages=(), timeline=None,
    )  # fmt: skip


def _saved_inputs(call: FormCall) -> list[Allocation]:
    case, saved = call.draw.case, _saved(call)
    sizes = {
        spec.name: math.prod(spec.size(case.dims)) * getattr(torch, spec.dtype_at(case)).itemsize
        for spec in call.contract.inputs
    }
    return [Allocation(size, f"input {name}", place="") for name, size in sizes.items() if name in saved]


def _saved_results(call: FormCall) -> list[Allocation]:
    numbers = [number for number in _saved(call) if isinstance(number, int)]
    if not numbers:
        return []
    sizes: list[int] = []

    def build(device: str) -> Step:
        tensors = call.inputs(device, values=False)
        return lambda: sizes.extend(output.nbytes for output in output_tensors(call.result(tensors)))

    get_meter("simulated").measure(build, warmup=0)
    return [Allocation(sizes[number], f"result {number}", place="") for number in numbers]


_SAVED: dict[tuple[object, ...], list[str | int]] = {}


def _saved(call: FormCall) -> list[str | int]:
    """Return the names of the inputs and the numbers of the results whose memory is in use when the caller has dropped
    them. Cached: most cases of a form become the same call when they are shortened."""
    small = _shortened(call)
    contract = call.contract
    key = (contract.name, contract.function(call.form), tuple(contract.inputs), small.draw.spelled())
    if key not in _SAVED:
        _SAVED[key] = _measure_saved(small)
    return _SAVED[key]


def _measure_saved(small: FormCall) -> list[str | int]:
    found: list[str | int] = []

    def build(device: str) -> Step:
        leaves = small.inputs(device, values=False)

        def step() -> object:
            # results of an operator, because the graph always holds leaves, to which it adds gradients
            tensors = {name: leaf * 1 if leaf.requires_grad else leaf for name, leaf in leaves.items()}
            leaves.clear()
            storages = {name: tensor.untyped_storage() for name, tensor in tensors.items()}
            outputs = output_tensors(small.result(tensors))
            tensors.clear()
            found.extend(name for name, storage in storages.items() if _is_in_use(storage))
            known = {storage._cdata for storage in storages.values()}
            results = [output.untyped_storage() for output in outputs]
            graph = [output.grad_fn for output in outputs]
            outputs.clear()
            found.extend(
                number for number, storage in enumerate(results) if _is_in_use(storage) and storage._cdata not in known
            )
            return graph

        return step

    get_meter("simulated").measure(build, warmup=0)
    return found


def _is_in_use(storage: torch.UntypedStorage) -> bool:
    """Whether anything but the given object uses the storage."""
    return torch._C._storage_Use_Count(storage._cdata) > 1


def _shortened(call: FormCall) -> FormCall:
    """Return the same call with short axes: a few chunks of two."""
    contract, case = call.contract, call.draw.case
    axes = contract.shape_dims()

    def short(dim: str) -> int:
        spec = contract.dims[dim]
        wanted = max(1, spec.low) * (4 if dim in axes else 2)
        return -(-wanted // spec.multiple_of) * spec.multiple_of

    dims = {dim: min(size, short(dim)) for dim, size in case.dims.items()}
    return replace(call, draw=replace(call.draw, case=replace(case, dims=dims)))
