"""The nvml meter: samples the driver's own count of the process's memory while the step runs.

It is a second opinion from outside torch. The driver sees segments, not tensors: torch takes memory from it in blocks
of 2 MiB and more, and keeps them. So the figure is coarse, it includes the kernels that the first run loads, and it can
miss a spike that is shorter than the sampling period. The driver may keep and count memory that this process returned
earlier; the meter allocates such memory again before it reads the base.
"""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

from ..errors import MeasurementError, MeterUnavailable
from ..units import MiB
from .base import Reading, StepBuilder
from .cuda import gpu_unavailable_reason
from .gpu_sharing import current_gpu_uuid, gpu_capacity_bytes, gpu_to_ourselves

GRANULARITY_BYTES = 2 * MiB
SAMPLE_PERIOD_S = 0.0005
_FILLER_BYTES = 32 * MiB


class NvmlMeter:
    name = "nvml"
    simulation = None

    def unavailable_reason(self) -> str | None:
        reason = gpu_unavailable_reason()
        if reason is not None:
            return f"{reason}; use the simulated meter"
        try:
            with _Device() as device:
                device.used_bytes()
        except Exception as error:
            return f"NVML does not answer ({error}); use the cuda meter"
        return None

    def capacity_bytes(self) -> int:
        return gpu_capacity_bytes()

    def expecting(self, total_bytes: int) -> NvmlMeter:
        return self

    def measure(self, build: StepBuilder, *, warmup: int = 1) -> Reading:
        import torch

        reason = self.unavailable_reason()
        if reason is not None:
            raise MeterUnavailable(f"nvml meter unavailable: {reason}")
        with gpu_to_ourselves(), _Device() as device:
            step = build("cuda")
            _load_what_every_step_needs()
            torch.cuda.empty_cache()
            fillers = _fill_what_the_driver_keeps(device)
            base = device.used_bytes()
            # sample the first run too: the driver may keep what it returns, and a later run would show no growth
            with _Sampler(device) as sampler:
                result: object = None
                for _ in range(warmup + 1):
                    del result  # two results must not be alive at once
                    result = step()
                torch.cuda.synchronize()
            torch.cuda.empty_cache()
            held = device.used_bytes()
            del result, fillers
            gc.collect()
            torch.cuda.empty_cache()
        peak = max(sampler.peak, held) - base
        return Reading(
            meter=self.name,
            device=torch.cuda.get_device_name(),
            peak_bytes=peak,
            base_bytes=base,
            held_bytes=max(0, held - base),
            leaked_bytes=0,  # kernels that stay loaded would look like a leak
            allocated_bytes=peak,
            reserved_bytes=peak,
            granularity_bytes=GRANULARITY_BYTES,
            exact=False,
            notes=(f"NVML counts what torch took from the driver, loaded kernels included, by {device.counts}",),
        )


def _load_what_every_step_needs() -> None:
    """Make cuBLAS allocate its workspaces for forward and backward, so that they do not count as the step's memory."""
    import torch

    ones = torch.ones(16, 16, device="cuda", requires_grad=True)
    (ones @ ones).sum().backward()
    torch.cuda.synchronize()


def _fill_what_the_driver_keeps(device: _Device) -> list[Any]:
    """Allocate blocks until NVML shows growth: before that, blocks reuse memory that the driver kept and counted."""
    import torch

    blocks, used = [], device.used_bytes()
    while device.used_bytes() < used + _FILLER_BYTES:
        blocks.append(torch.empty(_FILLER_BYTES, dtype=torch.uint8, device="cuda"))
    return blocks


class _Device:
    """The current GPU in NVML, found by its UUID: NVML's order is not CUDA's."""

    def __enter__(self) -> _Device:
        import pynvml

        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        uuid = current_gpu_uuid()
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        self.counts = "this process" if self._own_bytes() is not None else "the whole device (other processes included)"
        return self

    def __exit__(self, *exception: object) -> None:
        self._nvml.nvmlShutdown()

    def _own_bytes(self) -> int | None:
        """This process's memory; None if the container or the driver does not report it."""
        for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle):
            if process.pid == os.getpid() and process.usedGpuMemory:
                return int(process.usedGpuMemory)
        return None

    def used_bytes(self) -> int:
        own = self._own_bytes() if self.counts == "this process" else None
        return own if own is not None else int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)


class _Sampler:
    """Samples the device in a thread until the block ends, and keeps the highest value."""

    def __init__(self, device: _Device) -> None:
        self._device = device
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._failure: Exception | None = None
        self.peak = 0

    def _run(self) -> None:
        try:
            while not self._stop.wait(SAMPLE_PERIOD_S):
                self.peak = max(self.peak, self._device.used_bytes())
        except Exception as error:
            self._failure = error

    def __enter__(self) -> _Sampler:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._failure is not None:
            raise MeasurementError(f"NVML stopped answering while the step ran: {self._failure}")
        self.peak = max(self.peak, self._device.used_bytes())
