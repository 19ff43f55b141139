"""What the forms ``triton`` and ``cuda`` share: the autograd function, and the tensors that its passes exchange."""

# B batch, T tokens, H heads, K key width, V value width, S sequences, N chunks of all sequences, C tokens of a chunk,
# G segments of a sequence in a backward pass, but the first

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..alignment import begins_aligned
from ..derivatives import first_derivative_only
from .arguments import KdaOptions, KdaTensors, Outputs, scale_of
from .windows import Chunks, Window, windows_of


@dataclass(frozen=True)
class Passes:
    """The launches in which the forms ``triton`` and ``cuda`` differ; they share the rest."""

    prepare: Callable[[tuple[torch.Tensor, ...], Terms, Chunks, float], None]
    scan: Callable[[Terms, Chunks, ScanStates, torch.Tensor], None]
    scan_both_ways: Callable[[Terms, Chunks, Walk], None]
    gradients: Callable[[tuple[torch.Tensor, ...], Chunks, Walk, Kept, float, Gradients], None]
    new_beta_parts: Callable[[torch.Tensor, int], torch.Tensor]
    """Allocates ``Gradients.beta_parts_PBTH`` for a beta and a width of keys."""
    num_segments: Callable[[Chunks], int]
    """In how many segments a backward pass scans each sequence."""
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
    def empty(passes: Passes, like: torch.Tensor, chunks: Chunks, *, keeps_inverse: bool) -> Terms:
        return Terms(
            chunks.empty_rows(like, chunks.width_k),
            chunks.empty_rows(like, chunks.width_v),
            chunks.empty_rows(like, chunks.width_k),
            chunks.empty_rows(like, chunks.width_k),
            chunks.empty_pairs(like),
            chunks.empty_pairs(like) if keeps_inverse else None,
            chunks.empty(like, chunks.width_k, dtype=torch.float32),
            chunks.empty(like, dtype=torch.float32) if passes.bounds_growth else None,
        )

    def kept(self) -> Kept:
        assert self.inverse_NHCC is not None
        nan_of_gates = self.decay_NHK if self.growth_NH is None else self.growth_NH
        return Kept(self.inverse_NHCC, nan_of_gates, self.values_NHCV)


class ScanStates(NamedTuple):
    """The states of a forward scan: the first, those with which a backward pass's segments begin, and the last."""

    first_SHKV: torch.Tensor | None
    inner_GSHKV: torch.Tensor | None
    last_SHKV: torch.Tensor

    @property
    def num_inner(self) -> int:
        return 0 if self.inner_GSHKV is None else len(self.inner_GSHKV)


@dataclass(frozen=True)
class Walk:
    """Arguments and results of a backward pass's scans through the chunks of a window."""

    initial_SHKV: torch.Tensor | None
    inner_GSHKV: torch.Tensor | None
    """The states with which segments begin, without the first."""
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
    def empty_results(terms: Terms, chunks: Chunks) -> tuple[torch.Tensor, ...]:
        """Allocate the results: the last three fields."""
        states_NHVK = chunks.empty(terms.weights_NHCK, chunks.width_v, chunks.width_k)
        return states_NHVK, torch.empty_like(states_NHVK), torch.empty_like(terms.values_NHCV)


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

    def of_inputs(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return the gradients of q, k, v, g and beta, the last in this dtype."""
        parts_PBTH = self.beta_parts_PBTH
        beta_BTH = parts_PBTH[0] if len(parts_PBTH) == 1 else parts_PBTH.sum(0)
        return *self[:4], beta_BTH.to(dtype)


def kda_by(passes: Passes, tensors: KdaTensors, options: KdaOptions) -> Outputs:
    windows = windows_of(tensors, options.chunk_size, passes.num_segments)
    scale = scale_of(tensors.q_BTHK, options.scale)
    inputs = *tensors.inputs, tensors.initial_state_SHKV
    has_backward = torch.is_grad_enabled() and any(given is not None and given.requires_grad for given in inputs)
    out_BTHV, final_SHKV = _Kda.apply(*inputs, tensors.state_size, windows, scale, passes, has_backward)
    return out_BTHV, final_SHKV


class _Kda(torch.autograd.Function):
    """The autograd function of both forms. It saves the inputs as given; backward makes contiguous copies again."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Outputs:
        *inputs, initial_SHKV, state_size, windows, scale, passes, has_backward = given
        ctx.windows, ctx.scale, ctx.passes = windows, scale, passes
        ctx.set_materialize_grads(False)
        dense, dense_initial_SHKV = _dense(*inputs), None if initial_SHKV is None else initial_SHKV.contiguous()
        out_BTHV = inputs[2].new_empty(inputs[2].shape)
        final_SHKV = out_BTHV.new_empty(state_size, dtype=torch.float32)
        terms = Terms.empty(passes, out_BTHV, _largest(windows), keeps_inverse=False)
        starts, inners, last_SHKV = [], [], None
        for window in windows:
            first_SHKV = window.states_of(dense_initial_SHKV) if window.begins else last_SHKV
            last_SHKV = window.states_of(final_SHKV) if window.ends else window.empty_states(final_SHKV)
            inner_GSHKV = window.empty_inner(final_SHKV) if has_backward else None
            if window.chunks.num_chunks:
                passes.prepare(dense, terms, window.chunks, scale)
            passes.scan(terms, window.chunks, ScanStates(first_SHKV, inner_GSHKV, last_SHKV), out_BTHV)
            starts.append(None if window.begins else first_SHKV)
            inners.append(inner_GSHKV)
        ctx.save_for_backward(*inputs, initial_SHKV, *starts, *inners)
        return out_BTHV, final_SHKV

    @staticmethod
    @first_derivative_only("kda")
    def backward(ctx: Any, grad_out_BTHV: torch.Tensor | None, grad_final_SHKV: torch.Tensor | None) -> Any:
        saved, num_windows = ctx.saved_tensors, len(ctx.windows)
        *inputs, initial_SHKV = saved[:6]
        starts, inners = saved[6 : 6 + num_windows], saved[6 + num_windows :]
        inputs = _dense(*inputs)
        (grad_out_BTHV,) = _dense(torch.zeros_like(inputs[2]) if grad_out_BTHV is None else grad_out_BTHV)
        grad_final_SHKV = None if grad_final_SHKV is None else grad_final_SHKV.contiguous()
        grad_initial_SHKV = None
        if initial_SHKV is not None:
            initial_SHKV = initial_SHKV.contiguous()
            grad_initial_SHKV = torch.empty_like(initial_SHKV) if ctx.needs_input_grad[5] else None
        parts = [
            part
            for window, start_SHKV, inner_GSHKV in zip(ctx.windows, starts, inners, strict=True)
            for part in window.parts_with_states(
                window.states_of(initial_SHKV) if window.begins else start_SHKV, inner_GSHKV
            )
        ]
        largest = _largest([window for window, *_ in parts])
        terms = Terms.empty(ctx.passes, inputs[0], largest, keeps_inverse=True)
        results, kept = Walk.empty_results(terms, largest), terms.kept()
        gradients: Gradients | None = None
        grad_first_SHKV = None
        while parts:
            window, first_SHKV, inner_GSHKV = parts.pop()
            grad_last_SHKV = window.states_of(grad_final_SHKV) if window.ends else grad_first_SHKV
            grad_first_SHKV = window.states_of(grad_initial_SHKV) if window.begins else torch.empty_like(first_SHKV)
            walk = Walk(first_SHKV, inner_GSHKV, grad_out_BTHV, grad_last_SHKV, grad_first_SHKV, *results)
            if window.chunks.num_chunks:
                ctx.passes.prepare(inputs, terms, window.chunks, ctx.scale)
            ctx.passes.scan_both_ways(terms, window.chunks, walk)
            if not parts:
                del terms  # those that ``kept`` leaves out; in their place a call of one part allocates the gradients
            if gradients is None:
                gradients = Gradients.empty(ctx.passes, inputs)
            if window.chunks.num_chunks:
                ctx.passes.gradients(inputs, window.chunks, walk, kept, ctx.scale, gradients)
        del walk, results, kept
        assert gradients is not None
        return *gradients.of_inputs(inputs[4].dtype), grad_initial_SHKV, None, None, None, None, None


def _largest(windows: Sequence[Window]) -> Chunks:
    return max((window.chunks for window in windows), key=lambda chunks: chunks.num_chunks)


def _dense(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors contiguous, and at addresses that the kernels' vector loads accept."""
    dense = (tensor.contiguous() for tensor in tensors)
    return tuple(tensor if begins_aligned(tensor) else tensor.clone() for tensor in dense)
