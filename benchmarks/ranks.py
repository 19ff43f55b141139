"""Predicts the peak of one rank of a distributed step, and measures it on a GPU; the other ranks are fake in both.

    python -m benchmarks.ranks [--json PATH] [--measured PATH] [--only GLOB]

The steps train a small decoder with FSDP2, tensor, sequence, context, pipeline and expert parallelism, and with a
vocabulary-parallel loss. Without a GPU only predictions are printed.
"""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from memfix.meters.base import Step
from memfix.meters.one_rank import Mesh
from memfix.ops.linear_cross_entropy import vocabulary_parallel_linear_cross_entropy

from .predicted_rows import in_words, kept_rows, measured, take_measured, write_rows

VOCABULARY, WIDTH, HEAD, NUM_BLOCKS = 16_384, 512, 64, 4
BATCH, LENGTH = 4, 512


# ---------------------------------------------------------------- the decoder
class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        # the number of heads follows from the local width, which tensor parallelism divides
        heads = (layer(x).view(batch, length, -1, HEAD).transpose(1, 2) for layer in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, feed_forward: Callable[[], nn.Module] = FeedForward) -> None:
        super().__init__()
        self.first_norm, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.second_norm, self.feed_forward = nn.RMSNorm(WIDTH), feed_forward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first_norm(x))
        return x + self.feed_forward(self.second_norm(x))


class Decoder(nn.Module):
    def __init__(self, *, checkpointed: bool = False, feed_forward: Callable[[], nn.Module] = FeedForward) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(feed_forward) for _ in range(NUM_BLOCKS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.checkpointed = checkpointed

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.norm(x)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(ids))


def decoder(device: str, **options: Any) -> Decoder:
    with torch.device(device):
        return Decoder(**options)


def ids_on(device: str, length: int = LENGTH) -> torch.Tensor:
    return torch.arange(BATCH * length).remainder(VOCABULARY).view(BATCH, length).to(device)


def dense_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


def training(model: nn.Module, backward: Callable[[], object], *, clips: bool = True) -> Step:
    """Return a train step; ``backward`` runs the forward pass too."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


# ---------------------------------------------------------------- the kinds of parallelism
def shard(model: Decoder, mesh: DeviceMesh, *, reshards: bool = True) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshards)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshards)


def split(model: Decoder, mesh: DeviceMesh, *, whole_logits: bool) -> None:
    """Split each layer over the ranks of a mesh (tensor parallel), and positions between layers (sequence parallel)."""
    by_position = Shard(1)
    logits = Replicate() if whole_logits else Shard(-1)
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=by_position),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(
                input_layouts=by_position, output_layouts=logits, use_local_output=whole_logits
            ),
        },
    )  # fmt: skip
    whole = {"input_layouts": (by_position,), "desired_input_layouts": (Replicate(),)}
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "first_norm": SequenceParallel(),
                "attention": PrepareModuleInput(**whole),
                **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
                "attention.out": RowwiseParallel(output_layouts=by_position),
                "second_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(**whole),
                "feed_forward.up": ColwiseParallel(),
                "feed_forward.down": RowwiseParallel(output_layouts=by_position),
            },
        )


def sharded(device: str, mesh: DeviceMesh, *, reshards: bool = True, checkpointed: bool = False) -> Step:
    model, ids = decoder(device, checkpointed=checkpointed), ids_on(device)
    shard(model, mesh, reshards=reshards)
    return training(model, lambda: dense_loss(model(ids), ids).backward())


def tensor_parallel(device: str, mesh: DeviceMesh) -> Step:
    model, ids = decoder(device), ids_on(device)
    split(model, mesh, whole_logits=True)
    return training(model, lambda: dense_loss(model(ids), ids).backward())


def loss_by_vocabulary(device: str, mesh: DeviceMesh) -> Step:
    """Build a step with torch's loss parallelism: logits stay sharded by columns through loss and backward."""
    model, ids = decoder(device), ids_on(device)
    split(model, mesh, whole_logits=False)

    def backward() -> None:
        with loss_parallel():
            F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()

    return training(model, backward, clips=False)


def chunked_loss_by_vocabulary(device: str, mesh: DeviceMesh) -> Step:
    """Build a step of memfix's vocabulary-parallel loss alone, which never makes all logits."""
    rows = VOCABULARY // mesh.size()
    hidden = torch.randn(BATCH * LENGTH, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(rows, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
    target = ids_on(device).flatten()

    def step() -> None:
        hidden.grad = weight.grad = None
        vocabulary_parallel_linear_cross_entropy(hidden, weight, target, group=mesh.get_group()).backward()

    return step


def sharded_and_split(device: str, mesh: DeviceMesh) -> Step:
    model, ids = decoder(device), ids_on(device)
    split(model, mesh["tensor"], whole_logits=True)
    shard(model, mesh["data"])
    return training(model, lambda: dense_loss(model(ids), ids).backward())


def context_split(device: str, mesh: DeviceMesh) -> Step:
    """Build a step with context parallelism: each rank has some positions; keys and values circulate in a ring."""
    model, ids = decoder(device).bfloat16(), ids_on(device, LENGTH * mesh.size())

    def backward() -> None:
        batch, target = ids.clone(), ids.clone()
        with context_parallel(
            mesh, buffers=[batch, target], buffer_seq_dims=[1, 1], no_restore_buffers={batch, target}
        ):
            dense_loss(model(batch), target).backward()

    return training(model, backward, clips=False)


def pipelined(device: str, mesh: DeviceMesh) -> Step:
    """Build a step that trains one pipeline stage per rank by the 1F1B schedule."""
    rank, num_stages, num_batches = mesh.get_local_rank(), mesh.size(), 8
    with torch.device(device):
        model = nn.Sequential(*(Block() for _ in range(2)))
        x = torch.randn(num_batches * BATCH, LENGTH, WIDTH)
        passed = torch.empty(BATCH, LENGTH, WIDTH, requires_grad=True)
    stage = PipelineStage(
        model, rank, num_stages, torch.device(device), input_args=passed, output_args=passed, group=mesh.get_group()
    )
    schedule = Schedule1F1B(stage, num_batches, loss_fn=F.mse_loss)

    def backward() -> None:
        schedule.step(*([x] if stage.is_first else []), **({"target": x} if stage.is_last else {}))

    return training(model, backward, clips=False)


class Experts(nn.Module):
    """A mixture of experts, sharded over the ranks; each token is sent to one expert and back."""

    def __init__(self, group: dist.ProcessGroup, per_rank: int = 2) -> None:
        super().__init__()
        self.group, self.per_rank = group, per_rank
        self.router = nn.Linear(WIDTH, per_rank * group.size(), bias=False)
        self.up = nn.Parameter(torch.empty(per_rank, WIDTH, 4 * WIDTH))
        self.down = nn.Parameter(torch.empty(per_rank, 4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens, group = x.flatten(0, 1), self.group
        weight, expert = self.router(tokens).softmax(-1).max(-1)
        order = expert.argsort()
        # every rank gets the same number of tokens, as with a fixed capacity
        even = [len(tokens) // group.size()] * group.size()
        sent = collectives.all_to_all_single_autograd(tokens[order], even, even, group)
        mine = sent.view(self.per_rank, -1, WIDTH)
        done = torch.bmm(F.gelu(torch.bmm(mine, self.up)), self.down).flatten(0, 1)
        back = collectives.all_to_all_single_autograd(done, even, even, group)
        return torch.zeros_like(tokens).index_copy(0, order, back).mul(weight[:, None]).view_as(x)


def experts_spread(device: str, mesh: DeviceMesh) -> Step:
    model, ids = decoder(device, feed_forward=partial(Experts, mesh.get_group())), ids_on(device)
    return training(model, lambda: dense_loss(model(ids), ids).backward())


Build = Callable[[str, DeviceMesh], Step]
STEPS: dict[str, tuple[Mesh, Build]] = {
    "FSDP2, bfloat16, resharded after forward": ({"data": 8}, sharded),
    "FSDP2, bfloat16, kept after forward": ({"data": 8}, partial(sharded, reshards=False)),
    "FSDP2, bfloat16, checkpointed": ({"data": 8}, partial(sharded, checkpointed=True)),
    "FSDP2 in two replicas": ({"replica": 2, "data": 4}, sharded),
    "tensor and sequence parallel": ({"tensor": 8}, tensor_parallel),
    "FSDP2 and tensor parallel": ({"data": 4, "tensor": 2}, sharded_and_split),
    "vocabulary-parallel loss of torch": ({"tensor": 8}, loss_by_vocabulary),
    "vocabulary-parallel loss of memfix": ({"tensor": 8}, chunked_loss_by_vocabulary),
    "context parallel": ({"context": 8}, context_split),
    "pipeline, one forward one backward": ({"stage": 8}, pipelined),
    "experts spread over the ranks": ({"expert": 8}, experts_spread),
}
"""The mesh of 8 ranks and the builder of one rank's step, by name."""


@click.command()
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the figures there.")
@click.option("--only", default="*", help="Only steps whose names match, such as 'FSDP2*'.")
@click.option(
    "--measured", "before", type=click.Path(exists=True, path_type=Path), help="Take a GPU's bytes from there."
)
def main(json_path: Path | None, only: str, before: Path | None) -> None:
    chosen = [name for name in STEPS if fnmatch.fnmatchcase(name, only)]
    if not chosen:
        raise click.UsageError(f"--only {only!r} matches none of {len(STEPS)} steps, such as {next(iter(STEPS))!r}")
    kept, rows = kept_rows(before), {}
    for name in chosen:
        mesh, build = STEPS[name]
        row = rows[name] = {"mesh": mesh, "rank": 0} | measured(build, mesh=mesh)
        take_measured(row, kept, name)
        off = (
            f"; off by {row['predicted'] - row['measured']:+,} bytes" if {"predicted", "measured"} <= row.keys() else ""
        )
        click.echo(f"{name}, rank 0 of {mesh}: {in_words(row)}{off}")
        for note in row.get("notes", []):
            click.echo(f"  note: {note}")
    if json_path is not None:
        write_rows(json_path, rows, kept)


if __name__ == "__main__":
    sys.exit(main())
