"""Threads that stand in for the processes of the vocabulary-parallel loss, so that contracts need no ``torchrun``.

Only the collectives differ from those of ``torch.distributed``: threads wait for each other at a barrier, and a
thread that fails aborts the barrier, so that the others do not hang.
"""

# N tokens, D width, V classes of all processes

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..call import takes
from .options import LossTensors, Options
from .vocabulary_parallel import loss_of_shard

_LONGEST_WAIT_S = 60.0
Result = TypeVar("Result")


@dataclass(frozen=True)
class SingleProcess:
    """A group of one process, which has all classes."""

    def all_gather_int(self, number: int, device: torch.device) -> tuple[list[int], int]:
        return [number], 0

    def all_reduce_(self, tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
        return tensor


class Rendezvous:
    """The barrier at which threads wait for each other, and a slot per thread for the value that it contributes."""

    def __init__(self, number: int) -> None:
        self.number, self.barrier = number, threading.Barrier(number, timeout=_LONGEST_WAIT_S)
        self.values: list[Any] = [None] * number

    def all_run(self, run: Callable[[int], Result]) -> list[Result]:
        """Run ``run(rank)`` in one thread per rank, under the caller's autocast, and return the results."""
        autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

        def guarded(rank: int) -> Result:
            try:
                with torch.autocast("cpu", autocast[1], enabled=autocast[0]):
                    return run(rank)
            except BaseException:
                self.barrier.abort()
                raise

        self.barrier.reset()
        with ThreadPoolExecutor(self.number) as threads:
            answers = [threads.submit(guarded, rank) for rank in range(self.number)]
        errors = [error for answer in answers if (error := answer.exception()) is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [answer.result() for answer in answers]


@dataclass(frozen=True)
class ThreadCollectives:
    """The collectives of one thread of a rendezvous."""

    rendezvous: Rendezvous
    rank: int

    def all_gather_int(self, number: int, device: torch.device) -> tuple[list[int], int]:
        return self._exchanged(number), self.rank

    def all_reduce_(self, tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
        every = torch.stack(self._exchanged(tensor.clone()))
        return tensor.copy_(every.amax(0) if operation == dist.ReduceOp.MAX else every.sum(0))

    def _exchanged(self, own: Any) -> list[Any]:
        """Return the values of all threads, in the order of ranks."""
        self.rendezvous.values[self.rank] = own
        self.rendezvous.barrier.wait()
        every = list(self.rendezvous.values)
        self.rendezvous.barrier.wait()  # until all have read: the next exchange overwrites the values
        return every


@dataclass(frozen=True, kw_only=True)
class SpreadOptions(Options):
    """The options of the loss, and the number of threads that share the classes."""

    num_processes: int = 2


@takes(LossTensors, SpreadOptions)
def spread_linear_cross_entropy(tensors: LossTensors, options: SpreadOptions) -> torch.Tensor:
    """Compute ``vocabulary_parallel_linear_cross_entropy`` with the classes split into ``num_processes`` shards.

    On a GPU, simulated or real, one process has all classes: a meter reads one process, and the backwards of several
    threads would deadlock, since autograd runs all backwards of a GPU in one thread.
    """
    if tensors.hidden_ND.device.type != "cpu" or options.num_processes == 1:
        return loss_of_shard(tensors, options, SingleProcess())
    loss: torch.Tensor = _Spread.apply(*tensors, options)
    return loss


class _Spread(torch.autograd.Function):
    """The loss with one autograd graph per thread; its backward runs the backwards of all threads."""

    @staticmethod
    def forward(ctx: Any, *tensors_and_options: Any) -> torch.Tensor:
        *tensors, options = tensors_and_options
        hidden_ND, weight_VD, target_N, bias_V, _ = tensors
        number, wanted = options.num_processes, _wanted(ctx)
        rendezvous = Rendezvous(number)

        def leaves(shards: Sequence[torch.Tensor], is_wanted: bool) -> list[torch.Tensor]:
            return [shard.detach().requires_grad_(is_wanted) for shard in shards]

        hiddens = leaves([hidden_ND] * number, wanted[0])
        weights = leaves(weight_VD.tensor_split(number), wanted[1])
        biases = None if bias_V is None else leaves(bias_V.tensor_split(number), wanted[2])

        def run(rank: int) -> torch.Tensor:
            own = LossTensors(hiddens[rank], weights[rank], target_N, None if biases is None else biases[rank])
            with torch.set_grad_enabled(any(wanted)):
                return loss_of_shard(own, options, ThreadCollectives(rendezvous, rank))

        losses = rendezvous.all_run(run)
        _require_the_same("loss", losses)
        ctx.rendezvous, ctx.losses, ctx.leaves = rendezvous, losses, (hiddens, weights, biases)
        return losses[0].detach()

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wanted = _wanted(ctx)
        leaves = [of_rank for of_rank, is_wanted in zip(ctx.leaves, wanted, strict=True) if is_wanted]
        is_twice = torch.is_grad_enabled()

        def run(rank: int) -> tuple[torch.Tensor, ...]:
            own = [of_rank[rank] for of_rank in leaves]
            return torch.autograd.grad(ctx.losses[rank], own, upstream, retain_graph=True, create_graph=is_twice)

        found = dict(
            zip([i for i in range(3) if wanted[i]], zip(*ctx.rendezvous.all_run(run), strict=True), strict=True)
        )
        if 0 in found:
            _require_the_same("gradient of hidden", found[0])
        hidden = found[0][0] if 0 in found else None
        weight, bias = (torch.cat(found[i]) if i in found else None for i in (1, 2))
        return hidden, weight, None, bias, None, None


def _wanted(ctx: Any) -> tuple[bool, bool, bool]:
    """Return whether the gradients of hidden, weight and bias are wanted."""
    hidden, weight, _, bias, _, _ = ctx.needs_input_grad
    return hidden, weight, bias


def _require_the_same(what: str, tensors: Any) -> None:
    first, *others = (tensor.detach() for tensor in tensors)
    if any(not torch.equal(first.nan_to_num(nan=0.0), other.nan_to_num(nan=0.0)) for other in others):
        raise AssertionError(f"the {what} is not the same on every process")
