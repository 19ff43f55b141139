"""Recurrent layers: torch's fused cells have rules; cuDNN's layers have none, because their workspace is unknown."""

from __future__ import annotations

import torch

from .inner_sums import buffers_of_sum
from .rules import Call, NoRule, none_needed, rule, unknown

none_needed("_thnn_fused_lstm_cell _thnn_fused_gru_cell")

_GRU_WORKSPACE_PER_HIDDEN, _GRU_GATES_PER_HIDDEN = 5, 3


@rule("_thnn_fused_lstm_cell_backward_impl", "_thnn_fused_gru_cell_backward")
def _cell_backward(call: Call) -> list[int]:
    """Bias gradients are sums of the gate gradients over the batch."""
    if not call["has_bias"]:
        return []
    workspace = call["workspace"]
    batch, width = workspace.shape
    if call.operator.overloadpacket is torch.ops.aten._thnn_fused_gru_cell_backward:
        width = width // _GRU_WORKSPACE_PER_HIDDEN * _GRU_GATES_PER_HIDDEN
    gates = torch.empty(batch, width, dtype=workspace.dtype, device="meta")
    return buffers_of_sum(call.gpu, gates, [0])


@rule("_cudnn_rnn", "_cudnn_rnn_backward")
def _cudnn_rnn(call: Call) -> list[int]:
    raise NoRule(f"{call.operator} of {list(call['input'].shape)}: cuDNN chooses its workspace and its reserve")


unknown("{operator}: cuDNN chooses the size of its result", "_cudnn_rnn_flatten_weight", "_cudnn_init_dropout_state")
