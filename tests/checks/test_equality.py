"""What equality means: near the truth as naive is, in every tensor, and what a failure says."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from forked_python import forked_python

from memfix import Contract, Dim, Normal, TensorSpec, Tolerance
from memfix.checks import calls, reference
from memfix.checks.calls import drawn_calls
from memfix.checks.comparing import Unequal
from memfix.checks.draws import drawn, equality_draws, smallest_failure
from memfix.checks.equality import check_equality, check_equality_at, compare_once
from memfix.checks.inputs import Draw, laid_out, make_inputs
from memfix.contract import LAYOUTS, WIDE, WORKING_DTYPES, Form
from memfix.errors import ContractError, UsageError
from memfix.registry import all_contracts


def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


def contract(form, naive=square, **more) -> Contract:
    return Contract(
        "square",
        naive=naive,
        forms={"form": form},
        dims={"N": Dim(1, 9)},
        inputs=[TensorSpec("x", "N", grad=True)],
        cases={"small": {"N": 4}},
        **more,
    )


def at(made: Contract, **settings) -> Draw:
    return Draw(made.case_of("drawn", {"N": 4, **settings}))


def test_error_within_a_factor_of_naives_own_passes_and_beyond_fails():
    def off_by(ulps):
        return lambda x: x * x * (1 + ulps * torch.finfo(x.dtype).eps)

    compare_once(contract(off_by(3)), "form", at(contract(square)))
    with pytest.raises(Unequal, match=r"output is off by .* allowed .* \(naive's own error"):
        compare_once(contract(off_by(100)), "form", at(contract(square)))


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (lambda x: (x * x).unsqueeze(0), "output has shape [1, 4], naive's [4]"),
        (lambda x: (x * x, x), "returns 2 tensors, naive 1"),
        (lambda x: (x * x).double(), "returns torch.float64, naive torch.float32"),
        (lambda x: (x * x).detach(), "gives no gradient of x"),
        (lambda x: x * x.detach() + 0 * x, "gradient of x is off by"),
        (lambda x: torch.where(x > 0, x * x, float("nan")), "output is off by"),
    ],
)
def test_difference_is_named(form, message):
    made = contract(form)
    finding = check_equality_at(made, "form", at(made))
    assert finding.status == "fail"
    assert message in finding.message


def test_only_the_word_of_a_cpus_detour_is_kept_back(recwarn):
    """Torch says it with forty lines of its own stack, on every CPU that has no instructions for bfloat16."""

    def warning(x):
        warnings.warn("mkldnn_matmul failed, switching to BLAS gemm: a stack", stacklevel=1)
        warnings.warn("something of the form's own", stacklevel=1)
        return x * x

    assert check_equality(contract(warning), "form", dtype="float32", examples=2).status == "pass"
    assert check_equality_at(contract(warning), "form", at(contract(square))).status == "pass"
    assert {str(one.message) for one in recwarn} == {"something of the form's own"}


def test_naive_that_raises_is_not_the_forms_fault():
    def broken(x):
        raise KeyError("planted")

    made = contract(square, naive=broken)
    with pytest.raises(reference.NaiveFailed, match="KeyError: 'planted'"):
        compare_once(made, "form", at(made))
    assert check_equality(made, "form", dtype="float32", examples=3).status == "error"


def test_failure_shrinks_to_the_smallest_shape_and_reproduces():
    made = contract(lambda x: x * x if x.shape[0] < 5 else x * x * 2)
    finding = check_equality(made, "form", dtype="float32", examples=50)
    assert finding.status == "fail"
    assert "N=5,dtype=float32,seed=0" in finding.reproduce
    spelled = finding.reproduce.rpartition("--at ")[2]
    assert check_equality_at(made, "form", Draw.parsed(made, spelled)).status == "fail"


def test_the_same_draws_every_time_for_the_same_seed():
    seen = []
    made = contract(lambda x: seen.append(tuple(x.shape)) or x * x)
    for _ in range(2):
        check_equality(made, "form", dtype="float32", examples=15)
    half = len(seen) // 2
    assert seen[:half] == seen[half:]
    check_equality(made, "form", dtype="float32", examples=15, seed=1)
    seen_before = seen[:half]
    seen.clear()
    check_equality(made, "form", dtype="float32", examples=15)
    assert seen == seen_before


def calls_of(op: str, examples: int) -> list[Draw]:
    made = all_contracts()[op]
    return [call.draw for call in drawn(equality_draws(made, "float32"), made, examples)]


def test_draws_reach_one_odd_sizes_chunk_edges_and_chunks_above_the_size():
    calls = calls_of("linear_cross_entropy", 200)
    dims = [draw.case.dims for draw in calls]
    assert any(d["N"] == 1 for d in dims)
    assert any(d["rows_per_chunk"] == 1 < d["N"] for d in dims)
    assert any(d["rows_per_chunk"] > d["N"] for d in dims)
    assert any(d["rows_per_chunk"] > 1 and d["N"] % d["rows_per_chunk"] == 1 for d in dims)
    assert any(d["N"] % 2 for d in dims)
    assert {layout for draw in calls for layout in draw.layouts.values()} == {*LAYOUTS}
    assert {pattern for draw in calls for pattern in draw.patterns.values()} == {"even", "runs", "alike"}
    with_gradient = [({"hidden", "weight", *draw.case.present} - {"class_weight"}) - draw.frozen for draw in calls]
    alone = [names for names in with_gradient if len(names) == 1]
    assert {*itertools.chain(*alone)} == {"hidden", "weight", "bias"}
    assert {draw.share for draw in calls} == {0.0, 0.3, 1.0}
    assert {draw.case.present for draw in calls} == {(), ("bias",), ("class_weight",), ("bias", "class_weight")}
    assert {draw.magnitude for draw in calls} == {0.1, 1.0, 3.0, 5.0, 8.0, 100.0}


OPTIONAL = ("bias", "class_weight")


@pytest.mark.parametrize(("num_calls", "most_missed"), [(9, 6), (17, 2)])
def test_every_two_options_meet_in_a_few_draws(num_calls, most_missed):
    """Those of the loss, 96 pairs; nine calls are what a gate gives its kernels in all dtypes beside the plain."""
    choices = all_contracts()["linear_cross_entropy"].choices
    calls = calls_of("linear_cross_entropy", num_calls)
    options = [{**call.case.choices, **{name: name in call.case.present for name in OPTIONAL}} for call in calls]
    values = {**choices, **dict.fromkeys(OPTIONAL, (False, True))}
    missed = [
        (one, value, other, another)
        for one, other in itertools.combinations(values, 2)
        for value in values[one]
        for another in values[other]
        if not any(taken[one] == value and taken[other] == another for taken in options)
    ]
    assert len(missed) <= most_missed


def test_a_form_that_is_wrong_where_two_options_meet_is_found_in_four_calls_a_dtype():
    def product(x, scale=None, shift=None, *, power=1, sign=1):
        scaled = x if scale is None else x * scale
        return sign * scaled**power + (0 if shift is None else shift)

    def wrong(x, scale=None, shift=None, *, power=1, sign=1):
        return product(x, scale, shift, power=power, sign=1 if shift is not None else sign)

    optional = [TensorSpec(name, "N", optional=True) for name in ("scale", "shift")]
    plain = contract(wrong, naive=product, choices={"power": (1, 2, 3), "sign": (1, -1)})
    made = replace(plain, inputs=[*plain.inputs, *optional])
    found = [check_equality(made, "form", dtype=dtype, examples=4).status for dtype in made.dtypes]
    assert "fail" in found


def test_draws_differ_from_each_other_and_fill_their_ranges():
    calls = calls_of("rope", 40)
    assert len({call.spelled() for call in calls}) == 40
    assert sum(call.case.dims["offset"] > 2_000 for call in calls) > 10
    assert sum(call.case.dims["T"] > 7 for call in calls) > 8


def test_draws_do_not_hang_on_what_is_imported():
    """As those of Hypothesis itself do: it draws numbers that it reads in the modules of the project."""
    ask = (
        "import sys; sys.path.insert(0, '.')\n"
        "{more}\n"
        "from memfix.checks.draws import drawn, equality_draws\n"
        "from memfix.registry import all_contracts\n"
        "rope = all_contracts()['rope']\n"
        "print([call.draw.spelled() for call in drawn(equality_draws(rope, 'float32'), rope, 40)])"
    )
    root = Path(__file__).resolve().parents[2]
    said = [
        forked_python("-c", ask.format(more=more), cwd=root).stdout
        for more in ("", "import memfix.cli.gate, memfix.gate.timing.run, benchmarks.compare")
    ]
    assert said[0] == said[1] != ""


def test_draw_is_read_back_from_its_line():
    made = all_contracts()["linear_cross_entropy"]
    line = (
        "N=3,D=2,V=5,rows_per_chunk=2,reduction=sum,ignore_index=0,label_smoothing=0.1,softcap=None,z_loss=0.0,"
        "dtype=bfloat16,present=bias,seed=7,share=1,layout.hidden=strided,pattern.weight=runs,frozen=weight"
    )
    assert Draw.parsed(made, line).spelled() == line
    assert Draw.parsed(made, f"{line},absent=bias").spelled() == line.replace("present=bias,", "")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("N", "--at is a list of name=value, got 'N'"),
        ("N=x", "--at: cannot read 'N=x'"),
        ("frozen=wieght", "--at: linear_cross_entropy has no input 'wieght'; did you mean 'weight'?"),
        ("layout.hidden=round", "--at: cannot read 'layout.hidden=round'"),
        ("pattern.hidden=round", "--at: cannot read 'pattern.hidden=round'"),
        ("pattern.hiden=runs", "--at: linear_cross_entropy has no input 'hiden'; did you mean 'hidden'?"),
        ("reduction=max", "--at: cannot read 'reduction=max'"),
        ("present=bais", "--at: linear_cross_entropy has no input 'bais'; did you mean 'bias'?"),
        ("absent=bais", "--at: linear_cross_entropy has no input 'bais'; did you mean 'bias'?"),
        ("absent=bias", "--at: cannot read 'absent=bias'"),
    ],
)
def test_line_that_cannot_be_read_is_refused(line, message):
    with pytest.raises(UsageError) as refused:
        Draw.parsed(all_contracts()["linear_cross_entropy"], line)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("layout", "strides"),
    [("contiguous", (64, 1)), ("transposed", (1, 512)), ("strided", (129, 2)), ("sliced", (66, 1))],
)
def test_inputs_have_the_layout_asked_for(layout, strides):
    made = all_contracts()["linear_cross_entropy"]
    draw = Draw(made.cases["small"], layouts={"hidden": layout})
    hidden = make_inputs(made, draw, "cpu")["hidden"]
    assert hidden.shape == (512, 64)
    assert hidden.stride() == strides
    assert hidden.is_leaf
    assert hidden.requires_grad


def test_a_slice_of_heads_has_its_rows_side_by_side_and_its_other_axes_swapped():
    assert laid_out((7,), torch.float32, "cpu", "sliced").storage_offset() == 1
    heads = laid_out((2, 3, 5, 8), torch.float32, "cpu", "sliced")
    assert heads.shape == (2, 3, 5, 8)
    assert heads.stride() == (150, 10, 30, 1)


def test_a_form_that_takes_rows_for_neighbours_fails():
    def shifted(x):
        return x + 1

    def assuming(x):
        return (x.as_strided(x.shape, (x.shape[1], 1)) if x.stride(1) == 1 else x) + 1

    made = Contract(
        "shifted", naive=shifted, forms={"form": assuming}, dims={"N": Dim(1, 9), "D": Dim(2, 9)},
        inputs=[TensorSpec("x", "N D")], cases={"small": {"N": 4, "D": 4}},
    )  # fmt: skip
    finding = check_equality(made, "form", dtype="float32", examples=30)
    assert finding.status == "fail"
    assert "layout.x=sliced" in finding.text()


@pytest.mark.parametrize(("dtype", "largest"), [("bfloat16", 88.0), ("float16", 11.0)])
def test_exponentials_of_drawn_values_overflow(dtype, largest):
    made = all_contracts()["linear_cross_entropy"]
    drawn = [make_inputs(made, call.draw, "cpu")["hidden"] for call in drawn_calls(made, dtype, 32)]
    assert sum(bool((hidden.float() > largest).any()) for hidden in drawn) >= 3
    assert all(bool((hidden.float().nan_to_num() < 60).all()) for hidden in drawn) == (dtype == "float16")


def test_optional_input_is_none_unless_the_case_has_it():
    def shifted(x, shift=None):
        return x * x if shift is None else x * x + shift

    made = Contract(
        "shifted",
        naive=shifted,
        forms={"form": shifted, "deaf": lambda x, shift=None: x * x},
        dims={"N": Dim(1, 9)},
        inputs=[TensorSpec("x", "N", grad=True), TensorSpec("shift", "N", grad=True, optional=True)],
        cases={"small": {"N": 4}, "full": {"N": 4, "present": ["shift"]}},
    )
    assert list(make_inputs(made, Draw(made.cases["small"]), "cpu")) == ["x"]
    assert list(make_inputs(made, Draw(made.cases["full"]), "cpu")) == ["x", "shift"]
    assert made.cases["full"].spelled() == "N=4,dtype=float32,present=shift"
    assert check_equality(made, "form", dtype="float32", examples=20).status == "pass"
    finding = check_equality(made, "deaf", dtype="float32", examples=20)
    assert finding.status == "fail"
    assert "present=shift" in finding.reproduce
    with pytest.raises(ContractError, match=r"case 'x': no optional input 'shfit'; did you mean 'shift'\?"):
        made.case_of("x", {"N": 4, "present": ["shfit"]})


class Squared(torch.autograd.Function):
    """Refuses a second backward with the given words, or repeats it wrongly without."""

    @staticmethod
    def forward(ctx, x, words):
        ctx.save_for_backward(x)
        ctx.words, ctx.number = words, 0
        return x * x

    @staticmethod
    def backward(ctx, upstream):
        ctx.number += 1
        if ctx.number > 1 and ctx.words:
            raise RuntimeError(ctx.words)
        return 2 * ctx.number * ctx.saved_tensors[0] * upstream, None


@pytest.mark.parametrize(
    ("words", "repeats", "message"),
    [
        ("square gives its gradient away", False, None),
        ("square gives its gradient away", None, "raises RuntimeError: square gives its gradient away"),
        ("no more", False, "raises RuntimeError: no more"),
        ("", False, "second gradient of x is off by"),
    ],
)
def test_second_backward_is_refused_by_name_or_right(words, repeats, message):
    form = Form(lambda x: Squared.apply(x, words), repeats_backward=repeats)
    finding = check_equality_at(made := contract(form, repeats_backward=True), "form", at(made))
    assert finding.status == ("pass" if message is None else "fail")
    assert message is None or message in finding.message


def test_form_that_promises_more_than_naive_is_held_to_it():
    """Naive rounds on the way; a form that does the same is as good as naive, and not as good as it promised."""

    def rounding(x):
        return (x + 64) - 64

    def kept(x):
        return x * 1

    promise = Tolerance(rms_ulps=1.0)
    for function, status in ((kept, "pass"), (rounding, "fail")):
        made = contract(Form(function, tolerance=promise), naive=rounding, tolerance=Tolerance())
        draw = at(made, N=9, dtype="bfloat16")
        many = Draw(replace(draw.case, dims={"N": 64}))
        finding = check_equality_at(made, "form", many)
        assert finding.status == status, finding.text()
    assert "it rounds what the form promises to keep in float32" in finding.message
    assert check_equality_at(contract(rounding, naive=rounding), "form", many).status == "pass"


def test_form_that_rounds_its_operands_may_be_off_as_far_as_that_moves_the_truth():
    """Where the terms of a sum cancel, a rounding of them is many of the result."""
    signs = torch.tensor([1.0, -1.0]).repeat(32)

    def naive(x, y):
        return (1.1 * x.float() * y.float() * signs[: x.shape[0]]).sum().to(x.dtype)

    def rounding(x, y):
        return ((1.1 * x.float()).to(x.dtype).float() * y.float() * signs[: x.shape[0]]).sum().to(x.dtype)

    def wrong(x, y):
        return 1.05 * naive(x, y)

    def num_failed(form: Form) -> int:
        inputs, cases = [TensorSpec("x", "N"), TensorSpec("y", "N")], {"small": {"N": 4}}
        made = Contract("sums", naive=naive, forms={"form": form}, dims={"N": Dim(1, 64)}, inputs=inputs, cases=cases)
        draws = [Draw(replace(at(made).case, dims={"N": 64}, dtype="bfloat16"), seed) for seed in range(40)]
        return sum(check_equality_at(made, "form", draw).status == "fail" for draw in draws)

    allowed = Tolerance(operand_ulps=1)
    assert num_failed(Form(rounding)) > 0
    assert num_failed(Form(rounding, tolerance=allowed)) == 0
    assert num_failed(Form(wrong, tolerance=allowed)) > 10


def test_what_is_below_the_smallest_number_of_the_dtype_is_nothing():
    wide = TensorSpec("x", "N", dtype=WIDE, values=Normal(scale=1e-20))
    for dtype, status in (("float16", "pass"), ("float32", "fail")):
        made = replace(contract(lambda x: x * 0, naive=lambda x: x * 1), inputs=[wide])
        assert check_equality_at(made, "form", at(made, dtype=dtype)).status == status


# ---------------------------------------------------------------- what is remembered from form to form
def test_a_form_fails_at_the_same_call_whether_or_not_another_passed_before_it(monkeypatch):
    def wrong_from_five(x):
        return x * x if x.shape[0] < 5 else x * x + 0.5

    made = replace(contract(square), forms={"honest": Form(square), "wrong": Form(wrong_from_five)})
    monkeypatch.setattr(calls, "_DRAWN", {})
    alone = check_equality(made, "wrong", dtype="float32", examples=30)
    assert check_equality(made, "honest", dtype="float32", examples=30).status == "pass"
    assert len(calls._DRAWN) == 1
    after = check_equality(made, "wrong", dtype="float32", examples=30)
    assert alone == after
    assert after.status == "fail"
    assert "N=5" in after.details[0]


def test_the_simplest_call_and_a_usual_one_are_tried_in_every_dtype_and_others_in_each():
    tried: dict[str, list[str]] = {}
    for dtype in WORKING_DTYPES:
        several = calls.drawn_calls(all_contracts()["linear_cross_entropy"], dtype, 5)
        plain = [call for call in several if call.draw.spoiled is None and call.draw.mode == "plain"]
        assert {call.draw.case.dtype for call in plain} == {dtype}
        tried[dtype] = [replace(call.draw, case=replace(call.draw.case, dtype="any")).spelled() for call in plain]
    assert {len(of_one) for of_one in tried.values()} == {5}
    assert len({of_one[0] for of_one in tried.values()}) == 1
    assert len({of_one[-1] for of_one in tried.values()}) == 1
    others = [call for of_one in tried.values() for call in of_one[1:-1]]
    assert len(set(others)) == len(others)


def test_every_form_is_tried_on_the_same_calls():
    seen: dict[str, list[int]] = {"one": [], "other": []}
    made = replace(
        contract(square),
        forms={name: Form(lambda x, sizes=sizes: sizes.append(x.shape[0]) or x * x) for name, sizes in seen.items()},
    )
    for form in seen:
        check_equality(made, form, dtype="bfloat16", examples=30)
    assert seen["one"] == seen["other"]
    assert len(set(seen["one"])) > 3


def test_a_form_that_fails_now_and_then_has_failed():
    num_calls = 0

    def fails_once(draw):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise Unequal("once")

    made = contract(square)
    failure = smallest_failure(fails_once, drawn(equality_draws(made, "float32"), made, 10))
    assert failure is not None
    assert str(failure[1]) == "once"


def test_what_sums_are_allowed_is_worked_out_only_where_a_form_needs_it(monkeypatch):
    monkeypatch.setattr(reference, "_REMEMBERED", {})
    num_naive = 0

    def naive(x):
        nonlocal num_naive
        num_naive += 1
        return x * x

    compare_once(contract(square, naive=naive), "form", at(contract(square)))
    assert num_naive == 2  # in float64, and in the working dtype
    with pytest.raises(Unequal):
        compare_once(contract(lambda x: x * x + 1, naive=naive), "form", at(contract(square)))
    assert num_naive == 4  # and of inputs that are off, twice
