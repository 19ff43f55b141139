"""One op at one shape: its inputs, its steps, and how far each answer is off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks import workload
from benchmarks.peers import Comparison, comparison_of
from benchmarks.peers.kda import LEAST_GATE
from benchmarks.workload import Workload, draw_of, relative_error, with_peers
from memfix.contract import Contract
from memfix.errors import MemfixError
from memfix.registry import contracts

Tensor = torch.Tensor


def contract_of(op: str) -> Contract:
    (contract,) = contracts([op])
    return contract


def loss_at(*settings: str, values: str | None = "flat", **peers: Any) -> Workload:
    contract, comparison = contract_of("linear_cross_entropy"), comparison_of("linear_cross_entropy")
    return Workload(with_peers(contract, comparison, peers), comparison, draw_of(contract, "small", settings), values)


def kda_at(*settings: str, **peers: Any) -> Workload:
    contract, comparison = contract_of("kda"), comparison_of("kda")
    shape = ("B=1", "T=20", "H=2", "K=8", "V=8", *settings)
    return Workload(with_peers(contract, comparison, peers), comparison, draw_of(contract, None, shape), "mild")


def errors(work: Workload, form: str) -> dict[str, float]:
    return work.errors(form, "cpu", work.truth("cpu"))


# ---------------------------------------------------------------- which call
def test_settings_change_a_case_and_the_first_one_unless_it_is_named() -> None:
    contract = contract_of("kda")
    assert draw_of(contract, None, []).case.dims == contract.cases["incident"].dims
    draw = draw_of(contract, "small", ["T=7", "dtype=bfloat16", "dtype.g=float32", "share=0.5"])
    assert draw.case.dims == {**contract.cases["small"].dims, "T": 7}
    assert (draw.case.dtype, draw.dtypes, draw.share) == ("bfloat16", {"g": "float32"}, 0.5)
    assert draw.case.present == contract.cases["small"].present


@pytest.mark.parametrize(
    ("case", "settings", "message"),
    [
        ("smal", [], "kda has no case 'smal'; did you mean 'small'?"),
        (None, ["TT=3"], "no dim or choice 'TT'; did you mean 'T'?"),
        (None, ["T=many"], "DIM=VALUE: cannot read 'T=many'"),
        (None, ["T"], "DIM=VALUE is a list of name=value, got 'T'"),
        (None, ["T=0"], "T must be an int of at least 1, got 0"),
    ],
)
def test_settings_that_cannot_be_read_are_refused(case: str | None, settings: list[str], message: str) -> None:
    with pytest.raises(MemfixError, match=message.replace("?", r"\?")):
        draw_of(contract_of("kda"), case, settings)


def test_errors_are_taken_at_sizes_that_float64_can_hold() -> None:
    cut = kda_at("B=8", "T=8192", "K=128").at_error_size().draw.case.dims
    assert (cut["B"], cut["T"], cut["K"]) == (1, 256, 128)
    rope = contract_of("rope")
    small = Workload(rope, Comparison(), draw_of(rope, "incident", [])).at_error_size().draw.case.dims
    assert all(size <= rope.dims[dim].high for dim, size in small.items())


# ---------------------------------------------------------------- inputs
def test_gates_keys_and_strengths_are_such_that_every_kda_may_take_them() -> None:
    work = kda_at("T=500", "H=3", "K=16", "dtype=bfloat16", "dtype.g=float32")
    tensors = work.inputs("cpu")
    q, k, v, g, beta = tensors.values()
    assert {tensor.dtype for tensor in (q, k, v, beta)} == {torch.bfloat16}
    assert g.dtype == torch.float32
    torch.testing.assert_close(k.detach().float().norm(dim=-1), torch.ones(1, 500, 3), rtol=0, atol=1e-2)
    assert LEAST_GATE <= g.min() < g.max() < 0
    assert 0 <= beta.min() < 0.1 < 0.9 < beta.max() <= 1
    assert all(tensor.requires_grad for tensor in tensors.values())
    assert torch.equal(work.inputs("cpu")["g"], g)
    assert not torch.equal(work.inputs("cpu", seed=1)["g"], g)


def test_as_many_targets_are_ignored_as_asked() -> None:
    target = loss_at("N=4096", "share=0.5").inputs("cpu")["target"]
    assert 0.45 < (target == -100).double().mean().item() < 0.55


@pytest.mark.parametrize("width", [32, 512])
def test_peaked_logits_are_tens_at_any_width(width: int) -> None:
    tensors = loss_at("N=100", f"D={width}", "V=500", values="peaked").inputs("cpu")
    logits = tensors["hidden"] @ tensors["weight"].T
    assert logits.max() > 20
    assert (logits.argmax(-1) == tensors["target"]).sum() >= 90


def test_inputs_are_as_many_as_a_cache_cannot_hold_and_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    work = loss_at("N=8", "D=8", "V=50")
    many = work.rotated_inputs("cpu")
    assert len(many) == workload.MOST_COPIES
    assert not torch.equal(many[0]["hidden"], many[1]["hidden"])
    monkeypatch.setattr(workload, "ROTATED_BYTES", sum(tensor.nbytes for tensor in many[0].values()) - 1)
    assert len(work.rotated_inputs("cpu")) == 1


# ---------------------------------------------------------------- steps
def test_each_step_takes_the_next_inputs_and_drops_their_gradients() -> None:
    seen: list[int] = []

    def spying(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor, class_weight: Tensor) -> Tensor:
        seen.append(hidden.data_ptr())
        return F.cross_entropy(hidden @ weight.T, target)

    work = loss_at("N=8", spying=spying)
    inputs = [work.inputs("cpu", seed=seed) for seed in range(3)]
    step = work.step("spying", "train", inputs)
    seen.clear()  # building it takes a call
    for _ in range(4):
        step()
    places = [tensors["hidden"].data_ptr() for tensors in inputs]
    assert seen == [*places, places[0]]
    assert all(tensor.grad is None for tensors in inputs for tensor in tensors.values())


def test_a_forward_leaves_no_graph_and_a_floor_has_no_backward() -> None:
    modes: list[bool] = []

    def spying(*inputs: Tensor) -> Tensor:
        modes.append(torch.is_grad_enabled())
        return inputs[0].sum()

    work = loss_at("N=8", spying=spying)
    work.step("spying", "forward", [work.inputs("cpu")])()
    assert modes == [False]
    work.step("floor", "train", [work.inputs("cpu")])()


def test_a_step_of_several_calls_has_one_backward_and_adds_no_gradients_up() -> None:
    seen: list[Tensor] = []
    gradients: list[float] = []

    def spying(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor, class_weight: Tensor) -> Tensor:
        seen.append(hidden)
        if hidden.requires_grad:
            hidden.register_post_accumulate_grad_hook(lambda leaf: gradients.append(float(leaf.grad.sum())))
        return hidden.sum()

    work = replace(loss_at("N=8", "D=8", spying=spying), calls=3)
    step = work.step("spying", "train", [work.inputs("cpu")])
    seen.clear()  # building it takes a call
    step()
    assert len({tensor.data_ptr() for tensor in seen}) == 1
    assert len({id(tensor) for tensor in seen}) == 3
    assert gradients == [64.0] * 3
    assert all(tensor.grad is None for tensor in seen)


def test_a_floor_of_its_own_phase_is_taken_there() -> None:
    contract = contract_of("linear_cross_entropy")
    ran: list[str] = []
    comparison = Comparison(floors={"forward": lambda *inputs: ran.append("forward")})
    work = Workload(contract, comparison, draw_of(contract, "small", ["N=8"]))
    work.step("floor", "forward", [work.inputs("cpu")])()
    work.step("floor", "train", [work.inputs("cpu")])()
    assert ran == ["forward"]


@pytest.mark.parametrize(("gradient_of", "reached"), [((0,), [True, False]), (None, [True, True])])
def test_a_gradient_comes_in_through_the_outputs_that_are_named(gradient_of: Any, reached: list[bool]) -> None:
    contract, comparison = contract_of("kda"), Comparison(gradient_of=gradient_of)
    arrived: list[str] = []

    def two_outputs(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        first, second = 2 * v, 3 * k
        first.register_hook(lambda _: arrived.append("first"))
        second.register_hook(lambda _: arrived.append("second"))
        return first, second

    work = Workload(
        with_peers(contract, comparison, {"two": two_outputs}),
        comparison,
        draw_of(contract, "small", []),
    )
    work.step("two", "train", [work.inputs("cpu")])()
    assert [name in arrived for name in ("first", "second")] == reached


def test_the_gradient_of_a_loss_is_1_and_others_are_random() -> None:
    scalar, vector = Workload._upstreams([torch.zeros(()), torch.zeros(100)])
    assert scalar == 1
    assert vector.std() > 0.5


# ---------------------------------------------------------------- errors
@pytest.mark.parametrize(("dtype", "low", "high"), [("float32", 1e-9, 1e-6), ("bfloat16", 1e-4, 1e-2)])
def test_naives_error_is_the_rounding_of_its_dtype(dtype: str, low: float, high: float) -> None:
    found = errors(kda_at(f"dtype={dtype}"), "naive")
    assert found.keys() == {"output 0", "output 1", *(f"gradient of {name}" for name in ("q", "k", "v", "g", "beta"))}
    assert low < max(found.values()) < high


def test_a_gradient_that_leaves_out_rows_no_target_hits_is_seen() -> None:
    """The error that a filter of small probabilities makes: nearly nothing in the whole, everything in those rows."""

    def filtered(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor, class_weight: Tensor) -> Tensor:
        hit = torch.zeros(weight.shape[0], 1, dtype=weight.dtype).index_fill(0, target, 1)
        return F.cross_entropy(hidden @ (weight * hit + (weight * (1 - hit)).detach()).T, target)

    work = loss_at("N=64", "D=32", "V=20000", filtered=filtered)
    found = errors(work, "filtered")
    assert found["gradient of weight, rows without a target"] == 1.0
    assert found["gradient of weight"] < 0.2
    assert found["gradient of hidden"] < 1e-5
    assert max(errors(work, "naive").values()) < 1e-5


def test_logits_that_were_rounded_to_16_bits_are_seen_where_they_are_peaked() -> None:
    def rounded(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor, class_weight: Tensor) -> Tensor:
        return F.cross_entropy((hidden @ weight.T).bfloat16().float(), target)

    flat, peaked = (
        errors(loss_at("N=256", "D=32", "V=500", values=values, rounded=rounded), "rounded")["gradient of hidden"]
        for values in ("flat", "peaked")
    )
    assert peaked > 1e-2
    assert flat < peaked / 5


def test_a_gradient_that_does_not_arrive_is_an_error() -> None:
    def without_gate_gradient(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None
    ) -> Any:
        return contract_of("kda").naive(q, k, v, g.detach(), beta)

    with pytest.raises(ValueError, match="no gradient of g"):
        errors(kda_at(cheat=without_gate_gradient), "cheat")


@pytest.mark.parametrize(("found", "error"), [(0.0, 0.0), (1e-9, float("inf"))])
def test_of_a_true_zero_anything_else_is_infinitely_wrong(found: float, error: float) -> None:
    assert relative_error(torch.full((3,), found), torch.zeros(3, dtype=torch.float64)) == error
