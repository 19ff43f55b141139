"""The matrix products and row maxima: how often they load, at which sizes they hold, and how they are built."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable

import pytest
import torch

from memfix.cuda_kernels.emulated import Traffic, cannot_emulate, emulated
from memfix.ops.matmul import matmul, row_max
from memfix.ops.matmul.launching import SOURCE, TILE
from memfix.ops.matmul.naive import naive_row_max
from memfix.ops.matmul.one_thread import one_thread_matmul
from memfix.ops.matmul.row_maxima import THREADS
from memfix.ops.matmul.tiled import tiled_matmul

needs_compiler = pytest.mark.skipif(cannot_emulate() is not None, reason=str(cannot_emulate()))
Form = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def traffic_of(form: Form, M: int, N: int, K: int) -> Traffic:
    left, right = torch.randn(M, K), torch.randn(K, N)
    with emulated() as traffic:
        out = form(left, right)
    torch.testing.assert_close(out, left @ right)
    return traffic


@needs_compiler
def test_tiles_load_16_times_less_from_global_memory() -> None:
    M, N, K = 48, 32, 64
    one_thread, tiled = traffic_of(one_thread_matmul, M, N, K), traffic_of(tiled_matmul, M, N, K)
    assert one_thread.loads == 2 * M * N * K
    assert tiled.loads == 2 * M * N * K // 16
    assert one_thread.stores == tiled.stores == M * N


@needs_compiler
@pytest.mark.parametrize("transposed", ["", "left", "right", "left right"])
def test_loads_of_tiles_are_coalesced_also_where_an_operand_is_transposed(transposed: str) -> None:
    left, right = torch.randn(32, 48), torch.randn(48, 32)
    left = left.T.contiguous().T if "left" in transposed else left
    right = right.T.contiguous().T if "right" in transposed else right
    with emulated() as traffic:
        tiled_matmul(left, right)
    # 32 threads load 128 bytes, of which no sector of 32 is loaded twice
    assert traffic.sectors == 4 * traffic.requests


@needs_compiler
@pytest.mark.parametrize("form", [one_thread_matmul, tiled_matmul])
@pytest.mark.parametrize("size", [(1, 1, 1), (17, 15, 31), (16, 33, 1), (1, 16, 17), (5, 4, 0)])
def test_sizes_that_are_no_multiple_of_a_tile_are_guarded(form: Form, size: tuple[int, int, int]) -> None:
    traffic_of(form, *size)


@needs_compiler
def test_nothing_to_compute_launches_nothing() -> None:
    with emulated() as traffic:
        assert tiled_matmul(torch.zeros(0, 4), torch.zeros(4, 3)).shape == (0, 3)
        assert row_max(torch.zeros(0, 4)).shape == (0,)
    assert traffic == Traffic()


@needs_compiler
def test_a_maximum_drops_nan_and_begins_at_minus_infinity() -> None:
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([[1.0, nan, 3.0], [nan, nan, nan], [-inf, nan, -5.0], [nan, inf, 0.0]])
    with emulated():
        assert row_max(x).tolist() == [3.0, -inf, -5.0, inf]
        assert row_max(torch.zeros(2, 0)).tolist() == [-inf, -inf]
    assert torch.equal(naive_row_max(x), torch.tensor([3.0, -inf, -5.0, inf]))
    assert x.amax(1).isnan().all()


@needs_compiler
@pytest.mark.parametrize("columns", [1, THREADS - 1, THREADS, THREADS + 1, 3 * THREADS])
def test_every_column_takes_part_in_a_maximum(columns: int) -> None:
    x = torch.full((columns, columns), float("nan")).fill_diagonal_(7.0)[:3]
    with emulated():
        assert row_max(x).tolist() == [7.0] * len(x)


def test_the_cpu_is_refused_where_nothing_is_emulated() -> None:
    with pytest.raises(RuntimeError, match=r"matmul_tiled runs on a GPU, .* on cpu; use the op's torch form"):
        matmul(torch.zeros(2, 2), torch.zeros(2, 2))


def test_more_rows_than_a_grid_has_blocks_are_refused() -> None:
    rows = TILE * 65_535 + 1
    with pytest.raises(ValueError, match="the product must have at most 1,048,560 rows, got 1,048,561"):
        matmul(torch.zeros(rows, 1), torch.zeros(1, 1), form="tiled")


def test_constants_are_those_of_the_source() -> None:
    source = SOURCE.read_text(encoding="utf-8")
    constants = {name: int(value) for name, value in re.findall(r"#define (\w+) (\d+)", source)}
    assert constants == {"TILE": TILE, "ROW_THREADS": THREADS}


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_builds_the_kernels(tmp_path) -> None:
    for name in ("Makefile", "matmul.cu"):
        shutil.copy(SOURCE.with_name(name), tmp_path)
    is_real = shutil.which("nvcc") is not None
    dry = [] if is_real else ["-n"]
    for target in (["clean"], []):
        subprocess.run(["make", *dry, *target], cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "matmul.cubin").exists() is is_real


# ---------------------------------------------------------------- on a GPU
@pytest.mark.gpu(use="beside")
@pytest.mark.parametrize("form", ["one_thread", "tiled", "triton"])
@pytest.mark.parametrize("size", [(1, 1, 1), (17, 15, 31), (129, 257, 65), (512, 512, 512)])
def test_products_on_a_gpu_have_the_digits_of_float32(form: str, size: tuple[int, int, int]) -> None:
    M, N, K = size
    left = torch.randn(M, K, device="cuda", requires_grad=True)
    right = torch.randn(N, K, device="cuda").T.requires_grad_()
    out = matmul(left, right, form=form)
    upstream = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (left, right), upstream)
    wide = left.detach().double().requires_grad_(), right.detach().double().requires_grad_()
    truth = wide[0] @ wide[1]
    for got, true in zip((out, *gradients), (truth, *torch.autograd.grad(truth, wide, upstream.double())), strict=True):
        assert (got.double() - true).norm() <= 1e-6 * true.norm()


@pytest.mark.gpu(use="beside")
def test_a_maximum_on_a_gpu_drops_nan() -> None:
    x = torch.randn(100, 1000, device="cuda")
    x[x > 1.5] = float("nan")
    x[7] = float("nan")
    assert torch.equal(row_max(x), naive_row_max(x))
    assert torch.equal(row_max(x.T), naive_row_max(x.T))


@pytest.mark.gpu(use="beside")
def test_a_product_on_another_stream_waits_for_what_was_put_there_before() -> None:
    left, right = torch.ones(64, 64, device="cuda"), torch.ones(64, 64, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        left.fill_(2)
        out = matmul(left, right, form="tiled")
    stream.synchronize()
    assert torch.equal(out, torch.full_like(out, 128.0))
