"""The meters that need a GPU, on one; and what they say where there is none."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch

import memfix
from memfix.errors import MeasurementError, MeterUnavailable
from memfix.meters import gpu_sharing
from memfix.meters.cuda import CudaMeter
from memfix.meters.nvml import GRANULARITY_BYTES, NvmlMeter
from memfix.units import GiB, MiB


def build_buffer(device: str, *, size: int):
    return lambda: torch.empty(size, dtype=torch.uint8, device=device)


def test_python_collects_only_where_more_is_allocated_than_after_the_last_time(monkeypatch):
    allocated, collections = [0], []

    def collect():
        collections.append(allocated[0])
        allocated[0] -= allocated[0] % 10  # the cycles' share

    monkeypatch.setattr(gpu_sharing, "_allocated_after_cycles", 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: allocated[0])
    monkeypatch.setattr(gpu_sharing.gc, "collect", collect)
    for allocated[0] in (0, 13, 10, 5, 5, 11):
        gpu_sharing.free_cycles()
    assert collections == [13, 11]


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


def build_content_with_less(device: str):
    """Wants 1 GiB, and goes on with 1 MiB if that is refused."""

    def step():
        try:
            return torch.empty(GiB, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:
            return torch.empty(MiB, dtype=torch.uint8, device=device)

    return step


@pytest.mark.gpu(use="meters")
@pytest.mark.parametrize("build", [functools.partial(build_buffer, size=GiB), build_content_with_less])
def test_a_step_that_wants_more_than_its_share_has_the_whole_memory(build, monkeypatch):
    monkeypatch.setattr(CudaMeter, "num_processes", 1000)
    assert memfix.peak(build, meter="cuda").peak_bytes == GiB


def pointwise(x: torch.Tensor) -> torch.Tensor:
    return (x * 2 + 1).sin().relu()


def build_scripted(device: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(pointwise)  # the same object each time
    x = torch.ones(1 << 20, device=device)
    return lambda: scripted(x)


def test_scripted_code_is_an_estimate():
    reading = memfix.peak(build_scripted)
    assert reading.peak_bytes == 2 * 4 * MiB
    note = "TorchScript ran operator by operator: which of them its compiler fuses on a GPU is not known"
    assert (reading.exact, reading.notes) == (False, (note,))
    assert torch._C._get_graph_executor_optimize()


@pytest.mark.gpu(use="meters")
def test_scripted_code_that_was_compiled_before_launches_nothing_in_a_simulated_step():
    step = build_scripted("cuda")
    for _ in range(4):
        expected = step()
    assert memfix.peak(build_scripted).peak_bytes == 2 * 4 * MiB
    torch.cuda.synchronize()  # an illegal access would be told here
    assert torch.equal(step(), expected)


@pytest.mark.gpu(use="meters")
def test_fits_under_a_cap_and_not_under_a_smaller_one():
    meter = CudaMeter()
    build = functools.partial(build_buffer, size=1 * GiB)
    assert meter.fits(build, 2 * GiB).fits
    refused = meter.fits(build, GiB // 2)
    assert not refused.fits
    assert "out of memory" in refused.message


@pytest.mark.gpu(use="meters")
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
