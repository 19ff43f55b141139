"""Describe where a figure was measured: versions, GPU, driver, commit, time. Imports no torch."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def installed_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def gpu_and_driver() -> tuple[str, str] | None:
    """Ask the driver for the GPU's name and its own version, without torch. None where no driver answers."""
    try:
        import pynvml

        pynvml.nvmlInit()
        try:
            name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
            return str(name), str(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    except Exception:
        return None


def allocator_settings() -> str:
    return os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or "default"


def describe() -> dict[str, str]:
    """Return all of it, for reports that are read elsewhere."""
    gpu, driver = gpu_and_driver() or ("none", "none")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": _commit(),
        "torch": installed_version("torch"),
        "triton": installed_version("triton"),
        "hypothesis": installed_version("hypothesis"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "gpu": gpu,
        "driver": driver,
        "allocator": allocator_settings(),
    }


def _commit() -> str:
    """Return this memfix's commit, with a + where files differ. A variable names it for a copy without history."""
    if "MEMFIX_COMMIT" in os.environ:
        return os.environ["MEMFIX_COMMIT"]
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
