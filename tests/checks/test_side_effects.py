"""What a form does beside its answer: to a NaN of its input, and to the caller's random numbers."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from memfix import BadInput, Contract, Dim, Form, TensorSpec
from memfix.checks.calls import drawn_calls
from memfix.checks.comparing import Unequal
from memfix.checks.effort import PROFILES
from memfix.checks.equality import check_equality, compare_once
from memfix.checks.examine import examine
from memfix.checks.inputs import Draw, make_inputs
from memfix.errors import UsageError
from memfix.meters import get_meter


def product(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    return x * (2.0 if scale is None else scale)


def contract_of(form: Callable[..., torch.Tensor], naive: Callable[..., torch.Tensor] = product) -> Contract:
    return Contract(
        name="scaling",
        naive=naive,
        forms={"form": Form(form)},
        dims={"T": Dim(1, 20), "D": Dim(1, 20)},
        inputs=[TensorSpec("x", "T D", grad=True), TensorSpec("scale", "D", grad=True, optional=True)],
        cases={"small": {"T": 4, "D": 4}},
    )


def found(made: Contract, dtype: str | None = None) -> tuple[str, str]:
    finding = check_equality(made, "form", dtype=dtype or made.dtypes[-1], examples=20)
    return finding.status, finding.text()


def test_every_floating_input_is_spoiled_in_one_dtype_and_spelled() -> None:
    made = contract_of(product)
    calls = [call.draw for dtype in made.dtypes for call in drawn_calls(made, dtype, 20)]
    spoiled = [draw for draw in calls if draw.spoiled]
    assert [draw.spoiled for draw in spoiled] == ["x", "x", "scale", "scale"]
    assert len([draw for draw in calls if draw.mode == "plain"]) == 20 * len(made.dtypes) + 4
    for draw in spoiled:
        assert Draw.parsed(made, draw.spelled()).spoiled == draw.spoiled
        tensors = make_inputs(made, draw, "cpu")
        assert [name for name, tensor in tensors.items() if tensor.isnan().any()] == [draw.spoiled]
        assert tensors[str(draw.spoiled)].isnan().any(-1).all(), "in every row"
    with pytest.raises(UsageError, match="has no input 'y'"):
        Draw.parsed(made, "T=1,D=1,dtype=float32,spoiled=y")


def test_a_result_that_shares_memory_with_an_input_fails_unless_naives_does() -> None:
    def first(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        return x[:1] if scale is None else x[:1] * scale

    def copied(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        return first(x, scale).clone()

    status, text = found(contract_of(first, copied), "float32")
    assert status == "fail"
    assert "its output shares memory with its input x; naive's does not" in text
    assert found(contract_of(first, first), "float32")[0] == "pass"
    assert found(contract_of(copied, first), "float32")[0] == "pass"


@pytest.mark.parametrize("wrong", [12345.0, float("inf"), float("nan")])
def test_where_naive_and_the_truth_are_infinite_a_form_must_be_too(wrong: float) -> None:
    def infinite(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        return x.relu().log() if scale is None else x * scale

    def bounded(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        out = infinite(x, scale)
        return out.masked_fill(out.isneginf(), wrong)

    assert found(contract_of(infinite, infinite), "float32")[0] == "pass"
    status, text = found(contract_of(bounded, infinite), "float32")
    assert status == "fail"
    assert "output is neither naive's nor the truth where naive is not finite" in text


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_form_that_ends_the_process_fails(where: str) -> None:
    class Exiting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            if where == "forward":
                sys.exit(0)
            return x * 2.0

        @staticmethod
        def backward(ctx: Any, upstream: torch.Tensor) -> torch.Tensor:
            sys.exit(0)

    def exits(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        result: torch.Tensor = Exiting.apply(x) if scale is None else x * scale
        return result

    status, text = found(contract_of(exits))
    assert (status, "raises RuntimeError: it called sys.exit(0)" in text) == ("fail", True)
    statuses = {
        finding.status for finding in examine(contract_of(exits), get_meter("simulated"), PROFILES["dev"]).findings
    }
    assert "fail" in statuses


def test_a_form_that_exits_at_a_bad_input_fails() -> None:
    def exits(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        if not isinstance(x, torch.Tensor):
            sys.exit(0)
        return product(x, scale)

    bad = BadInput("no tensor", lambda call: call.update(x=1), "x must be a tensor")
    made = replace(contract_of(exits), bad_inputs=(bad,))
    found = examine(made, get_meter("simulated"), PROFILES["dev"]).findings
    assert [(f.check, f.message) for f in found if f.status == "fail"] == [("bad input", "it called sys.exit(0)")]


def test_a_number_and_an_empty_input_can_be_spoiled() -> None:
    made = Contract(
        name="adding", naive=lambda x, y: x + y.sum(), forms={"form": lambda x, y: x + y.sum()},
        dims={"N": Dim(0, 8)}, inputs=[TensorSpec("x", "", grad=True), TensorSpec("y", "N")], cases={"one": {"N": 1}},
    )  # fmt: skip
    assert make_inputs(made, Draw(made.cases["one"], spoiled="x"), "cpu")["x"].isnan()
    empty = Draw.parsed(made, "N=0,dtype=float32,spoiled=y")
    assert make_inputs(made, empty, "cpu")["y"].numel() == 0
    assert found(made)[0] == "pass"


@pytest.mark.parametrize("hide", [torch.nan_to_num, lambda y: torch.where(y == y, y, 0.0)])
def test_a_form_that_hides_a_nan_fails_and_one_that_passes_it_on_does_not(hide: Callable[..., torch.Tensor]) -> None:
    assert found(contract_of(product))[0] == "pass"
    status, text = found(contract_of(lambda x, scale: hide(product(x, scale))))
    assert status == "fail"
    assert "hides a NaN of its input: output is 0 at [0, 0], naive's is NaN" in text
    assert "spoiled=x" in text


def test_a_form_may_spread_a_nan_further_than_naive() -> None:
    assert found(contract_of(lambda x, scale: product(x, scale) + 0 * x.sum()))[0] == "pass"


def test_a_form_need_not_repeat_what_naive_makes_of_a_nan_that_it_does_not_see() -> None:
    def sums_before(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        """In row 0 of naive zeros times NaN; the first row of the form has no term."""
        return product(torch.ones(len(x), len(x), dtype=x.dtype).tril(-1) @ x, scale)

    def running(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        return product(torch.cat([torch.zeros_like(x[:1]), x.cumsum(0)[:-1]]), scale)

    assert found(contract_of(running, naive=sums_before))[0] == "pass"
    status, text = found(contract_of(lambda x, scale: running(x, scale).nan_to_num(), naive=sums_before))
    assert status == "fail"
    assert "hides a NaN of its input: output is 0 at [1, 0], naive's is NaN" in text


@pytest.mark.parametrize("use", [lambda: torch.manual_seed(3), lambda: torch.rand(2)])
def test_a_form_leaves_the_callers_random_numbers_alone_as_naive_does(use: Callable[[], object]) -> None:
    def uses(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        use()
        return product(x, scale)

    status, text = found(contract_of(uses), "float32")
    assert status == "fail"
    assert "leaves torch's random generator changed, which naive does not" in text
    assert found(contract_of(uses, naive=uses), "float32")[0] == "pass"


SETTINGS: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
    ("torch's default dtype", lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    ("torch's number of threads", lambda: torch.set_num_threads(torch.get_num_threads() + 1), torch.get_num_threads),
    (
        "the precision of float32 products",
        lambda: torch.set_float32_matmul_precision("medium"),
        torch.get_float32_matmul_precision,
    ),
    (
        "torch.backends.cuda.enable_flash_sdp",
        lambda: torch.backends.cuda.enable_flash_sdp(False),
        torch.backends.cuda.flash_sdp_enabled,
    ),
]


@pytest.mark.parametrize(("name", "change", "get"), SETTINGS, ids=[name for name, *_ in SETTINGS])
def test_a_setting_that_a_call_leaves_changed_fails_and_is_set_back(
    name: str, change: Callable[[], object], get: Callable[[], object]
) -> None:
    def changing(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        change()
        return product(x, scale)

    before = get()
    status, text = found(contract_of(changing), "float32")
    assert status == "fail"
    assert f"leaves {name} changed, which naive does not" in text
    assert get() == before
    assert found(contract_of(changing, changing), "float32")[0] == "pass"


class _Doubling(torch.autograd.Function):
    keeps: Callable[[Any, torch.Tensor, torch.Tensor], None]

    @classmethod
    def forward(cls, ctx: Any, x: torch.Tensor) -> torch.Tensor:
        result = 2 * x
        cls.keeps(ctx, x, result)
        return result

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> torch.Tensor:
        return 2 * upstream


def keeping(keeps: Callable[[Any, torch.Tensor, torch.Tensor], None]) -> Contract:
    function = type("Keeping", (_Doubling,), {"keeps": staticmethod(keeps)})

    def form(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        return function.apply(x) if scale is None else x * scale  # type: ignore[attr-defined, no-any-return]

    return contract_of(form)


def put(name: str, of: Callable[[torch.Tensor, torch.Tensor], object]) -> Callable[..., None]:
    return lambda ctx, x, result: setattr(ctx, name, of(x, result))


@pytest.mark.parametrize(
    ("keeps", "complaint"),
    [
        (put("x", lambda x, result: x), "keeps its input x as ctx.x"),
        (put("rows", lambda x, result: (1, x.detach()[:1])), "keeps its input x as ctx.rows"),
        (put("out", lambda x, result: result), "keeps its output as ctx.out"),
        (put("copied", lambda x, result: [x.clone(), result * 2, 3]), None),
        (put("leaf", lambda x, result: x.detach().requires_grad_()), None),
        (lambda ctx, x, result: ctx.save_for_backward(x, result), None),
    ],
)
def test_only_save_for_backward_keeps_inputs_and_results(keeps: Callable[..., None], complaint: str | None) -> None:
    status, text = found(keeping(keeps), "float32")
    assert status == ("fail" if complaint else "pass")
    assert (complaint or "") in text


def test_results_that_share_memory_with_each_other_fail_unless_naives_do() -> None:
    def two(x: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        out = product(x, scale)
        return out, out[:1].clone()

    def sharing(x: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        out = product(x, scale)
        return out, out[:1]

    status, text = found(contract_of(sharing, two), "float32")  # type: ignore[arg-type]
    assert status == "fail"
    assert "its output 1 shares memory with its output 0; naive's does not" in text
    assert found(contract_of(sharing, sharing), "float32")[0] == "pass"  # type: ignore[arg-type]


def test_an_input_that_the_form_freezes_still_wants_its_gradient() -> None:
    def freezes(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        if scale is not None and scale.is_leaf:
            scale.requires_grad_(False)
        return product(x, scale)

    status, text = found(contract_of(freezes), "float32")
    assert status == "fail"
    assert "gives no gradient of scale" in text


def test_an_input_need_not_be_a_leaf() -> None:
    class IntoGrad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.x = weakref.ref(x)
            return 2 * x

        @staticmethod
        def backward(ctx: Any, upstream: torch.Tensor) -> torch.Tensor | None:
            x = ctx.x()
            if not x.is_leaf:
                return None
            x.grad = 2 * upstream
            return None

    def form(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        return IntoGrad.apply(x) if scale is None else x * scale  # type: ignore[no-any-return]

    status, text = found(contract_of(form), "float32")
    assert status == "fail"
    assert "gives no gradient of x" in text


def test_an_answer_that_is_cached_by_the_object_is_stale_after_a_change_in_place() -> None:
    cached: dict[int, tuple[object, torch.Tensor]] = {}

    def form(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        _, largest = cached.setdefault(id(x), (x, x.detach().amax()))
        return product(x, scale) + (largest - x.detach().amax())

    status, text = found(contract_of(form), "float32")
    assert status == "fail"
    assert "output is off by" in text


def test_an_answer_that_is_cached_by_the_id_of_a_number_is_soon_wrong() -> None:
    kept: dict[int, float] = {}

    def scaled(x: torch.Tensor, *, times: float) -> torch.Tensor:
        return x * (2 * times)

    def form(x: torch.Tensor, *, times: float) -> torch.Tensor:
        if id(times) not in kept:
            kept[id(times)] = 2 * times
        return x * kept[id(times)]

    made = Contract(
        "scaled", naive=scaled, forms={"form": form}, dims={"T": Dim(1, 20)}, inputs=[TensorSpec("x", "T", grad=True)],
        choices={"times": (1.5, 2.5)}, cases={"small": {"T": 4}},
    )  # fmt: skip

    def compare_all() -> None:
        for dtype in made.dtypes:
            for call in drawn_calls(made, dtype, 50):
                compare_once(made, "form", call.draw)

    with pytest.raises(Unequal):
        compare_all()


def test_a_truth_of_zero_may_be_missed_by_a_few_roundings() -> None:
    def naive(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        return (x - x).sum(-1) if scale is None else product(x, scale)

    def form(x: torch.Tensor, scale: torch.Tensor | None, *, ulps: float = 8) -> torch.Tensor:
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
        return naive(x, scale) + ulps * eps if scale is None else naive(x, scale)

    assert found(contract_of(form, naive), "float64")[0] == "pass"
    assert found(contract_of(partial(form, ulps=1e6), naive), "float64")[0] == "fail"


def test_a_form_must_have_naives_defaults() -> None:
    def scaled(x: torch.Tensor, *, times: float = 1.5, power: int = 1) -> torch.Tensor:
        return (x * times) ** power

    def drifted(x: torch.Tensor, *, times: float = 2.5, power: int = 1) -> torch.Tensor:
        return scaled(x, times=times, power=power)

    def without(x: torch.Tensor, *, times: float, power: int = 1) -> torch.Tensor:
        return scaled(x, times=times, power=power)

    def made(form: Callable[..., torch.Tensor]) -> Contract:
        return Contract(
            "scaled", naive=scaled, forms={"form": form}, dims={"T": Dim(1, 20)}, inputs=[TensorSpec("x", "T")],
            choices={"times": (1.5, 2.5), "power": (1, 2)}, cases={"small": {"T": 4}},
        )  # fmt: skip

    assert found(made(scaled))[0] == found(made(without))[0] == "pass"
    status, text = found(made(drifted))
    assert status == "fail"
    assert "called without times, power, whose values are naive's defaults" in text
