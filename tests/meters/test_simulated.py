"""The simulated meter: bytes by hand, the same bytes on a GPU, and torch left as it was."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from workloads import WORKLOADS

import memfix
from memfix.errors import MeasurementError, UsageError
from memfix.meters import get_meter
from memfix.meters.simulated import fake_device, tables
from memfix.meters.simulated.gpus import get_gpu
from memfix.meters.simulated.workspace import rules


def simulated(build):
    return memfix.peak(build)


def test_matmul_forward_takes_its_result():
    def build(device):
        a, b = torch.empty(100, 50, device=device), torch.empty(50, 30, device=device)
        return lambda: a @ b

    reading = simulated(build)
    assert (reading.peak_bytes, reading.held_bytes) == (100 * 30 * 4, 100 * 30 * 4)
    assert reading.base_bytes == (100 * 50 + 50 * 30) * 4
    assert reading.exact


def test_dropped_temporary_is_counted_at_the_peak_and_not_held():
    def build(device):
        x = torch.empty(1000, device=device)
        return lambda: (x + 1).exp().sum()

    reading = simulated(build)
    assert reading.peak_bytes == 8000
    assert reading.held_bytes == 4


def test_softmax_backward_makes_the_product_of_gradient_and_output():
    def build(device):
        x = torch.empty(256, 512, device=device, requires_grad=True)
        upstream = torch.empty(256, 512, device=device)

        def step():
            x.softmax(-1).backward(upstream)
            x.grad = None

        return step

    assert simulated(build).peak_bytes == 3 * 256 * 512 * 4  # the output, the product, the gradient


def test_gradients_are_added_in_place_as_without_a_mode():
    def build(device):
        x = torch.empty(1 << 20, device=device, requires_grad=True)

        def step():
            (x * 1.0 + x * 2.0 + x * 3.0).sum().backward()
            x.grad = None

        return step

    reading = simulated(build)
    # two partial sums while a third product is made; in backward a gradient and the sum it is added to
    assert reading.peak_bytes == 3 * (4 << 20)


def test_bytes_are_the_same_twice_in_a_row():
    first, second = (simulated(WORKLOADS["checkpoint_without_reentry"]) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("name", WORKLOADS)
def test_everyday_training_code_is_known_exactly(name):
    reading = simulated(WORKLOADS[name])
    assert reading.notes == ()
    assert reading.peak_bytes > 0
    assert reading.leaked_bytes == 0


@pytest.mark.gpu(use="meters")
@pytest.mark.parametrize("name", WORKLOADS)
def test_prediction_is_the_allocators_byte_for_byte(name):
    predicted = simulated(WORKLOADS[name])
    real = memfix.peak(WORKLOADS[name], meter="cuda")
    assert predicted.peak_bytes == real.peak_bytes, predicted.table()


def test_leak_is_told_from_what_the_result_holds():
    kept = []

    def build(device):
        x = torch.empty(256, device=device)

        def step():
            kept.append(x + 1)
            return x * 2

        return step

    reading = simulated(build)
    assert (reading.held_bytes, reading.leaked_bytes) == (2048, 1024)


def test_operator_without_a_rule_makes_the_reading_an_estimate():
    def build(device):
        x = torch.empty(64, 64, device=device)
        return lambda: torch.linalg.qr(x)

    reading = simulated(build)
    assert not reading.exact
    assert reading.notes == ("the workspace that cuSOLVER asks for in aten.linalg_qr.default",)
    assert reading.peak_bytes == 64 * 64 * 4 * 2


def test_source_lines_name_forward_and_backward():
    def build(device):
        x = torch.empty(1024, 256, device=device, requires_grad=True)

        def step():
            y = x.exp()
            y.sin().sum().backward()
            x.grad = None

        return step

    table = simulated(build).table()
    assert "test_simulated.py" in table
    assert "y = x.exp()" in table
    assert "kept for backward" in table


class Node:
    """Something that only the collector frees."""

    def __init__(self):
        self.itself = self


def test_what_was_there_before_can_be_collected_afterwards():
    """Python 3.12 starts with frozen objects; what the meter froze on top of them was never collected again."""
    gc.collect()
    node = Node()
    alive = weakref.ref(node)
    simulated(lambda device: lambda: torch.empty(4, device=device))
    del node
    gc.collect()
    assert alive() is None


def test_what_a_program_has_frozen_stays_frozen_and_nothing_else_does():
    gc.freeze()
    try:
        frozen, node = gc.get_freeze_count(), Node()
        alive = weakref.ref(node)
        simulated(lambda device: lambda: torch.empty(4, device=device))
        assert 0.9 * frozen < gc.get_freeze_count() <= frozen  # some of them die by the way
        del node
        gc.collect()
        assert alive() is None
    finally:
        gc.unfreeze()


def test_named_ranges_reach_the_profiler_and_take_nothing():
    def build(device):
        def step():
            with torch.profiler.record_function("range"):
                return torch.empty(4, device=device)

        return step

    with torch.profiler.profile() as profiler:
        reading = simulated(build)
    assert (reading.peak_bytes, reading.exact) == (16, True)
    assert [row.count for row in profiler.key_averages() if row.key == "range"] == [2]  # the warm-up, and the step


def test_build_that_returns_no_step_is_refused():
    with pytest.raises(
        UsageError, match="build must return the step to measure, a function without arguments; got None"
    ):
        simulated(lambda device: None)


def test_torch_is_left_as_it_was_after_an_exception():
    def before_and_after():
        cuda = torch.cuda
        return (
            cuda.is_available,
            cuda.synchronize,
            torch.UntypedStorage.resize_,
            torch.autograd.graph._engine_run_backward,
        )

    def build(device):
        assert torch.cuda.is_available()
        raise KeyError("planted")

    was, collecting = before_and_after(), gc.isenabled()
    with pytest.raises(KeyError, match="planted"):
        simulated(build)
    assert before_and_after() == was
    assert gc.isenabled() == collecting
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    x = torch.ones(3, requires_grad=True)
    F.one_hot(torch.tensor([0, 1]), 2)
    (x * 2).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 2]


def test_measurements_nest():
    inner = []

    def build(device):
        x = torch.empty(1024, device=device)

        def step():
            if not inner:
                inner.append(simulated(WORKLOADS["matmul"]))
            return x + 1

        return step

    assert simulated(build).peak_bytes == 4096
    assert inner[0] == simulated(WORKLOADS["matmul"])


def test_a_torch_that_cannot_fake_cuda_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(fake_device, "_PROBE", "import os; os.abort()")
    verdict = fake_device._probe_in_child()
    assert verdict.no_device is not None
    assert verdict.no_device.startswith("this torch cannot hold fake CUDA tensors (self-test exit -6")
    assert "measure on a GPU with --meter=cuda" in verdict.no_device
    assert verdict.cannot_hide_modes == verdict.no_device


def test_a_torch_whose_formulas_cannot_be_followed_makes_every_reading_an_estimate(monkeypatch):
    monkeypatch.setattr(fake_device, "_PROBE", "print('fake-device-works', flush=True); raise OSError('planted')")
    verdict = fake_device._probe_in_child()
    assert verdict.no_device is None
    assert verdict.cannot_hide_modes == (
        "in-place steps of libtorch's formulas are counted as new tensors here (self-test exit 1: OSError: planted)"
    )
    monkeypatch.setattr(fake_device, "self_test", lambda: verdict)
    reading = simulated(WORKLOADS["matmul"])
    assert not reading.exact
    assert reading.notes == (verdict.cannot_hide_modes,)


def test_a_self_test_that_never_ends_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(fake_device, "_PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(fake_device, "_PROBE_TIMEOUT_S", 0.2)
    verdict = fake_device._probe_in_child()
    assert verdict.no_device is not None
    assert verdict.no_device == (
        "the self-test of fake CUDA tensors did not finish (TimeoutExpired); try again, or use torch 2.11 to 2.15 on "
        "Linux or macOS, or measure on a GPU with --meter=cuda"
    )


def test_a_self_test_that_did_not_finish_is_not_remembered(monkeypatch, tmp_path):
    """A machine was busy once, and every later run was refused."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fake_device, "_PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(fake_device, "_PROBE_TIMEOUT_S", 0.2)
    assert "try again" in fake_device.self_test.__wrapped__().no_device
    assert not [*tmp_path.rglob("*.json")]
    monkeypatch.setattr(fake_device, "_PROBE", "print('fake-device-works hiding-modes-works')")
    monkeypatch.setattr(fake_device, "_PROBE_TIMEOUT_S", 60)
    assert fake_device.self_test.__wrapped__().no_device is None
    assert len([*tmp_path.rglob("*.json")]) == 1


def test_process_ends_cleanly_after_measuring():
    """Libtorch follows pointers of ours at exit."""
    code = "import memfix, torch\nprint(memfix.peak(lambda d: (lambda: torch.empty(8, device=d))).peak_bytes)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "32"), done.stderr


def test_unknown_meter_suggests_the_nearest():
    with pytest.raises(UsageError, match="unknown meter 'simulate'; did you mean 'simulated'"):
        get_meter("simulate")


def test_memory_that_only_the_collector_frees_makes_the_reading_an_estimate():
    class Node:
        pass

    def build(device):
        x = torch.empty(1 << 20, device=device)

        def step():
            node = Node()
            node.itself, node.held = node, x + 1
            return x * 2

        return step

    reading = simulated(build)
    assert reading.notes == ("4.00 MiB were held by reference cycles until the collector ran, whenever that is",)
    assert (reading.peak_bytes, reading.leaked_bytes) == (8 << 20, 0)


def test_a_first_call_is_an_estimate():
    reading = memfix.peak(WORKLOADS["matmul"], warmup=0)
    assert reading.notes == ("a first call: what libraries take once, such as cuBLAS its workspace, is not counted",)


def test_a_second_gpu_is_refused():
    with pytest.raises(MeasurementError, match="one GPU is simulated, and the step uses cuda:1"):
        simulated(lambda device: lambda: torch.empty(8, device="cuda:1"))


def test_a_tensor_that_is_printed_makes_the_reading_an_estimate():
    reading = simulated(lambda device: lambda: str(torch.ones(3, device=device)))
    assert reading.notes == ("a tensor is printed, and what formatting it takes on a GPU is not known",)


# ---------------------------------------------------------------- versions of torch
def a_sum(device):
    x = torch.empty(1000, device=device)
    return lambda: x + 1


@pytest.mark.parametrize("version", ["2.11.0+cu130", "2.13.0+cpu", "2.15.3"])
def test_reading_under_a_tested_torch_is_exact(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    assert memfix.peak(a_sum).exact


@pytest.mark.parametrize("version", ["2.16.0+cu140", "2.10.1", "3.0.0", "2.16.0.dev20270101"])
def test_reading_under_another_torch_is_an_estimate_that_names_the_tested_ones(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    reading = memfix.peak(a_sum)
    assert reading.peak_bytes == 4000
    assert not reading.exact
    assert reading.notes == (
        f"torch {version} was not tested: the rules follow the kernels of torch 2.11 to 2.15; on a GPU they were "
        "measured with torch 2.11.0",
    )


def test_reading_under_a_newer_torch_is_exact_where_the_users_own_table_was_measured_with_it(monkeypatch):
    table = tables.table_of(get_gpu("H200"))
    own = replace(table, surroundings={**table.surroundings, "torch": "2.16.0"})
    monkeypatch.setattr(tables, "table_of", lambda gpu: own)
    monkeypatch.setattr(torch, "__version__", "2.16.1+cpu")
    assert memfix.peak(a_sum).exact
    monkeypatch.setattr(torch, "__version__", "2.17.0")
    assert "on a GPU they were measured with torch 2.16.0" in memfix.peak(a_sum).notes[0]


def test_argument_that_a_newer_torch_renamed_makes_an_estimate_and_no_crash(monkeypatch):
    monkeypatch.setitem(rules.RULES, torch.ops.aten._softmax, lambda call: [call["no_such_argument"].numel()])
    reading = memfix.peak(lambda device: partial(torch.empty(10, device=device).softmax, 0))
    assert reading.notes == (f"aten._softmax.default has no argument 'no_such_argument' in torch {torch.__version__}",)


def test_a_rule_is_asked_once_for_calls_with_the_same_arguments_at_the_same_place_in_memory(monkeypatch):
    asked = []
    monkeypatch.setitem(
        rules.RULES, torch.ops.aten._softmax, lambda call: asked.append(call["self"].storage_offset()) or []
    )

    def build(device):
        x = torch.empty(3, 10, device=device)
        return lambda: [x[row].softmax(0) for row in (0, 0, 2)]

    memfix.peak(build)
    assert asked == [0, 20]


def test_a_rule_is_asked_again_where_algorithms_must_be_deterministic():
    def build(device):
        x = torch.empty(10_000, device=device)

        def step():
            x.cumsum(0)
            torch.use_deterministic_algorithms(True)
            try:
                x.cumsum(0)
            finally:
                torch.use_deterministic_algorithms(False)

        return step

    assert memfix.peak(build).notes == ("a scan of one row with deterministic algorithms, which is another kernel",)


@pytest.mark.parametrize("norm", [F.layer_norm, F.rms_norm])
def test_the_gradient_of_a_norm_is_contiguous_whatever_the_upstream_gradient_is(norm: Any) -> None:
    """As a GPU writes it. Swin on an H200 took 465,404 bytes less than with a gradient that is copied afterwards."""
    seen: list[bool] = []

    def build(device: str) -> Any:
        x = torch.randn(2, 5, 8, device=device, requires_grad=True)
        weight, upstream = torch.ones(8, device=device, requires_grad=True), torch.randn(2, 8, 5, device=device)

        def step() -> None:
            given = x * 1
            given.register_hook(lambda gradient: seen.append(gradient.is_contiguous()))
            (norm(given, (8,), weight).transpose(1, 2) * upstream).sum().backward()

        return step

    memfix.peak(build)
    assert set(seen) == {True}


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda x, m: F.normalize(x, dim=0), id="norm"),
        pytest.param(lambda x, m: F.cosine_similarity(x, x, dim=0), id="cosine similarity"),
        pytest.param(lambda x, m: x.masked_select(m), id="masked select"),
        pytest.param(lambda x, m: x.masked_fill(m, 1.0), id="masked fill"),
        pytest.param(lambda x, m: x.sum(0) + x.amax(0) + x.std(0, correction=0), id="reductions"),
    ],
)
def test_a_number_is_a_tensor_without_dims(make: Any) -> None:
    def build(device: str) -> Any:
        x, mask = torch.randn((), device=device, requires_grad=True), torch.tensor(True).to(device)
        return lambda: make(x, mask).sum().backward()

    assert memfix.peak(build).peak_bytes < 2048


def test_rules_may_make_views_of_the_arguments() -> None:
    def build(device: str) -> Any:
        matrices = torch.randn(5, 2, 4, device=device), torch.randn(5, 4, 3, device=device)
        return lambda: torch.addbmm(torch.randn(2, 3, device=device), *matrices)

    assert memfix.peak(build).exact


def test_an_lstm_may_have_no_biases() -> None:
    def build(device: str) -> Any:
        model, x = torch.nn.LSTM(4, 5, bias=False).to(device), torch.randn(3, 2, 4, device=device)
        return lambda: model(x)[0].sum().backward()

    assert memfix.peak(build).peak_bytes > 0


def test_known_lengths_of_ctc_do_not_make_its_large_results_known() -> None:
    def build(device: str) -> Any:
        scores = torch.randn(50, 3, 20).log_softmax(2).to(device).requires_grad_()
        targets = torch.randint(1, 20, (3, 30)).to(device)
        lengths = torch.tensor([50, 50, 50]), torch.tensor([30, 25, 20])
        return lambda: F.ctc_loss(scores, targets, *lengths).backward()

    assert memfix.peak(build).peak_bytes > 0
