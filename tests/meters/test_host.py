"""The host meter: what it counts, what it refuses, and contracts whose budgets and laws are of host memory."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sub_sessions import OPTIONS

import memfix
from memfix.checks.effort import Effort
from memfix.checks.examine import examine, meter_of
from memfix.checks.finding import Finding
from memfix.errors import ContractError, MeasurementError, MeterUnavailable
from memfix.gate.judge import lockable_readings
from memfix.meters import get_meter, host, resident
from memfix.meters.base import Reading
from memfix.units import KiB, MiB

METER, EFFORT = get_meter("host"), Effort("few", 4, 2)


def peak(step: Callable[[], object]) -> Reading:
    return memfix.peak(lambda device: step, meter="host")


# ---------------------------------------------------------------- what it counts
@pytest.mark.parametrize("n", [1_000, 20_000])
def test_a_list_of_ints_takes_a_pointer_and_an_object_each(n: int) -> None:
    reading = peak(lambda: [i + 1_000 for i in range(n)])
    assert 36 * n <= reading.peak_bytes <= 42 * n + 2 * host.GRANULARITY_BYTES
    assert reading.held_bytes >= 36 * n
    assert reading.leaked_bytes < host.GRANULARITY_BYTES
    assert (reading.meter, reading.exact, reading.granularity_bytes) == ("host", True, host.GRANULARITY_BYTES)


def test_a_generator_that_is_summed_stays_below_the_granularity() -> None:
    assert peak(lambda: sum(i for i in range(10_000))).peak_bytes < host.GRANULARITY_BYTES


def test_a_numpy_array_is_counted_with_its_line() -> None:
    reading = peak(lambda: np.ones(1_000_000).sum())
    assert 8_000_000 <= reading.peak_bytes <= 8_000_000 + host.GRANULARITY_BYTES
    assert reading.held_bytes < host.GRANULARITY_BYTES
    largest = reading.alive_at_peak[0]
    assert (largest.what, largest.bytes) == ("numpy array", 8_000_000)
    assert "test_host.py" in largest.place
    assert "np.ones" in largest.code


def test_arrays_and_tensors_alive_together_have_one_common_peak() -> None:
    def step() -> None:
        array = np.ones(250_000)
        tensor = torch.ones(500_000)
        del array, tensor
        np.ones(250_000)

    reading = peak(step)
    assert 4_000_000 <= reading.peak_bytes <= 4_000_000 + 4 * host.GRANULARITY_BYTES
    assert {"numpy array", "CPU tensor"} <= {row.what for row in reading.alive_at_peak}


def test_tensors_of_torch_make_a_reading_an_estimate_that_says_so() -> None:
    reading = peak(lambda: torch.ones(1_000_000) + 1)
    assert 8_000_000 <= reading.peak_bytes <= 8_000_000 + 4 * host.GRANULARITY_BYTES
    assert not reading.exact
    assert "temporaries inside their kernels" in reading.notes[0]
    assert reading.leaked_bytes < host.GRANULARITY_BYTES


def test_another_thread_makes_a_reading_an_estimate_that_says_so() -> None:
    over = threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    try:
        reading = peak(lambda: list(range(1_000)))
    finally:
        over.set()
        other.join()
    assert not reading.exact
    assert "other threads" in reading.notes[0]
    assert peak(lambda: list(range(1_000))).exact


def test_a_tensor_that_shares_numpys_memory_is_counted_once() -> None:
    reading = peak(lambda: torch.from_numpy(np.ones(1_000_000)).view(10, -1))
    assert reading.peak_bytes <= 8_000_000 + 4 * host.GRANULARITY_BYTES


def test_what_existed_before_the_step_is_not_counted() -> None:
    def build(device: str) -> Callable[[], object]:
        assert device == "cpu"
        state = np.ones(1_000_000)
        return lambda: state[:10].copy()

    assert memfix.peak(build, meter="host").peak_bytes < host.GRANULARITY_BYTES


def test_what_only_the_first_call_makes_is_neither_in_the_peak_nor_in_its_lines() -> None:
    def build(device: str) -> Callable[[], object]:
        kept: list[bytearray] = []

        def step() -> object:
            if not kept:
                kept.append(bytearray(4 * MiB))
            return bytearray(MiB)

        return step

    reading = memfix.peak(build, meter="host")
    assert MiB <= reading.peak_bytes < MiB + host.GRANULARITY_BYTES
    assert sum(row.bytes for row in reading.alive_at_peak) < MiB + host.GRANULARITY_BYTES


def test_bytes_that_every_call_keeps_are_a_leak() -> None:
    kept: list[bytearray] = []
    reading = peak(lambda: kept.append(bytearray(50_000)))
    assert 50_000 <= reading.leaked_bytes <= 50_000 + host.GRANULARITY_BYTES


def test_a_leak_of_a_few_bytes_a_tensor_is_seen_among_thousands_of_tensors() -> None:
    kept: list[bytearray] = []

    def step() -> None:
        kept.extend(bytearray(64) for _ in [torch.ones(3) for _ in range(2000)])

    assert peak(lambda: [torch.ones(3) for _ in range(2000)]).leaked_bytes < host.GRANULARITY_BYTES
    assert peak(step).leaked_bytes > 100 * KiB


@pytest.mark.parametrize("lines", [False, True])
def test_names_that_python_keeps_of_the_last_look_ups_are_no_leak(lines: bool) -> None:
    def step() -> None:
        for _ in range(2000):
            getattr([], "".join(("app", "end")))  # a new string of 47 bytes or more, as C code may make at every call

    reading = host.HostMeter(lines=lines).measure(lambda _: step)
    assert reading.leaked_bytes < host.GRANULARITY_BYTES


@pytest.mark.parametrize("keeping", [1, 2, 4])
def test_bytes_that_some_calls_keep_are_no_leak(keeping: int) -> None:
    calls: list[object] = []

    def step() -> None:  # the measured one keeps them, after one warm-up, and some of those that confirm a leak
        calls.append(np.ones(100_000) if 1 <= len(calls) <= keeping else None)

    assert peak(step).leaked_bytes < host.GRANULARITY_BYTES


# ---------------------------------------------------------------- resident memory
def test_resident_memory_shows_pages_that_are_written() -> None:
    reading = peak(lambda: np.ones(8 * MiB).sum())
    assert reading.reserved_bytes is not None
    assert 32 * MiB <= reading.reserved_bytes <= 128 * MiB


def test_memory_that_nobody_counts_makes_the_reading_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "resident_growth", lambda step: resident.Growth(64 * MiB))
    reading = peak(lambda: None)
    assert not reading.exact
    assert "resident memory grew by 64.00 MiB" in reading.notes[0]


def test_without_proc_the_fallback_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resident, "_PROC", tmp_path / "none")
    reading = peak(lambda: None)
    assert "resident memory is a lower bound: /proc/self is not usable here (FileNotFoundError)" in reading.notes[0]
    assert reading.reserved_bytes is not None
    assert reading.exact


def test_a_status_without_the_field_is_no_crash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name:\tpython\n")
    (tmp_path / "clear_refs").write_text("")
    monkeypatch.setattr(resident, "_PROC", tmp_path)
    assert "not usable here (ValueError)" in peak(lambda: None).notes[0]


# ---------------------------------------------------------------- bad input
def test_a_tracemalloc_that_runs_already_is_used_and_goes_on() -> None:
    tracemalloc.start()
    try:
        earlier = np.ones(1_000_000)
        reading = peak(lambda: np.ones(100_000))
        assert tracemalloc.is_tracing()
        assert tracemalloc.get_traced_memory()[0] >= earlier.nbytes
    finally:
        tracemalloc.stop()
    assert 800_000 <= reading.peak_bytes <= 800_000 + host.GRANULARITY_BYTES
    assert [row.bytes for row in reading.alive_at_peak if row.what == "numpy array"] == [800_000]
    assert reading.reserved_bytes is None
    assert "tracemalloc was running already" in reading.notes[0]


def test_a_step_that_stops_tracemalloc_is_refused() -> None:
    with pytest.raises(MeasurementError, match="the step stopped tracemalloc"):
        memfix.peak(lambda device: tracemalloc.stop, meter="host", warmup=0)
    assert not tracemalloc.is_tracing()


def test_a_step_that_raises_leaves_tracemalloc_off() -> None:
    with pytest.raises(ZeroDivisionError):
        peak(lambda: 1 / 0)
    assert not tracemalloc.is_tracing()


def test_a_python_without_tracemalloc_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MeterUnavailable, match="host meter unavailable: this Python has no tracemalloc; use CPython"):
        peak(lambda: None)
    with pytest.raises(MeterUnavailable, match="host meter unavailable"):
        memfix.meters.usable_meter("host")


# ---------------------------------------------------------------- contracts of host memory
def numbers(dims: Mapping[str, int], seed: int) -> range:
    return range(seed, seed + dims["N"])


def listed(numbers: range) -> Iterator[int]:
    return iter([1000 + number * 3 for number in numbers])


def streamed(numbers: range) -> Iterator[int]:
    return (1000 + number * 3 for number in numbers)


def keeping(numbers: range) -> Iterator[int]:
    """The cheat: it looks like a stream, and keeps everything that it gave."""
    kept = []
    for number in numbers:
        kept.append(1000 + number * 3)
        yield kept[-1]


def contract(form: Callable[..., Any], **options: Any) -> memfix.Contract:
    laws: dict[str, Any] = {
        "inputs": [memfix.ObjectSpec("numbers", "N", make=numbers)],
        "budgets": [memfix.Budget("form", phase="forward", bytes="4096")],
        "scaling": [memfix.Scaling("form", dim="N", at_most=0, case="large", phase="forward", doublings=3)],
        "memory": "host",
        **options,
    }
    return memfix.Contract(
        "numbers",
        naive=listed,
        forms={"form": form},
        dims={"N": memfix.Dim(0, 50)},
        cases={"large": {"N": 1000}},
        **laws,
    )


def findings(form: Callable[..., Any], **options: Any) -> dict[tuple[str, str | None], Finding]:
    found = examine(contract(form, **options), get_meter("simulated"), EFFORT)
    return {(finding.check, finding.case): finding for finding in found.findings}


def test_a_stream_holds_its_budget_and_its_law_by_the_host_meter() -> None:
    found = findings(streamed)
    assert {finding.status for finding in found.values()} == {"pass"}
    assert "meter host" in found["budget", "large"].message
    assert "meter host" in found["scaling", "large"].message


def test_a_stream_that_keeps_everything_breaks_its_law_and_its_budget() -> None:
    found = findings(keeping)
    assert found["equality", None].status == "pass"
    assert found["scaling", "large"].status == "fail"
    assert "grows like N^1.0" in found["scaling", "large"].message
    assert any("test_host.py" in line for line in found["scaling", "large"].details)
    assert found["budget", "large"].status == "fail"


def test_a_list_grows_with_its_length() -> None:
    assert findings(listed)["scaling", "large"].status == "fail"


def test_a_form_that_leaks_is_caught() -> None:
    kept: list[object] = []

    def leaking(numbers: range) -> Iterator[int]:
        kept.append(np.ones(10_000))
        return streamed(numbers)

    leak = findings(leaking)["leak", "large"]
    assert leak.status == "fail"
    assert "per call: alive after the result was dropped, meter host" in leak.message


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda numbers: iter([*streamed(numbers)][:-1]), "returns"),
        (lambda numbers: (number + 1 for number in streamed(numbers)), "item 0 is"),
        (lambda numbers: tuple(streamed(numbers)), "returns"),
    ],
)
def test_a_stream_with_another_result_is_unequal(wrong: Callable[..., Any], message: str) -> None:
    unequal = findings(wrong)["equality", None]
    assert unequal.status == "fail"
    assert message in unequal.message


def test_a_form_that_writes_into_its_object_is_unequal() -> None:
    def made(dims: Mapping[str, int], seed: int) -> list[int]:
        return [*range(dims["N"], 0, -1)]

    def sorts(numbers: list[int]) -> list[int]:
        numbers.sort()
        return numbers

    inputs = [memfix.ObjectSpec("numbers", "N", make=made)]
    found = examine(
        memfix.Contract(
            "sorting", naive=sorted, forms={"form": sorts}, dims={"N": memfix.Dim(0, 50)}, cases={"large": {"N": 50}},
            inputs=inputs, memory="host",
        ), METER, EFFORT,
    )  # fmt: skip
    assert any("writes into its input numbers" in finding.message for finding in found.findings)


def test_arrays_are_compared_by_dtype_shape_and_values() -> None:
    from memfix.checks.objects import are_same

    ones = np.ones((2, 3))
    assert are_same({"batch": [ones, float("inf")]}, {"batch": [ones.copy(), float("inf")]})
    assert are_same(np.array([np.nan, 1]), np.array([np.nan, 1]))
    assert not are_same(ones, np.ones((2, 3), dtype=np.float32))
    assert not are_same(ones, np.ones((3, 2)))
    assert not are_same(ones, np.zeros((2, 3)))
    assert not are_same([ones], (ones,))
    assert not are_same({"a": 1}, {"b": 1})


def test_tensors_of_a_host_contract_are_measured_on_the_cpu() -> None:
    doubled = memfix.Contract(
        "doubled", naive=lambda x: x + x, forms={"form": lambda x: x * 2}, dims={"N": memfix.Dim(1, 50)},
        inputs=[memfix.TensorSpec("x", "N")], cases={"large": {"N": 100_000}}, memory="host",
        budgets=[memfix.Budget("form", phase="forward", bytes="e*N + 16384")],
    )  # fmt: skip
    found = examine(doubled, get_meter("simulated"), EFFORT)
    assert [f.message for f in found.findings if f.status in ("fail", "error")] == []
    (reading,) = (r for (form, _, _), r in found.readings.items() if form == "form")
    assert reading.meter == "host"
    assert 400_000 <= reading.peak_bytes <= 400_000 + 16 * KiB


def test_host_bytes_enter_no_lock() -> None:
    found = examine(contract(streamed), get_meter("simulated"), EFFORT)
    assert found.readings
    assert lockable_readings([found]) == {}


def test_a_contract_of_the_gpu_is_never_measured_by_the_host_meter() -> None:
    on_gpu = memfix.Contract(
        "same", naive=lambda x: x, forms={"form": lambda x: x}, dims={"N": memfix.Dim(1, 5)},
        inputs=[memfix.TensorSpec("x", "N")], cases={"small": {"N": 5}},
    )  # fmt: skip
    assert meter_of(on_gpu, METER).name == "simulated"
    assert meter_of(contract(streamed), get_meter("cuda")).name == "host"


# ---------------------------------------------------------------- contracts that are refused
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "cpu"}, r"memory must be one of \('gpu', 'host'\), got 'cpu'"),
        ({"memory": "gpu"}, "an ObjectSpec is host memory; declare the contract with memory='host'"),
        ({"inputs": [memfix.TensorSpec("x", "N", grad=True)]}, "measures no backward; drop grad=True of input 'x'"),
    ],
)
def test_a_host_contract_that_contradicts_itself_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        contract(streamed, **options)


def test_a_host_contract_with_kernels_is_refused() -> None:
    with pytest.raises(ContractError, match="measures no GPU; drop has_kernels=True of form 'form'"):
        contract(memfix.Form(streamed, has_kernels=True))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "input 'x': an ObjectSpec needs make=, a function of dims and a seed"),
        ({"make": 3}, "needs make="),
        ({"make": numbers, "grad": True}, "grad= is for tensors"),
        ({"make": numbers, "dtype": "float32"}, "dtype= is for tensors"),
    ],
)
def test_an_object_that_is_declared_like_a_tensor_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        memfix.ObjectSpec("x", "N", **options)


def test_an_object_that_can_be_read_once_is_refused() -> None:
    once = memfix.ObjectSpec("x", "N", make=lambda dims, seed: iter(range(dims["N"])))
    with pytest.raises(ContractError, match="make returned an iterator, which can be read once; return a list"):
        once.made({"N": 3}, 0)


# ---------------------------------------------------------------- under pytest
def test_the_suite_and_the_fixture_use_the_host_meter(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_own="""
        import memfix

        def listed(numbers):
            return iter([n + 1000 for n in numbers])

        def streamed(numbers):
            return (n + 1000 for n in numbers)

        test_streams = memfix.suite(memfix.Contract(
            "numbers", naive=listed, forms={"streamed": streamed}, dims={"N": memfix.Dim(0, 50)},
            inputs=[memfix.ObjectSpec("numbers", "N", make=lambda dims, seed: range(dims["N"]))],
            cases={"large": {"N": 1000}}, memory="host",
            scaling=[memfix.Scaling("streamed", dim="N", at_most=0, case="large", phase="forward")],
        ), only="cpu")

        def test_fixture(peak_memory):
            assert peak_memory(list, range(10_000)).peak_bytes > 80_000
        """
    )
    result = pytester.runpytest_inprocess(*OPTIONS, "--memfix-meter=host", "-q")
    result.assert_outcomes(passed=4)
