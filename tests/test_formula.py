"""Budget formulas: exact, and nothing but arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfix.errors import ContractError, FormulaError
from memfix.formula import Formula

MAY_HOLD = "may hold numbers, dims, + - * / // % ** and min, max, ceil_div, round_up, power_of_two; not"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2*T*D*e + V", 2 * 3 * 5 * 2 + 7),
        ("T/2 + T/2", 3),
        ("0.3 - 0.1 - 0.2", 0),
        ("(1/49)*49", 1),
        ("7/2", 3),
        ("-7/2", -4),
        ("7//2", 3),
        ("7 % T", 1),
        ("T**2", 9),
        ("2**8", 256),
        ("2**0", 1),
        ("-T + 1", -2),
        ("4*GiB", 4 << 30),
        ("KiB + MiB + TiB", (1 << 10) + (1 << 20) + (1 << 40)),
        ("min(T, D, V)", 3),
        ("max(T, D, V)", 7),
        ("ceil_div(V, T)", 3),
        ("ceil_div(6, T)", 2),
        ("round_up(V, 4)", 8),
        ("round_up(8, 4)", 8),
        ("round_up(0, 4)", 0),
        ("power_of_two(1)", 1),
        ("power_of_two(64)", 64),
        ("power_of_two(V*9 + 1/2)", 32),
        (" 1_000 ", 1000),
    ],
)
def test_a_formula_is_evaluated_exactly_and_rounded_down_at_the_end(text: str, value: int) -> None:
    assert Formula(text).evaluate({"T": 3, "D": 5, "V": 7, "e": 2}) == value


def test_numbers_far_above_float_precision_keep_every_byte() -> None:
    assert Formula("T*T + 1").evaluate({"T": 10**20 + 1}) == (10**20 + 1) ** 2 + 1


def test_a_single_value_is_its_own_maximum() -> None:
    assert Formula("max(T)").evaluate({"T": 3}) == 3


def test_names_are_the_dims_and_neither_units_nor_functions() -> None:
    assert Formula("max(T*D*e, 4*GiB) + ceil_div(T, 2)").names == {"T", "D", "e"}


_ATOMS = st.one_of(st.integers(0, 10**9).map(str), st.sampled_from(["T", "D"]))
_EXPRESSIONS = st.recursive(
    _ATOMS,
    lambda inner: st.builds("({} {} {})".format, inner, st.sampled_from(["+", "-", "*", "//"]), inner),
    max_leaves=8,
)


@given(text=_EXPRESSIONS, T=st.integers(0, 10**6), D=st.integers(0, 10**6))
def test_integer_arithmetic_agrees_with_python(text: str, T: int, D: int) -> None:
    formula = Formula(text)
    try:
        expected = eval(text, {}, {"T": T, "D": D})
    except ZeroDivisionError:
        with pytest.raises(FormulaError, match="divides by zero"):
            formula.evaluate({"T": T, "D": D})
    else:
        assert formula.evaluate({"T": T, "D": D}) == expected


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(FormulaError) as refused:
        Formula("T*rows_per_chnk").evaluate({"T": 1, "rows_per_chunk": 2})
    assert str(refused.value) == (
        "unknown name 'rows_per_chnk' in the formula 'T*rows_per_chnk'; did you mean 'rows_per_chunk'?"
    )


def test_an_unknown_name_with_nothing_near_lists_what_is_known() -> None:
    with pytest.raises(FormulaError) as refused:
        Formula("Q").evaluate({"T": 1, "D": 2})
    assert str(refused.value) == "unknown name 'Q' in the formula 'Q'; known: D, T"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("T D", "cannot parse the formula 'T D' at column 3"),
        ("T +* D", "cannot parse the formula 'T +* D' at column 4"),
        ("", "cannot parse the formula ''"),
        ("T = 1", "cannot parse the formula 'T = 1' at column 3"),
    ],
)
def test_a_syntax_error_names_the_formula_and_the_column(text: str, message: str) -> None:
    with pytest.raises(FormulaError) as refused:
        Formula(text)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("T.real", "T.real"),
        ("T.bit_length()", "T.bit_length()"),
        ("(lambda: 1)()", "(lambda: 1)()"),
        ("lambda: 1", "lambda: 1"),
        ("2*'a'", "'a'"),
        ("T<2", "T < 2"),
        ("T and D", "T and D"),
        ("T if D else 1", "T if D else 1"),
        ("[T]", "[T]"),
        ("T[0]", "T[0]"),
        ("max(*T)", "*T"),
        ("max(T, key=D)", "max(T, key=D)"),
        ("T + True", "True"),
        ("'a' * 2", "'a'"),
        ("-T.real", "T.real"),
        ("max(1, T.real)", "T.real"),
        ("1j", "1j"),
        ("~T", "~T"),
        ("T << 40", "T << 40"),
        ("[x for x in T]", "[x for x in T]"),
    ],
)
def test_anything_but_arithmetic_is_refused_when_the_formula_is_written(text: str, part: str) -> None:
    with pytest.raises(FormulaError) as refused:
        Formula(text)
    assert str(refused.value) == f"the formula {text!r} {MAY_HOLD} {part!r}"


def test_an_unknown_function_is_refused_and_never_called() -> None:
    with pytest.raises(FormulaError) as refused:
        Formula("__import__('os')")
    assert str(refused.value) == (
        "unknown function '__import__' in the formula \"__import__('os')\"; "
        "known: ceil_div, max, min, power_of_two, round_up"
    )


def test_a_misspelled_function_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(FormulaError) as refused:
        Formula("ceildiv(T, 2)")
    assert str(refused.value) == "unknown function 'ceildiv' in the formula 'ceildiv(T, 2)'; did you mean 'ceil_div'?"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max()", "max takes one or more values in the formula 'max()', got 0"),
        ("ceil_div(T)", "ceil_div takes 2 values in the formula 'ceil_div(T)', got 1"),
        ("round_up(1, 2, 3)", "round_up takes 2 values in the formula 'round_up(1, 2, 3)', got 3"),
    ],
)
def test_a_function_with_the_wrong_number_of_values_is_refused(text: str, message: str) -> None:
    with pytest.raises(FormulaError) as refused:
        Formula(text)
    assert str(refused.value) == message


@pytest.mark.parametrize(("text", "shown"), [("2**9", "9"), ("2**-1", "-1"), ("4**0.5", "1/2"), ("9**9**9", "9")])
def test_an_exponent_outside_0_to_8_is_refused(text: str, shown: str) -> None:
    with pytest.raises(FormulaError) as refused:
        Formula(text).evaluate({})
    assert str(refused.value) == f"an exponent must be a whole number from 0 to 8, got {shown}"


def test_a_tower_of_small_exponents_is_refused_too() -> None:
    with pytest.raises(FormulaError):
        Formula("(((((9**8)**8)**8)**8)**8)**8").evaluate({})


def test_a_number_above_every_float_is_refused() -> None:
    with pytest.raises(FormulaError):
        Formula("1e400").evaluate({})


def test_a_formula_of_1000_characters_is_read_and_one_of_1001_refused() -> None:
    text = "1+" * 249 + "10".rjust(502)
    assert Formula(text).evaluate({}) == 259
    with pytest.raises(FormulaError) as refused:
        Formula(text + "0")
    assert str(refused.value) == "a formula must be at most 1000 characters, got 1001"


@pytest.mark.parametrize("text", ["-" * 999 + "1", "1+" * 499 + "1"])
def test_a_formula_that_nests_too_deep_is_refused(text: str) -> None:
    with pytest.raises(FormulaError, match="a formula may nest 300 operators"):
        Formula(text)


@pytest.mark.parametrize("text", ["T/D", "T//D", "T % D", "ceil_div(T, D)", "round_up(T, D)"])
def test_a_division_by_zero_names_the_formula_and_the_values(text: str) -> None:
    with pytest.raises(FormulaError) as refused:
        Formula(text).evaluate({"T": 3, "D": 0})
    assert str(refused.value) == f"the formula {text!r} divides by zero at {{'T': 3, 'D': 0}}"


def test_a_formula_error_is_a_contract_error() -> None:
    with pytest.raises(ContractError, match="cannot parse"):
        Formula("(")
