"""Measures the PSNR that the decoders of ``scent_decoder`` reach on synthetic images.

    python -m benchmarks.psnr --config small --json benchmarks/results/cpu/psnr_scent_decoder.json

Every decoder trains as with ``memfix train``, on the same images, with its parameters drawn from several seeds. The
PSNR of a step is computed from its loss, before the step changes the parameters.
"""

from __future__ import annotations

from typing import Any

import click

from memfix.cli.ending import run
from memfix.cli.options import json_option, overrides_argument
from memfix.cli.output import Output
from memfix.incidents.config import RunConfig
from memfix.incidents.distributed import joined
from memfix.incidents.incident import load_config
from memfix.incidents.scent_decoder.images import psnr
from memfix.incidents.scent_decoder.incident import incident, num_parameters
from memfix.incidents.scent_decoder.model import DECODERS
from memfix.incidents.training import train
from memfix.provenance import describe


def curve(config: RunConfig) -> dict[int, float]:
    """Train one decoder; return the PSNR in dB of the first step, of every ``log_every``-th and of the last."""
    with joined(config.training.device) as world:
        return {
            step.step: round(psnr(step.loss), 2)
            for step in train(incident, config, world)
            if step.step % config.training.log_every == 0 or step.step in (1, step.steps)
        }


@click.command()
@overrides_argument
@click.option("--config", "config_file", default="small", show_default=True, metavar="FILE", help="As memfix train's.")
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="Of the parameters.")
@json_option
def main(overrides: tuple[str, ...], config_file: str, seeds: int, output: Output) -> int:
    """Train each decoder from several seeds. SECTION.KEY=VALUE overrides the config, as in training.steps=10."""
    base = load_config(incident, config_file, overrides)
    found: dict[str, Any] = {
        "surroundings": describe(),
        "config": base.name,
        "settings": base.as_dict(),
        "decoders": {},
    }
    for decoder in DECODERS:
        config = base.replaced({"model.decoder": decoder})
        curves = [curve(config.replaced({"training.seed": seed})) for seed in range(seeds)]
        found["decoders"][decoder] = {"parameters": num_parameters(config), "psnr_db": curves}
        last = "  ".join(f"{one[max(one)]:.2f} dB" for one in curves)
        output.line(f"{decoder:<8} {num_parameters(config):>11,} parameters  {last}")
    output.write_json(lambda: found)
    return 0


if __name__ == "__main__":
    run(main, "python -m benchmarks.psnr")
