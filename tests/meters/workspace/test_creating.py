"""What is taken to make, move and draw tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rules_on_meta import hidden, meta
from torch._subclasses.fake_tensor import FakeTensorMode

from memfix.meters.simulated.workspace import NoRule

aten = torch.ops.aten
bf16, f64 = torch.bfloat16, torch.float64


def gapped() -> torch.Tensor:
    """Thirty rows of twenty on the GPU, a gap after every element."""
    return torch.empty_strided((30, 20), (40, 2), device="cuda")


# ---------------------------------------------------------------- between the host and the GPU
@pytest.fixture
def fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


@pytest.mark.usefixtures("fake")
def test_a_contiguous_transfer_needs_no_staging() -> None:
    on_gpu, on_host = torch.empty(30, 20, device="cuda"), torch.empty(30, 20)
    for non_blocking in (False, True):
        assert hidden(aten.copy_.default, on_gpu, on_host, non_blocking) == []
        assert hidden(aten.copy_.default, on_host, on_gpu, non_blocking) == []
        assert hidden(aten.copy_.default, on_gpu.t(), on_host.t(), non_blocking) == []


@pytest.mark.usefixtures("fake")
def test_a_slice_is_gathered_on_the_gpu_before_it_leaves() -> None:
    slice_ = gapped()
    on_host = torch.empty(30, 20)
    assert hidden(aten.copy_.default, on_host, slice_, False) == [2400]
    assert hidden(aten._to_copy.default, slice_, device="cpu", outputs=on_host) == [2400]
    assert hidden(aten.copy_.default, slice_, on_host, False) == [2400]


@pytest.mark.usefixtures("fake")
def test_a_dtype_is_changed_on_the_host_unless_the_copy_does_not_block() -> None:
    on_gpu, on_host = torch.empty(30, 20, device="cuda"), torch.empty(30, 20, dtype=bf16)
    assert hidden(aten.copy_.default, on_host, on_gpu, False) == []
    assert hidden(aten.copy_.default, on_host, on_gpu, True) == [1200]
    assert hidden(aten.copy_.default, on_gpu, on_host, False) == []
    assert hidden(aten.copy_.default, on_gpu, on_host, True) == [1200]
    assert hidden(aten.copy_.default, on_host, torch.empty(20, 30, device="cuda").t(), True) == [1200, 1200]


@pytest.mark.usefixtures("fake")
def test_on_the_gpu_nothing_is_staged() -> None:
    assert hidden(aten.copy_.default, gapped(), torch.empty(20, device="cuda", dtype=f64)) == []


# ---------------------------------------------------------------- choosing and rolling
def test_both_sides_of_where_are_brought_to_one_dtype() -> None:
    mask = meta(30, 20, dtype=torch.bool)
    assert hidden(aten.where.self, mask, meta(30, 20), meta(30, 20)) == []
    assert hidden(aten.where.self, mask, meta(30, 20), meta(20, dtype=bf16)) == [80]
    assert hidden(aten.where.self, mask.to(torch.uint8), meta(30, 20), meta(30, 20)) == [600]


@pytest.mark.usefixtures("fake")
def test_a_number_of_the_host_is_sent_to_the_gpu() -> None:
    x = torch.empty(30, 20, device="cuda")
    assert hidden(aten.where.self, x > 0, x, torch.empty(())) == [4]


def test_a_roll_of_several_axes_keeps_what_each_leaves() -> None:
    assert hidden(aten.roll.default, meta(30, 20), [1], [0]) == []
    assert hidden(aten.roll.default, meta(30, 20).t(), [1], [0]) == [2400]
    assert hidden(aten.roll.default, meta(30, 20), [3]) == []
    assert hidden(aten.roll.default, meta(4, 5, 6), [1, 1, 1], [0, 1, 2]) == [480, 480]


def test_the_absolute_value_of_complex_numbers_is_first_complex() -> None:
    assert hidden(aten.abs.default, meta(100)) == []
    assert hidden(aten.abs.out, meta(100, dtype=torch.complex64), out=meta(100)) == [800]


def test_positions_are_written_down_where_windows_overlap() -> None:
    assert hidden(aten.unfold_backward.default, meta(3, 20, 5), [3, 100], 1, 5, 5) == []
    assert hidden(aten.unfold_backward.default, meta(3, 32, 5), [3, 100], 1, 5, 3) == [8 * 98]


# ---------------------------------------------------------------- drawing
def test_probabilities_in_half_precision_are_cast() -> None:
    assert hidden(aten.bernoulli.default, meta(100)) == []
    assert hidden(aten.bernoulli.default, meta(100, dtype=bf16)) == [400]
    assert hidden(aten.bernoulli_.float, meta(100, dtype=bf16), 0.5) == []
    assert hidden(aten.bernoulli_.Tensor, meta(30, 20), meta(20, dtype=bf16)) == [80]
    assert hidden(aten.bernoulli_.Tensor, meta(30, 20, dtype=f64), meta(20)) == [160]


def test_a_normal_draw_around_means_makes_one_tensor_too_many() -> None:
    assert hidden(aten.normal.Tensor_float, meta(100), 1.0) == [400]


def test_standard_deviations_are_checked() -> None:
    assert hidden(aten.normal.float_Tensor, 0.0, meta(100)) == [4, 1]
    assert hidden(aten.normal.Tensor_Tensor, meta(1 << 20), meta(1 << 20)) == [4, 512, 4]


def test_a_dirichlet_draw_divides_by_its_sums() -> None:
    assert hidden(aten._sample_dirichlet.default, meta(30, 20)) == [120]


# ---------------------------------------------------------------- transforms
@pytest.mark.parametrize(
    ("operator", "args", "library"),
    [
        (aten._fft_c2c.default, (meta(8, dtype=torch.complex64), [0], 0, True), "cuFFT"),
        (aten.linalg_qr.default, (meta(8, 8),), "cuSOLVER"),
    ],
    ids=str,
)
def test_what_a_library_asks_for_at_run_time_is_not_known(operator: Any, args: tuple[Any, ...], library: str) -> None:
    with pytest.raises(NoRule, match=rf"^the workspace that {library} asks for in {operator}$"):
        hidden(operator, *args)


# ---------------------------------------------------------------- numbers of a higher kind than the tensor
INTEGERS = meta(1000, dtype=torch.int64)


@pytest.mark.parametrize(
    ("operator", "args", "taken"),
    [
        (aten.pow.Tensor_Scalar, (INTEGERS, 0.5), [4000]),
        (aten.pow.Tensor_Scalar, (INTEGERS, 2), []),
        (aten.pow.Tensor_Scalar, (meta(1000), 0.5), []),
        (aten.pow.Tensor_Scalar, (meta(1000), 2j), [8000]),
        (aten.clamp.default, (INTEGERS, 0.5, 10.5), [4000]),
        (aten.clamp.default, (INTEGERS, None, 10.5), [4000]),
        (aten.clamp.default, (INTEGERS, 1, 10), []),
        (aten.clamp.default, (meta(1000, dtype=torch.float16), 0.5), []),
        (aten.clamp.default, (meta(1000, dtype=torch.bool), 1), [8000]),
        (aten.clamp_min.default, (INTEGERS, 0.5), [4000]),
        (aten.clamp_max.default, (INTEGERS, 0.5), [4000]),
        (aten.clamp_min.Tensor, (INTEGERS, meta(1000)), []),
        (aten._foreach_pow.Scalar, ([INTEGERS, INTEGERS], 0.5), [4000]),
        (aten._foreach_pow.ScalarList, ([INTEGERS, meta(2000)], [0.5, 0.5]), []),
        (aten._foreach_clamp_min.Scalar, ([meta(10), INTEGERS], 0.5), [4000]),
        (aten._foreach_maximum.Scalar, ([INTEGERS], 2), []),
    ],
    ids=str,
)
def test_a_tensor_is_cast_by_numbers_of_a_higher_kind(operator: Any, args: tuple[Any, ...], taken: list[int]) -> None:
    assert hidden(operator, *args) == taken
