"""``memfix train``: trains an incident's model with the training loop of all incidents."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from .options import CONFIG_HELP, overrides_argument
from .output import report_console


@click.command()
@click.argument("incident", metavar="INCIDENT")
@overrides_argument
@click.option("--config", "config_path", type=click.Path(path_type=Path), metavar="FILE", help=CONFIG_HELP)
@click.option("--resume", "resume_path", type=click.Path(path_type=Path), metavar="FILE", help="Continue a saved run.")
@click.option("--json", "json_path", metavar="PATH", help="Write a line of JSON per step; - for standard output.")
@click.option("--keys", is_flag=True, help="List the keys of a config, with their values and defaults.")
def train(
    incident: str,
    overrides: tuple[str, ...],
    config_path: Path | None,
    resume_path: Path | None,
    json_path: str | None,
    keys: bool,
) -> int:
    """Train the model of INCIDENT with a config file, with keys overridden as in training.steps=10.

    For several processes with sharded parameters: torchrun --nproc_per_node=2 -m memfix train ...
    """
    from ..incidents import get_incident
    from ..incidents.incident import load_config, own_configs, sections
    from ..incidents.schema import described

    chosen = get_incident(incident)
    if keys:
        console = report_console(to_stderr=False)
        for key, takes, about in described(sections(chosen)):
            console.print(Text(f"{key:<38} {takes:<44} {about}"), soft_wrap=True)
        return 0
    if config_path is None:
        brought = ", ".join(name.removesuffix(".yaml") for name in own_configs(chosen))
        raise click.UsageError(
            f"Missing option '--config': {incident} comes with {brought}; --keys lists the keys of a config"
        )
    config = load_config(chosen, config_path, overrides)

    from ..gate import report
    from ..incidents.distributed import joined
    from ..incidents.training import train as run
    from ..provenance import describe

    report.require_writable(json_path)
    with joined(config.training.device) as world, _lines(json_path, world.is_first, resume_path is not None) as write:
        console = report_console(to_stderr=json_path == "-")

        def say(line: str) -> None:
            if world.is_first:
                console.print(Text(line), soft_wrap=True)

        training = config.training
        length = f"{training.epochs} epochs" if training.steps is None else f"{training.steps} steps"
        say(f"{incident}: {length}, processes: {world.size}, {world.device}, "
            f"{', '.join([config.training.precision, *chosen.describe(config)])}")  # fmt: skip
        write({
            "event": "start", "incident": incident, "processes": world.size, "device": str(world.device),
            "config": config.as_dict(), "surroundings": describe(),
        })  # fmt: skip
        for step in run(chosen, config, world, resume=resume_path, say=say):
            write({"event": "step", **vars(step)})
            if step.step % config.training.log_every == 0 or step.step in (1, step.steps):
                say(_progress(step, chosen.quality))
        write({"event": "end"})
    return 0


def _progress(step: Any, quality: Callable[[float], str] | None = None) -> str:
    from ..units import format_bytes

    is_tokens = step.tokens_per_s is not None
    speed = f"{step.tokens_per_s:,.0f} tokens/s" if is_tokens else f"{step.examples_per_s:,.0f} examples/s"
    shown = "" if quality is None else f"  {quality(step.loss)}"
    return (
        f"step {step.step:>{len(str(step.steps))}}/{step.steps}  loss {step.loss:.4f}{shown}  "
        f"rate {step.learning_rate:.2e}  norm {step.gradient_norm:.3f}  {speed}  "
        f"peak {format_bytes(step.peak_bytes)} {step.peak_meter}"
        + (f"  skipped: gradients overflow at loss scale {step.loss_scale:g}" if step.skipped else "")
    )


@contextmanager
def _lines(path: str | None, is_first: bool, append: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that writes a record as one line of JSON at once, so that a killed run keeps its log."""
    if path is None or not is_first:
        yield lambda _: None
    elif path == "-":
        yield lambda record: click.echo(json.dumps(record))
    else:
        # a resumed run appends to its log
        with open(path, "a" if append else "w", encoding="utf-8", buffering=1) as file:
            yield lambda record: print(json.dumps(record), file=file)
