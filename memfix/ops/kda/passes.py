"""What the forms ``triton`` and ``cuda`` share: the autograd function, and the tensors that its passes exchange."""

# B batch, T tokens, H heads, K key width, V value width, S sequences, N chunks of all sequences, C tokens of a chunk,
# G segments of a sequence but the last

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..derivatives import first_derivative_only
from .arguments import KdaOptions, KdaTensors, Outputs, scale_of
from .windows import Chunks, Window, windows_of


@dataclass(frozen=True)
class Passes:
    """The launches in which the forms ``triton`` and ``cuda`` differ; they share the rest."""

    prepare: Callable[[tuple[torch.Tensor, ...], Terms, Chunks, float], None]
    scan: Callable[[Terms, Chunks, torch.Tensor | None, torch.Tensor, torch.Tensor], torch.Tensor | None]
    """Returns the states between segments, from which a backward pass may start, or None."""
    scan_both_ways: Callable[[Terms, Chunks, Walk], None]
    gradients: Callable[[tuple[torch.Tensor, ...], Chunks, Walk, Kept, float, Gradients], None]
    new_beta_parts: Callable[[torch.Tensor, int], torch.Tensor]
    """Allocates ``Gradients.beta_parts_PBTH`` for a beta and a width of keys."""
    bounds_growth: bool = False


@dataclass(frozen=True)
class Terms:
    """The effect of every chunk on a state; ``kernels.prepare`` defines each term."""

    weights_NHCK: torch.Tensor
    values_NHCV: torch.Tensor
    queries_NHCK: torch.Tensor
    keys_NHCK: torch.Tensor
    scores_NHCC: torch.Tensor
    inverse_NHCC: torch.Tensor | None
    decay_NHK: torch.Tensor
    growth_NH: torch.Tensor | None
    """An upper bound on the factor by which a chunk scales the length of a state, as an exponent of 2."""

    @staticmethod
    def of(
        passes: Passes, inputs: tuple[torch.Tensor, ...], chunks: Chunks, scale: float, *, keeps_inverse: bool
    ) -> Terms:
        q_BTHK = inputs[0]
        terms = Terms(
            chunks.empty_rows(q_BTHK, chunks.width_k),
            chunks.empty_rows(q_BTHK, chunks.width_v),
            chunks.empty_rows(q_BTHK, chunks.width_k),
            chunks.empty_rows(q_BTHK, chunks.width_k),
            chunks.empty_pairs(q_BTHK),
            chunks.empty_pairs(q_BTHK) if keeps_inverse else None,
            chunks.empty(q_BTHK, chunks.width_k, dtype=torch.float32),
            chunks.empty(q_BTHK, dtype=torch.float32) if passes.bounds_growth else None,
        )
        if chunks.num_chunks:
            passes.prepare(inputs, terms, chunks, scale)
        return terms

    def kept(self) -> Kept:
        assert self.inverse_NHCC is not None
        nan_of_gates = self.decay_NHK if self.growth_NH is None else self.growth_NH
        return Kept(self.inverse_NHCC, nan_of_gates, self.values_NHCV)


@dataclass(frozen=True)
class Walk:
    """Arguments and results of a backward pass's scans through the chunks of a window."""

    initial_SHKV: torch.Tensor | None
    ends_GSHKV: torch.Tensor | None
    """The states at the ends of the segments that forward cut sequences into."""
    grad_out_BTHV: torch.Tensor
    grad_final_SHKV: torch.Tensor | None
    grad_initial_SHKV: torch.Tensor | None
    states_NHVK: torch.Tensor
    """The first state of each chunk, transposed to values by channels."""
    grad_states_NHVK: torch.Tensor
    """The gradient of each chunk's last state, transposed too."""
    grad_values_NHCV: torch.Tensor
    """The gradient of what the chunks write, V'."""

    @staticmethod
    def of(terms: Terms, chunks: Chunks, *arguments: Any) -> Walk:
        """Allocate the results beside the ``arguments``."""
        states_NHVK = chunks.empty(terms.weights_NHCK, chunks.width_v, chunks.width_k)
        results = {
            "states_NHVK": states_NHVK,
            "grad_states_NHVK": torch.empty_like(states_NHVK),
            "grad_values_NHCV": torch.empty_like(terms.values_NHCV),
        }
        return Walk(*arguments, **results)


class Kept(NamedTuple):
    """The terms that the gradients need after the scans."""

    inverse_NHCC: torch.Tensor
    nan_of_gates: torch.Tensor
    """NaN for chunks with a NaN gate: the bounds on growth, or the decays where no bounds are made."""
    values_NHCV: torch.Tensor
    """V', with which the scans overwrote the values."""


class Gradients(NamedTuple):
    """Where the kernels store the gradients of the inputs."""

    q_BTHK: torch.Tensor
    k_BTHK: torch.Tensor
    v_BTHV: torch.Tensor
    g_BTHK: torch.Tensor
    beta_parts_PBTH: torch.Tensor
    """The gradient of beta is their sum over P."""

    @staticmethod
    def empty(passes: Passes, inputs: tuple[torch.Tensor, ...]) -> Gradients:
        q_BTHK, k_BTHK, v_BTHV, g_BTHK = (torch.empty_like(tensor) for tensor in inputs[:4])
        return Gradients(q_BTHK, k_BTHK, v_BTHV, g_BTHK, passes.new_beta_parts(inputs[4], q_BTHK.shape[3]))

    def of(self, window: Window) -> Gradients:
        if window.is_whole:
            return self
        q_BTHK, k_BTHK, v_BTHV, g_BTHK = window.of(*self[:4])
        return Gradients(q_BTHK, k_BTHK, v_BTHV, g_BTHK, self.beta_parts_PBTH[:, window.batch, window.tokens])

    def of_inputs(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return the gradients of q, k, v, g and beta, the last in this dtype."""
        parts_PBTH = self.beta_parts_PBTH
        beta_BTH = parts_PBTH[0] if len(parts_PBTH) == 1 else parts_PBTH.sum(0)
        return *self[:4], beta_BTH.to(dtype)


def kda_by(passes: Passes, tensors: KdaTensors, options: KdaOptions) -> Outputs:
    windows = windows_of(tensors, options.chunk_size)
    scale = scale_of(tensors.q_BTHK, options.scale)
    given = (*tensors.inputs, tensors.initial_state_SHKV, tensors.state_size, windows, scale, passes)
    out_BTHV, final_SHKV = _Kda.apply(*given)
    return out_BTHV, final_SHKV


class _Kda(torch.autograd.Function):
    """The autograd function of both forms. It saves the inputs as given; backward makes contiguous copies again."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Outputs:
        *inputs, initial_SHKV, state_size, windows, scale, passes = given
        ctx.windows, ctx.scale, ctx.passes = windows, scale, passes
        ctx.set_materialize_grads(False)
        dense, dense_initial_SHKV = _dense(*inputs), None if initial_SHKV is None else initial_SHKV.contiguous()
        out_BTHV = inputs[2].new_empty(inputs[2].shape)
        final_SHKV = out_BTHV.new_empty(state_size, dtype=torch.float32)
        starts, ends, last_SHKV = [], [], None
        for window in windows:
            first_SHKV = window.states_of(dense_initial_SHKV) if window.begins else last_SHKV
            last_SHKV = window.states_of(final_SHKV) if window.ends else window.empty_states(final_SHKV)
            terms = Terms.of(passes, window.of(*dense), window.chunks, scale, keeps_inverse=False)
            ends.append(passes.scan(terms, window.chunks, first_SHKV, last_SHKV, *window.of(out_BTHV)))
            starts.append(None if window.begins else first_SHKV)
            del terms
        ctx.save_for_backward(*inputs, initial_SHKV, *starts, *ends)
        return out_BTHV, final_SHKV

    @staticmethod
    @first_derivative_only("kda")
    def backward(ctx: Any, grad_out_BTHV: torch.Tensor | None, grad_final_SHKV: torch.Tensor | None) -> Any:
        saved, num_windows = ctx.saved_tensors, len(ctx.windows)
        *inputs, initial_SHKV = saved[:6]
        starts, ends = saved[6 : 6 + num_windows], saved[6 + num_windows :]
        inputs = _dense(*inputs)
        (grad_out_BTHV,) = _dense(torch.zeros_like(inputs[2]) if grad_out_BTHV is None else grad_out_BTHV)
        grad_final_SHKV = None if grad_final_SHKV is None else grad_final_SHKV.contiguous()
        grad_initial_SHKV = None
        if initial_SHKV is not None:
            initial_SHKV = initial_SHKV.contiguous()
            grad_initial_SHKV = torch.empty_like(initial_SHKV) if ctx.needs_input_grad[5] else None
        gradients: Gradients | None = None
        grad_first_SHKV = None
        for window, start_SHKV, ends_GSHKV in reversed(list(zip(ctx.windows, starts, ends, strict=True))):
            of_window = window.of(*inputs)
            first_SHKV = window.states_of(initial_SHKV) if window.begins else start_SHKV
            grad_last_SHKV = window.states_of(grad_final_SHKV) if window.ends else grad_first_SHKV
            grad_first_SHKV = window.states_of(grad_initial_SHKV) if window.begins else torch.empty_like(start_SHKV)
            terms = Terms.of(ctx.passes, of_window, window.chunks, ctx.scale, keeps_inverse=True)
            (grad_out_of_window,) = window.of(grad_out_BTHV)
            given = first_SHKV, ends_GSHKV, grad_out_of_window, grad_last_SHKV, grad_first_SHKV
            walk = Walk.of(terms, window.chunks, *given)
            ctx.passes.scan_both_ways(terms, window.chunks, walk)
            kept = terms.kept()
            del terms  # frees the terms that ``kept`` leaves out, before the gradients are allocated
            if gradients is None:
                gradients = Gradients.empty(ctx.passes, inputs)
            if window.chunks.num_chunks:
                ctx.passes.gradients(of_window, window.chunks, walk, kept, ctx.scale, gradients.of(window))
            del walk, kept
        assert gradients is not None
        return *gradients.of_inputs(inputs[4].dtype), grad_initial_SHKV, None, None, None, None


def _dense(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors contiguous and aligned to 16 bytes, the size of the kernels' loads."""
    dense = (tensor.contiguous() for tensor in tensors)
    return tuple(tensor.clone() if tensor.storage_offset() * tensor.itemsize % 16 else tensor for tensor in dense)
