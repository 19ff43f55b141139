"""The plugin in real sub-sessions: fixtures, markers, options, xdist, and what it says without a GPU."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
import torch
from rendered_markdown import rendered
from sub_sessions import OPTIONS

HAS_GPU = torch.cuda.is_available()

LOSS = """
import torch
import torch.nn.functional as F
import memfix
from memfix import Budget, Dim, Integers, TensorSpec

def dense_loss(hidden, weight, target):
    return F.cross_entropy(hidden @ weight.T, target)

def chunked_loss(hidden, weight, target, *, chunk):
    total = 0.0
    for start in range(0, hidden.shape[0], chunk):
        rows = slice(start, start + chunk)
        total = total + F.cross_entropy(hidden[rows] @ weight.T, target[rows], reduction="sum")
    return total / hidden.shape[0]
"""

REPORTED, SMALL = "T=131_072, D=2560, V=151_936, chunk=4096", "T=512, D=64, V=500, chunk=64"


def suite(phase: str, case: str = REPORTED, times_below_naive: int = 20) -> str:
    """A test file with a contract of the loss. ``SMALL`` takes a third of the time, for tests of what is around it."""
    return f"""{LOSS}
contract = memfix.Contract(
    name="my_loss",
    naive=dense_loss,
    forms={{"chunked": chunked_loss}},
    dims=dict(T=Dim(1, 40), D=Dim(1, 8), V=Dim(2, 50), chunk=Dim(1, 50)),
    inputs=[TensorSpec("hidden", "T D", grad=True), TensorSpec("weight", "V D", grad=True),
            TensorSpec("target", "T", dtype="int64", values=Integers("V"))],
    cases={{"incident": dict({case}, dtype="bfloat16")}},
    dtypes=["float64", "float32"],
    budgets=[Budget("chunked", phase="{phase}", case="incident", times_below_naive={times_below_naive})],
)
test_my_loss = memfix.suite(contract)
"""


def test_peak_memory_measures_a_call_above_its_arguments(pytester: pytest.Pytester, run: Callable) -> None:
    pytester.makepyfile(
        LOSS
        + """
def inputs():
    return (torch.randn(256, 16, requires_grad=True), torch.randn(1000, 16, requires_grad=True),
            torch.randint(0, 1000, (256,)))

def test_forward_holds_two_logits(peak_memory):
    reading = peak_memory(dense_loss, *inputs())
    assert reading.peak_bytes == 2 * 256 * 1000 * 4 + 8  # logits, log-probabilities, and two numbers
    assert reading.exact

def test_chunks_save_memory_without_gradients_only(peak_memory):
    arguments = inputs()
    dense, chunked = (peak_memory(f, *arguments, **o) for f, o in ((dense_loss, {}), (chunked_loss, {"chunk": 32})))
    assert chunked.times_below(dense) > 7
    trained = peak_memory(chunked_loss, *arguments, chunk=32, backward=True)
    assert trained.times_below(peak_memory(dense_loss, *arguments, backward=True)) < 3
    assert "chunked_loss" in trained.table()
    assert all(t.grad is None for t in arguments), "the caller's tensors are left alone"
"""
    )
    result = run("--memfix-json=readings.json", "--memfix-md=readings.md", "--strict-markers")
    result.assert_outcomes(passed=2)
    readings = json.loads((pytester.path / "readings.json").read_text())["readings"]
    assert readings[0]["bytes"] == 2 * 256 * 1000 * 4 + 8
    assert readings[0]["meter"] == "simulated"
    assert "| simulated |" in (pytester.path / "readings.md").read_text()
    result.stdout.fnmatch_lines(["memfix *: meter simulated, torch *", "*= memfix =*", "*simulated*dense_loss"])


def test_peak_memory_takes_a_module_and_shared_storage(pytester: pytest.Pytester, run: Callable) -> None:
    pytester.makepyfile(
        """
import torch

def test_module(peak_memory):
    layer = torch.nn.Linear(64, 256, bias=False)
    reading = peak_memory(layer, torch.randn(32, 64), backward=True)
    # the output, and the gradient of the weight
    assert reading.peak_bytes == 32 * 256 * 4 + 64 * 256 * 4

def test_views_of_one_storage_stay_one(peak_memory):
    base = torch.randn(1024)
    reading = peak_memory(lambda a, b: a + b, base[:512], base[512:])
    assert reading.base_bytes == 1024 * 4
    assert reading.peak_bytes == 512 * 4

def test_no_gradient_is_said(peak_memory):
    peak_memory(lambda a: a + 1, torch.ones(3), backward=True)

def test_what_cannot_be_simulated_is_said(peak_memory):
    peak_memory(lambda a: a.to_sparse(), torch.ones(3))

def test_a_read_value_is_no_obstacle(peak_memory):
    assert peak_memory(lambda a: (a.sum().item(), None)[1], torch.ones(3)).exact
"""
    )
    result = run()
    result.assert_outcomes(passed=3, failed=2)
    result.stdout.fnmatch_lines(
        ["*MeasurementError: backward=True, but no result of the call requires a gradient*"], consecutive=False
    )
    result.stdout.fnmatch_lines(["*MeasurementError: the step uses what cannot be simulated*"])


def test_suite_passes_an_honest_contract(pytester: pytest.Pytester, run: Callable) -> None:
    pytester.makepyfile(suite("forward"))
    result = run("-m", "not gpu")
    # two dtypes, the case, and variants: two with a frozen input, and one in a dtype that the case has not
    result.assert_outcomes(passed=6, deselected=4)


def test_suite_fails_a_broken_budget_and_names_the_line(pytester: pytest.Pytester, run: Callable) -> None:
    pytester.makepyfile(suite("train"))
    result = run("-k", "small-incident")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "my_loss/chunked [[]incident, train]: peak 39.*GiB, budget 5.56 GiB (20x below naive) (7.1x over), meter *",
            "*alive at the peak, largest first",
            "*GiB  _log_softmax, kept for backward * in chunked_loss *(31 x 1.16 GiB)",
        ]
    )


def test_lock_is_written_on_update_and_held_against_afterwards(pytester: pytest.Pytester, run: Callable) -> None:
    pytester.makepyfile(suite("forward", SMALL, times_below_naive=4))
    pytester.makeini("[pytest]\nmemfix_lock = memory.lock\n")
    lock = pytester.path / "memory.lock"
    result = run("-k", "small-incident")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*no entry in the lock; if this is meant, run --memfix-update and commit the lock file"]
    )
    run("-k", "small-incident", "--memfix-update").assert_outcomes(passed=1)
    entry = "my_loss/chunked [incident, held] "
    assert entry in lock.read_text()
    run("-k", "small-incident").assert_outcomes(passed=1)
    lock.write_text(re.sub(re.escape(entry) + r"\d+", entry + "1", lock.read_text()))
    result = run("-k", "small-incident")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["my_loss/chunked [[]incident, held]: * bytes (*), lock *"])


def test_results_travel_under_xdist(pytester: pytest.Pytester, run: Callable) -> None:
    pytest.importorskip("xdist")
    pytester.makepyfile(suite("forward", SMALL, times_below_naive=4))
    run("-n1", "-k", "small-incident", "--memfix-json=readings.json").assert_outcomes(passed=1)
    names = {r["name"] for r in json.loads((pytester.path / "readings.json").read_text())["readings"]}
    assert "my_loss/chunked [incident, train]" in names


@pytest.mark.skipif(HAS_GPU, reason="this is about machines without a GPU")
class TestWithoutAGpu:
    def test_gpu_tests_skip_with_the_reason_and_the_summary_says_so(
        self, pytester: pytest.Pytester, run: Callable
    ) -> None:
        pytester.makepyfile("import pytest\n@pytest.mark.gpu\ndef test_a(): raise AssertionError\n")
        result = run("-m", "gpu", "-rs")
        result.assert_outcomes(skipped=1)
        assert result.ret == pytest.ExitCode.OK
        result.stdout.fnmatch_lines(
            [
                "nothing was measured on a GPU: 1 test skipped, torch sees no GPU",
                "*SKIPPED*no GPU to measure on: torch sees no GPU",
            ]
        )

    def test_strict_makes_that_a_failure(self, pytester: pytest.Pytester, run: Callable) -> None:
        pytester.makepyfile("import pytest\n@pytest.mark.gpu\ndef test_a(): pass\n")
        for place in ("option", "ini"):
            if place == "ini":
                pytester.makeini("[pytest]\nmemfix_strict = true\n")
            result = run("-m", "gpu", *(["--memfix-strict"] if place == "option" else []))
            assert result.ret == pytest.ExitCode.TESTS_FAILED, place
            result.stdout.fnmatch_lines(["nothing was measured on a GPU:*: a failure under --memfix-strict"])

    def test_limit_marker_skips_rather_than_passing_unmeasured(self, pytester: pytest.Pytester, run: Callable) -> None:
        pytester.makepyfile("import pytest\n@pytest.mark.memfix('2GiB')\ndef test_a(): pass\n")
        run().assert_outcomes(skipped=1)

    def test_cuda_meter_falls_back_and_says_so(self, pytester: pytest.Pytester, run: Callable) -> None:
        pytester.makepyfile("import torch\ndef test_a(peak_memory): peak_memory(torch.relu, torch.ones(3))\n")
        result = run("--memfix-meter=cuda")
        result.assert_outcomes(passed=1)
        result.stdout.fnmatch_lines(
            ["note: cuda meter unavailable: torch sees no GPU; *used the simulated meter instead"]
        )
        assert run("--memfix-meter=cuda", "--memfix-strict").ret == pytest.ExitCode.TESTS_FAILED


@pytest.mark.gpu
def test_limit_marker_fails_a_test_that_takes_more(pytester: pytest.Pytester, run: Callable) -> None:
    pytester.makepyfile(
        """
import pytest, torch

@pytest.mark.memfix("64MiB")
def test_within(): torch.empty(32 << 20, dtype=torch.uint8, device="cuda")

@pytest.mark.memfix(limit="64MiB")
def test_over(): torch.empty(65 << 20, dtype=torch.uint8, device="cuda")

@pytest.mark.memfix("64MiB")
def test_nested(peak_memory): assert peak_memory(torch.relu, torch.ones(1 << 20)).peak_bytes == 4 << 20
"""
    )
    result = run("--memfix-meter=cuda")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["the test took 65.00 MiB of GPU memory, limit 64.00 MiB, meter cuda"])


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--memfix-meter=cdua", "*unknown meter 'cdua'; did you mean 'cuda'?"),
        ("--memfix-profile=fast", "*unknown profile 'fast'*"),
        ("--memfix-json=no/such/folder.json", "*cannot write the report no/such/folder.json: no folder*"),
        ("--memfix-update", "*--memfix-update writes the lock file: name it with --memfix-lock or memfix_lock"),
    ],
)
def test_bad_option_is_a_usage_error(pytester: pytest.Pytester, run: Callable, argument: str, message: str) -> None:
    pytester.makepyfile("def test_a(): pass")
    result = run(argument)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([message])


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("memfix()", "*the memfix marker takes one limit; write it as*"),
        ("memfix('2GB')", "*unknown unit 'GB' in '2GB'*"),
        ("memfix(most='2GiB')", "*the memfix marker takes one limit*"),
    ],
)
def test_bad_marker_is_a_usage_error(pytester: pytest.Pytester, run: Callable, marker: str, message: str) -> None:
    pytester.makepyfile(f"import pytest\n@pytest.mark.{marker}\ndef test_a(): pass\n")
    result = run()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([message])


def test_loading_the_plugin_imports_no_torch(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import sys\ndef test_a(): assert 'torch' not in sys.modules\n")
    pytester.runpytest_subprocess(*OPTIONS).assert_outcomes(passed=1)


def test_the_markdown_escapes_test_ids_and_has_a_verdict_for_each_reading(
    pytester: pytest.Pytester, run: Callable
) -> None:
    pytester.makepyfile(
        """
import pytest, torch

@pytest.mark.parametrize("text", ["a|b", "<img src=x>", "@everyone [x](http://y)"])
def test_hostile(peak_memory, text):
    assert peak_memory(torch.exp, torch.ones(8)).peak_bytes < (32 if "|" in text else 64), "```\\n<b>too large</b>"
"""
    )
    run("--memfix-md=readings.md").assert_outcomes(passed=2, failed=1)
    text = (pytester.path / "readings.md").read_text()
    shown = rendered(text)
    assert text.startswith("### memfix: 1 test failed, 3 readings\n")
    assert shown.references() == []
    assert {"img", "a", "b"} & {*shown.elements} == set()
    assert shown.elements.count("tr") == 4
    assert (text.count("| **FAIL** |"), text.count("| pass |")) == (1, 2)
    assert "too large" in text
