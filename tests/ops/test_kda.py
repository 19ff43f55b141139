"""KDA at its edges: gates that reset, overflow or are no number, states in and out, packed sequences, generation."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from memfix.checks.drawn_budgets import measure_and_judge
from memfix.checks.form_call import FormCall, StepOf
from memfix.checks.inputs import Draw
from memfix.checks.interpreter import in_interpreter
from memfix.cuda_kernels import CudaKernel
from memfix.cuda_kernels.emulated import cannot_emulate, emulated
from memfix.meters import get_meter
from memfix.meters.base import Reading
from memfix.meters.simulated import SimulatedMeter
from memfix.ops.kda import cuda, decode_kda, kda, windows
from memfix.ops.kda.arguments import DEFAULT_CHUNK_SIZE
from memfix.ops.kda.chunk_layout import MOST_ROWS, rows_per_chunk
from memfix.ops.kda.contract import contract
from memfix.ops.kda.cuda import cuda_kda
from memfix.ops.kda.naive import naive_kda
from memfix.ops.kda.passes import Terms
from memfix.ops.kda.sequential import sequential_kda
from memfix.ops.kda.streamed import streamed_kda
from memfix.ops.kda.triton import triton_kda
from memfix.ops.kda.windows import Chunks
from memfix.ops.kda.wy import wy_kda
from memfix.registry import all_contracts

FORMS = [sequential_kda, streamed_kda, wy_kda]
CHUNKED = [streamed_kda, wy_kda]
NAMES = ("o", "final state", "q", "k", "v", "g", "beta", "initial state")
BATCH, HEADS, KEY, VALUE = 2, 2, 5, 3

each_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__.removesuffix("_kda"))
each_chunked_form = pytest.mark.parametrize("form", CHUNKED, ids=lambda form: form.__name__.removesuffix("_kda"))


def inputs(
    num_tokens: int = 21,
    dtype: torch.dtype = torch.float64,
    batch: int = BATCH,
    states: int | None = None,
    value: int = VALUE,
) -> list[torch.Tensor]:
    """q, k, v, g, beta and an initial state: all leaves. Keys are short, so that the delta rule does not diverge."""
    torch.manual_seed(0)
    size = (batch, num_tokens, HEADS)
    q, v = torch.randn(*size, KEY), torch.randn(*size, value)
    k = 0.6 * torch.rand(*size, KEY) - 0.3
    g, beta = -torch.rand(*size, KEY), torch.rand(size)
    state = torch.randn(batch if states is None else states, HEADS, KEY, value)
    wide = torch.promote_types(dtype, torch.float32)
    return [*(x.to(dtype).requires_grad_() for x in (q, k, v, g, beta)), state.to(wide).requires_grad_()]


def with_gates(tensors: list[torch.Tensor], g: torch.Tensor) -> list[torch.Tensor]:
    return [*tensors[:3], g.detach().requires_grad_(), *tensors[4:]]


def answer(form: Callable[..., Any], tensors: list[torch.Tensor], *more: Any, **options: Any) -> list[torch.Tensor]:
    """Outputs, final state and every gradient, with gradients coming in through both results."""
    if form not in CHUNKED:
        options.pop("chunk_size", None)
    results = form(*tensors, *more, **options)
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(result.shape, generator=generator, dtype=torch.float64).to(result) for result in results]
    return [*(result.detach() for result in results), *torch.autograd.grad(results, tensors, upstream)]


def assert_same(got: list[torch.Tensor], expected: list[torch.Tensor], **tolerance: Any) -> None:
    for name, one, other in zip(NAMES, got, expected, strict=True):
        torch.testing.assert_close(one, other, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


def as_float64(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


# ---------------------------------------------------------------- gates
@each_form
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "gate_at",
    [
        lambda t: torch.full_like(t, -115.0, dtype=torch.float64),
        lambda t: torch.where(t % 2 == 0, 0.0, -115.0),
        lambda t: torch.where(t % 7 == 0, -115.0, -1e-3),
        lambda t: torch.zeros_like(t, dtype=torch.float64),
    ],
    ids=["all strong", "alternating", "rarely strong", "none"],
)
def test_extreme_gates_are_as_exact_as_mild_ones(
    form: Callable[..., Any], dtype: torch.dtype, gate_at: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    tensors = inputs(130, dtype)
    gates = gate_at(torch.arange(130)).to(dtype)[None, :, None, None].expand_as(tensors[3])
    tensors = with_gates(tensors, gates.clone())
    expected = answer(naive_kda, as_float64(tensors))
    got = answer(form, tensors, chunk_size=64)
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    for name, one, true in zip(NAMES, got, expected, strict=True):
        assert (one.double() - true).abs().max() <= 200 * eps * true.abs().max() + tiny, name


@each_form
@pytest.mark.parametrize("num_tokens", [5, 21, 80])
def test_gate_of_minus_infinity_is_a_reset_with_finite_gradients(form: Callable[..., Any], num_tokens: int) -> None:
    tensors = inputs(num_tokens)
    gates = tensors[3].detach().clone()
    gates[:, 3] = -torch.inf
    gates[:, num_tokens // 2, :, 1] = -torch.inf
    tensors = with_gates(tensors, gates)
    got = answer(form, tensors, chunk_size=16)
    assert all(tensor.isfinite().all() for tensor in got)
    assert_same(got, answer(naive_kda, tensors))
    fresh = [tensor[:, 3:] for tensor in tensors[:5]]
    torch.testing.assert_close(got[0][:, 3:], form(*fresh)[0])


@each_form
def test_positive_gates_give_naives_answer(form: Callable[..., Any]) -> None:
    tensors = inputs(80)
    tensors = with_gates(tensors, 0.3 * torch.randn_like(tensors[3]))
    assert_same(answer(form, tensors, chunk_size=16), answer(naive_kda, tensors))


@each_form
def test_strengths_above_one_and_below_zero_give_naives_answer(form: Callable[..., Any]) -> None:
    tensors = inputs(40)
    tensors[4] = (4 * torch.rand_like(tensors[4]) - 1).requires_grad_()
    assert_same(answer(form, tensors, chunk_size=16), answer(naive_kda, tensors))


@each_form
@pytest.mark.parametrize("where", [0, 13, 16, 20])
def test_nan_in_a_gate_reaches_all_outputs_from_its_token_on_and_none_before(
    form: Callable[..., Any], where: int
) -> None:
    tensors = inputs(21)
    gates = tensors[3].detach().clone()
    gates[1, where, 0, 2] = torch.nan
    tensors = with_gates(tensors, gates)
    got, expected = answer(form, tensors, chunk_size=4), answer(naive_kda, tensors)
    for one, other in zip(got[:2], expected[:2], strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)
    assert got[0][1, where:, 0].isnan().all()
    assert got[0][1, :where].isfinite().all()
    assert got[1][1, 0].isnan().all()
    clean = [one[0] for one in got]
    assert all(tensor.isfinite().all() for tensor in clean), "the other sequence knows nothing of it"


@each_form
@pytest.mark.parametrize("where", [0, 13, 20])
def test_gradients_are_nan_wherever_naives_are_up_to_the_chunk_of_a_nan(form: Callable[..., Any], where: int) -> None:
    tensors = inputs(21)
    gates = tensors[3].detach().clone()
    gates[1, where, 0, 2] = torch.nan
    tensors = with_gates(tensors, gates)
    got, expected = answer(form, tensors, chunk_size=4), answer(naive_kda, tensors)
    for name, one, other in zip(NAMES[2:7], got[2:7], expected[2:7], strict=True):
        spoilt = other[1, : where + 1, 0].isnan()
        assert one[1, : where + 1, 0][spoilt].isnan().all(), name
    assert expected[7].isnan().any()
    assert got[7][expected[7].isnan()].isnan().all()


# ---------------------------------------------------------------- chunks
@each_chunked_form
def test_every_chunk_size_gives_the_same(form: Callable[..., Any]) -> None:
    tensors = inputs(13)
    expected = answer(naive_kda, tensors)
    for chunk_size in range(1, 13 + 6):
        assert_same(answer(form, tensors, chunk_size=chunk_size), expected)


@each_chunked_form
def test_default_chunk_is_64(form: Callable[..., Any]) -> None:
    assert DEFAULT_CHUNK_SIZE == 64
    tensors = inputs(70, torch.float32)
    assert_same(answer(form, tensors), answer(form, tensors, chunk_size=64), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("chunk_size", "longest", "rows"),
    [
        (64, 256, 64),
        (1, 9, 1),
        (63, 256, 32),
        (17, 256, 16),
        (1000, 256, MOST_ROWS),
        (64, 1, 1),
        (64, 5, 8),
    ],
)
def test_a_wy_chunk_has_a_power_of_two_rows(chunk_size: int, longest: int, rows: int) -> None:
    assert rows_per_chunk(chunk_size, longest) == rows


@each_chunked_form
@pytest.mark.parametrize("cuts", [None, [0, 2, 2, 6]])
def test_gradients_are_those_of_finite_differences(form: Callable[..., Any], cuts: list[int] | None) -> None:
    tensors = inputs(6, batch=1, states=None if cuts is None else 3)
    lengths = None if cuts is None else torch.tensor(cuts)
    assert torch.autograd.gradcheck(lambda *t: form(*t, lengths, chunk_size=4), tensors, fast_mode=True)


# ---------------------------------------------------------------- states
@each_form
@pytest.mark.parametrize("first", [1, 8, 13, 20])
def test_two_halves_through_the_state_equal_the_whole(form: Callable[..., Any], first: int) -> None:
    def in_two(*tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        *tokens, state = tensors
        early, state = form(*(x[:, :first] for x in tokens), state, **options)
        late, state = form(*(x[:, first:] for x in tokens), state, **options)
        return torch.cat([early, late], dim=1), state

    tensors = inputs()
    assert_same(answer(in_two, tensors), answer(form, tensors))


@each_form
def test_no_initial_state_is_a_state_of_zeros(form: Callable[..., Any]) -> None:
    *tokens, state = inputs()
    for one, other in zip(form(*tokens), form(*tokens, torch.zeros_like(state)), strict=True):
        assert torch.equal(one, other)


def gradients_through(used: int, form: Callable[..., Any], **how: Any) -> list[torch.Tensor]:
    tensors = inputs(**how)
    loss = form(*tensors)[used].square().sum()
    return list(torch.autograd.grad(loss, tensors, allow_unused=True, materialize_grads=True))


through_each_result = pytest.mark.parametrize("used", [0, 1], ids=["outputs", "final state"])


@each_form
@through_each_result
def test_gradient_through_one_result_alone(form: Callable[..., Any], used: int) -> None:
    for one, other in zip(gradients_through(used, form), gradients_through(used, naive_kda), strict=True):
        torch.testing.assert_close(one, other)


@through_each_result
@pytest.mark.parametrize("value", [VALUE, 200], ids=["narrow values", "wide values"])
def test_gradient_of_the_kernels_through_one_result_alone(used: int, value: int) -> None:
    pytest.importorskip("triton")
    how = {"dtype": torch.float32, "value": value}
    got = in_interpreter(partial(gradients_through, used, triton_kda, **how))
    for one, other in zip(got, gradients_through(used, naive_kda, **how), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@each_form
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_states_are_wide_and_gradients_have_the_dtype_of_their_input(
    form: Callable[..., Any], dtype: torch.dtype
) -> None:
    tensors = inputs(9, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    gates = tensors[3].detach().to(wide)
    got = answer(form, with_gates(tensors, gates))
    assert [tensor.dtype for tensor in got] == [dtype, wide, dtype, dtype, dtype, wide, dtype, wide]


@each_form
def test_wide_gates_of_16_bit_inputs_are_not_rounded(form: Callable[..., Any]) -> None:
    """Over 200 tokens a gate of -0.001 that bfloat16 rounds by 2^-9 is off by its rounding 200 times over."""
    tensors = inputs(200, torch.bfloat16)
    tensors = with_gates(tensors, torch.full(tensors[3].shape, -0.0010009))
    got, expected = answer(form, tensors), answer(naive_kda, as_float64(tensors))
    torch.testing.assert_close(got[1].double(), expected[1], rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- packed sequences
@each_form
@pytest.mark.parametrize("cuts", [[0, 21], [0, 5, 21], [0, 0, 1, 9, 9, 20, 21, 21], [0, 16, 17, 21]])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_sequences_equal_a_loop_over_them(form: Callable[..., Any], cuts: list[int], dtype: torch.dtype) -> None:
    tensors = inputs(21, batch=1, states=len(cuts) - 1)

    def in_a_loop(*tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        *tokens, states = tensors
        outputs, finals = [], []
        for i, (start, stop) in enumerate(pairwise(cuts)):
            state = states[i : i + 1]
            if stop > start:
                o, state = naive_kda(*(x[:, start:stop] for x in tokens), state)
                outputs.append(o)
            finals.append(state)
        return torch.cat(outputs, dim=1), torch.cat(finals)

    packed = answer(form, tensors, torch.tensor(cuts, dtype=dtype), chunk_size=4)
    assert_same(packed, answer(in_a_loop, tensors))


@pytest.mark.gpu(use="beside")
@each_form
def test_lengths_may_be_on_either_device(form: Callable[..., Any]) -> None:
    tensors = [x.detach().cuda().requires_grad_() for x in inputs(21, batch=1, states=3)]
    cuts = torch.tensor([0, 5, 5, 21])
    for one, other in zip(form(*tensors, cuts), form(*tensors, cuts.cuda()), strict=True):
        assert torch.equal(one, other)


# ---------------------------------------------------------------- the functions that users call
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_decoding_token_by_token_equals_the_training_form(dtype: torch.dtype) -> None:
    *tokens, state = inputs(9, dtype)
    expected, last = kda(*tokens, initial_state=state, scale=0.7)
    outputs = []
    for token in zip(*(x.unbind(1) for x in tokens), strict=True):
        o, state = decode_kda(*token, state, scale=0.7)
        outputs.append(o)
    assert outputs[0].dtype == dtype
    torch.testing.assert_close(torch.stack(outputs, dim=1), expected)
    torch.testing.assert_close(state, last)


def test_decoding_leaves_the_state_it_was_given_and_refuses_a_narrow_one() -> None:
    *tokens, state = (tensor.detach() for tensor in inputs(1, torch.float32))
    token, before = [x[:, 0] for x in tokens], state.clone()
    decode_kda(*token, state)
    assert torch.equal(state, before)
    with pytest.raises(
        ValueError, match=r"state must be torch\.float32 to go with torch\.float32 inputs, got torch\.bf"
    ):
        decode_kda(*token, state.bfloat16())
    with pytest.raises(ValueError, match=r"q must be \[B, H, K\], got shape \[2, 1, 2, 5\]"):
        decode_kda(*tokens, state)


@pytest.mark.parametrize("form", ["auto", "sequential", "streamed", "wy"])
def test_every_form_is_reached_by_name(form: str) -> None:
    *tokens, state = inputs()
    got = kda(*tokens, initial_state=state, chunk_size=7, scale=0.4, form=form)
    for one, other in zip(got, naive_kda(*tokens, state, scale=0.4), strict=True):
        torch.testing.assert_close(one, other)


def test_packed_sequences_by_the_name_of_their_own() -> None:
    from memfix.ops.kda import kda_packed

    *tokens, state = inputs(21, batch=1, states=2)
    cuts = torch.tensor([0, 8, 21])
    got = kda_packed(*tokens, cuts, initial_state=state, form="streamed")
    for one, other in zip(got, naive_kda(*tokens, state, cuts), strict=True):
        torch.testing.assert_close(one, other)


def test_unknown_form_is_refused() -> None:
    with pytest.raises(
        ValueError, match="form must be one of auto, sequential, streamed, wy, triton, cuda, got 'dense'"
    ):
        kda(*inputs()[:5], form="dense")


@each_form
def test_autocast_changes_nothing(form: Callable[..., Any]) -> None:
    tensors = inputs(dtype=torch.float32)
    expected = form(*tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = form(*tensors)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


@each_chunked_form
def test_second_derivative_is_refused_in_words(form: Callable[..., Any]) -> None:
    tensors = inputs(5)
    with pytest.raises(RuntimeError, match="kda has no second derivative"):
        torch.autograd.grad(form(*tensors)[0].sum(), tensors[0], create_graph=True)


@each_form
def test_permuted_memory_gives_the_same(form: Callable[..., Any]) -> None:
    tensors = inputs()
    by_head = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors[:5]]
    reversed_state = tensors[5].detach().mT.contiguous().mT.requires_grad_()
    assert_same(answer(form, [*by_head, reversed_state], chunk_size=8), answer(form, tensors, chunk_size=8))


# ---------------------------------------------------------------- memory that no budget states
def reading(form: str, phase: Any, **dims: Any) -> Reading:
    case = contract.case_of("drawn", {"B": 1, "T": 128, "H": 2, "K": 32, "V": 32, "chunk_size": 64, **dims})
    return get_meter("simulated").measure(StepOf(contract, form, Draw(case), phase))


@pytest.mark.parametrize("phase", ["forward", "train"])
def test_streamed_peak_falls_with_the_chunk_and_that_of_the_report_does_not(phase: str) -> None:
    streamed, reported = (
        [reading(form, phase, T=64, chunk_size=chunk).peak_bytes for chunk in (64, 32)]
        for form in ("streamed", "reported")
    )
    assert streamed[0] > 1.5 * streamed[1]
    assert max(reported) - min(reported) < 0.05 * reported[0]


def test_wy_at_2048_tokens_takes_no_tensor_of_tokens_by_key_by_key() -> None:
    """Transitions alone would be 2 GiB here, of 16 bits."""
    peak = reading("wy", "train", T=2048, H=32, K=128, V=128, dtype="bfloat16").peak_bytes
    assert peak < 3 * 2**28


# ---------------------------------------------------------------- laws
@pytest.mark.parametrize(
    "shape",
    ["K=8,V=8,chunk_size=64", "K=100,V=1,chunk_size=8", "K=100,V=100,chunk_size=30", "K=1,V=100,chunk_size=200"],
)
@pytest.mark.parametrize(("op", "batch"), [("kda", "B=2"), ("kda_packed", "S=3")])
def test_budgets_of_the_wy_form_hold_where_rows_are_short_and_chunks_long(op: str, batch: str, shape: str) -> None:
    contract = all_contracts()[op]
    draw = Draw.parsed(contract, f"{batch},T=300,H=2,{shape},scale=None,dtype=float32")
    found = measure_and_judge(
        FormCall(contract, "wy", draw), contract.budgets_of("wy", "drawn"), get_meter("simulated")
    )
    assert len(found) == 3
    assert [finding.text() for finding in found if finding.status != "pass"] == []


@pytest.mark.parametrize(
    ("changed", "has_kernels"),
    [
        ({}, True),
        ({"K": 64, "V": 96}, True),
        ({"K": 32}, False),
        ({"V": 40}, False),
        ({"V": 544}, False),
        ({"dtype": torch.float32}, False),
        ({"gates": torch.bfloat16}, True),
        ({"gates": torch.float16}, False),
    ],
)
def test_the_form_cuda_has_kernels_for_wide_keys_in_bfloat16(changed: dict[str, Any], has_kernels: bool) -> None:
    sizes = {"K": 128, "V": 128, "dtype": torch.bfloat16, "gates": torch.float32} | changed

    def build(device: str) -> Callable[[], Any]:
        q, k, g = (torch.empty(1, 8, 1, sizes["K"], device=device, dtype=sizes["dtype"]) for _ in range(3))
        v = torch.empty(1, 8, 1, sizes["V"], device=device, dtype=sizes["dtype"])
        return lambda: kda(q, k, v, g.to(sizes["gates"]), g[..., 0], form="cuda")

    languages = {isinstance(launch.kernel, CudaKernel) for launch in SimulatedMeter().launches(build)}
    assert languages == {has_kernels}


@pytest.mark.skipif(cannot_emulate() is not None, reason=str(cannot_emulate()))
def test_the_form_cuda_takes_inputs_at_any_address() -> None:
    """Its kernels load 16 bytes at once."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)

    q, k, v, g = torch.randn(4, 1, 3, 1, 64)
    given = [q.bfloat16(), k.bfloat16() / 8, v.bfloat16(), -g.abs(), torch.rand(1, 3, 1)]
    with emulated():
        at_multiples = cuda_kda(*given)
        for one, other in zip(at_multiples, cuda_kda(*map(moved, given)), strict=True):
            assert torch.equal(one, other)


# ---------------------------------------------------------------- the segments that the form cuda cuts sequences into
def _grown_keys(k: torch.Tensor) -> torch.Tensor:
    """So long that the delta rule lengthens a state by more than a gate of -1 shortens it."""
    return 2 * k / k.norm(dim=-1, keepdim=True)


@pytest.mark.skipif(cannot_emulate() is not None, reason=str(cannot_emulate()))
@pytest.mark.parametrize("V", [64, 96])
@pytest.mark.parametrize(
    ("cuts", "window_bytes"),
    [(None, 1 << 30), (None, 192 << 10), ([0, 5, 5, 170, 230], 1 << 30), ([0, 5, 5, 170, 230], 192 << 10)],
    ids=["whole", "in_parts", "packed", "packed_in_parts"],
)
@pytest.mark.parametrize(
    ("gates", "has_long_keys"), [((-0.02, 0.0), False), ((-9.0, -4.0), False), ((-1.0, -1.0), True)]
)
def test_segments_begin_as_if_the_sequence_was_whole(
    monkeypatch: pytest.MonkeyPatch,
    gates: tuple[float, float],
    has_long_keys: bool,
    cuts: list[int] | None,
    window_bytes: int,
    V: int,
) -> None:
    """Weak gates hand a state on, strong ones forget it, and long keys make it grow whatever the gates."""
    monkeypatch.setattr(cuda, "FEWER_SEGMENTS", 1)
    monkeypatch.setattr(windows, "BYTES_AT_ONCE", window_bytes)
    monkeypatch.setattr(windows, "TIMES_RESULTS", 0.0)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 230, 1, width, generator=generator) for width in (64, 64, V))
    g = torch.empty(1, 230, 1, 64).uniform_(*gates, generator=generator)
    states = torch.randn(1 if cuts is None else len(cuts) - 1, 1, 64, V, generator=generator)
    beta = torch.rand(1, 230, 1, generator=generator) / 2 + 0.5
    given = [x.bfloat16() for x in (q, _grown_keys(k) if has_long_keys else k / 8, v)] + [g, beta, states]
    packed = None if cuts is None else torch.tensor(cuts)

    def answers(form: Callable[..., Any], inputs: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
        inputs = [tensor.clone().requires_grad_() for tensor in inputs]
        outputs = form(*inputs, packed, **options)
        upstream = [torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype) for out in outputs]
        return [*outputs, *torch.autograd.grad(outputs, inputs, upstream)]

    with emulated():
        got = answers(cuda_kda, given, chunk_size=8)
    for one, other in zip(got, answers(naive_kda, [tensor.double() for tensor in given]), strict=True):
        assert (one - other).norm() <= 0.01 * other.norm()


@pytest.mark.skipif(cannot_emulate() is not None, reason=str(cannot_emulate()))
@pytest.mark.parametrize("window_bytes", [1 << 30, 150_000], ids=["one_window", "two_windows"])
@pytest.mark.parametrize(("spoilt", "at"), [(1, 3), (2, 3), (3, 3), (3, 140), (5, 3)], ids="k v g late_g state".split())
def test_a_nan_reaches_segments_that_have_forgotten_all_else(
    monkeypatch: pytest.MonkeyPatch, spoilt: int, at: int, window_bytes: int
) -> None:
    monkeypatch.setattr(cuda, "FEWER_SEGMENTS", 1)
    monkeypatch.setattr(windows, "BYTES_AT_ONCE", window_bytes)
    monkeypatch.setattr(windows, "TIMES_RESULTS", 0.0)
    q, k, v = torch.randn(3, 1, 160, 1, 64).bfloat16()
    given = [q, k / 8, v, torch.full((1, 160, 1, 64), -9.0), torch.rand(1, 160, 1), torch.randn(1, 1, 64, 64)]
    given[spoilt].view(-1, 64)[at, 7] = torch.nan
    given = [tensor.requires_grad_() for tensor in given]
    with emulated():
        got = answer(partial(cuda_kda, chunk_size=8), given)
    expected = answer(naive_kda, given)
    for one, other in zip(got[:2], expected[:2], strict=True):
        assert other[..., 7].isnan().any()
        assert one[other.isnan()].isnan().all()
    for name, one, other in zip(NAMES[3:7], got[3:7], expected[3:7], strict=True):
        is_nan = other[:, :at].isnan()
        assert one[:, :at][is_nan].isnan().all(), name
    assert got[7][expected[7].isnan()].isnan().all()


@pytest.mark.skipif(cannot_emulate() is not None, reason=str(cannot_emulate()))
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("least_gate", [-2.0, -40.0], ids=["flat", "steep"])
def test_what_a_chunk_leaves_of_a_state_is_bounded_by_every_gate_and_every_key(least_gate: float, width: int) -> None:
    q, k, v = torch.randn(3, 1, 150, 1, width)
    k *= torch.rand(1, 150, 1, 1) * 4 / k.norm(dim=-1, keepdim=True)
    given = (
        q.bfloat16(),
        k.bfloat16(),
        v.bfloat16(),
        torch.empty_like(q).uniform_(least_gate, 0),
        torch.rand(1, 150, 1),
    )
    chunks = Chunks(1, width, width, 1, 5, 0, 150, 150, 8)
    terms = Terms.empty(cuda._PASSES, given[0], chunks, keeps_inverse=False)
    with emulated():
        cuda._PASSES.prepare(given, terms, chunks, 1.0)
    _, k, _, g, beta = (x.double()[0, :, 0] for x in given)
    longer = (1 - beta * k.square().sum(-1)).abs().clamp(min=1)
    exponent = F.pad(g.amax(-1) / math.log(2) + longer.log2(), (0, 10)).view(5, 32).sum(1)
    assert terms.growth_NH is not None
    excess = terms.growth_NH.double().flatten() - exponent
    assert (excess >= -1e-3).all()
    assert (excess <= 2).all()


@pytest.mark.parametrize(
    ("capability", "takes_them"), [((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)]
)
def test_cuda_kernels_run_where_a_block_has_room_for_them(
    capability: tuple[int, int], takes_them: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    rows = SimpleNamespace(dtype=torch.bfloat16, shape=(1, 64, 2, 128), is_cuda=True, device="cuda")
    gates = SimpleNamespace(dtype=torch.float32)
    assert cuda._is_supported(SimpleNamespace(inputs=(rows, rows, rows, gates, rows))) is takes_them


@pytest.mark.parametrize(
    ("batch", "length", "heads", "forward", "backward"),
    [(1, 8192, 32, 4, 1), (1, 65536, 16, 8, 2), (4, 4096, 16, 1, 1), (1, 256, 8, 1, 1), (1, 4096, 1, 16, 4)],
)
def test_few_long_sequences_are_cut_into_segments(
    batch: int, length: int, heads: int, forward: int, backward: int
) -> None:
    chunks = Chunks(heads, 128, 128, batch, batch * length // 32, 0, length, length, DEFAULT_CHUNK_SIZE)
    assert cuda._num_segments(chunks) == forward
    assert cuda._num_segments_both_ways(chunks) == backward
