"""Fake kernels for operators of which torch has none, or a wrong one. Their results have CUDA's layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._refs
from torch._decomp import decomposition_table

from .workspace.memory_formats import suggested_format


def _gru_cell(
    input_gates: torch.Tensor, hidden_gates: torch.Tensor, hx: torch.Tensor, *biases: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(hx), hx.new_empty((hx.shape[0], 5 * hx.shape[1]))


def _gru_cell_backward(grad_hy: torch.Tensor, workspace: torch.Tensor, has_bias: bool) -> tuple[Any, ...]:
    batch, hidden = grad_hy.shape
    gates = [grad_hy.new_empty((batch, 3 * hidden)) for _ in range(2)]
    biases = [grad_hy.new_empty((3 * hidden,)) if has_bias else None for _ in range(2)]
    return (*gates, torch.empty_like(grad_hy), *biases)


def _cudnn_takes_ctc(log_probs: torch.Tensor, targets: torch.Tensor, inputs: Any, lengths: Any, blank: int) -> bool:
    return (
        torch.backends.cudnn.enabled
        and blank == 0
        and (log_probs.dim(), targets.dim()) == (3, 1)
        and (log_probs.dtype, targets.dtype) == (torch.float32, torch.int32)
        and targets.device.type == "cpu"
    )


def _grouped_mm(
    left: torch.Tensor, right: torch.Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Any:
    """A fake ``_grouped_mm`` for all dtypes that CUDA takes; torch's own refuses all but bfloat16. CUDA aligns the rows
    of the result to 16 bytes."""
    rows, columns = left.shape[-2], right.shape[-1]
    dtype = out_dtype or left.dtype
    per_row = -(-columns * dtype.itemsize // 16) * 16 // dtype.itemsize
    if left.dim() != right.dim():  # the groups divide up the rows, or the columns
        return left.new_empty_strided((rows, columns), (per_row, 1), dtype=dtype)
    groups = offs.numel() if left.dim() == 2 else left.shape[0]
    return left.new_empty_strided((groups, rows, columns), (rows * per_row, per_row, 1), dtype=dtype)


def _vector_norm(
    tensor: torch.Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> torch.Tensor:
    """Torch 2.11's own fake keeps an axis of one element that is counted from the end."""
    reduced = {axis % max(1, tensor.dim()) for axis in dim or range(tensor.dim())}
    sizes = [1 if axis in reduced else size for axis, size in enumerate(tensor.shape) if keepdim or axis not in reduced]
    return tensor.new_empty(sizes, dtype=(dtype or tensor.dtype).to_real())


def _where(condition: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Torch's own fake refuses a condition in bytes, which CUDA takes."""
    if condition.dtype == torch.uint8:
        condition = torch.empty_like(condition, dtype=torch.bool)
    kernel: Any = torch._refs.where
    return kernel(condition, left, right)


def _with_targets_in_bytes(name: str, position: int) -> Callable[..., Any]:
    """A fake of a loss that also takes targets in bytes, which torch's own refuses."""

    def run(*args: Any, **kwargs: Any) -> Any:
        kernel: Any = decomposition_table[getattr(torch.ops.aten, name).default]
        targets = args[position]
        if targets.dtype == torch.uint8:
            targets = torch.empty_like(targets, dtype=torch.int64)
        return kernel(*args[:position], targets, *args[position + 1 :], **kwargs)

    return run


def _of_lists(tensors: list[torch.Tensor], *args: Any) -> list[torch.Tensor]:
    return [torch.empty_like(tensor) for tensor in tensors]


def _writes_into_arguments(*args: Any, **kwargs: Any) -> None:
    return None


def _returns_its_argument(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor


def _is_set_to(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata and (
        (one.storage_offset(), one.shape, one.stride()) == (other.storage_offset(), other.shape, other.stride())
    )


def _with_mask(tensor: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A fake quantization and the mask of what it does not clip."""
    return torch.empty_like(tensor), torch.empty_like(tensor, dtype=torch.bool)


def _quantize_backward(
    grad: torch.Tensor, tensor: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(tensor), torch.empty_like(scale), torch.empty_like(zero_point)


def _packed_qkv(qkv: torch.Tensor, bias: torch.Tensor, num_heads: int) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values in one piece of memory."""
    batch, length, width = qkv.shape
    return bias.new_empty((3, batch, num_heads, length, width // 3 // num_heads)).unbind()


# ---------------------------------------------------------------- batch norm over several ranks
def _statistics(tensor: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    mean = tensor.new_empty(tensor.shape[1], dtype=_accumulated(tensor.dtype))
    return mean, torch.empty_like(mean)


def _gathered_statistics(tensor: torch.Tensor, mean: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    gathered = mean.new_empty(mean.shape[1], dtype=_accumulated(mean.dtype))
    return gathered, torch.empty_like(gathered)


def _normalized(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=suggested_format(tensor))


def _reduced_gradients(
    grad: torch.Tensor,
    tensor: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor | None,
    *wanted: bool,
) -> tuple[torch.Tensor | None, ...]:
    likes = (mean, mean, weight, weight)
    of_input, of_weight, of_bias = wanted
    made = zip((of_input, of_input, of_weight, of_bias), likes, strict=True)
    return tuple(torch.empty_like(like) if wants and like is not None else None for wants, like in made)


def _accumulated(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


_DRAWN_IN_PLACE = ("exponential_.default", "cauchy_.default", "geometric_.default", "log_normal_.default")

MISSING_FAKES = {
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
    "_cummax_helper": _writes_into_arguments,
    "_cummin_helper": _writes_into_arguments,
    "_fused_sgd_": _writes_into_arguments,
    "_fused_sgd_.tensor_lr": _writes_into_arguments,
    "_fused_adagrad_": _writes_into_arguments,
    "_fused_adagrad_.tensor_lr": _writes_into_arguments,
    "_fused_adam_.tensor_lr": _writes_into_arguments,
    "_fused_adamw_.tensor_lr": _writes_into_arguments,
    "is_set_to": _is_set_to,
    # torch's own fakes refuse scalars in a tensor, which they take for one on a GPU
    "_foreach_addcdiv.Tensor": _of_lists,
    "_foreach_addcmul.Tensor": _of_lists,
    "_foreach_addcdiv_.Tensor": _writes_into_arguments,
    "_foreach_addcmul_.Tensor": _writes_into_arguments,
    "_use_cudnn_ctc_loss": _cudnn_takes_ctc,
    "_use_cudnn_ctc_loss.Tensor": _cudnn_takes_ctc,
    "_ctc_loss_backward": lambda grad, log_probs, *rest: torch.empty_like(log_probs),
    "_use_miopen_ctc_loss": lambda *args: False,
    "_use_miopen_ctc_loss.Tensor": lambda *args: False,
    "_standard_gamma": lambda tensor, generator=None: torch.empty_like(tensor),
    "_standard_gamma_grad": lambda tensor, output: torch.empty_like(tensor),
    "_sample_dirichlet": lambda tensor, generator=None: torch.empty_like(tensor),
    "_dirichlet_grad": lambda x, alpha, total: torch.empty_like(x),
    "multi_margin_loss_backward": lambda grad, tensor, *rest, **named: torch.empty_like(tensor),
    "multilabel_margin_loss_backward": lambda grad, tensor, *rest, **named: torch.empty_like(tensor),
    "fake_quantize_per_tensor_affine_cachemask": _with_mask,
    "fake_quantize_per_channel_affine_cachemask": _with_mask,
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams": _with_mask,
    "_fake_quantize_learnable_per_tensor_affine": lambda tensor, *rest: torch.empty_like(tensor),
    "_fake_quantize_learnable_per_tensor_affine_backward": _quantize_backward,
    "_fake_quantize_learnable_per_channel_affine": lambda tensor, *rest: torch.empty_like(tensor),
    "_fake_quantize_learnable_per_channel_affine_backward": _quantize_backward,
    "batch_norm_stats": _statistics,
    "batch_norm_gather_stats_with_counts": _gathered_statistics,
    "batch_norm_elemt": _normalized,
    "batch_norm_backward_reduce": _reduced_gradients,
    "batch_norm_backward_elemt": lambda grad, tensor, *rest: _normalized(tensor),
    "_masked_softmax": lambda tensor, *rest: torch.empty_like(tensor),
    "_masked_softmax_backward": lambda grad, output, *rest: torch.empty_like(grad),
    "_transform_bias_rescale_qkv": _packed_qkv,
    "fractional_max_pool3d_backward": lambda grad, tensor, *rest: torch.empty_like(tensor),
    "glu_jvp": lambda glu, *rest: torch.empty_like(glu),
    "binomial": lambda count, prob, generator=None: torch.empty_like(count, memory_format=torch.contiguous_format),
    "cudnn_grid_sampler": lambda tensor, grid: tensor.new_empty((*tensor.shape[:2], *grid.shape[1:3])),
    "cudnn_grid_sampler_backward": lambda tensor, grid, grad: (torch.empty_like(tensor), torch.empty_like(grid)),
    "_logcumsumexp": lambda tensor, dim: torch.empty_like(tensor, memory_format=torch.contiguous_format),
}

CORRECTED_FAKES: dict[str, Any] = {  # torch 2.11's fake of addmm.dtype takes the dtype argument for beta
    "addmm.dtype": lambda added, left, right, dtype, **named: left.new_empty(
        (left.shape[0], right.shape[1]), dtype=dtype
    ),
    "_grouped_mm.default": _grouped_mm,
    "where.self": _where,
    "nll_loss_forward.default": _with_targets_in_bytes("nll_loss_forward", 1),
    "nll_loss_backward.default": _with_targets_in_bytes("nll_loss_backward", 2),
    "linalg_vector_norm.default": _vector_norm,
    # torch's own fakes refuse a generator
    **dict.fromkeys(_DRAWN_IN_PLACE, _returns_its_argument),
    "addmm.dtype_out": lambda added, left, right, dtype, *, out, **named: out,
}
