"""What every form of linear cross entropy demands of its arguments."""

from __future__ import annotations

import torch

from ..arguments import require_at_least_one, require_floating, require_same, require_shape


def require_linear_cross_entropy(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    target_N: torch.Tensor,
    bias_V: torch.Tensor | None,
    class_weight_V: torch.Tensor | None,
    rows_per_chunk: int = 1,
    *,
    target_name: str = "target",
) -> None:
    """Refuse what cannot be computed, before anything is allocated."""
    require_shape("hidden", hidden_ND, "N D")
    require_shape("weight", weight_VD, "V D")
    require_shape(target_name, target_N, "N")
    require_floating(hidden=hidden_ND, weight=weight_VD)
    if target_N.dtype != torch.int64:
        raise ValueError(f"{target_name} must be int64, got {target_N.dtype}")
    dtypes = (hidden_ND.dtype, weight_VD.dtype)
    casts = torch.float64 not in dtypes and torch.is_autocast_enabled(hidden_ND.device.type)  # all others
    if not casts:
        require_same("dtype", hidden=hidden_ND.dtype, weight=weight_VD.dtype)
    devices = {"hidden": hidden_ND.device, "weight": weight_VD.device, target_name: target_N.device}
    require_same("device", **devices)
    require_same("width D", hidden=hidden_ND.shape[1], weight=weight_VD.shape[1])
    require_same("number of rows N", **{"hidden": hidden_ND.shape[0], target_name: target_N.shape[0]})
    if hidden_ND.shape[0] == 0 or weight_VD.shape[0] == 0:
        raise ValueError(
            f"hidden and weight must have at least one row, got {hidden_ND.shape[0]} and {weight_VD.shape[0]}"
        )
    _require_per_class("bias", bias_V, weight_VD)
    _require_per_class("class_weight", class_weight_V, weight_VD)
    for name, tensor_V in (("bias", bias_V), ("class_weight", class_weight_V)):
        if tensor_V is not None and not casts:
            require_same("dtype", **{name: tensor_V.dtype, "weight": weight_VD.dtype})
    if class_weight_V is not None and class_weight_V.requires_grad:
        raise ValueError("class_weight takes no gradient, as in torch; detach it")
    require_at_least_one("rows_per_chunk", rows_per_chunk)


def require_leading_dims(name: str, hidden: torch.Tensor, target: torch.Tensor) -> None:
    """``hidden`` is ``[..., D]`` and ``target`` is ``[...]``, with the same dims for the dots."""
    if hidden.dim() == 0 or target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"{name} must have the shape of hidden without its last dim, got {list(target.shape)} "
            f"for hidden {list(hidden.shape)}"
        )


def _require_per_class(name: str, tensor_V: torch.Tensor | None, weight_VD: torch.Tensor) -> None:
    if tensor_V is None:
        return
    require_shape(name, tensor_V, "V")
    require_floating(**{name: tensor_V})
    require_same("number of classes V", **{name: tensor_V.shape[0], "weight": weight_VD.shape[0]})
    require_same("device", **{name: tensor_V.device, "weight": weight_VD.device})
