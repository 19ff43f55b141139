"""Checks whether a GPU is ready for timing: idle, and with unthrottled clocks. Asks NVML, not torch."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from ..errors import MeterUnavailable
from ..units import GiB, format_bytes

BUSY_PERCENT = 5
IDLE_BYTES = 2 * GiB  # a driver keeps some hundred MiB for itself
SAMPLES, SAMPLE_PERIOD_S = 5, 0.2

# NVML's reasons for lowered clocks; those in _HARMLESS, such as limits that the owner set, do not disturb timing
_SLOWED = {
    0x0000000000000004: "power cap",
    0x0000000000000008: "hardware slowdown",
    0x0000000000000020: "temperature",
    0x0000000000000040: "hardware temperature",
    0x0000000000000080: "power brake",
}
_HARMLESS = {
    0x0000000000000001: "idle",
    0x0000000000000002: "clocks set by the owner",
    0x0000000000000010: "sync boost",
    0x0000000000000100: "display clocks",
}


@dataclass(frozen=True)
class Readiness:
    """The state of one GPU as NVML reports it while memfix runs nothing there. ``troubles`` is empty if it is ready."""

    gpu: str
    driver: str
    used_bytes: int
    utilization_percent: int
    other_processes: tuple[int, ...]
    sm_clock_mhz: int
    max_sm_clock_mhz: int
    memory_clock_mhz: int
    temperature_c: int
    power_w: float
    power_limit_w: float
    throttle_reasons: tuple[str, ...]
    troubles: tuple[str, ...]

    @property
    def is_ready(self) -> bool:
        return not self.troubles

    def require(self) -> None:
        """Raise if the GPU is not ready for timing."""
        if self.troubles:
            raise MeterUnavailable(f"{'; '.join(self.troubles)}: a time taken now is not this code's own")

    def line(self) -> str:
        state = "ready" if self.is_ready else f"not ready: {'; '.join(self.troubles)}"
        clocks = f"SM {self.sm_clock_mhz} of {self.max_sm_clock_mhz} MHz, memory {self.memory_clock_mhz} MHz"
        why = ", ".join(self.throttle_reasons) or "none"
        return (
            f"{self.gpu}, driver {self.driver}: {state} ({clocks}, clocks held by: {why}, {self.temperature_c} C, "
            f"{self.power_w:.0f} of {self.power_limit_w:.0f} W, {format_bytes(self.used_bytes)} in use)"
        )


def troubles_of(
    utilization_percent: int, used_bytes: int, other_processes: tuple[int, ...], throttle_bits: int
) -> list[str]:
    """Reasons why a time taken now would be disturbed."""
    troubles = []
    if other_processes:
        troubles.append(f"used by process {', '.join(map(str, other_processes))}")
    if utilization_percent > BUSY_PERCENT:
        troubles.append(f"busy {utilization_percent} % of the time")
    if used_bytes > IDLE_BYTES and not other_processes:  # in a container NVML does not name other processes
        troubles.append(f"{format_bytes(used_bytes)} are in use by processes that are not shown here")
    slowed = [name for bit, name in _SLOWED.items() if throttle_bits & bit]
    if slowed:
        troubles.append(f"clocks are held down by {', '.join(slowed)}")
    return troubles


def read(index: int = 0) -> Readiness:
    """Sample the GPU with this NVML index for a second."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except Exception as error:
        raise MeterUnavailable(f"no GPU to be timed: NVML does not answer ({error})") from None
    try:
        return _read(nvml, nvml.nvmlDeviceGetHandleByIndex(index))
    except nvml.NVMLError as error:
        raise MeterUnavailable(f"GPU {index} cannot be read: {error}") from None
    finally:
        nvml.nvmlShutdown()


def _read(nvml: Any, handle: Any) -> Readiness:
    busiest = used = bits = 0
    others: set[int] = set()
    for number in range(SAMPLES):
        if number:
            time.sleep(SAMPLE_PERIOD_S)
        busiest = max(busiest, nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        used = max(used, int(nvml.nvmlDeviceGetMemoryInfo(handle).used))
        bits |= nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
        others |= {process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)} - {os.getpid()}
    known = {**_SLOWED, **_HARMLESS}
    return Readiness(
        gpu=str(nvml.nvmlDeviceGetName(handle)),
        driver=str(nvml.nvmlSystemGetDriverVersion()),
        used_bytes=used,
        utilization_percent=busiest,
        other_processes=tuple(sorted(others)),
        sm_clock_mhz=nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        max_sm_clock_mhz=nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
        memory_clock_mhz=nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
        temperature_c=nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        power_w=nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        power_limit_w=nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
        throttle_reasons=tuple(name for bit, name in known.items() if bits & bit),
        troubles=tuple(troubles_of(busiest, used, tuple(sorted(others)), bits)),
    )


def ready_within(seconds: float) -> Readiness:
    """The first reading within ``seconds`` that is ready, or else the last one."""
    deadline = time.monotonic() + seconds
    reading = read()
    while not reading.is_ready and time.monotonic() < deadline:
        reading = read()
    return reading
