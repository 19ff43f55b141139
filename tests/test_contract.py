"""Contracts: a declaration that contradicts itself is refused where it is written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from memfix.contract import (
    DTYPE_BYTES,
    BadInput,
    Case,
    Contract,
    Dim,
    Form,
    Integers,
    Normal,
    TensorSpec,
    parameters_of,
)  # fmt: skip
from memfix.errors import EXIT_USAGE, ContractError, FormulaError
from memfix.laws import Budget, Scaling, SpeedBudget, Tolerance


def naive_scale(x: Any, weight: Any, *, mode: str = "up") -> Any: ...


def chunked_scale(x: Any, weight: Any, *, rows: int, mode: str = "up") -> Any: ...


def reported_scale(x: Any, weight: Any) -> Any: ...


def make(**changes: Any) -> Contract:
    """A sound contract with some of its parts replaced."""
    parts: dict[str, Any] = {
        "naive": naive_scale,
        "forms": {"chunked": chunked_scale},
        "dims": {"N": Dim(1, 9), "D": Dim(1, 5), "rows": Dim(1, 4)},
        "choices": {"mode": ("up", "down")},
        "inputs": [TensorSpec("x", "N D", grad=True), TensorSpec("weight", "D")],
        "cases": {"small": {"N": 8, "D": 4, "rows": 2}},
    }
    return Contract(changes.pop("name", "scale"), **{**parts, **changes})


def refusal(build: Callable[[], object]) -> str:
    with pytest.raises(ContractError) as refused:
        build()
    return str(refused.value)


# ---------------------------------------------------------------- what is filled in
def test_a_plain_callable_becomes_a_form_that_no_report_shipped() -> None:
    assert make().forms == {"chunked": Form(chunked_scale, reported=False)}


def test_a_case_takes_the_first_value_of_a_choice_it_leaves_out() -> None:
    contract = make(cases={"small": {"N": 8, "D": 4, "rows": 2}, "down": {"N": 1, "D": 1, "rows": 1, "mode": "down"}})
    assert [case.choices for case in contract.cases.values()] == [{"mode": "up"}, {"mode": "down"}]


def test_a_case_works_in_float32_unless_it_says_otherwise() -> None:
    contract = make(cases={"a": {"N": 1, "D": 1, "rows": 1}, "b": {"N": 1, "D": 1, "rows": 1, "dtype": "bfloat16"}})
    assert [case.formula_values["e"] for case in contract.cases.values()] == [4, 2]


def test_a_case_given_as_a_case_is_taken_under_its_key() -> None:
    given = Case("other", {"N": 8, "D": 4, "rows": 2}, {"mode": "down"}, "float16")
    assert make(cases={"small": given}).cases["small"] == Case(
        "small", {"N": 8, "D": 4, "rows": 2}, {"mode": "down"}, "float16"
    )


def test_a_case_is_spelled_as_dims_then_choices_then_dtype() -> None:
    assert make().cases["small"].spelled() == "N=8,D=4,rows=2,mode=up,dtype=float32"


def test_a_form_is_handed_only_the_settings_that_it_takes() -> None:
    contract = make()
    case = contract.cases["small"]
    assert contract.options("naive", case) == {"mode": "up"}
    assert contract.options("chunked", case) == {"rows": 2, "mode": "up"}


def test_a_dim_that_is_only_a_keyword_is_no_dim_of_a_shape() -> None:
    assert make().shape_dims() == ["N", "D"]


def test_a_budget_without_a_case_holds_for_every_case() -> None:
    everywhere, there = Budget("chunked", bytes="N*D*e"), Budget("chunked", case="small", bytes="1 KiB")
    contract = make(budgets=[everywhere, there])
    assert contract.budgets_of("chunked", "small") == [everywhere, there]
    assert contract.budgets_of("chunked", "drawn") == [everywhere]
    assert contract.budgets_of("naive", "small") == []


@pytest.mark.parametrize(
    ("budget", "spelled"),
    [
        (Budget("chunked", bytes="5 GiB"), "chunked [every shape, train] at most 5.00 GiB"),
        (Budget("chunked", bytes=1024, phase="held"), "chunked [every shape, held] at most 1.00 KiB"),
        (Budget("chunked", bytes="N*D*e", case="small"), "chunked [small, train] at most N*D*e"),
        (Budget("chunked", times_below_naive=2.5), "chunked [every shape, train] 2.5x below naive"),
        (
            Budget("chunked", times_below={"reported": 8}, known_broken=True),
            "chunked [every shape, train] 8x below reported, known broken",
        ),
    ],
)
def test_a_budget_is_spelled_with_its_limit(budget: Budget, spelled: str) -> None:
    assert budget.spelled() == spelled


def test_a_form_like_another_is_held_to_all_its_promises() -> None:
    contract = make(
        budgets=[Budget("chunked", bytes="N*D*e"), Budget("chunked", case="small", times_below_naive=2)],
        scaling=[Scaling("chunked", dim="N", case="small")],
        speed=[SpeedBudget("chunked", case="small", times_naive=3)],
    )
    more = contract.with_form("cheat", reported_scale, like="chunked")
    assert more.forms["cheat"] == Form(reported_scale)
    assert [law for law in more.budgets if law.form == "cheat"] == [
        Budget("cheat", bytes="N*D*e"),
        Budget("cheat", case="small", times_below_naive=2),
    ]
    assert [law for law in more.scaling if law.form == "cheat"] == [Scaling("cheat", dim="N", case="small")]
    assert [law for law in more.speed if law.form == "cheat"] == [SpeedBudget("cheat", case="small", times_naive=3)]
    assert (more.cases, more.dims, more.choices) == (contract.cases, contract.dims, contract.choices)
    assert "cheat" not in contract.forms


def test_a_form_like_a_reported_one_is_not_held_to_what_that_breaks() -> None:
    contract = make(
        forms={"chunked": chunked_scale, "reported": Form(reported_scale, reported=True)},
        budgets=[Budget("reported", bytes=1, known_broken=True), Budget("reported", bytes="N*D*e")],
    )
    more = contract.with_form("copy", reported_scale, like="reported")
    assert not more.forms["copy"].reported
    assert [law for law in more.budgets if law.form == "copy"] == [Budget("copy", bytes="N*D*e")]


def test_every_law_has_a_key_and_a_line() -> None:
    contract = make(
        budgets=[Budget("chunked", bytes="N*D*e"), Budget("chunked", times_below_naive=2)],
        scaling=[Scaling("chunked", dim="N", case="small")],
        speed=[SpeedBudget("chunked", case="small", times_naive=3)],
        bad_inputs=[BadInput("no rows", lambda arguments: None, "rows must be at least 1")],
        dtypes=("float32", "bfloat16"),
        tolerance=Tolerance(factor=2),
    )
    assert contract.laws() == {
        "tolerance": "(factor=2, rms_factor=3.0, ulps=1.0, sum_ulps=32.0)",
        "dtypes": "float32, bfloat16",
        "repeats backward": "false",
        "form chunked": "saves memory",
        "dim N": "1 to 9",
        "dim D": "1 to 5",
        "dim rows": "1 to 4",
        "choice mode": "up, down",
        "input x": "shape=N D, dtype=working, grad=True, values=Normal()",
        "input weight": "shape=D, dtype=working, grad=False, values=Normal()",
        "case small": "N=8,D=4,rows=2,mode=up,dtype=float32",
        "bad input no rows": "ValueError: rows must be at least 1",
        "budget chunked [every shape, train]": "chunked [every shape, train] at most N*D*e",
        "budget chunked [every shape, train] #2": "chunked [every shape, train] 2x below naive",
        "scaling chunked [small, train]": "chunked [small, train] grows at most like N^1 over 4 doublings",
        "speed chunked [small, train]": "chunked [small, train, cpu] takes at most 3x naive's time",
    }


def test_the_tolerance_is_a_law_where_nobody_states_it() -> None:
    assert make().laws()["tolerance"] == "(factor=4.0, rms_factor=3.0, ulps=1.0, sum_ulps=32.0)"


def test_a_loosened_law_keeps_its_key() -> None:
    tight, loose = (
        make(
            budgets=[Budget("chunked", bytes=limit), Budget("chunked", bytes=limit)],
            scaling=[Scaling("chunked", dim="N", at_most=limit, case="small")],
            speed=[SpeedBudget("chunked", case="small", times_naive=limit)],
            tolerance=Tolerance(factor=limit),
        ).laws()
        for limit in (1, 2)
    )
    assert list(tight) == list(loose)
    assert [key for key in tight if tight[key] != loose[key]] == [
        "tolerance",
        "budget chunked [every shape, train]",
        "budget chunked [every shape, train] #2",
        "scaling chunked [small, train]",
        "speed chunked [small, train]",
    ]


def test_a_reported_form_with_the_budget_it_breaks_is_taken_and_said_to_be_reported() -> None:
    contract = make(
        forms={"chunked": chunked_scale, "reported": Form(reported_scale, reported=True)},
        budgets=[Budget("reported", bytes="N", known_broken=True)],
    )
    assert contract.laws()["form reported"] == "reported"


# ---------------------------------------------------------------- dims and inputs
@pytest.mark.parametrize(("low", "high"), [(-1, 3), (4, 3)])
def test_a_dim_with_an_impossible_range_is_refused(low: int, high: int) -> None:
    assert refusal(lambda: Dim(low, high)) == f"a Dim needs 0 <= low <= high, got low={low}, high={high}"


def test_a_dim_may_begin_at_zero_and_hold_one_value() -> None:
    contract = make(
        dims={"N": Dim(0, 0), "D": Dim(3, 3), "rows": Dim(1, 4)}, cases={"empty": {"N": 0, "D": 3, "rows": 1}}
    )
    assert contract.laws()["dim N"] == "0 to 0"


@pytest.mark.parametrize(("dtype", "size"), DTYPE_BYTES.items())
def test_the_size_of_an_element_is_torchs(dtype: str, size: int) -> None:
    assert getattr(torch, dtype).itemsize == size


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "flaot32"}, "input 'x': unknown dtype 'flaot32'; did you mean 'float32'?"),
        (
            {"dtype": "int64", "values": Integers(3), "grad": True},
            "input 'x': int64 cannot take a gradient; drop grad=True",
        ),
        (
            {"dtype": "int64"},
            "input 'x': an integer input needs values=Integers(high), where high is a number or the name of a dim",
        ),
        (
            {"layouts": ("dense",)},
            "input 'x': layouts must be some of ('contiguous', 'transposed', 'strided', 'sliced'), got ('dense',)",
        ),
        (
            {"layouts": ()},
            "input 'x': layouts must be some of ('contiguous', 'transposed', 'strided', 'sliced'), got ()",
        ),
        (
            {"patterns": ("even", "odd")},
            "input 'x': patterns must be some of ('even', 'runs', 'alike'), got ('even', 'odd')",
        ),
        ({"patterns": ()}, "input 'x': patterns must be some of ('even', 'runs', 'alike'), got ()"),
    ],
)
def test_an_input_that_cannot_be_drawn_is_refused(settings: dict[str, Any], message: str) -> None:
    assert refusal(lambda: TensorSpec("x", "N", **settings)) == message


def test_an_input_knows_its_size_and_the_dims_it_speaks_of() -> None:
    spec = TensorSpec("ids", "N 3", dtype="int64", values=Integers("V"))
    assert spec.size({"N": 8, "V": 50}) == (8, 3)
    assert spec.dims == {"N", "V"}
    assert TensorSpec("scalar", "").size({}) == ()


# ---------------------------------------------------------------- budgets
@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({}, "budget of 'f': give exactly one of bytes, times_below_naive, times_below; got 0"),
        (
            {"bytes": 1, "times_below_naive": 2},
            "budget of 'f': give exactly one of bytes, times_below_naive, times_below; got 2",
        ),
        ({"bytes": 1, "phase": "trian"}, "budget of 'f': unknown phase 'trian'; did you mean 'train'?"),
        ({"times_below": {"a": 2, "b": 3}}, "budget of 'f': times_below names one other form, got {'a': 2, 'b': 3}"),
        ({"times_below": {}}, "budget of 'f': times_below names one other form, got {}"),
        ({"times_below_naive": 0}, "budget of 'f': a factor must be above 0, got 0"),
        ({"times_below": {"a": -1}}, "budget of 'f': a factor must be above 0, got -1"),
        ({"times_below_naive": float("nan")}, "budget of 'f': a factor must be above 0, got nan"),
    ],
)
def test_a_budget_without_one_clear_limit_is_refused(limits: dict[str, Any], message: str) -> None:
    assert refusal(lambda: Budget("f", **limits)) == message


def test_a_form_may_be_allowed_more_than_naive() -> None:
    assert Budget("f", times_below_naive=0.5).factor == 0.5


def test_a_budget_with_a_broken_formula_is_refused_where_it_is_written() -> None:
    with pytest.raises(FormulaError, match=r"^cannot parse the formula 'N\*\*\*D' at column 4$"):
        Budget("f", bytes="N***D")


def test_a_budget_in_decimal_units_is_told_of_powers_of_two() -> None:
    assert "unknown unit 'GB' in '24 GB'; memfix counts in powers of two" in refusal(lambda: Budget("f", bytes="24 GB"))


def test_a_budget_below_zero_is_refused() -> None:
    assert "-1" in refusal(lambda: Budget("f", bytes=-1))


# ---------------------------------------------------------------- cases
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"N": 8, "D": 4}, "scale, case 'small': missing rows"),
        ({}, "scale, case 'small': missing N, D, rows"),
        (
            {"N": 8, "D": 4, "rows": 2, "mdoe": "up"},
            "scale, case 'small': no dim or choice 'mdoe'; did you mean 'mode'?",
        ),
        ({"N": 0, "D": 4, "rows": 2}, "scale, case 'small': N must be an int of at least 1, got 0"),
        ({"N": 8.0, "D": 4, "rows": 2}, "scale, case 'small': N must be an int of at least 1, got 8.0"),
        ({"N": True, "D": 4, "rows": 2}, "scale, case 'small': N must be an int of at least 1, got True"),
        (
            {"N": 8, "D": 4, "rows": 2, "dtype": "int64"},
            "scale, case 'small': dtype must be one of ('float64', 'float32', 'bfloat16', 'float16'), got 'int64'",
        ),
    ],
)
def test_a_case_that_does_not_fix_a_call_is_refused(settings: dict[str, Any], message: str) -> None:
    assert refusal(lambda: make(cases={"small": settings})) == message


# ---------------------------------------------------------------- the contract as a whole
@pytest.mark.parametrize("name", ["", "two words", "a/b", "_"])
def test_a_contract_whose_name_is_no_word_is_refused(name: str) -> None:
    assert refusal(lambda: make(name=name)) == (
        f"a contract's name must be a word of letters, digits and _, got {name!r}"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"forms": {}}, "scale: a contract needs at least one form and one input"),
        ({"inputs": []}, "scale: a contract needs at least one form and one input"),
        ({"cases": {}}, "scale: a contract needs at least one case, or nothing would be measured"),
        (
            {"forms": {"naive": chunked_scale}},
            "scale: 'naive' is the reference and cannot be the name of a form",
        ),
        ({"choices": {"mode": ("up",), "tone": ()}}, "scale: choice 'tone' has no values"),
        (
            {"dtypes": ("float32", "int8")},
            "scale: dtypes must be some of ('float64', 'float32', 'bfloat16', 'float16'), got 'int8'",
        ),
        (
            {"inputs": [TensorSpec("x", "N D"), TensorSpec("weight", "rowz")]},
            "scale: input 'weight' uses 'rowz', which is no dim; did you mean 'rows'?",
        ),
        (
            {"inputs": [TensorSpec("x", "N D"), TensorSpec("weight", "D", dtype="int64", values=Integers("Q"))]},
            "scale: input 'weight' uses 'Q', which is no dim; known: D, N, rows",
        ),
        (
            {"inputs": [TensorSpec("x", "N D"), TensorSpec("weight", "D", values=Normal(fan_in="row"))]},
            "scale: input 'weight' uses 'row', which is no dim; did you mean 'rows'?",
        ),
        (
            {"inputs": [TensorSpec("x", "N D"), TensorSpec("weight", "D", sometimes="moed")]},
            "scale: input 'weight' is sometimes 'moed', which is no choice; did you mean 'mode'?",
        ),
        (
            {"inputs": [TensorSpec("x y", "N D"), TensorSpec("weight", "D")]},
            "scale: the name of an input must be a Python name and no keyword, got 'x y'",
        ),
        (
            {"inputs": [TensorSpec("lambda", "N D"), TensorSpec("weight", "D")]},
            "scale: the name of an input must be a Python name and no keyword, got 'lambda'",
        ),
        (
            {"inputs": [TensorSpec("x", "N D"), TensorSpec("x", "D")]},
            "scale: two inputs are named 'x'; each needs a name of its own",
        ),
        (
            {"dims": {"N|": Dim(1, 2)}, "cases": {"small": {"N|": 2}}},
            "scale: the name of a dim must be a Python name and no keyword, got 'N|'",
        ),
        (
            {"dims": {"e": Dim(1, 2)}, "cases": {"small": {"e": 2}}},
            "scale: 'e' cannot be the name of a dim: in formulas it is the item size",
        ),
        ({"naive": 3}, "scale: naive must be callable, got 3"),
        ({"forms": {"chunked": "chunked_scale"}}, "scale: chunked must be callable, got 'chunked_scale'"),
        (
            {"forms": {"chunked": lambda x, weight, rows, mode, blocks: x}},
            "scale: chunked takes 'blocks', which is no input, dim or choice",
        ),
        (
            {"naive": lambda x, weight, *, temperature: x},
            "scale: naive takes 'temperature', which is no input, dim or choice",
        ),
        (
            {"forms": {"chunked": reported_scale}},
            "scale: 'rows' is no axis of an input and no form takes it",
        ),
        (
            {"budgets": [Budget("chunkd", bytes=1)]},
            "scale: a budget names the form 'chunkd'; did you mean 'chunked'?",
        ),
        (
            {"budgets": [Budget("chunked", case="smal", bytes=1)]},
            "scale: a budget names the case 'smal'; did you mean 'small'?",
        ),
        (
            {"scaling": [Scaling("chunked", dim="N", case="big")]},
            "scale: a budget names the case 'big'; known: small",
        ),
        (
            {"speed": [SpeedBudget("chunkd", case="small", times_naive=2)]},
            "scale: a budget names the form 'chunkd'; did you mean 'chunked'?",
        ),
        (
            {"scaling": [Scaling("chunked", dim="row", case="small")]},
            "scale: a scaling law names the dim 'row'; did you mean 'rows'?",
        ),
        (
            {"scaling": [Scaling("chunked", dim="N row", case="small")]},
            "scale: a scaling law names the dim 'row'; did you mean 'rows'?",
        ),
        (
            {"budgets": [Budget("chunked", bytes="N*mode")]},
            "scale: unknown name 'mode' in the budget formula 'N*mode'; choices count where they are on or off",
        ),
        (
            {"budgets": [Budget("chunked", bytes="N*D*row")]},
            "scale: unknown name 'row' in the budget formula 'N*D*row'; did you mean 'rows'?",
        ),
        (
            {"budgets": [Budget("chunked", times_below={"chunkd": 2})]},
            "scale: times_below names the form 'chunkd'; did you mean 'chunked'?",
        ),
        (
            {"budgets": [Budget("chunked", bytes=1, known_broken=True)]},
            "scale: only a reported form may carry a known_broken budget; 'chunked' is not reported",
        ),
        (
            {"forms": {"chunked": Form(chunked_scale, reported=True)}, "budgets": [Budget("chunked", bytes=1)]},
            "scale: the reported form 'chunked' needs the budget that it breaks, with known_broken=True, "
            "or known_unequal=",
        ),
    ],
)
def test_a_contract_that_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    assert refusal(lambda: make(**changes)) == message


def test_a_form_that_is_not_there_is_refused_with_the_nearest_one() -> None:
    assert refusal(lambda: make().function("naiv")) == "scale has no form 'naiv'; did you mean 'naive'?"


def test_keywords_with_a_default_and_variadic_ones_need_no_dim() -> None:
    contract = make(forms={"chunked": lambda x, weight, rows, block=64, **more: x})
    assert contract.options("chunked", contract.cases["small"]) == {"rows": 2}


@pytest.mark.parametrize(
    "law",
    [
        lambda: Scaling("chunked", dim="N", case="small", phase="trian"),  # type: ignore[arg-type]
        lambda: SpeedBudget("chunked", case="small", times_naive=2, phase="trian"),  # type: ignore[arg-type]
    ],
    ids=["scaling", "speed"],
)
def test_scaling_and_speed_refuse_an_unknown_phase_like_a_budget(law: Callable[[], Any]) -> None:
    assert "unknown phase 'trian'; did you mean 'train'?" in refusal(law)


def test_a_scaling_law_without_a_dim_is_refused() -> None:
    assert refusal(lambda: Scaling("chunked", dim=" ", case="small")) == (
        "scaling of 'chunked': dim must name a dim, got ' '"
    )


def test_a_scaling_law_with_too_few_points_to_fit_is_refused() -> None:
    assert "doublings" in refusal(lambda: make(scaling=[Scaling("chunked", dim="N", case="small", doublings=1)]))


def test_a_case_whose_choice_is_none_of_the_values_is_refused() -> None:
    assert "sideways" in refusal(lambda: make(cases={"small": {"N": 8, "D": 4, "rows": 2, "mode": "sideways"}}))


@pytest.mark.parametrize(
    "changes",
    [
        {"cases": {"two words": {"N": 8, "D": 4, "rows": 2}}},
        {"forms": {"chunk-64": chunked_scale}},
    ],
    ids=["case", "form"],
)
def test_a_name_that_the_lock_file_cannot_hold_is_refused(changes: dict[str, Any]) -> None:
    (name,) = next(iter(changes.values()))
    assert name in refusal(lambda: make(**changes))


def test_a_contract_error_is_a_value_error_and_ends_with_the_usage_code() -> None:
    with pytest.raises(ValueError, match="needs at least one case") as refused:
        make(cases={})
    assert isinstance(refused.value, ContractError)
    assert refused.value.exit_code == EXIT_USAGE


def test_annotations_of_a_form_need_not_be_names_that_exist() -> None:
    """Python 3.14 looks them up when a signature is asked for; earlier ones want them quoted."""
    names: dict[str, Any] = {}
    quote = "" if sys.version_info >= (3, 14) else "'"
    source = f"def form(x: {quote}OnlyForTypes{quote}, weight, *, rows): ..."
    exec(compile(source, "form.py", "exec", dont_inherit=True), names)
    assert make(forms={"form": names["form"]}).dims.keys() == {"N", "D", "rows"}


# ---------------------------------------------------------------- autograd functions
class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, mode: str = "up") -> Any: ...


class ScaledInRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, rows: int) -> Any: ...


class ScaledWithASetup(torch.autograd.Function):
    @staticmethod
    def forward(x: Any, weight: Any, rows: int, mode: str = "up") -> Any: ...

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...


def builtin_apply(function: type[torch.autograd.Function]) -> Any:
    """As in torch 2.15, where it is a builtin and has no signature."""
    apply = torch._C._FunctionBase.__dict__["apply"]
    return apply.__get__(None, function)


def test_apply_of_an_autograd_function_takes_what_its_forward_takes_after_ctx() -> None:
    for apply in (Scaled.apply, builtin_apply(Scaled)):
        parameters = parameters_of(apply)
        assert [parameter.name for parameter in parameters] == ["x", "weight", "mode"]
        assert make(forms={"chunked": chunked_scale, "function": apply}).forms["function"].function == apply


def test_forward_without_ctx_gives_its_parameters_by_name() -> None:
    for apply in (ScaledWithASetup.apply, builtin_apply(ScaledWithASetup)):
        assert [parameter.name for parameter in parameters_of(apply)] == ["x", "weight", "rows", "mode"]
        contract = make(forms={"function": apply})
        assert contract.options("function", contract.cases["small"]) == {"rows": 2, "mode": "up"}


def test_apply_that_would_need_a_dim_by_position_is_refused() -> None:
    assert refusal(lambda: make(forms={"function": ScaledInRows.apply})) == (
        "scale: function takes 'rows' by position only, and dims and choices are given by name; wrap it in a function "
        "that takes it by name"
    )


def test_apply_that_is_none_of_an_autograd_function_has_its_own_signature() -> None:
    class Other:
        @classmethod
        def apply(cls, x: Any, weight: Any, *, rows: int) -> Any: ...

    assert [parameter.name for parameter in parameters_of(Other.apply)] == ["x", "weight", "rows"]
