"""Measures the simulated meter's own time and memory: per operator, compared with FakeTensor and torch's MemTracker,
and for a full-size train step.

    python -m benchmarks.oracle [--json PATH]

All of it runs in one process, on one thread, without a GPU. The full-size step is a 4B decoder at 131,072 tokens,
checkpointed, with AdamW.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import memfix
from memfix.atomic_write import write_whole
from memfix.meters.resident import process_peak_bytes
from memfix.meters.simulated import fake_device
from memfix.ops.linear_cross_entropy import linear_cross_entropy
from memfix.provenance import describe
from memfix.units import MiB, format_bytes

ROUNDS = 7


class Block(nn.Module):
    """A decoder layer: RMS norm, grouped-query attention with rotary positions, gated feed-forward."""

    def __init__(self, width: int, heads: int, kv_heads: int, head: int, hidden: int, **where: Any) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = heads, kv_heads, head
        self.norm_in, self.norm_out = nn.RMSNorm(width, **where), nn.RMSNorm(width, **where)
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * head, bias=False, **where)
        self.out = nn.Linear(heads * head, width, bias=False, **where)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False, **where)
        self.down = nn.Linear(hidden, width, bias=False, **where)

    def forward(self, x_BTD: torch.Tensor, cos_TK: torch.Tensor, sin_TK: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x_BTD.shape
        packed = self.qkv(self.norm_in(x_BTD)).view(batch, length, -1, self.head).transpose(1, 2)
        query, key, value = packed.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        query, key = (_rotated(part, cos_TK, sin_TK) for part in (query, key))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.gate_up(self.norm_out(x_BTD)).chunk(2, dim=-1)
        return x_BTD + self.down(F.silu(gate) * up)


def _rotated(x: torch.Tensor, cos_TK: torch.Tensor, sin_TK: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos_TK + torch.cat((-second, first), dim=-1) * sin_TK


def decoder_step(
    device: str,
    *,
    layers: int = 36,
    width: int = 2560,
    heads: int = 32,
    kv_heads: int = 8,
    head: int = 128,
    hidden: int = 9728,
    vocabulary: int = 151_936,
    tokens: int = 131_072,
) -> Callable[[], None]:
    """Return a whole train step: checkpointed layers, the loss in chunks, gradient clipping, AdamW."""
    where = {"device": device, "dtype": torch.bfloat16}
    embedding = nn.Embedding(vocabulary, width, **where)
    blocks = nn.ModuleList(Block(width, heads, kv_heads, head, hidden, **where) for _ in range(layers))
    norm = nn.RMSNorm(width, **where)
    model = nn.ModuleList([embedding, blocks, norm])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids_BT = torch.zeros(1, tokens, dtype=torch.int64, device=device)
    angles_TK = torch.outer(torch.arange(tokens, device=device), torch.ones(head, device=device))
    cos_TK, sin_TK = angles_TK.cos().bfloat16(), angles_TK.sin().bfloat16()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        x_BTD = embedding(ids_BT)
        for block in blocks:
            x_BTD = checkpoint(block, x_BTD, cos_TK, sin_TK, use_reentrant=False)
        hidden_ND = norm(x_BTD).view(-1, width)
        # standard_up_to: at the small size torch's operators run, as FakeTensorMode alone needs
        linear_cross_entropy(hidden_ND, embedding.weight, ids_BT.view(-1), standard_up_to="10 GiB").backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def small_step(device: str) -> Callable[[], None]:
    return decoder_step(device, layers=6, width=512, heads=8, kv_heads=4, head=64, hidden=1536, vocabulary=4096,
                        tokens=1024)  # fmt: skip


# ---------------------------------------------------------------- per operator
class _Counter(TorchDispatchMode):
    """Counts the operators that a step dispatches, at the level of the tools above fake tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


Forget = Callable[[], object]
"""The type of a function that is called between two steps, so that a tool drops what it recorded of the first."""


@contextmanager
def fake_tensors_alone() -> Iterator[Forget]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield gc.collect


@contextmanager
def mem_tracker() -> Iterator[Forget]:
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode(allow_non_fake_inputs=True), MemTracker() as tracker:
        yield tracker.reset_mod_stats


@contextmanager
def simulated_meter() -> Iterator[Forget]:
    from memfix.meters.simulated.environment import simulated_gpu
    from memfix.meters.simulated.gpus import H200

    with simulated_gpu(H200, hides_modes=fake_device.self_test().cannot_hide_modes is None):
        yield gc.collect


def overhead() -> dict[str, Any]:
    """Return the median time of a warm step under each tool, interleaved, in all and per dispatched operator.

    The counts differ: without memfix the optimizer and attention take the code paths of a machine without a GPU.
    """
    worlds = {"FakeTensor alone": fake_tensors_alone, "torch MemTracker": mem_tracker, "memfix": simulated_meter}
    counts = {name: _operators_in(world) for name, world in worlds.items()}
    times: dict[str, list[float]] = {name: [] for name in worlds}
    for _ in range(ROUNDS):
        for name, world in worlds.items():
            with world() as forget:
                step = small_step("cuda")
                step()
                forget()
                start = time.perf_counter()
                step()
                times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    return {
        name: {
            "operators": counts[name],
            "seconds": round(seconds, 4),
            "microseconds_per_operator": round(1e6 * seconds / counts[name], 1),
        }
        for name, seconds in medians.items()
    }


def _operators_in(world: Callable[[], Any]) -> int:
    with world() as forget:
        step = small_step("cuda")
        step()
        forget()
        with _Counter() as counter:
            step()
    return counter.count


def full_size() -> dict[str, Any]:
    """Measure the simulation of the 4B decoder at 131,072 tokens."""
    start = time.perf_counter()
    reading = memfix.peak(decoder_step)
    return {
        "seconds": round(time.perf_counter() - start, 2),
        "process_peak_bytes": process_peak_bytes(),
        "peak_bytes": reading.peak_bytes,
        "base_bytes": reading.base_bytes,
        "exact": reading.exact,
        "notes": list(reading.notes),
    }


@click.command()
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the figures there.")
def main(json_path: Path | None) -> None:
    torch.set_num_threads(1)
    fake_device.install()
    found = {"surroundings": describe(), "decoder": full_size(), "overhead": overhead()}
    decoder, cost = found["decoder"], found["overhead"]
    print(
        f"4B decoder, 131,072 tokens, two steps: {decoder['seconds']:.1f} s, "
        f"{decoder['process_peak_bytes'] / MiB:,.0f} MiB of RAM; predicted {format_bytes(decoder['peak_bytes'])} above "
        f"{format_bytes(decoder['base_bytes'])}"
    )
    for name, row in cost.items():
        print(
            f"{name:<18} {row['seconds']:.3f} s, {row['microseconds_per_operator']:6.1f} us for each of "
            f"{row['operators']:,} operators"
        )
    if json_path is not None:
        write_whole(json_path, json.dumps(found, indent=1) + "\n", "the figures")


if __name__ == "__main__":
    sys.exit(main())
