"""The kernels of native sparse attention at calls that drawn ones seldom meet, in the interpreter; where they run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import memfix.ops.nsa as op
from memfix.checks.interpreter import in_interpreter
from memfix.ops.nsa.arguments import Blocks

pytest.importorskip("triton")
from ops import interpreted_nsa as calls

from memfix.ops.nsa import triton

BLOCKS = Blocks(compress_block=32, compress_stride=16, select_block=64, num_selected=16, window=512)


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    return in_interpreter(calls.everything)


@pytest.mark.parametrize("name", calls.CALLS)
def test_kernels_are_as_near_to_the_truth_as_naive(answers: dict[str, Any], name: str) -> None:
    for ours, theirs in answers[name]:
        assert ours <= 2 * theirs + 1e-7


@pytest.mark.parametrize(("dtype", "magnitude"), calls.SELECTIONS)
def test_selects_the_blocks_that_naive_selects(answers: dict[str, Any], dtype: torch.dtype, magnitude: float) -> None:
    """From scores that are all equal to scores where one block has all the weight."""
    ours, theirs = answers["selected"][dtype, magnitude]
    assert torch.equal(ours, theirs)


def test_keys_of_16_bits_would_select_others(answers: dict[str, Any]) -> None:
    """So the test above would see it."""
    assert not all(torch.equal(*both) for both in answers["selected by 16 bits"])


def test_queries_are_scored_again_where_scores_tie_and_seldom_elsewhere(answers: dict[str, Any]) -> None:
    """Of 200, 152 have more blocks than are selected."""
    assert answers["doubtful"][0] == (152, 152)
    near, again = answers["doubtful"][1]
    assert again <= near < 76


def test_a_scale_below_zero_leaves_doubts_too(answers: dict[str, Any]) -> None:
    assert all(number > 20 for number in answers["doubtful by the scale's sign"])


def test_blocks_near_the_last_are_put_in_order(answers: dict[str, Any]) -> None:
    """Where scores are so rough that they would select others."""
    (rough, naive), (settled, of_settled) = answers["selected by rough scores"]
    assert not torch.equal(rough, naive)
    assert torch.equal(settled, of_settled)
    assert len(settled) > 0.9 * len(rough)


def test_a_second_run_gives_the_same_bits(answers: dict[str, Any]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(*answers["twice"], strict=True))


def test_second_derivative_is_refused_in_words(answers: dict[str, Any]) -> None:
    assert "nsa has no second derivative" in answers["second derivative"]


def test_users_get_the_same_from_both_forms(answers: dict[str, Any]) -> None:
    torch.testing.assert_close(*answers["as users call it"])


def test_auto_takes_the_kernels_on_a_gpu() -> None:
    with FakeTensorMode():
        tensors = [torch.empty(1, 1, 1, 2, device=device) for device in ("cuda", "cpu")]
        assert [op.DISPATCHER.chosen("auto", tensor) for tensor in tensors] == ["triton", "chunked"]


def test_the_kernels_refuse_a_cpu() -> None:
    with pytest.raises(
        RuntimeError, match="form 'triton' runs on a GPU, and the tensors are on the CPU; take form='chunked'"
    ):
        triton.triton_nsa(*calls.inputs(3, 1, 8), **calls.SIZES, queries_per_chunk=3)


@pytest.mark.parametrize(
    ("shape", "dtype", "sizes"),
    [
        ((1, 4, 1, 1, 8), torch.float64, {}),
        ((1, 4, 1, 1, 257), torch.float32, {}),
        ((1, 4, 1, 65, 8), torch.float32, {}),
        ((1, 4, 1, 1, 8), torch.float32, {"compress_block": 300, "select_block": 257}),
        ((1, 4, 1, 1, 8), torch.float32, {"compress_block": 256, "select_block": 257, "compress_stride": 1}),
    ],
    ids=["float64", "wide", "heads", "shared tokens", "blocks that meet"],
)
def test_what_the_kernels_do_not_take_goes_to_the_other_form(
    shape: tuple[int, ...], dtype: torch.dtype, sizes: dict[str, int]
) -> None:
    """On a CPU, which the kernels refuse."""
    q = torch.randn(shape, dtype=dtype)
    k = torch.randn(*shape[:3], shape[4], dtype=dtype)
    gates = torch.rand(*shape[:4], 3, dtype=dtype)
    out = triton.triton_nsa(q, k, k, gates, **{**calls.SIZES, **sizes}, queries_per_chunk=4)
    assert out.shape == q.shape


def test_default_chunk_is_that_of_the_form_which_computes_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """float64 goes from the kernels to ``chunked``, whose queries take more bytes."""
    chunks: list[int] = []
    honest = triton.chunked_nsa
    monkeypatch.setattr(
        triton,
        "chunked_nsa",
        lambda *args, **options: chunks.append(options["queries_per_chunk"]) or honest(*args, **options),
    )
    monkeypatch.setattr(op, "CHUNK_BYTES", 2**16)
    q, k, v, gates = (tensor.flatten(2, 3) if tensor.dim() == 5 else tensor for tensor in calls.inputs(100, 1, 8))
    op.nsa(q.double(), k.double(), v.double(), gates.double(), **calls.SIZES, form="triton")
    assert chunks == [op._fitting_chunk(q, 2, Blocks(**calls.SIZES))] != [100]


def test_default_chunk_keeps_its_scores_within_the_bound() -> None:
    q = torch.empty(1, 131_072, 32, 80, dtype=torch.bfloat16, device="meta")
    assert op._scored_chunk(q, 8, BLOCKS) * 8 * 2048 * 4 == op.KERNELS_CHUNK_BYTES
    assert op._scored_chunk(q[:, :20], 8, BLOCKS) == 20
    assert op._scored_chunk(torch.empty(4096, 2**17, 8, 8, device="meta"), 8, BLOCKS) == 64
