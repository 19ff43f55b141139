"""CUDA kernels compiled for a GPU where NVRTC or nvcc is there; and launched where a GPU is."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from memfix.checks import compiling
from memfix.checks.compiling import check_compiles
from memfix.cuda_kernels import CudaKernel, compiled
from memfix.cuda_kernels.compiled import CompilerRefused, cubin_of, no_compiler, static_shared_bytes
from memfix.meters import get_meter
from memfix.ops.matmul.tiled import tiled_matmul
from memfix.ops.matmul.triton import triton_matmul
from memfix.registry import all_contracts

needs_compiler = pytest.mark.skipif(no_compiler() is not None, reason=str(no_compiler()))
DOUBLED = 'extern "C" __global__ void doubled(float* x, int n) { if (threadIdx.x < n) x[threadIdx.x] *= 2; }'


@pytest.fixture
def doubled(tmp_path: Path) -> CudaKernel:
    path = tmp_path / "doubled.cu"
    path.write_text(DOUBLED, encoding="utf-8")
    return CudaKernel(path, "doubled")


def rewritten(kernel: CudaKernel, text: str) -> CudaKernel:
    kernel.path.write_text(text, encoding="utf-8")
    return CudaKernel(kernel.path, kernel.name)


@needs_compiler
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_shared_memory_is_what_the_kernel_declares(doubled: CudaKernel, capability: tuple[int, int]) -> None:
    shared = DOUBLED.replace("{", "{ __shared__ float all[100]; all[n] = x[0]; __syncthreads(); x[1] = all[n - 1];", 1)
    assert static_shared_bytes(cubin_of(doubled, capability), "doubled", capability) == 0
    cubin = cubin_of(rewritten(doubled, shared), capability)
    assert static_shared_bytes(cubin, "doubled", capability) == 400


@needs_compiler
def test_what_the_compiler_refuses_is_said_in_its_words(doubled: CudaKernel) -> None:
    with pytest.raises(CompilerRefused, match=r'doubled\.cu\(1\): error: identifier "m" is undefined'):
        cubin_of(rewritten(doubled, DOUBLED.replace("< n", "< m")), (9, 0))


@needs_compiler
def test_a_header_beside_the_file_is_compiled_once_with_it(doubled: CudaKernel) -> None:
    header = doubled.path.with_name("twice.h")
    header.write_text("__device__ float twice(float x) { return 2 * x; }\n", encoding="utf-8")
    include, body = (
        '#include "twice.h"  // what it needs\n',
        DOUBLED.replace("x[threadIdx.x] *= 2", "x[0] = twice(x[0])"),
    )
    kernel = rewritten(doubled, 2 * include + body)
    assert cubin_of(kernel, (9, 0))
    assert kernel.first_line == 3

    with pytest.raises(CompilerRefused, match=r'doubled\.cu\(2\): error: identifier "m" is undefined'):
        cubin_of(rewritten(doubled, include + body.replace("< n", "< m")), (9, 0))
    header.write_text("\n__device__ float twice(float x) { return 2 * y; }\n", encoding="utf-8")
    with pytest.raises(CompilerRefused, match=r'twice\.h\(2\): error: identifier "y" is undefined'):
        cubin_of(rewritten(doubled, include + body), (9, 0))


@needs_compiler
def test_a_header_that_is_not_there_is_said_by_the_compiler(doubled: CudaKernel) -> None:
    with pytest.raises(CompilerRefused, match=r'doubled\.cu\(1\)[\s\S]*"gone\.h"'):
        cubin_of(rewritten(doubled, '#include "gone.h"\n' + DOUBLED), (9, 0))


@needs_compiler
def test_a_later_process_takes_what_was_compiled(
    doubled: CudaKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiles(*_: object) -> bytes:
        raise AssertionError("compiles")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled._cubin_of.cache_clear()
    cubin = cubin_of(doubled, (9, 0))
    for compiler in ("_by_nvrtc", "_by_nvcc"):
        monkeypatch.setattr(compiled, compiler, compiles)
    compiled._cubin_of.cache_clear()  # as in a new process
    assert cubin_of(doubled, (9, 0)) == cubin
    with pytest.raises(AssertionError, match="compiles"):
        cubin_of(doubled, (8, 0))
    monkeypatch.setattr(compiled, "_OPTIONS", ("--std=c++14",))
    compiled._cubin_of.cache_clear()
    with pytest.raises(AssertionError, match="compiles"):
        cubin_of(doubled, (9, 0))


@needs_compiler
def test_a_home_that_cannot_be_written_to_keeps_nothing(
    doubled: CudaKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    compiled._cubin_of.cache_clear()
    assert cubin_of(doubled, (9, 0))


@needs_compiler
def test_the_gate_fails_a_kernel_that_does_not_compile(doubled: CudaKernel) -> None:
    doubled.path.write_text(DOUBLED.replace("*= 2", "*= of_the_host(2)"), encoding="utf-8")

    def form(x_RC: torch.Tensor) -> torch.Tensor:
        out_R = x_RC.new_empty(x_RC.shape[0])
        doubled.launch((1,), (1,), out_R, 1)
        return out_R

    contract = all_contracts()["row_max"].with_form("broken", form, like="cuda")
    found = check_compiles(contract, "broken", get_meter("simulated"))
    assert found.status == "fail"
    assert found.message.startswith("doubled does not compile for H200: ")
    assert 'identifier "of_the_host" is undefined' in found.message


@needs_compiler
def test_the_gate_fails_a_launch_with_more_shared_memory_than_a_block_has(doubled: CudaKernel) -> None:
    def form(x_RC: torch.Tensor) -> torch.Tensor:
        out_R = x_RC.new_empty(x_RC.shape[0])
        doubled.launch((1,), (1,), out_R, 1, shared_bytes=232_448 + 1)
        return out_R

    contract = all_contracts()["row_max"].with_form("greedy", form, like="cuda")
    found = check_compiles(contract, "greedy", get_meter("simulated"))
    assert found.message == "doubled needs 232,449 bytes of shared memory, and a block on H200 has at most 232,448"
    assert found.source.endswith("doubled.cu:1")


@needs_compiler
def test_kernels_of_one_form_may_be_of_two_languages(monkeypatch: pytest.MonkeyPatch) -> None:
    def form(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return tiled_matmul(left, right) + triton_matmul(left, right)

    contract = all_contracts()["matmul"].with_form("both", form, like="triton")
    found = check_compiles(contract, "both", get_meter("simulated"))
    both = int(found.message.partition(" kernels compile for H200")[0])
    monkeypatch.setattr(compiling.compiled, "no_compiler", lambda: "no nvcc")
    found = check_compiles(contract, "both", get_meter("simulated"))
    assert found.message.startswith(f"{both - 1} kernels compile for H200")
    assert found.message.endswith("; others not compiled: no nvcc")


def test_without_a_compiler_the_gate_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_nvrtc", lambda: None)
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    found = check_compiles(all_contracts()["matmul"], "tiled", get_meter("simulated"))
    assert found.status == "note"
    assert found.message == "kernels not compiled for H200: " + str(no_compiler())


def test_the_simulated_meter_refuses_a_call_that_the_kernel_would(doubled: CudaKernel) -> None:
    def build(device: str) -> Callable[[], None]:
        x = torch.zeros(4, device=device, dtype=torch.float64)
        return lambda: doubled.launch((1,), (4,), x, 4)

    with pytest.raises(TypeError, match=r"doubled: x must be torch\.float32, got torch\.float64"):
        get_meter("simulated").measure(build)


@pytest.mark.gpu(use="beside")
def test_a_launch_runs_on_the_current_stream(doubled: CudaKernel) -> None:
    x = torch.ones(32, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.fill_(3)
        doubled.launch((1,), (32,), x, 32)
    stream.synchronize()
    assert x.tolist() == [6.0] * 32, "a launch on another stream would not have waited for the 3"


@pytest.mark.gpu(use="beside")
def test_a_launch_from_another_thread_finds_its_context(doubled: CudaKernel) -> None:
    x = torch.ones(8, device="cuda")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(doubled.launch, (1,), (8,), x, 8).result()
    assert x.tolist() == [2.0] * 8


@pytest.mark.gpu(use="beside")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_launch_runs_where_its_tensors_are(doubled: CudaKernel) -> None:
    x = torch.ones(8, device="cuda:1")
    doubled.launch((1,), (8,), x, 8)
    assert x.tolist() == [2.0] * 8
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu(use="beside")
def test_a_kernel_is_compiled_once_for_a_device(doubled: CudaKernel) -> None:
    first = compiled.function_on(doubled, 0)
    assert compiled.function_on(replace(doubled), 0) is first
