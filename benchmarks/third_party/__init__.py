"""Steps of unmodified public packages. Each subject is a module with its ``STEPS``.

A step takes a few MiB to a few GiB. Models have random weights, and packages are imported when a step is built.
"""

from __future__ import annotations

import importlib

from memfix.meters.base import StepBuilder

from ..peers import not_installed

Steps = dict[str, tuple[str, StepBuilder]]
"""By name, the tested package and the builder of the step."""

_SUBJECTS = "language sequences mixtures pictures audio vision graphs adapters numerics trainers diffusion kernels"
SUBJECTS: dict[str, Steps] = {
    subject: importlib.import_module(f"{__name__}.{subject}").STEPS for subject in _SUBJECTS.split()
}
WORKLOADS: Steps = {name: workload for steps in SUBJECTS.values() for name, workload in steps.items()}

_ALSO_NEEDED = {
    "liger_kernel": ("transformers", "triton"),
    "fla": ("triton",),
    "peft": ("transformers",),
    "accelerate": ("transformers",),
}


def missing(package: str) -> str | None:
    """Return why workloads of ``package`` cannot run here, or None."""
    return not_installed((package, *_ALSO_NEEDED.get(package, ())))
