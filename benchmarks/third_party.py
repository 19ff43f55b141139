"""Other people's code, unmodified, under the simulated meter, and on a GPU beside the real one.

    python -m benchmarks.third_party [--json PATH]

A package that is not installed is left out, with a line that says so.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
import torch

import memfix
from memfix.atomic_write import write_whole
from memfix.meters.base import Step, StepBuilder
from memfix.provenance import describe, installed_version
from memfix.units import format_bytes

from .peers import not_installed


def qwen3(device: str, *, checkpointed: bool) -> Step:
    """A train step of ``transformers``' Qwen3 with random weights: forward, loss, backward, AdamW."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, vocab_size=151_936, max_position_embeddings=4096, use_cache=False,
    )  # fmt: skip
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, config.vocab_size, (2, 2048), device=device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    return step


def liger_loss(device: str) -> Step:
    """Liger's fused linear cross-entropy, forward and backward."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    hidden = torch.randn(8192, 2560, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(151_936, 2560, device=device, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, 151_936, (8192,), device=device)
    loss_of = LigerFusedLinearCrossEntropyLoss()

    def step() -> None:
        hidden.grad = weight.grad = None
        loss_of(weight, hidden, target).backward()

    return step


def fla_kda(device: str) -> Step:
    """flash-linear-attention's chunked KDA, forward and backward."""
    from fla.ops.kda import chunk_kda

    shape = (1, 8192, 16, 128)
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    gate = torch.rand(shape, device=device).neg_().requires_grad_()
    beta = torch.rand(shape[:3], device=device, dtype=torch.bfloat16).requires_grad_()
    upstream = torch.randn(shape, device=device, dtype=torch.bfloat16)

    def step() -> None:
        for tensor in (q, k, v, gate, beta):
            tensor.grad = None
        out, _ = chunk_kda(q, k, v, gate, beta, use_qk_l2norm_in_kernel=True)
        out.backward(upstream)

    return step


WORKLOADS: dict[str, tuple[str, StepBuilder]] = {
    "Qwen3, train step": ("transformers", lambda device: qwen3(device, checkpointed=False)),
    "Qwen3, train step, checkpointed": ("transformers", lambda device: qwen3(device, checkpointed=True)),
    "Liger fused linear cross-entropy": ("liger_kernel", liger_loss),
    "flash-linear-attention chunk KDA": ("fla", fla_kda),
}
"""By name: the package that it needs, and how the step is built."""

_DISTRIBUTION = {"liger_kernel": "liger-kernel", "fla": "flash-linear-attention"}


def missing(package: str) -> str | None:
    """Why workloads of ``package`` cannot run here, or None."""
    needed = (package,) if package == "transformers" else (package, "triton")
    return not_installed(needed)


def measured(build: StepBuilder) -> dict[str, Any]:
    predicted = memfix.peak(build)
    row: dict[str, Any] = {"predicted": predicted.peak_bytes, "exact": predicted.exact, "notes": list(predicted.notes)}
    if torch.cuda.is_available():
        row["measured"] = memfix.peak(build, meter="cuda").peak_bytes
    return row


@click.command()
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the figures there.")
def main(json_path: Path | None) -> None:
    rows: dict[str, Any] = {}
    data = {"surroundings": describe(), "workloads": rows}
    for name, (package, build) in WORKLOADS.items():
        reason = missing(package)
        if reason is not None:
            click.echo(f"{name}: left out: {reason}")
            continue
        row = rows[name] = {"package": package, "version": installed_version(_DISTRIBUTION.get(package, package))}
        row |= measured(build)
        real = f", measured {row['measured']:,}" if "measured" in row else ""
        click.echo(f"{name}: predicted {row['predicted']:,} bytes ({format_bytes(row['predicted'])}){real}")
        for note in row["notes"]:
            click.echo(f"  note: {note}")
        if json_path is not None:  # after each, since the next may be long
            write_whole(json_path, json.dumps(data, indent=1) + "\n", "the figures")


if __name__ == "__main__":
    sys.exit(main())
