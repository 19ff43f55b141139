"""CUDA kernels emulated on the host: right answers, counted loads, and what a GPU would not forgive."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from memfix.cuda_kernels import CudaKernel, Parameter, parameters_of
from memfix.cuda_kernels import emulated as emulation
from memfix.cuda_kernels.emulated import KernelFault, cannot_emulate, emulated

needs_compiler = pytest.mark.skipif(cannot_emulate() is not None, reason=str(cannot_emulate()))

SHIFTED = """
extern "C" __global__ void shifted(const float* x, float* out, int n, int by) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i + by];
}
"""
REVERSED = """
extern "C" __global__ void reversed(const float* x, float* out) {
    __shared__ float all[64];
    all[threadIdx.x] = x[threadIdx.x];
    BARRIER
    out[threadIdx.x] = all[63 - threadIdx.x];
}
"""


def kernel(folder: Path, source: str, name: str) -> CudaKernel:
    path = folder / f"{name}.cu"
    path.write_text(source, encoding="utf-8")
    return CudaKernel(path, name)


@needs_compiler
def test_a_kernel_gives_its_answer_and_its_traffic(tmp_path: Path) -> None:
    x, out = torch.arange(101.0), torch.full((100,), float("nan"))
    with emulated() as traffic:
        kernel(tmp_path, SHIFTED, "shifted").launch((2,), (64,), x, out, 100, 1)
    assert torch.equal(out, x[1:])
    assert (traffic.loads, traffic.stores) == (100, 100)
    assert traffic.requests == 4, "of warps of 32 threads, the last with four"


@needs_compiler
def test_a_stride_makes_a_request_of_many_sectors(tmp_path: Path) -> None:
    strided = SHIFTED.replace("x[i + by]", "x[i * by]")
    # room for an address that a sector begins at
    x = torch.zeros(32 * 8 + 8)[: 31 * 8 + 1]
    with emulated() as traffic:
        kernel(tmp_path, strided, "shifted").launch((1,), (32,), x, torch.empty(32), 32, 8)
    assert (traffic.requests, traffic.sectors) == (1, 32)


@needs_compiler
@pytest.mark.parametrize(
    ("by", "message"),
    [
        (2, r"shifted: thread \(35, 0, 0\) of block \(1, 0, 0\) reads x\[101\], which has 101 elements"),
        (-1, r"thread \(0, 0, 0\) of block \(0, 0, 0\) reads x\[-1\]"),
    ],
)
def test_a_read_out_of_bounds_is_named(tmp_path: Path, by: int, message: str) -> None:
    with emulated(), pytest.raises(KernelFault, match=message):
        kernel(tmp_path, SHIFTED, "shifted").launch((2,), (64,), torch.zeros(101), torch.zeros(100), 100, by)


@needs_compiler
def test_a_write_out_of_bounds_is_named(tmp_path: Path) -> None:
    with emulated(), pytest.raises(KernelFault, match=r"writes out\[99\], which has 99 elements"):
        kernel(tmp_path, SHIFTED, "shifted").launch((2,), (64,), torch.zeros(100), torch.zeros(99), 100, 0)


@needs_compiler
def test_threads_of_a_block_meet_at_a_barrier(tmp_path: Path) -> None:
    x, out = torch.arange(64.0), torch.zeros(64)
    with emulated():
        kernel(tmp_path, REVERSED.replace("BARRIER", "__syncthreads();"), "reversed").launch((1,), (64,), x, out)
    assert torch.equal(out, x.flip(0))


@needs_compiler
def test_without_the_barrier_the_answer_is_wrong(tmp_path: Path) -> None:
    x, out = torch.arange(1.0, 65.0), torch.zeros(64)
    with emulated():
        kernel(tmp_path, REVERSED.replace("BARRIER", ""), "reversed").launch((1,), (64,), x, out)
    assert not torch.equal(out, x.flip(0))


@needs_compiler
def test_a_barrier_that_some_threads_do_not_reach_is_a_fault(tmp_path: Path) -> None:
    source = REVERSED.replace("BARRIER", "if (threadIdx.x > 40) return; __syncthreads();")
    with emulated(), pytest.raises(KernelFault, match="__syncthreads is reached by 41 of 64 threads of a block"):
        kernel(tmp_path, source, "reversed").launch((1,), (64,), torch.zeros(64), torch.zeros(64))


@needs_compiler
def test_a_source_that_does_not_compile_is_shown(tmp_path: Path) -> None:
    with emulated(), pytest.raises(KernelFault, match=r"shifted.cu:4:.*was not declared|undeclared"):
        kernel(tmp_path, SHIFTED.replace("i < n", "i < m"), "shifted").launch(
            (1,), (1,), torch.zeros(1), torch.zeros(1), 1, 0
        )


def test_without_emulation_the_cpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the kernel shifted runs on a GPU, and the tensors are on cpu"):
        kernel(tmp_path, SHIFTED, "shifted").launch((1,), (1,), torch.zeros(1), torch.zeros(1), 1, 0)


def test_without_a_compiler_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulation.shutil, "which", lambda name: None)
    assert cannot_emulate() == "there is no C++ compiler; install g++, or set CXX"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(1), torch.zeros(1), 1), "shifted takes 4 arguments, got 3"),
        ((torch.zeros(1), 5, 1, 0), "shifted: out must be a tensor of float, got int"),
        ((torch.zeros(1), torch.zeros(1), 1, torch.zeros(1)), "shifted: by must be int, got Tensor"),
        ((torch.zeros(1).double(), torch.zeros(1), 1, 0), "shifted: x must be torch.float32, got torch.float64"),
    ],
)
def test_wrong_arguments_are_refused_before_a_launch(tmp_path: Path, arguments: tuple, message: str) -> None:
    with emulated(), pytest.raises(TypeError, match=message):
        kernel(tmp_path, SHIFTED, "shifted").launch((1,), (1,), *arguments)


def test_tensors_of_two_devices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="shifted needs tensors of one device, got cpu, meta"):
        kernel(tmp_path, SHIFTED, "shifted").launch((1,), (1,), torch.zeros(1), torch.zeros(1, device="meta"), 1, 0)


def test_declarations_are_read_as_they_are_written() -> None:
    source = 'extern "C" __global__ void f(const float* __restrict__ x, long long *at,\n  int n) {}'
    assert parameters_of(source, "f") == (
        Parameter("const float", "x", True),
        Parameter("long long", "at", True),
        Parameter("int", "n", False),
    )
    with pytest.raises(ValueError, match="no kernel 'g': declare it extern"):
        parameters_of(source, "g")
    with pytest.raises(ValueError, match="f: a parameter is one of float, double, int, long long or a pointer to one"):
        parameters_of('extern "C" __global__ void f(half* x) {}', "f")
