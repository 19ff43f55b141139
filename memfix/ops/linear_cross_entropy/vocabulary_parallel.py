"""The chunked loss with the classes split over processes: each has some rows of the weight, and all rows of hidden.

The loop is that of all chunked forms. Its pass runs two all-reduces per tile: the maximum of each token's logits,
then the sums of its exponentials and of its target's logit, which only one process has. Those are a few numbers per
token; logits and their gradient stay on the process that has their classes.
"""

# N tokens, D width, V classes of this process, R tokens of a tile of a chunk

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..derivatives import first_derivative_only
from ..products import as_rows
from .chunks import ChunkStrategy, Head, chunked_linear_cross_entropy
from .options import LossTensors, Options
from .recompute import Tile, TiledPass, first_rows
from .terms import Coefficients

OP = "vocabulary_parallel_linear_cross_entropy"


def vocabulary_parallel_linear_cross_entropy(
    hidden: torch.Tensor,
    weight_shard: torch.Tensor,
    target: torch.Tensor,
    *,
    bias_shard: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    rows_per_chunk: int = 4096,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    r"""Equals ``linear_cross_entropy(hidden, torch.cat(weight_shards), target)``, on every process of ``group``.

    ``hidden`` (``[..., D]``) and ``target`` (``[...]``) are the same everywhere. ``weight_shard`` is ``[V, D]``: the
    shards are in the order of ranks and may differ in length, but none is empty. Targets are class indices of the
    whole vocabulary. The gradient of ``hidden`` is summed over the processes, in its own dtype, and so the same
    everywhere; the gradient of a shard stays on its process.

    Every process must call this function, and run its backward, with the same arguments except the shards, and with
    gradients wanted of the same tensors. Peak above inputs: that of ``recompute`` with one process's ``V`` classes.
    """
    options = Options(
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        softcap=softcap,
        z_loss=z_loss,
        rows_per_chunk=rows_per_chunk,
    )
    if not dist.is_initialized():
        raise RuntimeError(
            f"{OP} needs the processes to know each other: start them with torchrun and call "
            "torch.distributed.init_process_group, or use linear_cross_entropy in one process"
        )
    tensors = LossTensors(as_rows(hidden), weight_shard, target.reshape(-1), bias_shard)
    return options.shaped(loss_of_shard(tensors, options, GroupCollectives(group)), target)


class Collectives(Protocol):
    """The collectives of one process among those that share the classes."""

    def all_gather_int(self, number: int, device: torch.device) -> tuple[list[int], int]:
        """Return every process's ``number``, in the order of ranks, and the rank of this process."""

    def all_reduce_(self, tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
        """Reduce ``tensor`` over all processes in place, to the sum or the maximum, and return it."""


@dataclass(frozen=True)
class GroupCollectives:
    """The collectives of a process group of ``torch.distributed``."""

    group: dist.ProcessGroup | None

    def all_gather_int(self, number: int, device: torch.device) -> tuple[list[int], int]:
        own = torch.tensor(number, device=device)
        numbers = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(numbers, own, group=self.group)
        return torch.stack(numbers).tolist(), dist.get_rank(self.group)

    def all_reduce_(self, tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
        dist.all_reduce(tensor, operation, group=self.group)
        return tensor


def loss_of_shard(tensors: LossTensors, options: Options, collectives: Collectives) -> torch.Tensor:
    """Compute the loss in this process, which shares the classes with others through ``collectives``."""
    shard = Shard.of(tensors.weight_VD, collectives)
    tensors = LossTensors.checked(*tensors)
    tensors = tensors._replace(hidden_ND=_SumGradients.apply(tensors.hidden_ND, collectives))

    def make_pass(head: Head, rows_per_chunk: int, wants_gradient: bool) -> _ShardPass:
        return _ShardPass(head, rows_per_chunk, wants_gradient, shard)

    return chunked_linear_cross_entropy(tensors, options, ChunkStrategy(make_pass), num_classes=shard.num_classes)


@dataclass(frozen=True)
class Shard:
    """The position of this process's classes: they start at ``first``, of ``num_classes`` in all."""

    first: int
    num_classes: int
    collectives: Collectives

    @staticmethod
    def of(weight_VD: torch.Tensor, collectives: Collectives) -> Shard:
        sizes, rank = collectives.all_gather_int(weight_VD.shape[0], weight_VD.device)
        if 0 in sizes:  # raised by every process, so that none waits for another one
            raise ValueError(f"weight_shard must have at least one row on every process, got {sizes}")
        return Shard(sum(sizes[:rank]), sum(sizes), collectives)


class _ShardPass(TiledPass):
    """The pass whose softmax runs over the classes of all processes."""

    def __init__(self, head: Head, rows_per_chunk: int, wants_gradient: bool, shard: Shard) -> None:
        super().__init__(head, rows_per_chunk, wants_gradient)
        self.shard = shard

    def _visit_tile(self, tile: Tile) -> None:
        hidden_RD, target_R, sums, coefficients, gradient_RV = tile
        num_rows = hidden_RD.shape[0]
        values_RV = self._logits_buffer(num_rows, gradient_RV)
        slope_RV = None if self.slope_RV is None else first_rows(num_rows, self.slope_RV)
        self._logits(hidden_RD, values_RV, slope_RV)

        column_R1 = (target_R - self.shard.first).unsqueeze(1)
        is_here_R1 = (column_R1 >= 0) & (column_R1 < self.head.vocabulary)
        # where another process has the target, look up column 0 instead and drop the result
        column_R1 = column_R1.where(is_here_R1, 0)
        highest_R1 = self.shard.collectives.all_reduce_(values_RV.amax(1, keepdim=True), dist.ReduceOp.MAX)
        to_sum = [values_RV.gather(1, column_R1).where(is_here_R1, 0)]
        if sums.smooth_K is not None:
            to_sum.append(values_RV.sum(1, keepdim=True))
        to_sum.append(values_RV.sub_(highest_R1).exp_().sum(1, keepdim=True))
        target_logit_R1, *rest, sum_R1 = self.shard.collectives.all_reduce_(torch.stack(to_sum), dist.ReduceOp.SUM)
        logsumexp_R1 = highest_R1 + sum_R1.log()
        torch.sub(logsumexp_R1.squeeze(1), target_logit_R1.squeeze(1), out=sums.nll_K)
        if sums.logsumexp_K is not None:
            sums.logsumexp_K.copy_(logsumexp_R1.squeeze(1))
        if sums.smooth_K is not None:
            (logits_R1,) = rest
            sums.smooth_K.copy_((self.shard.num_classes * logsumexp_R1 - logits_R1).squeeze(1))
        if gradient_RV is not None:
            log_p_target_R1 = target_logit_R1 - logsumexp_R1
            at_target_R1 = self._weigh_exponentials(values_RV, sum_R1, log_p_target_R1, logsumexp_R1, coefficients)
            # where another process has the target, keep column 0 as it is
            at_target_R1 = at_target_R1.where(is_here_R1, values_RV.gather(1, column_R1))
            values_RV.scatter_(1, column_R1, at_target_R1)
            if slope_RV is not None:
                values_RV.mul_(slope_RV)
            gradient_RV.copy_(values_RV)  # does nothing if both are the same memory

    @staticmethod
    def _weigh_exponentials(
        exponential_RV: torch.Tensor,
        sum_R1: torch.Tensor,
        log_p_target_R1: torch.Tensor,
        logsumexp_R1: torch.Tensor,
        coefficients: Coefficients | None,
    ) -> torch.Tensor:
        """Turn exponentials into the gradient given by ``Coefficients``; return the target's column of it instead."""
        # p - 1 at the target, by expm1: accurate where p is nearly 1
        at_target_R1 = log_p_target_R1.expm1()
        if coefficients is None:
            exponential_RV.div_(sum_R1)
            return at_target_R1
        softmax_R1, target_R1 = coefficients.softmax_K.unsqueeze(1), coefficients.target_K.unsqueeze(1)
        if coefficients.square_K is not None:
            softmax_R1 = softmax_R1 + coefficients.square_K.unsqueeze(1) * logsumexp_R1
        at_target_R1 = target_R1 * at_target_R1 + (softmax_R1 - target_R1) * log_p_target_R1.exp()
        exponential_RV.mul_(softmax_R1 / sum_R1)
        if coefficients.smooth_K is not None:
            smooth_R1 = coefficients.smooth_K.unsqueeze(1)
            exponential_RV.sub_(smooth_R1)
            at_target_R1 = at_target_R1 - smooth_R1
        return at_target_R1


class _SumGradients(torch.autograd.Function):
    """The identity of hidden, whose backward sums the gradient over all processes."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: torch.Tensor, collectives: Collectives) -> torch.Tensor:
        ctx.collectives = collectives
        return hidden_ND.view_as(hidden_ND)

    @staticmethod
    @first_derivative_only(OP)
    def backward(ctx: Any, gradient_ND: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # in place: the loss made this gradient for no other use
        return ctx.collectives.all_reduce_(gradient_ND, dist.ReduceOp.SUM), None
