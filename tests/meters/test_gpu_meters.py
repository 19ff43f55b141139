"""The meters that need a GPU, on one; and what they say where there is none."""

from __future__ import annotations

import functools

import pytest
import torch

import memfix
from memfix.errors import MeasurementError, MeterUnavailable
from memfix.meters.cuda import CudaMeter
from memfix.meters.nvml import GRANULARITY_BYTES, NvmlMeter
from memfix.units import GiB, MiB


def build_buffer(device: str, *, size: int):
    return lambda: torch.empty(size, dtype=torch.uint8, device=device)


def build_failing(device: str):
    def step():
        raise KeyError("planted")

    return step


@pytest.mark.gpu(use="meters")
def test_cuda_meter_reads_requested_bytes_above_the_inputs():
    def build(device):
        x = torch.ones(1000, device=device)
        return lambda: (x + 1).exp()

    reading = memfix.peak(build, meter="cuda")
    assert (reading.peak_bytes, reading.held_bytes, reading.leaked_bytes) == (8000, 4000, 0)
    assert reading.allocated_bytes == 2 * 4096
    assert reading.reserved_bytes is not None


@pytest.mark.gpu
def test_fits_under_a_cap_and_not_under_a_smaller_one():
    meter = CudaMeter()
    build = functools.partial(build_buffer, size=1 * GiB)
    assert meter.fits(build, 2 * GiB).fits
    refused = meter.fits(build, GiB // 2)
    assert not refused.fits
    assert "out of memory" in refused.message


@pytest.mark.gpu
def test_fits_says_what_went_wrong_in_the_child():
    with pytest.raises(MeasurementError, match=r"the capped run failed: KeyError: 'planted'"):
        CudaMeter().fits(build_failing, GiB)
    with pytest.raises(MeasurementError, match="use a function of a module"):
        CudaMeter().fits(lambda device: lambda: None, GiB)


@pytest.mark.gpu
def test_nvml_agrees_with_the_allocator_within_its_granularity():
    reason = NvmlMeter().unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    reading = memfix.peak(functools.partial(build_buffer, size=512 * MiB), meter="nvml")
    assert reading.granularity_bytes == GRANULARITY_BYTES
    assert abs(reading.peak_bytes - 512 * MiB) <= 32 * MiB
    assert not reading.exact


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about machines without a GPU")
@pytest.mark.parametrize("meter", ["cuda", "nvml"])
def test_without_a_gpu_the_meter_says_why_and_what_to_use(meter):
    with pytest.raises(
        MeterUnavailable, match=f"{meter} meter unavailable: torch sees no GPU; use the simulated meter"
    ):
        memfix.peak(functools.partial(build_buffer, size=1), meter=meter)
