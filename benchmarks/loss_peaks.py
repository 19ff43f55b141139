"""The steps of the loss benchmark on the simulated meter, beside the peaks that a GPU showed.

    python -m benchmarks.loss_peaks [--measured PATH] [--json PATH]

No GPU is needed: ``--measured`` is what ``benchmarks.linear_cross_entropy`` wrote on one.
"""

# N tokens, D width, V vocabulary

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
import torch

import memfix
from memfix.meters.base import Step, StepBuilder
from memfix.provenance import describe

from .peers import our_forms
from .rounds import LossOf, forget_gradients, train

MEASURED = Path(__file__).parent / "results/h200/linear_cross_entropy.json"


def step_of(loss_of: LossOf, setting: dict[str, Any], tokens: int) -> StepBuilder:
    """One train step with the shapes of the benchmark."""

    def build(device: str) -> Step:
        made: dict[str, Any] = {"device": device, "dtype": getattr(torch, setting["dtype"]), "requires_grad": True}
        hidden_ND = torch.randn(tokens, setting["width"], **made)
        weight_VD = torch.randn(setting["vocabulary"], setting["width"], **made)
        target_N = torch.randint(0, setting["vocabulary"], (tokens,), device=device)
        inputs = (hidden_ND, weight_VD, target_N)

        def step() -> None:
            train(loss_of, inputs)
            forget_gradients(inputs)

        return step

    return build


@click.command()
@click.option("--measured", type=click.Path(path_type=Path, exists=True), default=MEASURED, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the figures there.")
def main(measured: Path, json_path: Path | None) -> None:
    found = json.loads(measured.read_text(encoding="utf-8"))
    data: dict[str, Any] = {"surroundings": describe(), "measured_on": found["surroundings"], "rows": []}
    for race in found["speed"]:
        for contender in our_forms():
            row = race["rows"].get(contender.name, {})
            if row.get("peak_bytes") is None:
                continue
            predicted = memfix.peak(step_of(contender.function, found["setting"], race["tokens"])).peak_bytes
            figures = {"form": contender.name, "predicted": predicted, "measured": row["peak_bytes"]}
            data["rows"].append({"tokens": race["tokens"], **figures})
            difference = predicted - row["peak_bytes"]
            click.echo(f"{race['tokens']:>7,} tokens  {contender.name:<10}  {predicted:>15,} bytes  {difference:+,}")
    if json_path is not None:
        json_path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
