"""Meters: each runs a step and returns a ``Reading``. None of them knows an op."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import MeterUnavailable, UsageError, did_you_mean
from .base import Allocation, Meter, Reading, StepBuilder

__all__ = [
    "GPU_METERS", "METERS", "Allocation", "Meter", "Reading", "StepBuilder", "get_meter", "meter_or_simulated",
    "usable_meter",
]  # fmt: skip

GPU_METERS = ("simulated", "cuda", "nvml")
METERS = (*GPU_METERS, "host")


def get_meter(name: str, gpu: str = "H200", assume: Mapping[str, Any] | None = None) -> Meter:
    """The meter called ``name``, even if it cannot run here.

    For the simulated meter, ``gpu`` names the GPU, and ``assume`` has values that the simulation does not know.
    """
    if name == "simulated":
        from .simulated import SimulatedMeter

        return SimulatedMeter(gpu, assume)
    if name == "cuda":
        from .cuda import CudaMeter

        return CudaMeter()
    if name == "nvml":
        from .nvml import NvmlMeter

        return NvmlMeter()
    if name == "host":
        from .host import HostMeter

        return HostMeter()
    raise UsageError(f"unknown meter {name!r}{did_you_mean(name, METERS)}")


def usable_meter(name: str, gpu: str = "H200", assume: Mapping[str, Any] | None = None) -> Meter:
    """The meter called ``name``. Raises ``MeterUnavailable`` if it cannot run here."""
    meter = get_meter(name, gpu, assume)
    reason = meter.unavailable_reason()
    if reason is not None:
        raise MeterUnavailable(f"{name} meter unavailable: {reason}")
    return meter


def meter_or_simulated(name: str) -> tuple[Meter, str | None]:
    """The meter called ``name`` and None; if it lacks a GPU, the simulated meter and a sentence that says so."""
    try:
        return usable_meter(name), None
    except MeterUnavailable as error:
        if name in ("simulated", "host"):
            raise
        return usable_meter("simulated"), f"{error}; used the simulated meter instead"
