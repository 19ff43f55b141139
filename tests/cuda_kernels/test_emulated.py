"""CUDA kernels emulated on the host: right answers, counted loads, and what a GPU would not forgive."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from memfix.cuda_kernels import CudaKernel, Parameter, parameters_of
from memfix.cuda_kernels import emulated as emulation
from memfix.cuda_kernels.compiled import CompilerRefused
from memfix.cuda_kernels.emulated import KernelFault, cannot_emulate, emulated

needs_compiler = pytest.mark.skipif(cannot_emulate() is not None, reason=str(cannot_emulate()))

# one file for all, since it is compiled once
SOURCE = """
extern "C" __global__ void shifted(const float* x, float* out, int n, int by) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i + by];
}
extern "C" __global__ void strided(const float* x, float* out, int by) {
    out[threadIdx.x] = x[threadIdx.x * by];
}
extern "C" __global__ void reversed(const float* x, float* out) {
    __shared__ float all[64];
    all[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = all[63 - threadIdx.x];
}
extern "C" __global__ void reversed_too_early(const float* x, float* out) {
    __shared__ float all[64];
    all[threadIdx.x] = x[threadIdx.x];
    out[threadIdx.x] = all[63 - threadIdx.x];
}
extern "C" __global__ void ends_before_the_barrier(const float* x, float* out) {
    if (threadIdx.x > 40) return;
    __syncthreads();
    out[threadIdx.x] = x[threadIdx.x];
}
extern "C" __global__ void sums_of_warps(const float* x, float* out, int steps) {
    float sum = x[threadIdx.x];
    const int lane = threadIdx.x % 32;
    for (int step = 1; step < (threadIdx.x < 32 ? 32 : steps); step *= 2) sum += shuffle(sum, lane ^ step);
    __syncthreads();
    out[threadIdx.x] = sum;
}
extern "C" __global__ void parts_a_warp(const float* x, float* out) {
    if (threadIdx.x % 4 == 0) out[threadIdx.x] = shuffle(x[threadIdx.x], 0);
}
extern "C" __global__ void copies_four(const float* x, float* out) {
    async_copy16(16 * threadIdx.x, x, 4 * threadIdx.x);
    store16(out, 4 * threadIdx.x, load_shared16(16 * threadIdx.x));
}
// a[64, 16] @ b[32, :16]^T, or @ b[:16, 32]
extern "C" __global__ void multiplies_by_wgmma(
    const float* a, const bfloat16* b, float* out, int is_transposed, int awaits) {
    const int row = threadIdx.x / 4, part = threadIdx.x % 4, first = threadIdx.x / 32 * 16 + row % 8;
    async_copy16(row * 64 + (part ^ (row >> 1 & 3)) * 16, b, row * 32 + part * 8);
    unsigned operand[1][4];
    for (int i = 0; i < 4; ++i) {
        const int at = (first + i % 2 * 8) * 16 + i / 2 * 8 + 2 * part;
        operand[0][i] = pack(a[at], a[at + 1]);
    }
    float sums[4][4] = {};
    fence_async_proxy();
    __syncthreads();
    begin_wgmma(sums, operand);
    if (is_transposed)
        wgmma<true, 1>(sums, operand[0], WgmmaOperand<64>(0));
    else
        wgmma<false, 1>(sums, operand[0], WgmmaOperand<64>(0));
    commit_wgmma();
    if (awaits) await_wgmma<0>(sums);
    for (int n = 0; n < 4; ++n)
        for (int e = 0; e < 4; ++e) out[(first + e / 2 * 8) * 32 + 8 * n + 2 * part + e % 2] = sums[n][e];
}
extern "C" __global__ void fills(float* out, const float* x) { out[threadIdx.x] = is_not_null(x) ? float(x[0]) : 7.0f; }
"""


Named = Callable[[str], CudaKernel]


@pytest.fixture
def kernel(tmp_path: Path) -> Named:
    path = tmp_path / "kernels.cu"
    path.write_text(SOURCE, encoding="utf-8")
    return lambda name: CudaKernel(path, name)


@needs_compiler
def test_a_kernel_gives_its_answer_and_its_traffic(kernel: Named) -> None:
    x, out = torch.arange(101.0), torch.full((100,), float("nan"))
    with emulated() as traffic:
        kernel("shifted").launch((2,), (64,), x, out, 100, 1)
    assert torch.equal(out, x[1:])
    assert (traffic.loads, traffic.stores) == (100, 100)
    assert traffic.requests == 4, "of warps of 32 threads, the last with four"


@needs_compiler
def test_a_stride_makes_a_request_of_many_sectors(kernel: Named) -> None:
    with emulated() as traffic:
        kernel("strided").launch((1,), (32,), torch.zeros(32 * 8), torch.empty(32), 8)
    assert (traffic.requests, traffic.sectors) == (1, 32)


@needs_compiler
@pytest.mark.parametrize(
    ("by", "message"),
    [
        (2, r"shifted: thread \(35, 0, 0\) of block \(1, 0, 0\) reads x\[101\], which has 101 elements"),
        (-1, r"thread \(0, 0, 0\) of block \(0, 0, 0\) reads x\[-1\]"),
    ],
)
def test_a_read_out_of_bounds_is_named(kernel: Named, by: int, message: str) -> None:
    with emulated(), pytest.raises(KernelFault, match=message):
        kernel("shifted").launch((2,), (64,), torch.zeros(101), torch.zeros(100), 100, by)


@needs_compiler
def test_a_write_out_of_bounds_is_named(kernel: Named) -> None:
    with emulated(), pytest.raises(KernelFault, match=r"writes out\[99\], which has 99 elements"):
        kernel("shifted").launch((2,), (64,), torch.zeros(100), torch.zeros(99), 100, 0)


@needs_compiler
def test_threads_of_a_block_meet_at_a_barrier_and_without_it_the_answer_is_wrong(kernel: Named) -> None:
    x = torch.arange(1.0, 65.0)
    for name, is_right in (("reversed", True), ("reversed_too_early", False)):
        out = torch.zeros(64)
        with emulated():
            kernel(name).launch((1,), (64,), x, out)
        assert torch.equal(out, x.flip(0)) is is_right


@needs_compiler
def test_a_barrier_that_some_threads_do_not_reach_is_a_fault(kernel: Named) -> None:
    with emulated(), pytest.raises(KernelFault, match="__syncthreads is reached by 41 of 64 threads of a block"):
        kernel("ends_before_the_barrier").launch((1,), (64,), torch.zeros(64), torch.zeros(64))


@needs_compiler
def test_a_source_that_does_not_compile_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "broken.cu"
    path.write_text('extern "C" __global__ void broken(float* x) {\n    x[0] = y;\n}\n', encoding="utf-8")
    with emulated(), pytest.raises(CompilerRefused, match=r"does not compile for the host:[\s\S]*broken\.cu:2"):
        CudaKernel(path, "broken").launch((1,), (1,), torch.zeros(1))


def test_without_emulation_the_cpu_is_refused(kernel: Named) -> None:
    with pytest.raises(RuntimeError, match="the kernel shifted runs on a GPU, and the tensors are on cpu"):
        kernel("shifted").launch((1,), (1,), torch.zeros(1), torch.zeros(1), 1, 0)


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
def test_wrong_arguments_are_refused_before_a_launch(kernel: Named, arguments: tuple, message: str) -> None:
    with emulated(), pytest.raises(TypeError, match=message):
        kernel("shifted").launch((1,), (1,), *arguments)


@needs_compiler
def test_warps_of_a_block_may_go_different_ways(kernel: Named) -> None:
    x, out = torch.ones(64), torch.zeros(64)
    with emulated():
        kernel("sums_of_warps").launch((1,), (64,), x, out, 4)
    assert out.tolist() == [32.0] * 32 + [4.0] * 32


@needs_compiler
def test_a_warp_whose_threads_part_is_a_fault(kernel: Named) -> None:
    with emulated(), pytest.raises(KernelFault, match="8 of 32 threads of a warp wait for the others"):
        kernel("parts_a_warp").launch((1,), (32,), torch.zeros(32), torch.zeros(32))


@needs_compiler
def test_sixteen_bytes_are_loaded_and_stored_at_multiples_of_them(kernel: Named) -> None:
    x, out = torch.arange(12.0), torch.zeros(12)
    with emulated():
        kernel("copies_four").launch((1,), (2,), x, out, shared_bytes=32)
        assert out[:8].equal(x[:8])
        with pytest.raises(KernelFault, match=r"reads 16 bytes of x from \[0\] on, which does not begin at a multiple"):
            kernel("copies_four").launch((1,), (1,), x[1:], out, shared_bytes=16)
        with pytest.raises(KernelFault, match=r"writes 16 bytes of out from \[0\] on"):
            kernel("copies_four").launch((1,), (1,), x, out[2:], shared_bytes=16)


@needs_compiler
def test_shared_memory_that_the_launch_has_not_is_a_fault(kernel: Named) -> None:
    x, out = torch.arange(8.0), torch.zeros(8)
    with emulated(), pytest.raises(KernelFault, match="uses byte 32 of shared memory, of which the launch has 16"):
        kernel("copies_four").launch((1,), (2,), x, out, shared_bytes=16)
    with (
        emulated(),
        pytest.raises(KernelFault, match="asks for 300000 bytes of shared memory, and a block has"),
    ):
        kernel("copies_four").launch((1,), (2,), x, out, shared_bytes=300_000)


@needs_compiler
@pytest.mark.parametrize("transposed", [False, True])
def test_four_warps_multiply_together_and_their_product_is_there_once_awaited(kernel: Named, transposed: bool) -> None:
    a, b, out = torch.randn(64, 16).bfloat16(), torch.randn(32, 32).bfloat16(), torch.zeros(64, 32)
    with emulated():
        kernel("multiplies_by_wgmma").launch((1,), (128,), a.float(), b, out, int(transposed), 1, shared_bytes=2048)
        torch.testing.assert_close(out, a.float() @ (b[:16] if transposed else b[:, :16].T).float())
        kernel("multiplies_by_wgmma").launch((1,), (128,), a.float(), b, out, int(transposed), 0, shared_bytes=2048)
        assert not out.any()


@needs_compiler
def test_warps_that_are_not_four_cannot_multiply_together(kernel: Named) -> None:
    a, b, out = torch.zeros(64, 16), torch.zeros(32, 32).bfloat16(), torch.zeros(64, 32)
    with emulated(), pytest.raises(KernelFault, match="multiplies with other warps, of which there are not four"):
        kernel("multiplies_by_wgmma").launch((1,), (64,), a, b, out, 0, 1, shared_bytes=2048)


@needs_compiler
def test_none_is_a_pointer_to_nothing(kernel: Named) -> None:
    out = torch.zeros(2)
    with emulated():
        kernel("fills").launch((1,), (2,), out, None)
        assert out.tolist() == [7.0, 7.0]
        kernel("fills").launch((1,), (2,), out, torch.ones(1))
    assert out.tolist() == [1.0, 1.0]


def test_tensors_of_two_devices_are_refused(kernel: Named) -> None:
    with pytest.raises(ValueError, match="shifted needs tensors of one device, got cpu, meta"):
        kernel("shifted").launch((1,), (1,), torch.zeros(1), torch.zeros(1, device="meta"), 1, 0)


def test_declarations_are_read_as_they_are_written() -> None:
    source = 'extern "C" __global__ void f(const float* __restrict__ x, long long *at,\n  int n) {}'
    assert parameters_of(source, "f") == (
        Parameter("const float", "x", True),
        Parameter("long long", "at", True),
        Parameter("int", "n", False),
    )
    typed = '#define NUMBER float\nextern "C" __global__ void f(const NUMBER* x) {}'
    assert parameters_of(typed, "f") == (Parameter("const float", "x", True),)
    with pytest.raises(ValueError, match="no kernel 'g': declare it extern"):
        parameters_of(source, "g")
    with pytest.raises(ValueError, match=r"f: a parameter is one of float, .*, bfloat16 or a pointer to one"):
        parameters_of('extern "C" __global__ void f(half* x) {}', "f")
