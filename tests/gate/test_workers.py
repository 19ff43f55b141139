"""An examination in parts, by several processes, says what one process says."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_python import forked_python

from memfix.checks.effort import Effort, get_effort
from memfix.checks.examine import Examination, Found, Tools, examine, put_together, run_checks
from memfix.checks.interpreter import in_interpreter, is_interpreting, start_interpreter
from memfix.checks.plan import Check, gate_plan, place_of
from memfix.contract import BadInput, Contract, Dim, Form, TensorSpec, setting
from memfix.gate import run, workers
from memfix.gate.judge import judge
from memfix.gate.report.table import table_rows
from memfix.gate.workers import Batch, batches_of, examine_all
from memfix.laws import NAIVE, Budget, Scaling
from memfix.meters import cuda, get_meter
from memfix.meters.base import Reading
from memfix.ops.embedding.gather import gather_embedding
from memfix.registry import all_contracts

ROOT = Path(__file__).resolve().parents[2]
METER = get_meter("simulated")
EFFORT = Effort("test", equality_examples=4, memory_examples=1)


def by_batches(contract: Contract) -> Examination:
    found: Found = {}
    for batch in reversed(batches_of(plan := gate_plan(contract, METER))):  # workers answer in any order
        found |= batch.run(EFFORT)
    return put_together(contract, plan, found)


def rounded(x: torch.Tensor) -> torch.Tensor:
    return (x.bfloat16() * 2 + 1).to(x.dtype)


# an equal form, and a reported one that is not, in one dtype of two
AFFINE = Contract(
    "affine",
    naive=lambda x: x * 2 + 1,
    forms={
        "in_place": lambda x: (x * 2).add_(1),
        "rounded": Form(rounded, reported=True, known_unequal={"float32": "it is rounded to bfloat16"}),
    },
    dims={"N": Dim(1, 9)},
    inputs=[TensorSpec("x", "N", grad=True)],
    cases={"small": {"N": 256}},
    dtypes=("float32", "bfloat16"),
    budgets=[Budget("in_place", phase="forward", bytes="N*e")],
    scaling=[Scaling("in_place", dim="N", case="small")],
    bad_inputs=[BadInput("no tensor", setting(x=None), "NoneType", TypeError)],
)


@pytest.mark.parametrize("contract", [all_contracts()["embedding"], AFFINE], ids=lambda contract: contract.name)
def test_batches_say_what_the_whole_says(contract: Contract, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "all_contracts", lambda: {contract.name: contract})
    whole = examine(contract, METER, EFFORT)
    assert by_batches(contract) == whole
    assert {finding.check for finding in whole.findings} >= {"equality", "bad input", "budget"}
    assert whole.readings


def test_every_check_of_every_form_is_in_a_batch() -> None:
    contract = all_contracts()["linear_cross_entropy"]
    plan = gate_plan(contract, METER, device="cpu")
    batches = batches_of(plan)
    assert sorted(map(str, plan)) == sorted(str(check) for batch in batches for check in batch.checks)
    asked = {(batch.kind, check.form, check.dtype) for batch in batches for check in batch.checks}
    for form, declared in contract.forms.items():
        kind = "interpreted equality" if declared.has_kernels else "equality"
        assert {(kind, form, dtype) for dtype in contract.dtypes} <= asked
        assert {("memory", form, ""), ("bad inputs", form, "")} <= asked
    assert ("memory", NAIVE, "") in asked
    assert len([batch for batch in batches if batch.kind == "equality"]) == len(contract.dtypes)


def test_on_a_gpu_kernels_run_there_and_laws_beyond_the_cases_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "gpu_unavailable_reason", lambda: None)
    contract = all_contracts()["linear_cross_entropy"]
    plan = gate_plan(contract, OnGpu())
    on_gpu = [batch.checks for batch in batches_of(plan) if batch.kind == "equality on the GPU"]
    assert [[(check.form, check.dtype) for check in checks] for checks in on_gpu] == [
        [("triton", dtype)] for dtype in contract.dtypes
    ]
    assert {check.kind for check in plan} == {"equality", "bad input", "memory"}
    assert place_of(contract, "triton") == "cuda"
    assert place_of(contract, "recompute") == "cpu"
    assert place_of(contract, "triton", "cpu") == "interpreter"


def off_in_float16(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows = weight[ids]
    return rows.add_(1) if weight.dtype == torch.float16 else rows


def off_in_float16_and_large(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return off_in_float16(ids, weight.clone())


@pytest.mark.parametrize(("cheat", "broken"), [(off_in_float16, False), (off_in_float16_and_large, True)])
def test_of_a_form_that_is_not_equal_no_memory_passes_and_what_is_too_large_is_said(cheat: Any, broken: bool) -> None:
    honest = all_contracts()["embedding"]
    contract = replace(honest.with_form("cheat", cheat, like="gather"), dtypes=("float32", "float16", "bfloat16"))
    plan = gate_plan(contract, METER, forms=["cheat"])
    # as workers do: each dtype without knowing of the others
    found: Found = {}
    for check in plan:
        found |= run_checks(contract, [check], Tools(METER, EFFORT), {})
    together = put_together(contract, plan, found)
    assert together == examine(contract, METER, EFFORT, forms=["cheat"])
    assert [f.status for f in together.findings if f.check == "equality"] == ["pass", "fail"]
    note, *others = [f for f in together.findings if f.check == "budget"]
    assert (note.status, note.message) == ("note", "no memory of it can pass: the form is not equal to naive")
    assert {f.status for f in others} == ({"fail"} if broken else set())
    assert together.equal_forms == frozenset()


@dataclass
class OnGpu:
    """Stands for the meter of a real GPU with so much memory: its bytes are the simulated ones."""

    capacity: int = 2**60
    name: str = "cuda"
    simulation: None = None
    ran: list[int] = field(default_factory=list)
    expected: list[int] = field(default_factory=list)

    def unavailable_reason(self) -> None: ...

    def capacity_bytes(self) -> int:
        return self.capacity

    def expecting(self, total_bytes: int) -> OnGpu:
        self.expected.append(total_bytes)
        return self

    def measure(self, build: Any, *, warmup: int = 1) -> Reading:
        reading = replace(METER.measure(build, warmup=warmup), meter=self.name)
        self.ran.append(reading.base_bytes + reading.peak_bytes)
        return reading


def test_a_form_that_is_not_equal_is_kept_off_a_real_gpu() -> None:
    contract = all_contracts()["embedding"].with_form("cheat", lambda ids, weight: weight[ids] + 1, like="gather")
    examination = examine(contract, OnGpu(), EFFORT, forms=["cheat"])
    assert {form for form, _, _ in examination.readings} == {NAIVE}


def test_what_does_not_fit_the_gpu_is_simulated_and_not_run() -> None:
    meter = OnGpu(capacity=2**32)
    found = examine_all([all_contracts()["embedding"]], meter, EFFORT, lambda _: None)
    (examination,) = found
    assert max(meter.ran) == max(meter.expected) <= meter.capacity
    simulated = {key[:2] for key, reading in examination.readings.items() if reading.meter == "simulated"}
    assert simulated == {(NAIVE, "incident")}
    ratios = [f for f in examination.findings if f.case == "incident" and "below naive" in f.message]
    assert ratios, "budgets beside naive are held against its simulated bytes"
    assert {f.status for f in ratios} == {"pass"}

    verdict = judge(found, lock=None, meter=meter.name)
    words = {row.cells[1:3]: row.cells[-1] for row in table_rows(verdict)}
    assert words[NAIVE, "incident"] == "reference, not run: does not fit"
    assert words["gather", "incident"] == "pass"
    (note,) = run._not_run(found, meter.name)
    assert note.startswith("embedding/naive [incident] was not run: it would take 15.35 GiB above ")


def test_a_step_that_runs_out_of_memory_all_the_same_says_so_in_a_sentence() -> None:
    class Full(OnGpu):
        def measure(self, build: Any, *, warmup: int = 1) -> Reading:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has a capacity of ...")

    (examination,) = examine_all([all_contracts()["embedding"]], Full(), EFFORT, lambda _: None)
    errors = [f for f in examination.findings if f.status == "error"]
    assert errors
    said = "could not be measured, meter cuda: out of memory, asked for 2 GiB"
    assert {f.message for f in errors} == {said}


def by_way_of_a_sparse_tensor(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return gather_embedding(ids.to_sparse().to_dense(), weight)


def test_a_form_that_no_law_can_be_measured_of_is_an_error_of_each_and_ends_nothing() -> None:
    contract = all_contracts()["embedding"].with_form("sparse", by_way_of_a_sparse_tensor, like="gather")
    examination = examine(contract, METER, EFFORT, forms=["sparse"])
    assert {f.status for f in examination.findings if f.check == "equality"} == {"pass"}
    unknown = [f for f in examination.findings if f.status == "error"]
    assert {f.check for f in unknown} == {"memory", "budget", "scaling"}
    assert all("cannot be simulated" in f.message for f in unknown)


class NoWorkers:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("a worker was started")


def test_where_little_is_asked_no_worker_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "ProcessPoolExecutor", NoWorkers)
    monkeypatch.setattr(workers, "start_interpreter", lambda method: None)
    monkeypatch.setattr(workers, "_draw_once", lambda *_: None)
    contract = all_contracts()["embedding"]
    (found,) = examine_all([contract], METER, get_effort("dev"), lambda _: None)
    assert found.op == "embedding"
    with pytest.raises(AssertionError, match="a worker was started"):
        examine_all(list(all_contracts().values()), METER, get_effort("ci"), lambda _: None)


def test_a_contract_of_ones_own_is_examined_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "ProcessPoolExecutor", NoWorkers)
    monkeypatch.setattr(workers, "_WORTH_A_START", 0)
    own = replace(all_contracts()["embedding"], name="own")
    (found,) = examine_all([own], METER, EFFORT, lambda _: None)
    assert found.op == "own"


# in a process that has no thread of autograd yet, as that of a gate: workers may be forked from it
BY_WORKERS = """
import json
import pickle
from memfix.checks.effort import PROFILES, Effort
from memfix.gate import workers
from memfix.meters import cuda, get_meter
from memfix.registry import all_contracts
PROFILES["dev"] = Effort("dev", equality_examples=2, memory_examples=1)
workers._WORTH_A_START = 0
workers.os.cpu_count = lambda: 2
said = []
contracts = [all_contracts()[op] for op in ("matmul", "embedding")]
found = workers.examine_all(contracts, get_meter("simulated"), PROFILES["dev"], said.append)
findings = [finding for examination in found for finding in examination.findings]
bad = [finding.message for finding in findings if finding.status not in ("pass", "note")]
print(json.dumps([[examination.op for examination in found], len(findings), bad, said]))
"""


def test_workers_bring_back_what_they_found_and_say_when_an_op_is_done() -> None:
    child = forked_python("-c", BY_WORKERS, cwd=ROOT)
    assert child.returncode == 0, child.stderr
    ops, num_findings, bad, said = json.loads(child.stdout)
    assert ops == ["matmul", "embedding"]
    assert num_findings > 10
    assert bad == []
    done = [line.split(" is examined")[0] for line in said if " is examined" in line]
    assert sorted(done) == ["embedding", "matmul"]
    assert said[-1].endswith("is examined")


ON_A_GPU = """
import json
import os
from dataclasses import replace
from memfix.checks.effort import PROFILES, Effort
from memfix.gate import workers
from memfix.meters import get_meter
from memfix.meters.cuda import CudaMeter
from memfix.registry import all_contracts
PROFILES["dev"] = Effort("dev", equality_examples=2, memory_examples=1)
class OnGpu:
    name, simulation = "cuda", None
    def capacity_bytes(self):
        return 2**60
    def expecting(self, total_bytes):
        return self
    def measure(self, build, *, warmup=1):
        reading = get_meter("simulated").measure(build, warmup=warmup)
        return replace(reading, device=f"{os.getpid()} of {CudaMeter.num_processes}")
workers._WORTH_A_START = 0
workers.os.cpu_count = lambda: 3
workers.get_meter = lambda name: OnGpu() if name == "cuda" else get_meter(name)
contract = all_contracts()["one_hot_loss"]
(found,) = workers.examine_all([contract], OnGpu(), PROFILES["dev"], lambda _: None)
here = workers.examine(contract, OnGpu(), PROFILES["dev"])
of_both = [[[*where, reading.peak_bytes] for where, reading in each.readings.items()] for each in (found, here)]
print(json.dumps([os.getpid(), [reading.device for reading in found.readings.values()], *of_both]))
"""


def test_workers_measure_on_a_real_gpu_what_is_equal() -> None:
    child = forked_python("-c", ON_A_GPU, cwd=ROOT)
    assert child.returncode == 0, child.stderr
    waits, devices, found, here = json.loads(child.stdout)
    assert {device.partition(" ")[2] for device in devices} == {"of 3"}
    assert str(waits) not in {device.partition(" ")[0] for device in devices}
    assert sorted(found) == sorted(here)


def run_in_forks(monkeypatch: pytest.MonkeyPatch, run: Callable[[Batch, Effort], Found]) -> None:
    """Let workers, which are forked, run ``run`` in place of a batch."""
    monkeypatch.setattr(Batch, "run", run)
    monkeypatch.setattr(workers, "start_method", lambda: "fork")
    for slow in ("_draw_once", "import_for_equality", "import_for_meters"):
        monkeypatch.setattr(workers, slow, lambda *_: None)


def test_host_memory_is_left_to_processes_without_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads that wait for workers unpickle what those found, and the host meter would count it."""
    here, this_process = [], os.getpid()

    def run(batch: Batch, effort: Effort) -> Found:
        if os.getpid() == this_process:
            here.append((batch.op, batch.kind))
        return {}

    plan = [check for op in ("vocabulary", "embedding") for check in gate_plan(all_contracts()[op], METER)]
    batches = [batch for batch in batches_of(plan) if not batch.kind.startswith("interpreted")]
    run_in_forks(monkeypatch, run)
    workers._run_batches(batches, get_effort("dev"), 2, lambda _: None)
    assert here
    assert ("vocabulary", "memory") not in here


class UnreadableHere:
    def __reduce__(self) -> Any:
        return _raise, ()


def _raise() -> None:
    raise ImportError("planted")


@pytest.mark.parametrize("in_worker", [UnreadableHere, lambda: os._exit(9)])
def test_what_a_lost_worker_was_asked_is_done_here(in_worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is killed, or whose answer cannot be read, ends Python's pool."""
    here, this_process, said = [], os.getpid(), []

    def run(batch: Batch, effort: Effort) -> Any:
        if os.getpid() != this_process:
            return in_worker()
        here.append(batch)
        return {}

    batches = batches_of(gate_plan(all_contracts()["vocabulary"], METER))
    run_in_forks(monkeypatch, run)
    workers._run_batches(batches, get_effort("dev"), 2, said.append)
    assert sorted(here, key=str) == sorted(batches, key=str)
    assert any("because a worker was lost" in line for line in said)


def test_a_batch_is_plain_data() -> None:
    check = Check("embedding", "equality", "gather", dtype="float32")
    batch = pickle.loads(pickle.dumps(Batch("embedding", "equality", (check,))))
    (finding,) = batch.run(EFFORT)[check].findings
    assert finding.status == "pass"


def test_the_interpreter_is_started_before_any_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a worker could be started with its environment, and interpret what it only has to measure."""
    started: list[str] = []

    class Started(Exception):
        pass

    def start_workers(*args: Any, **kwargs: Any) -> None:
        started.append("workers")
        raise Started

    monkeypatch.setattr(workers.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(workers, "start_interpreter", lambda method: started.append("interpreter"))
    monkeypatch.setattr(workers, "_draw_once", lambda *_: None)
    monkeypatch.setattr(workers, "ProcessPoolExecutor", start_workers)
    with pytest.raises(Started):
        examine_all(list(all_contracts().values()), METER, get_effort("dev"), lambda _: None)
    assert started == ["interpreter", "workers"]


def test_this_process_does_not_interpret_once_the_interpreter_is_started() -> None:
    pytest.importorskip("triton")
    start_interpreter()
    assert not is_interpreting()
    assert in_interpreter(is_interpreting)
