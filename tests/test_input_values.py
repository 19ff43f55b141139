"""``TensorSpec(values=...)``: what each kind of values takes, how it is spelled, and what is refused."""

from __future__ import annotations

import dataclasses
import pickle
from functools import partial
from typing import Any

import pytest

from memfix import Contract, Cuts, Dim, Integers, LogUniform, Mask, Normal, TensorSpec, Uniform
from memfix.contract import WIDE, Values
from memfix.errors import ContractError


def refusal(*arguments: Any, **options: Any) -> str:
    with pytest.raises(ContractError) as refused:
        TensorSpec(*arguments, **options)
    return str(refused.value)


def zeros(shape: Any, generator: Any, dims: Any) -> Any: ...


class Filler:
    def __call__(self, shape: Any, generator: Any, dims: Any) -> Any: ...


# ---------------------------------------------------------------- what is taken
@pytest.mark.parametrize(
    ("values", "spelled", "dims"),
    [
        (Normal(), "Normal()", set()),
        (Normal(0.5), "Normal(scale=0.5)", set()),
        (Normal(fan_in="D"), "Normal(fan_in='D')", {"D"}),
        (Normal(2, "D"), "Normal(scale=2, fan_in='D')", {"D"}),
        (Uniform(-0.3, 0.3), "Uniform(-0.3, 0.3)", set()),
        (Uniform(low=0, high=1), "Uniform(0, 1)", set()),
        (LogUniform(-1000.0, -0.001), "LogUniform(-1000.0, -0.001)", set()),
        (Integers("V"), "Integers('V')", {"V"}),
        (Integers(0, "V"), "Integers('V')", {"V"}),
        (Integers(high=7), "Integers(7)", set()),
        (Integers(-2, 7), "Integers(-2, 7)", set()),
        (Integers("T", "V"), "Integers('T', 'V')", {"T", "V"}),
        (Mask(), "Mask()", set()),
        (Cuts("T"), "Cuts('T')", {"T"}),
    ],
)
def test_values_are_spelled_as_they_are_written_and_know_their_dims(
    values: Values, spelled: str, dims: set[str]
) -> None:
    assert repr(values) == spelled
    assert values.dims == dims
    assert eval(spelled) == values
    assert pickle.loads(pickle.dumps(values)) == values
    assert hash(dataclasses.replace(values)) == hash(values)  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("dtype", "values"),
    [("working", Normal()), (WIDE, Normal()), ("float32", Normal()), ("bool", Mask())],
)
def test_a_floating_input_is_normal_and_a_bool_is_a_mask_unless_they_say_otherwise(dtype: str, values: Values) -> None:
    assert TensorSpec("x", "N", dtype=dtype) == TensorSpec("x", "N", dtype=dtype, values=values)
    assert TensorSpec("x", "N", dtype=dtype).spelled() == f"shape=N, dtype={dtype}, grad=False, values={values!r}"


def test_bounds_that_are_dims_have_their_sizes() -> None:
    assert Integers("T", "V").range_at({"T": 3, "V": 50}) == (3, 50)
    assert Integers(9).range_at({}) == (0, 9)


@pytest.mark.parametrize(
    ("function", "spelled"),
    [
        (zeros, "function zeros"),
        (Filler(), "function Filler"),
        (lambda shape, generator, dims: None, "function <lambda>"),
        (lambda *arguments: None, "function <lambda>"),
    ],
    ids=["def", "object", "lambda", "variadic"],
)
def test_a_function_of_three_arguments_is_taken_and_spelled_without_its_address(function: Any, spelled: str) -> None:
    spec = TensorSpec("x", "N", values=function, sometimes=0.0)
    assert spec.spelled().endswith(f"values={spelled}, sometimes=0.0")
    assert spec == dataclasses.replace(spec), "a copy holds the same function"


def test_dims_that_values_name_belong_to_the_input() -> None:
    assert TensorSpec("ids", "N 3", dtype="int64", values=Integers("low", "V")).dims == {"N", "low", "V"}
    assert TensorSpec("cuts", "S+1", dtype="int32", values=Cuts("T")).dims == {"S", "T"}
    twice = TensorSpec("weight", "2*F D")
    assert (twice.dims, twice.size({"F": 3, "D": 5})) == ({"F", "D"}, (6, 5))


# ---------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("dtype", "values", "reason"),
    [
        ("working", Normal(scale=0), "Normal(scale=0) needs a scale above 0, and as fan_in the name of a dim"),
        (
            "working",
            Normal(scale=float("nan")),
            "Normal(scale=nan) needs a scale above 0, and as fan_in the name of a dim",
        ),
        ("working", Normal("D"), "Normal(scale='D') needs a scale above 0, and as fan_in the name of a dim"),
        ("working", Normal(fan_in=64), "Normal(fan_in=64) needs a scale above 0, and as fan_in the name of a dim"),
        ("int64", Normal(), "Normal() needs a floating dtype, got int64 and shape 'S+1'"),
        ("bool", Uniform(0, 1), "Uniform(0, 1) needs a floating dtype, got bool and shape 'S+1'"),
        ("working", Uniform(1.0, 1.0), "Uniform(1.0, 1.0) needs two numbers, low below high"),
        ("working", Uniform(0.0, "V"), "Uniform(0.0, 'V') needs two numbers, low below high"),
        ("working", Uniform(0.0, float("inf")), "Uniform(0.0, inf) needs two numbers, low below high"),
        ("working", LogUniform(0.0, 1.0), "LogUniform(0.0, 1.0) needs two numbers of one sign, low below high"),
        ("working", LogUniform(9.0, 1.0), "LogUniform(9.0, 1.0) needs two numbers of one sign, low below high"),
        ("working", LogUniform(None, 1.0), "LogUniform(None, 1.0) needs two numbers of one sign, low below high"),
        ("int64", LogUniform(1.0, 9.0), "LogUniform(1.0, 9.0) needs a floating dtype, got int64 and shape 'S+1'"),
        ("working", Integers("V"), "Integers('V') needs an integer dtype, got working and shape 'S+1'"),
        ("bool", Integers(2), "Integers(2) needs an integer dtype, got bool and shape 'S+1'"),
        ("int64", Integers(2.5), "Integers(2.5) needs whole numbers or names of dims, low below high"),
        ("int64", Integers(True, 3), "Integers(True, 3) needs whole numbers or names of dims, low below high"),
        ("int64", Integers(), "Integers(0) needs whole numbers or names of dims, low below high"),
        ("int64", Integers(3, 3), "Integers(3, 3) needs whole numbers or names of dims, low below high"),
        ("int8", Mask(), "Mask() needs bool, got int8 and shape 'S+1'"),
        ("int8", Cuts("T"), "Cuts('T') needs int32 or int64 and a shape like 'S+1', got int8 and shape 'S+1'"),
        ("int64", Cuts(3), "Cuts(3) needs the name of a dim"),
        ("int64", lambda shape: None, "function <lambda> needs to take three arguments: shape, generator and dims"),
        ("int64", partial(zeros, dims={}), "function partial needs to take three arguments: shape, generator and dims"),
        ("int64", Integers, "values=Integers is a class; write values=Integers(...)"),
        (
            "working",
            0.5,
            "values must be Normal, Uniform, LogUniform, Integers, Mask, Cuts or a function of shape, generator and "
            "dims, got 0.5",
        ),
    ],
)
def test_values_that_cannot_be_drawn_are_refused_with_the_name_of_the_input(
    dtype: str, values: Any, reason: str
) -> None:
    assert refusal("x", "S+1", dtype=dtype, values=values) == f"input 'x': {reason}"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "bool", "sometimes": 1}, "Mask() decides every element; drop sometimes="),
        ({"dtype": "bool", "patterns": ("even",)}, "Mask() has no patterns; drop patterns="),
        ({"values": zeros, "patterns": ("even",)}, "function zeros has no patterns; drop patterns="),
        (
            {"dtype": "int64", "values": Cuts("T"), "patterns": ("even", "runs")},
            "Cuts('T') has no patterns; drop patterns=",
        ),
    ],
)
def test_options_that_values_leave_no_room_for_are_refused(options: dict[str, Any], reason: str) -> None:
    assert refusal("x", "S+1", **options) == f"input 'x': {reason}"


def test_a_dim_that_only_values_name_has_to_be_there() -> None:
    with pytest.raises(ContractError, match=r"^same: input 'x' uses 'Q', which is no dim; known: N$"):
        Contract(
            "same", naive=abs, forms={"form": abs}, dims={"N": Dim(1, 3)}, cases={"a": {"N": 2}},
            inputs=[TensorSpec("x", "N", dtype="int64", values=Integers("N", "Q"))],
        )  # fmt: skip


# ---------------------------------------------------------------- how it was spelled before
@pytest.mark.parametrize(
    ("options", "now"),
    [
        ({"dtype": "int64", "high": "V"}, "high='V' is spelled values=Integers('V')"),
        ({"dtype": "int64", "low": 2, "high": 9}, "low=2, high=9 is spelled values=Integers(2, 9)"),
        ({"dtype": "int64", "low": 2}, "low=2 is spelled values=Integers(high)"),
        ({"low": -0.3, "high": 0.3}, "low=-0.3, high=0.3 is spelled values=Uniform(-0.3, 0.3)"),
        ({"high": 2.0}, "high=2.0 is spelled values=Uniform(0.0, 2.0)"),
        (
            {"low": -9.0, "high": -1.0, "log_uniform": True},
            "low=-9.0, high=-1.0, log_uniform=True is spelled values=LogUniform(-9.0, -1.0)",
        ),
        ({"scale": 0.5}, "scale=0.5 is spelled values=Normal(scale=0.5)"),
        ({"fan_in": "D", "scale": 1.0}, "fan_in='D', scale=1.0 is spelled values=Normal(fan_in='D')"),
        ({"dtype": "int64", "cumulative": "T"}, "cumulative='T' is spelled values=Cuts('T')"),
        ({"dtype": "bool", "high": 2}, "high=2 is spelled values=Mask()"),
        ({"dtype": "int64", "high": "V", "values": Integers("V")}, "high='V' is spelled values=Integers('V')"),
    ],
)
def test_an_old_spelling_is_refused_with_the_new_one(options: dict[str, Any], now: str) -> None:
    assert refusal("x", "N", **options) == f"input 'x': {now}"
    assert refusal(name="x", shape="N", **options) == f"input 'x': {now}"


def test_an_option_that_never_was_is_pythons_to_refuse() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'vlaues'"):
        TensorSpec("x", "N", vlaues=Normal())  # type: ignore[call-arg]
