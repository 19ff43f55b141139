"""Forms with CUDA kernels in a gate without a GPU: emulated where there is a C++ compiler, and else not compared."""

from __future__ import annotations

import pytest

from memfix.checks import equality
from memfix.checks.effort import PROFILES
from memfix.checks.examine import examine
from memfix.checks.finding import exit_code_of
from memfix.checks.plan import equality_checks, place_of
from memfix.cuda_kernels.emulated import cannot_emulate
from memfix.errors import EXIT_PASS
from memfix.meters import get_meter
from memfix.registry import all_contracts


def test_cuda_kernels_are_compared_on_the_cpu_and_tritons_in_the_interpreter() -> None:
    contract = all_contracts()["matmul"]
    assert place_of(contract, "tiled", "cpu") == "cpu"
    assert place_of(contract, "triton", "cpu") == "interpreter"
    assert place_of(contract, "tiled", "cuda") == "cuda"
    assert [check.dtype for check in equality_checks(contract, "tiled", "cpu")] == ["float32"]


@pytest.mark.skipif(cannot_emulate() is not None, reason=str(cannot_emulate()))
def test_emulated_kernels_are_compared_with_naive() -> None:
    found = equality.check_equality(all_contracts()["row_max"], "cuda", dtype="float32", examples=6)
    assert (found.status, found.message) == ("pass", "float32: equal in 6 drawn calls on cpu")


def test_without_a_compiler_nothing_passes_and_nothing_is_a_regression(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equality, "cannot_emulate", lambda: "there is no C++ compiler; install g++, or set CXX")
    contract = all_contracts()["row_max"]
    examined = examine(contract, get_meter("simulated"), PROFILES["dev"], device="cpu")
    assert examined.equal_forms == frozenset()
    assert exit_code_of(examined.findings) == EXIT_PASS
    texts = {finding.check: finding.message for finding in examined.findings if finding.status == "note"}
    assert texts["equality"] == (
        "not compared on the CPU, where its kernels must be emulated: there is no C++ compiler; install g++, or set CXX"
    )
    assert texts["budget"] == "no memory of it can pass: the form was not compared with naive"
    assert not [finding for finding in examined.findings if finding.check == "budget" and finding.status == "pass"]
