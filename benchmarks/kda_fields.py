"""One field of the KDA benchmark: a shape, a dtype, and who runs there; their first steps, errors, and two races."""

# B batch, T tokens, H heads, K key width, V value width

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click
import torch
import torch.nn.functional as F

from memfix.laws import NAIVE
from memfix.registry import contracts
from memfix.units import format_seconds

from .contenders import relative_error
from .rounds import Inputs, Limits, Row, forget_gradients, inputs_to_rotate, run_rounds, train, trouble_of

KdaOf = Callable[..., tuple[torch.Tensor, torch.Tensor]]

PHASES = ("train", "forward")
INPUTS = ("q", "k", "v", "g", "beta")
CHECKED_TOKENS = 256
WRONG_ABOVE = 0.05  # of the norm: far beyond what bfloat16 rounds away, far below a term that is left out
LEAST_GATE = -5.0  # what flash-linear-attention's safe_gate asks for
BATCH_S = 0.05
CHUNKS, REPORTED_CHUNK, PAIRS = (32, 64, 128), 64, 11

SLOW = (NAIVE, "reported", "streamed", "sequential")
FAST = ("wy", "triton", "fla", "fla_safe_gate")
IN_FLOAT32 = (NAIVE, "streamed", "wy", "triton")


@dataclass(frozen=True)
class Shape:
    batch: int
    tokens: int
    heads: int
    width: int
    """Of keys and of values."""
    for_all: bool = False
    """Whether the forms that are a thousand times slower at larger shapes run here too, and float32."""

    def spelled(self) -> str:
        return f"B{self.batch} T{self.tokens} H{self.heads} d{self.width}"

    def fields(self) -> dict[str, tuple[str, ...]]:
        """By dtype, who runs."""
        return {"bfloat16": (*SLOW, *FAST), "float32": IN_FLOAT32} if self.for_all else {"bfloat16": FAST}


SHAPES = {
    "incident": Shape(16, 256, 8, 64, for_all=True),
    "long": Shape(1, 8192, 32, 128),
    "batched": Shape(8, 2048, 16, 128),
    "context": Shape(1, 65_536, 16, 128),
}
SMOKE_SHAPES = {"smoke": Shape(2, 40, 2, 16, for_all=True)}


def make_inputs(shape: Shape, dtype: str, device: str, *, seed: int = 0) -> Inputs:
    """Keys of length 1, gates that forget mildly, in float32 whatever the dtype, and beta between 0 and 1."""
    made: dict[str, Any] = {"generator": torch.Generator(device).manual_seed(seed), "device": device}
    size = (shape.batch, shape.tokens, shape.heads, shape.width)
    q_BTHK, k_BTHK, v_BTHV, raw_gate_BTHK = (torch.randn(size, **made) for _ in range(4))
    g_BTHK = F.logsigmoid(raw_gate_BTHK).clamp_(min=LEAST_GATE)
    beta_BTH = torch.rand(size[:3], **made)
    narrow = (tensor.to(getattr(torch, dtype)) for tensor in (q_BTHK, F.normalize(k_BTHK, dim=-1), v_BTHV, beta_BTH))
    q_BTHK, k_BTHK, v_BTHV, beta_BTH = narrow
    return tuple(tensor.requires_grad_() for tensor in (q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH))


def upstream_of(inputs: Inputs) -> torch.Tensor:
    """A random gradient of o, which is as large as v and has the dtype of q."""
    q_BTHK, _, v_BTHV, *_ = inputs
    generator = torch.Generator(q_BTHK.device).manual_seed(1)
    return torch.randn(v_BTHV.shape, generator=generator, device=q_BTHK.device).to(q_BTHK.dtype)


# ---------------------------------------------------------------- one field: a shape, a dtype, and who runs there
def measured(
    shape: Shape, dtype: str, contenders: Mapping[str, KdaOf], device: str, *, seconds: float
) -> dict[str, Any]:
    """First steps, errors and both races. ``seconds`` are those of the rounds."""
    inputs = inputs_to_rotate(lambda seed: make_inputs(shape, dtype, device, seed=seed))
    first_step_s, troubles = first_steps(contenders, inputs[0], device)
    errors = errors_of({name: contenders[name] for name in first_step_s}, shape, dtype, device)
    troubles |= {name: trouble for name, row in errors.items() if (trouble := trouble_with(row)) is not None}
    sound = {name: contenders[name] for name in contenders if name not in troubles}
    entry: dict[str, Any] = {"spelled": shape.spelled(), **dataclasses.asdict(shape)}
    entry |= {"dtype": dtype, "first_step_s": first_step_s, "errors": errors, "rounds": {}}
    limits = Limits(seconds=seconds / len(PHASES))
    for phase in PHASES:
        rows = race(phase, sound, inputs, device, limits)
        entry["rounds"][phase] = max((len(row.times_s) for row in rows.values()), default=0)
        entry[phase] = {
            name: _figures(rows[name]) if name in rows else {"trouble": troubles[name]} for name in contenders
        }
    return entry


def first_steps(
    contenders: Mapping[str, KdaOf], inputs: Inputs, device: str
) -> tuple[dict[str, float], dict[str, str]]:
    """Seconds of each one's first train step in this process, and why the others have none."""
    seconds, troubles = {}, {}
    upstream = upstream_of(inputs)
    for name, kda_of in contenders.items():
        start = time.perf_counter()
        try:
            train(train_of(kda_of), inputs, upstream)
            _synchronize(device)
            seconds[name] = time.perf_counter() - start
        except Exception as error:
            troubles[name] = trouble_of(error)
        finally:
            forget_gradients(inputs)
        click.echo(f"  {name}: {troubles.get(name) or format_seconds(seconds[name])}", err=True)
    return seconds, troubles


def race(
    phase: str, contenders: Mapping[str, KdaOf], inputs: Sequence[Inputs], device: str, limits: Limits
) -> dict[str, Row]:
    step_of = {"train": train_of, "forward": forward_of}[phase]
    return run_rounds(
        {name: step_of(kda_of) for name, kda_of in contenders.items()},
        inputs,
        device,
        deadline_s=math.inf,
        limits=limits,
        upstream=upstream_of(inputs[0]),
        batch_s=BATCH_S,
    )


def train_of(kda_of: KdaOf) -> Callable[..., torch.Tensor]:
    return lambda *inputs: kda_of(*inputs)[0]


def forward_of(kda_of: KdaOf) -> Callable[..., None]:
    @torch.no_grad()
    def forward(*inputs: torch.Tensor) -> None:
        kda_of(*inputs)

    return forward


def _figures(row: Row) -> dict[str, Any]:
    memory = {key: getattr(row, key) for key in ("peak_bytes", "allocated_bytes", "held_bytes")}
    if row.trouble is not None:
        return {"trouble": row.trouble, **memory}
    return {"seconds": row.median_s, **memory, "batch_steps": row.batch_steps, "times_s": row.times_s}


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


# ---------------------------------------------------------------- error
def errors_of(contenders: Mapping[str, KdaOf], shape: Shape, dtype: str, device: str) -> dict[str, dict[str, Any]]:
    """Relative errors in norm of o, of the final state and of every gradient, against naive in float64.

    One sequence of at most 256 tokens, on the same values.
    """
    short = dataclasses.replace(shape, batch=1, tokens=min(shape.tokens, CHECKED_TOKENS))
    inputs = make_inputs(short, dtype, device)
    upstream = upstream_of(inputs)
    wide = tuple(tensor.detach().double().requires_grad_() for tensor in inputs)
    (contract,) = contracts(["kda"])
    true = _results_and_gradients(contract.function(NAIVE), wide, upstream.double())
    rows: dict[str, dict[str, Any]] = {}
    for name, kda_of in contenders.items():
        try:
            found = _results_and_gradients(kda_of, inputs, upstream)
            rows[name] = {key: relative_error(found[key], true[key]) for key in true}
        except Exception as error:
            rows[name] = {"trouble": trouble_of(error)}
    return rows


def trouble_with(errors: Mapping[str, Any]) -> str | None:
    """Why one with these errors is not timed, or None."""
    if "trouble" in errors:
        return errors["trouble"]
    for name, error in errors.items():
        if not error <= WRONG_ABOVE:  # NaN is wrong too
            what = f"the gradient of {name}" if name in INPUTS else name
            return f"wrong: {what} is off by {error:.1e} of its norm"
    return None


def _results_and_gradients(kda_of: KdaOf, inputs: Inputs, upstream: torch.Tensor) -> dict[str, torch.Tensor]:
    try:
        o_BTHV, final_state_BHKV = kda_of(*inputs)
        o_BTHV.backward(upstream)
        found = {"o": o_BTHV.detach(), "final_state": final_state_BHKV.detach()}
        for name, tensor in zip(INPUTS, inputs, strict=True):
            if tensor.grad is None:
                raise ValueError(f"no gradient of {name}")
            found[name] = tensor.grad
        return found
    finally:
        forget_gradients(inputs)


# ---------------------------------------------------------------- "about 5 % slower"
def overhead(naive: KdaOf, streamed: KdaOf, shape: Shape, device: str) -> dict[str, Any]:
    """Streamed over naive, in float32, in the pairs of ``PAIRS`` rounds, and streamed by its chunk in the same rounds.

    ``overhead`` has ratios, so 1.05 is 5 % slower; ``low`` and ``high`` are those of single pairs.
    """
    inputs = inputs_to_rotate(lambda seed: make_inputs(shape, "float32", device, seed=seed))
    contenders = {str(chunk): functools.partial(streamed, chunk_size=chunk) for chunk in CHUNKS}
    found: dict[str, Any] = {"overhead": {}, "streamed_by_chunk": {chunk: {} for chunk in contenders}}
    for phase in PHASES:
        rows = race(phase, {NAIVE: naive, **contenders}, inputs, device, Limits(least=PAIRS, fair=PAIRS, most=PAIRS))
        found["overhead"][phase] = _spread(rows[str(REPORTED_CHUNK)], rows[NAIVE])
        for chunk in contenders:
            row = rows[chunk]
            timed = {f"{phase}_ms": 1e3 * row.median_s} if row.trouble is None else {f"{phase}_trouble": row.trouble}
            found["streamed_by_chunk"][chunk] |= timed
    return found


def _spread(row: Row, reference: Row) -> dict[str, Any]:
    trouble = row.trouble or reference.trouble
    if trouble is not None:
        return {"trouble": trouble}
    ratios = [a / b for a, b in zip(row.times_s, reference.times_s, strict=True)]
    return {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios), "pairs": len(ratios)}
