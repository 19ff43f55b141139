"""One step of other people's code: predicted, and on a GPU measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

import memfix
from memfix.meters.base import StepBuilder
from memfix.meters.cuda import CudaMeter
from memfix.provenance import installed_version

from . import SUBJECTS

_DISTRIBUTION = {"liger_kernel": "liger-kernel", "fla": "flash-linear-attention"}


def measured(build: StepBuilder) -> dict[str, Any]:
    """What is predicted, with its bounds and the CPU time that it took, or why it is not; and what a GPU takes."""
    row: dict[str, Any] = {}
    start = time.process_time()
    try:
        predicted = memfix.peak(build)
    except Exception as error:  # other people's code may raise anything
        row["error"] = f"{type(error).__name__}: {error}"
    else:
        row |= {"predicted": predicted.peak_bytes, "exact": predicted.exact, "notes": list(predicted.notes)}
        if predicted.at_most is not None:
            row |= {"at_least": predicted.at_least, "at_most": predicted.at_most}
    row["cpu_s"] = round(time.process_time() - start, 1)
    if torch.cuda.is_available():
        try:
            row["measured"] = memfix.peak(build, meter="cuda").peak_bytes
        except Exception as error:
            row["error_on_gpu"] = f"{type(error).__name__}: {error}"
    return row


def rows_of(subject: str, chosen: Sequence[str], num_processes: int = 1) -> dict[str, dict[str, Any]]:
    """The rows of the chosen steps of a subject, of which as many as there are processes measure on one GPU."""
    CudaMeter.num_processes = num_processes
    rows: dict[str, dict[str, Any]] = {}
    for name in chosen:
        package, build = SUBJECTS[subject][name]
        row = {"package": package, "version": installed_version(_DISTRIBUTION.get(package, package))}
        rows[name] = row | measured(build)
    return rows
