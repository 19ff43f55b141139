"""Writes this machine into ASV's machine file: CPU, memory, GPU, driver, torch, triton and cuDNN.

    python -m benchmarks.machine

prints the name under which its results are kept: that of its GPU or CPU, not its host name.
"""

from __future__ import annotations

import platform
import re

import click
import torch
from asv.machine import Machine, MachineCollection
from asv.util import UserError

from memfix.cli.ending import run
from memfix.errors import MemfixError
from memfix.provenance import gpu_and_driver, installed_version
from memfix.units import GiB


def facts() -> dict[str, str]:
    """Return everything that a time depends on: ASV draws one line for every combination of these."""
    own = Machine.get_defaults()
    gpu, driver = gpu_and_driver() or ("none", "none")
    cudnn = torch.backends.cudnn.version()
    name = gpu if gpu != "none" else f"{own['cpu']} {own['num_cpu']}"
    return {
        "machine": re.sub(r"[^0-9a-z]+", "-", re.sub(r"\(\w+\)", "", name.lower())).strip("-"),
        "os": platform.system(),
        "arch": own["arch"],
        "cpu": own["cpu"],
        "num_cpu": own["num_cpu"],
        "ram": f"{round(int(own['ram']) / GiB)} GiB",
        "gpu": gpu,
        "driver": driver,
        "torch": torch.__version__,
        "triton": installed_version("triton"),
        "cudnn": "none" if cudnn is None else str(cudnn),
    }


def write_machine_file() -> str:
    """Write this machine to ASV's per-user machine file; return the machine's name."""
    known = facts()
    try:
        MachineCollection.save(known["machine"], known)
    except (UserError, OSError) as error:
        raise MemfixError(f"cannot write ASV's machine file: {error}") from None
    return known["machine"]


@click.command()
def main() -> None:
    """Write this machine into ASV's machine file and print its name."""
    click.echo(write_machine_file())


if __name__ == "__main__":
    run(main, "python -m benchmarks.machine")
