"""The loss that users call: its options, what it refuses, how it chooses, and what it keeps of its gradients."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from memfix.checks.equality import check_equality
from memfix.checks.form_call import FormCall
from memfix.checks.inputs import Draw
from memfix.checks.measuring import measure
from memfix.incidents.evidence import default_of
from memfix.meters import get_meter
from memfix.ops.linear_cross_entropy import (
    LinearCrossEntropy,
    chosen_form,
    chunks,
    linear_cross_entropy,
    log_probabilities,
    token_log_probabilities,
)
from memfix.ops.linear_cross_entropy.chunk_size import ChunkMemory, usual_rows
from memfix.ops.linear_cross_entropy.logits_gradient import DenseGradient
from memfix.ops.linear_cross_entropy.narrowing import WeightGradient
from memfix.ops.linear_cross_entropy.options import Options
from memfix.ops.linear_cross_entropy.recompute import TiledPass
from memfix.ops.linear_cross_entropy.standard import standard_linear_cross_entropy
from memfix.ops.linear_cross_entropy.triton import KERNELS, ExponentialsPass, LogitsPass
from memfix.registry import all_contracts

N, D, V = 23, 6, 37
CHUNKED = ("recompute", "checkpoint")


def made(dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    target = torch.randint(0, V, (N,), generator=generator)
    class_weight = torch.rand(V, generator=generator, dtype=torch.float64).to(dtype) + 0.25
    return {"hidden": normal(N, D), "weight": normal(V, D), "target": target, "bias": normal(V), "class": class_weight}


def gradients(loss: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss.sum(), leaves))


def relative_error(got: torch.Tensor, true: torch.Tensor) -> float:
    return ((got.double() - true.double()).norm() / true.double().norm()).item()


# ---------------------------------------------------------------- options
def test_every_option_at_once_is_what_torch_says() -> None:
    x = made()
    logits = 4 * torch.tanh(F.linear(x["hidden"], x["weight"], x["bias"]) / 4)
    target = x["target"].clone()
    target[::3] = -1
    expected = F.cross_entropy(logits, target, x["class"], ignore_index=-1, label_smoothing=0.2)
    expected = expected + 0.01 * logits.logsumexp(1).square()[target != -1].mean()
    for form in ("standard", *CHUNKED):
        loss = linear_cross_entropy(
            *(x["hidden"], x["weight"], target), bias=x["bias"], class_weight=x["class"], ignore_index=-1,
            label_smoothing=0.2, softcap=4.0, z_loss=0.01, form=form,
        )  # fmt: skip
        leaves = x["hidden"], x["weight"], x["bias"]
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(
            gradients(loss, *leaves), list(torch.autograd.grad(expected, leaves, retain_graph=True))
        )


def test_standard_path_is_equal_to_naive() -> None:
    contract = all_contracts()["linear_cross_entropy"].with_form(
        "standard", standard_linear_cross_entropy, like="checkpoint"
    )
    for dtype in ("float32", "bfloat16"):
        assert check_equality(contract, "standard", dtype=dtype, examples=20).status == "pass"


@pytest.mark.parametrize("form", ["auto", *CHUNKED])
def test_upstream_gradient_of_every_token_is_its_own(form: str) -> None:
    x = made()
    upstream = torch.randn(N, dtype=torch.float64)
    losses = F.cross_entropy(x["hidden"] @ x["weight"].T, x["target"], reduction="none")
    expected = torch.autograd.grad(losses, [x["hidden"], x["weight"]], upstream)
    loss = linear_cross_entropy(x["hidden"], x["weight"], x["target"], reduction="none", form=form)
    torch.testing.assert_close(torch.autograd.grad(loss, [x["hidden"], x["weight"]], upstream), expected)


@pytest.mark.parametrize("wanted", [("hidden",), ("weight",), ("bias",), ()])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_only_what_is_not_frozen_gets_a_gradient(wanted: tuple[str, ...], reduction: str) -> None:
    x = made()
    for name in ("hidden", "weight", "bias"):
        x[name].requires_grad_(name in wanted)
    loss = linear_cross_entropy(
        x["hidden"], x["weight"], x["target"], bias=x["bias"], reduction=reduction, form="recompute", rows_per_chunk=5
    )
    assert loss.requires_grad == bool(wanted)
    if wanted:
        loss.sum().backward()
    assert {name for name in ("hidden", "weight", "bias") if x[name].grad is not None} == set(wanted)


@pytest.mark.parametrize("form", ["auto", *CHUNKED])
def test_tied_weight_gets_both_gradients(form: str) -> None:
    x = made()
    expected = F.cross_entropy(F.embedding(x["target"], x["weight"]) @ x["weight"].T, x["target"].roll(1))
    loss = linear_cross_entropy(F.embedding(x["target"], x["weight"]), x["weight"], x["target"].roll(1), form=form)
    torch.testing.assert_close(gradients(loss, x["weight"]), gradients(expected, x["weight"]))


@pytest.mark.parametrize("form", ["auto", *CHUNKED])
@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16])
def test_autocast_is_that_of_torch(form: str, hidden_dtype: torch.dtype) -> None:
    """Inside autocast the hidden rows often are 16-bit already, and the weight is a float32 parameter."""
    x = made(torch.float32)
    hidden, weight, bias = x["hidden"].to(hidden_dtype).detach().requires_grad_(), x["weight"], x["bias"]
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    true = F.cross_entropy(F.linear(*wide), x["target"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = F.cross_entropy(F.linear(hidden, weight, bias), x["target"])
        loss = linear_cross_entropy(hidden, weight, x["target"], bias=bias, form=form, rows_per_chunk=7)
        assert (hidden @ weight.T).dtype == torch.bfloat16  # what it turned off for itself is on again
    assert loss.dtype == expected.dtype == torch.float32
    leaves = (hidden, weight, bias)
    mine, torchs, truth = gradients(loss, *leaves), gradients(expected, *leaves), gradients(true, *wide)
    for got, other, right, leaf in zip(mine, torchs, truth, leaves, strict=True):
        assert got.dtype == other.dtype == leaf.dtype
        assert relative_error(got, right) <= 1.5 * relative_error(other, right) + 1e-3


def test_ignored_rows_take_no_part_whatever_is_in_them() -> None:
    x = made()
    target = x["target"].clone()
    target[5:9] = -100
    hidden = x["hidden"].detach().clone()
    hidden[5:9] = float("nan")
    hidden.requires_grad_()
    kept = [i for i in range(N) if not 5 <= i < 9]
    expected = F.cross_entropy(x["hidden"][kept] @ x["weight"].T, target[kept])
    loss = linear_cross_entropy(hidden, x["weight"], target, form="recompute", rows_per_chunk=4)
    torch.testing.assert_close(loss, expected)
    of_hidden, of_weight = gradients(loss, hidden, x["weight"])
    assert not of_hidden[5:9].any()
    torch.testing.assert_close(of_weight, *gradients(expected, x["weight"]))


def test_ignored_rows_reach_no_product() -> None:
    """Half the targets ignored is half the work: the pass never sees their rows."""
    from memfix.ops.linear_cross_entropy import recompute

    x = made()
    target = x["target"].clone()
    target[::2] = -100
    seen: list[int] = []

    class Counting(TiledPass):
        def __call__(self, hidden_CD: torch.Tensor, *rest: Any) -> Any:
            seen.append(hidden_CD.shape[0])
            return super().__call__(hidden_CD, *rest)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(recompute, "TiledPass", Counting)
        recompute.recompute_linear_cross_entropy(x["hidden"], x["weight"], target, rows_per_chunk=4)
    assert seen == [4, 4, 3]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("form", CHUNKED)
def test_nan_and_inf_in_hidden_give_what_naive_gives(bad: float, reduction: str, form: str) -> None:
    x = made()
    hidden = x["hidden"].detach().clone()
    hidden[3, 2] = bad
    hidden.requires_grad_()
    expected = F.cross_entropy(hidden @ x["weight"].T, x["target"], reduction=reduction)
    loss = linear_cross_entropy(hidden, x["weight"], x["target"], reduction=reduction, form=form, rows_per_chunk=4)
    torch.testing.assert_close(loss, expected, equal_nan=True)
    for got, right in zip(gradients(loss, hidden, x["weight"]), gradients(expected, hidden, x["weight"]), strict=True):
        torch.testing.assert_close(got, right, equal_nan=True)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("form", ["auto", *CHUNKED])
def test_all_targets_ignored_is_as_in_torch(reduction: str, form: str) -> None:
    x = made()
    target = torch.full((N,), -100)
    loss = linear_cross_entropy(
        x["hidden"], x["weight"], target, bias=x["bias"], reduction=reduction, form=form, z_loss=0.1
    )
    logits = F.linear(x["hidden"], x["weight"], x["bias"])
    torch.testing.assert_close(loss, F.cross_entropy(logits, target, reduction=reduction), equal_nan=True)
    assert not any(gradient.any() for gradient in gradients(loss, x["hidden"], x["weight"], x["bias"]))


# ---------------------------------------------------------------- accuracy
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_peaked_logits_keep_what_rounding_them_would_lose(dtype: torch.dtype) -> None:
    """A trained model has logits of tens: rounded to 16 bits they are off by a tenth, and so are the probabilities."""
    torch.manual_seed(0)
    hidden = torch.randn(256, 64).to(dtype).requires_grad_()
    weight = (3 * torch.randn(500, 64)).to(dtype).requires_grad_()
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    logits = wide[0] @ wide[1].T
    target = logits.detach().topk(3).indices[:, 2]
    truth = gradients(F.cross_entropy(logits, target), *wide)
    kept = gradients(linear_cross_entropy(hidden, weight, target, form="recompute", rows_per_chunk=100), hidden, weight)
    rounded = gradients(linear_cross_entropy(hidden, weight, target, form="standard"), hidden, weight)
    assert logits.abs().max() > 50
    eps = torch.finfo(dtype).eps
    for mine, standard, true in zip(kept, rounded, truth, strict=True):
        assert relative_error(mine, true) < 0.5 * eps
        assert relative_error(standard, true) > 4 * relative_error(mine, true)


def test_a_gradient_over_many_chunks_is_as_good_as_over_one() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(2048, 16).bfloat16(), torch.randn(50, 16).bfloat16().requires_grad_()
    target = torch.randint(0, 50, (2048,))
    wide = weight.detach().double().requires_grad_()
    (true,) = gradients(F.cross_entropy(hidden.double() @ wide.T, target), wide)
    errors = [
        relative_error(
            *gradients(linear_cross_entropy(hidden, weight, target, form="recompute", rows_per_chunk=rows), weight),
            true,
        )
        for rows in (2048, 16)
    ]
    assert errors[1] <= 1.05 * errors[0]


# ---------------------------------------------------------------- what is held and handed over
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_handed_over_without_a_copy(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    real = WeightGradient.finished

    def watched(self: WeightGradient, *args: Any) -> torch.Tensor:
        gradient = real(self, *args)
        taken.append(gradient.data_ptr())
        return gradient

    monkeypatch.setattr(WeightGradient, "finished", watched)
    x = made(dtype)
    linear_cross_entropy(x["hidden"], x["weight"], x["target"], form="recompute", rows_per_chunk=5).backward()
    assert x["weight"].grad is not None
    assert taken == [x["weight"].grad.data_ptr()]


@pytest.mark.parametrize(("rows", "columns"), [(1, 3), (2, 5), (7, 4), (1500, 1500), (1501, 1433)])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_sum_is_narrowed_into_its_own_memory(rows: int, columns: int, scale: float | None) -> None:
    """Past a million elements the ranges of source and destination lie in one storage."""
    torch.manual_seed(0)
    weight = torch.empty(rows, columns, dtype=torch.bfloat16)
    gradient = WeightGradient(weight, in_one_product=False)
    chunks = [(torch.randn(2, rows).bfloat16(), torch.randn(2, columns).bfloat16()) for _ in range(2)]
    for gradient_CV, hidden_CD in chunks:
        gradient.add(DenseGradient(gradient_CV, weight), hidden_CD, 1.0)
    first = gradient.parts[0]
    expected = sum(g.float().T @ h.float() for g, h in chunks) * (scale or 1)
    result = gradient.finished(None if scale is None else torch.tensor([scale]))
    assert result.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    assert result.untyped_storage().nbytes() <= 2 * weight.numel() + 2 * columns
    torch.testing.assert_close(result, expected.bfloat16())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["recompute", "triton"])
def test_a_bias_costs_no_more_than_a_few_rows_of_logits(form: str, dtype: str) -> None:
    """The sum over a chunk of 1024 rows, as torch takes it, has a workspace of twice the chunk."""
    contract, meter = all_contracts()["linear_cross_entropy"], get_meter("simulated")
    medium = replace(contract.cases["medium"], dtype=dtype)
    without, with_bias = (
        measure(FormCall(contract, form, Draw(replace(medium, present=present))), "train", meter).peak_bytes
        for present in ((), ("bias",))
    )
    assert with_bias - without < 40 * medium.dims["V"]


def test_second_backward_is_refused_in_words_and_checkpoint_repeats_it() -> None:
    x = made()
    loss = linear_cross_entropy(x["hidden"], x["weight"], x["target"], form="recompute")
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="linear_cross_entropy gave its gradient away in the first backward"):
        loss.backward()
    again = linear_cross_entropy(x["hidden"], x["weight"], x["target"], form="checkpoint")
    first = torch.autograd.grad(again, x["weight"], retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(again, x["weight"]), first)


def test_forward_without_gradients_keeps_nothing() -> None:
    x = made()
    with torch.no_grad():
        loss = linear_cross_entropy(x["hidden"], x["weight"], x["target"], form="recompute")
    assert not loss.requires_grad
    assert loss.grad_fn is None


# ---------------------------------------------------------------- choosing a form and a chunk
def on_meta(*tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = torch.empty(*tokens, 2560, dtype=dtype, device="meta")
    return hidden, torch.empty(151_936, 2560, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("tokens", "chosen"),
    [
        ((35_335,), "standard"),
        ((35_336,), "recompute"),
        ((8, 4096), "standard"),
        ((9, 4096), "recompute"),
        ((1, 131_072), "recompute"),
    ],
)
def test_auto_switches_where_its_caller_says(tokens: tuple[int, ...], chosen: str) -> None:
    assert chosen_form(*on_meta(*tokens), standard_up_to="10 GiB") == chosen


@pytest.mark.parametrize("tokens", [1, 2, 128, 4096, 35_335, 131_072])
@pytest.mark.parametrize("switch", [{}, {"standard_up_to": None}, {"standard_up_to": 0}])
def test_auto_is_chunked_at_any_size(tokens: int, switch: dict[str, Any]) -> None:
    assert chosen_form(*on_meta(tokens), **switch) == "recompute"
    with FakeTensorMode():
        on_gpu = [torch.empty(size, 2560, dtype=torch.bfloat16, device="cuda") for size in (tokens, 151_936)]
        assert chosen_form(*on_gpu, **switch) == "triton"


def test_auto_counts_bytes_of_the_dtype() -> None:
    ten = "10 GiB"
    assert chosen_form(*on_meta(17_668, dtype=torch.float32), standard_up_to=ten) == "recompute"
    assert chosen_form(*on_meta(17_667, dtype=torch.float32), standard_up_to=ten) == "standard"
    assert chosen_form(*on_meta(131_072), standard_up_to="40 GiB") == "standard"
    assert chosen_form(*on_meta(8, 4096), max_bytes="2 GiB", standard_up_to=ten) == "recompute"


@pytest.mark.parametrize(
    ("tokens", "rows"),
    [(1, 128), (128, 128), (129, 256), (2048, 2048), (2049, 1152), (6144, 2048), (6145, 1664), (131_072, 2048)],
)
def test_chunks_are_alike_and_have_2048_rows_at_most(tokens: int, rows: int) -> None:
    assert usual_rows(tokens, 151_936) == rows
    assert tokens % rows == 0 or tokens < rows or tokens % rows > rows // 2


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "rows"),
    [(8192, 32_000, 4096), (8192, 65_536, 4096), (8192, 65_537, 2816), (8192, 131_072, 2048), (4097, 2, 2176)],
)
def test_chunks_of_a_small_vocabulary_have_up_to_4096_rows(tokens: int, vocabulary: int, rows: int) -> None:
    assert usual_rows(tokens, vocabulary) == rows


def test_default_chunk_is_2048_rows_and_the_reports_is_4096() -> None:
    contract = all_contracts()["linear_cross_entropy"]
    defaults = {form: default_of(contract.function(form), "rows_per_chunk") for form in ("reported", *CHUNKED)}
    assert defaults == {"reported": 4096, **dict.fromkeys(CHUNKED, 2048)}


def test_auto_runs_what_it_chose() -> None:
    x = made()
    expected = F.cross_entropy(x["hidden"] @ x["weight"].T, x["target"])
    for threshold, is_chunked in ((N * V * 8, False), (N * V * 8 - 1, True)):
        loss = linear_cross_entropy(x["hidden"], x["weight"], x["target"], standard_up_to=threshold)
        torch.testing.assert_close(loss, expected)
        assert loss.grad_fn is not None
        assert (loss.grad_fn.name() == "_ReducedBackward") == is_chunked


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("max_bytes", [40 * 1000, 123_457, "1 MiB"])
def test_rows_of_max_bytes_fit_and_one_more_does_not(
    dtype: torch.dtype, softcap: float | None, max_bytes: int | str
) -> None:
    from memfix.units import parse_bytes

    caps = softcap is not None
    rows = ChunkMemory("recompute", 64, 1000, dtype, Options(softcap=softcap)).rows_within(max_bytes)
    assert TiledPass.bytes_of(rows, 1000, dtype, caps=caps) <= parse_bytes(max_bytes)
    assert TiledPass.bytes_of(rows + 4, 1000, dtype, caps=caps) > parse_bytes(max_bytes)


def test_max_bytes_bounds_what_a_chunk_takes(peak_memory: Any) -> None:
    """The simulated peak beside the gradients that are the result, and beside what grows with the tokens alone."""
    hidden = torch.empty(4096, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(20_000, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    target = torch.empty(4096, dtype=torch.int64, device="meta")
    limit = 10 * 2**20
    reading = peak_memory(
        linear_cross_entropy, hidden, weight, target, max_bytes=limit, form="recompute", backward=True
    )
    results = 2 * 4096 * 64 + 4 * 20_000 * 64
    assert 0.9 * limit < reading.peak_bytes - results < limit + 64 * 4096


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"form": "liger"}, "form must be one of auto, standard, checkpoint, recompute, triton, got 'liger'"),
        ({"rows_per_chunk": 0}, "rows_per_chunk must be at least 1, got 0"),
        (
            {"max_bytes": 100, "form": "recompute"},
            "max_bytes of 100 B is too small: one row of 37 logits takes 296 B in form 'recompute'",
        ),
        ({"max_bytes": 100}, "max_bytes of 100 B is too small"),
        ({"max_bytes": "2 GiB", "rows_per_chunk": 4}, "give rows_per_chunk or max_bytes, not both"),
        ({"max_bytes": "2 GiB", "form": "standard"}, "max_bytes bounds a chunk, and form 'standard' makes none"),
        ({"standard_up_to": "10 apples"}, "standard_up_to: unknown unit 'apples' in '10 apples'"),
        ({"standard_up_to": -1}, "standard_up_to: a size must be at least 0 bytes, got -1"),
        ({"standard_up_to": 1.5}, "standard_up_to: a size must be an int or a string such as '24GiB', got 1.5"),
        ({"standard_up_to": -1, "form": "recompute"}, "standard_up_to: a size must be at least 0 bytes, got -1"),
        ({"softcap": -1.0}, "softcap must be above 0, got -1.0"),
        ({"label_smoothing": 1.5}, "label_smoothing must be between 0 and 1, got 1.5"),
        ({"class_weight": torch.ones(3, dtype=torch.float64)}, "class_weight and weight must have the same number of"),
        ({"bias": torch.ones(V, 2, dtype=torch.float64)}, "bias must be [V], got shape [37, 2]"),
    ],
)
def test_call_that_cannot_be_right_is_refused(change: dict[str, Any], message: str) -> None:
    x = made()
    with pytest.raises(ValueError, match=re.escape(message)):
        linear_cross_entropy(x["hidden"], x["weight"], x["target"], **change)


@pytest.mark.parametrize("form", ["auto", *CHUNKED])
@pytest.mark.parametrize("value", [V, -1, 2**40])
def test_target_out_of_range_is_named(form: str, value: int) -> None:
    x = made()
    target = x["target"].clone()
    target[11] = value
    with pytest.raises(ValueError, match=rf"below the vocabulary of 37.*; got {value} at index 11"):
        linear_cross_entropy(x["hidden"], x["weight"], target, form=form)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_wrong_guess_that_all_tokens_count_changes_nothing(monkeypatch: pytest.MonkeyPatch, reduction: str) -> None:
    """On a GPU the chunks are prepared before it is known which targets count, or are classes."""
    x = made(torch.bfloat16)
    target = x["target"].clone()
    target[::3] = -100

    def answer() -> list[torch.Tensor]:
        loss = linear_cross_entropy(
            x["hidden"], x["weight"], target, reduction=reduction, form="recompute", rows_per_chunk=5
        )
        return [loss, *gradients(loss, x["hidden"], x["weight"])]

    expected = answer()
    monkeypatch.setattr(chunks, "_is_worth_a_guess", lambda *_: True)
    for got, right in zip(answer(), expected, strict=True):
        assert torch.equal(got, right)
    target[4] = V
    with pytest.raises(ValueError, match=f"got {V} at index 4"):
        answer()


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    x = made()
    with pytest.raises(ValueError, match=r"shape of hidden without its last dim, got \[7, 2\] for hidden \[2, 7, 5\]"):
        linear_cross_entropy(torch.ones(2, 7, 5), torch.ones(3, 5), torch.zeros(7, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="hidden and weight must have at least one row, got 0 and 37"):
        linear_cross_entropy(x["hidden"][:0], x["weight"], x["target"][:0])
    with pytest.raises(ValueError, match=r"hidden must be floating, got torch\.int64"):
        linear_cross_entropy(x["hidden"].detach().long(), x["weight"], x["target"])


# ---------------------------------------------------------------- log-probabilities
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_of_the_tokens(softcap: float | None, temperature: float) -> None:
    x = made()
    hidden, token = x["hidden"][:22].reshape(2, 11, D), x["target"][:22].reshape(2, 11)
    logits = F.linear(hidden, x["weight"], x["bias"])
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    expected = (logits / temperature).log_softmax(-1).gather(-1, token.unsqueeze(-1)).squeeze(-1)
    got = token_log_probabilities(
        hidden, x["weight"], token, bias=x["bias"], softcap=softcap, temperature=temperature, rows_per_chunk=5
    )
    assert got.shape == token.shape
    torch.testing.assert_close(got, expected)
    upstream, leaves = torch.randn_like(expected), [x["hidden"], x["weight"], x["bias"]]
    found, right = (torch.autograd.grad(value, leaves, upstream, retain_graph=True) for value in (got, expected))
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(torch.autograd.grad(got, leaves, upstream), right)  # once more: nothing was given away


def test_log_probabilities_are_float32_and_padding_is_zero() -> None:
    x = made(torch.bfloat16)
    token = x["target"].clone()
    token[-4:] = -100
    got = token_log_probabilities(x["hidden"], x["weight"], token)
    true = (x["hidden"].double() @ x["weight"].double().T).log_softmax(-1).gather(1, x["target"][:, None]).squeeze(1)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got[:-4].double(), true[:-4], rtol=1e-5, atol=1e-5)
    assert not got[-4:].any()
    assert not torch.autograd.grad(got.sum(), x["hidden"])[0][-4:].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature must be above 0, got 0.0"),
        ({"max_bytes": 10}, "max_bytes of 10 B is too small"),
        ({"max_bytes": 10, "rows_per_chunk": 1}, "not both"),
    ],
)
def test_log_probabilities_refuse_what_cannot_be(change: dict[str, Any], message: str) -> None:
    x = made()
    with pytest.raises(ValueError, match=message):
        token_log_probabilities(x["hidden"], x["weight"], x["target"], **change)


# ---------------------------------------------------------------- the module
def test_module_is_the_function_with_its_own_weight() -> None:
    torch.manual_seed(0)
    x = made()
    module = LinearCrossEntropy(
        D, V, bias=True, class_weight=x["class"], dtype=torch.float64, label_smoothing=0.1, form="recompute"
    )
    linear = torch.nn.Linear(D, V, dtype=torch.float64)
    module.load_state_dict({**linear.state_dict(), "class_weight": x["class"]})
    loss = module(x["hidden"], x["target"])
    expected = F.cross_entropy(linear(x["hidden"]), x["target"], x["class"], label_smoothing=0.1)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close([p.grad for p in module.parameters()], [p.grad for p in linear.parameters()])
    assert "width=6, vocabulary=37, bias=True, label_smoothing=0.1, form='recompute'" in repr(module)


def test_module_begins_like_a_linear_layer() -> None:
    torch.manual_seed(3)
    mine = LinearCrossEntropy(D, V, bias=True)
    torch.manual_seed(3)
    linear = torch.nn.Linear(D, V)
    torch.testing.assert_close(list(mine.parameters()), list(linear.parameters()))


def test_module_with_a_tied_weight_has_no_parameter_of_its_own() -> None:
    embedding = torch.nn.Embedding(V, D)
    before = embedding.weight.detach().clone()
    loss = LinearCrossEntropy(D, V, tied_weight=embedding.weight)
    model = torch.nn.ModuleDict({"embedding": embedding, "loss": loss})
    assert len(list(model.parameters())) == 1
    torch.testing.assert_close(embedding.weight.detach(), before)
    target = torch.randint(0, V, (N,))
    loss(embedding(target), target).backward()
    assert embedding.weight.grad is not None
    with pytest.raises(ValueError, match=r"tied_weight must be .*, here \[37, 7\], got shape \[37, 6\]"):
        LinearCrossEntropy(7, V, tied_weight=embedding.weight)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda function: torch.utils.checkpoint.checkpoint(function, use_reentrant=False),
        lambda function: function(),
    ],
)
def test_loss_works_inside_a_checkpointed_region(wrap: Callable[[Callable[[], torch.Tensor]], torch.Tensor]) -> None:
    x = made()
    expected = F.cross_entropy(x["hidden"] @ x["weight"].T, x["target"])
    loss = wrap(lambda: linear_cross_entropy(x["hidden"], x["weight"], x["target"], form="recompute"))
    torch.testing.assert_close(gradients(loss, x["hidden"], x["weight"]), gradients(expected, x["hidden"], x["weight"]))


# ---------------------------------------------------------------- where kernels run
def test_kernels_are_refused_on_the_cpu_in_words() -> None:
    x = made(torch.bfloat16)
    with pytest.raises(
        RuntimeError, match="form 'triton' runs on a GPU, and the tensors are on the CPU; take form='re"
    ):
        linear_cross_entropy(x["hidden"], x["weight"], x["target"], form="triton")


@pytest.mark.parametrize(("width", "taken"), [(16, ExponentialsPass), (6, LogitsPass)])
def test_log_probabilities_run_on_kernels_where_there_is_a_gpu(
    peak_memory: Any, monkeypatch: pytest.MonkeyPatch, width: int, taken: type
) -> None:
    """With rows that the copy engine takes and with others; the simulated device is a GPU to the code."""
    made = set()

    def watched(*arguments: Any) -> Any:
        visit_chunk = make_pass(*arguments)
        made.add(type(visit_chunk))
        return visit_chunk

    make_pass = KERNELS.make_pass
    monkeypatch.setattr(log_probabilities, "KERNELS", replace(KERNELS, make_pass=watched))
    hidden = torch.empty(64, width, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(200, width, dtype=torch.bfloat16, device="meta", requires_grad=True)
    token = torch.empty(64, dtype=torch.int64, device="meta")
    peak_memory(token_log_probabilities, hidden, weight, token, rows_per_chunk=16, backward=True)
    assert made == {taken}
