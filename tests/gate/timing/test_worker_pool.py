"""Fresh processes: each times once, and what becomes of one is said."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest

from memfix.gate.timing import worker, worker_pool
from memfix.gate.timing.rule import CANARY_FACTOR
from memfix.gate.timing.timing_plan import Comparison, TimedForm
from memfix.gate.timing.worker import SizingTask, TimingResult, TimingTask, WorkerConfig
from memfix.gate.timing.worker_pool import WorkerPool
from memfix.meters.clock import LEAST_PAIRS, Race
from memfix.registry import contracts

TIMED = TimedForm("shared_table", "small", "train")
COMPARISON = Comparison(TIMED, "base")
CONFIG = WorkerConfig("rope", "cpu", None)


def says_who_it_is(connection: Connection, config: WorkerConfig, forms: list[TimedForm]) -> None:
    connection.send("ready")
    task: TimingTask = connection.recv()
    for one in task.comparisons:
        connection.send(TimingResult(one, Race(float(os.getpid()), 1.0, 2)))
    time.sleep(60)  # it is not waited for


def dies_at_once(connection: Connection, config: WorkerConfig, forms: list[TimedForm]) -> None:
    os._exit(7)


def dies_when_asked(connection: Connection, config: WorkerConfig, forms: list[TimedForm]) -> None:
    connection.send("ready")
    connection.recv()
    os._exit(8)


@pytest.fixture
def children() -> Iterator[None]:
    before = set(multiprocessing.active_children())
    yield
    assert set(multiprocessing.active_children()) == before


@pytest.fixture
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that only stand in are forked: one that is spawned, as is asked for, imports torch for two seconds."""

    def get_context(method: str) -> object:
        assert method == "spawn"
        return multiprocessing.get_context("fork")

    monkeypatch.setattr(worker_pool, "multiprocessing", SimpleNamespace(get_context=get_context))


@pytest.mark.usefixtures("children", "_forked")
@pytest.mark.parametrize("together", [1, 3])
def test_each_process_times_once_and_none_is_left(monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    monkeypatch.setattr(worker_pool, "run_worker", says_who_it_is)
    monkeypatch.setitem(worker_pool.POOL_SIZE, "cpu", together)
    with WorkerPool(CONFIG) as workers:
        read = [workers.time([COMPARISON], base_first=False) for _ in range(2)]
        assert len(multiprocessing.active_children()) >= together - 2
    races = [timed.race for batch in read for timed in batch]
    assert len({race.ratio for race in races if race is not None}) == 2


@pytest.mark.usefixtures("children", "_forked")
@pytest.mark.parametrize(("life", "code"), [(dies_at_once, 7), (dies_when_asked, 8)])
def test_a_process_that_dies_is_trouble_with_its_code(monkeypatch: pytest.MonkeyPatch, life: object, code: int) -> None:
    monkeypatch.setattr(worker_pool, "run_worker", life)
    with WorkerPool(CONFIG) as workers:
        (timed,) = workers.time([COMPARISON], base_first=False)
    assert (timed.race, timed.error) == (None, f"the process that was to time it ended with {code}")


@pytest.mark.usefixtures("children")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_real_one_times_a_form_against_itself_slowed(device: str) -> None:
    """What it reads is the machine's; what it must see of a slowdown is for ``benchmarks.gate_power``."""
    with WorkerPool(WorkerConfig("rope", device, None)) as workers:
        (timed,) = workers.time([Comparison(TIMED, "canary")], base_first=True)
    assert (timed.comparison, timed.error) == (Comparison(TIMED, "canary"), "")
    assert timed.race is not None
    assert timed.race.pairs >= LEAST_PAIRS


@pytest.mark.parametrize("base_first", [False, True])
def test_the_canary_is_the_form_slowed_by_the_rules_factor_beside_the_form_as_it_is(
    monkeypatch: pytest.MonkeyPatch, base_first: bool
) -> None:
    slowdowns: list[tuple[object, float, str]] = []
    raced: list[object] = []

    def slowed(step: object, factor: float, device: str) -> str:
        slowdowns.append((step, factor, device))
        return "slowed"

    def race(first: object, second: object, **_: object) -> Race:
        raced.extend([first, second])
        return Race(1.1, 1.0, 2)

    monkeypatch.setattr(worker, "slowed", slowed)
    monkeypatch.setattr(worker, "race", race)
    timed = worker._timed(contracts(["rope"])[0], Comparison(TIMED, "canary"), CONFIG, base_first)
    assert timed.race == Race(1.1, 1.0, 2)
    ((step, factor, device),) = slowdowns
    assert (factor, device) == (CANARY_FACTOR, "cpu")
    assert raced[0] == "slowed"
    assert raced[1] is not step
    assert callable(raced[1])


@pytest.mark.parametrize("base_first", [False, True])
def test_who_is_timed_first_is_as_the_task_says(monkeypatch: pytest.MonkeyPatch, base_first: bool) -> None:
    began: list[bool] = []

    def noted(*steps: object, second_begins: bool, **_: object) -> Race:
        began.append(second_begins)
        return Race(1.0, 1.0, 2)

    monkeypatch.setattr(worker, "race", noted)
    worker._timed(contracts(["rope"])[0], Comparison(TIMED, "naive"), CONFIG, base_first)
    assert began == [base_first]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_all_threads_of_a_process_on_a_gpu_stay_on_one_core() -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        cores = pool.apply(cores_of_threads)
    assert len(cores) > 1
    assert len(cores[0]) == 1
    assert all(core == cores[0] for core in cores)


def cores_of_threads() -> list[set[int]]:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()  # as torch starts one for the backward
    worker._stay_on_one_core()
    return [os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")]


@pytest.mark.usefixtures("children", "_forked")
def test_processes_get_ready_for_what_they_are_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "run_worker", says_its_cases)
    other = TimedForm("shared_table", "medium", "train")
    with WorkerPool(CONFIG) as workers:
        errors = [
            [timed.error for timed in workers.time(comparisons, base_first=False)]
            for comparisons in (
                [COMPARISON, Comparison(TIMED, "canary"), Comparison(other, "base")],
                [Comparison(other, "base")],
            )
        ]
    assert errors == [["small medium"] * 3, ["medium"]]


def says_its_cases(connection: Connection, config: WorkerConfig, forms: list[TimedForm]) -> None:
    connection.send("ready")
    task: TimingTask = connection.recv()
    for one in task.comparisons:
        connection.send(TimingResult(one, None, " ".join(timed.case for timed in forms)))


# ---------------------------------------------------------------- the limit
LARGE = TimedForm("shared_table", "medium", "train")


def is_slow_at_large(connection: Connection, config: WorkerConfig, forms: list[TimedForm]) -> None:
    connection.send("ready")
    task = connection.recv()
    for one in task.comparisons:
        if one.timed == LARGE:
            time.sleep(60)
        connection.send(TimingResult(one, Race(1.0, 1.0, 2)))


def is_slow_beside_naive(connection: Connection, config: WorkerConfig, forms: list[TimedForm]) -> None:
    connection.send("ready")
    task = connection.recv()
    for one in task.comparisons:
        if one.against == "naive":
            os.kill(os.getpid(), signal.SIGKILL)  # as Linux ends a process that takes too much memory
        connection.send(TimingResult(one, Race(1.0, 1.0, 2)))


def grows(connection: Connection, config: WorkerConfig, forms: list[TimedForm]) -> None:
    connection.send("ready")
    task: SizingTask = connection.recv()
    for timed in task.sizes:
        if timed.halvings == 0:
            time.sleep(60)
        connection.send(None if timed.halvings == 3 else 1 / (1 << timed.halvings))


@pytest.mark.usefixtures("children", "_forked")
def test_a_case_that_takes_longer_than_the_limit_is_given_up_once_and_the_rest_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_pool, "run_worker", is_slow_at_large)
    said: list[str] = []
    comparisons = [Comparison(LARGE, "canary"), COMPARISON, Comparison(LARGE, "base"), Comparison(TIMED, "naive")]
    with WorkerPool(CONFIG, limit_s=2.0, say=said.append) as workers:
        results = workers.time(comparisons, base_first=False)
    assert [result.comparison for result in results] == comparisons
    assert [result.is_too_large for result in results] == [True, False, True, False]
    assert results[0].error == results[2].error == "it took longer than 2 s"
    assert said == [
        "rope: shared_table [medium, train] against canary",
        "rope: shared_table [small, train] against base",
        "rope: shared_table [small, train] against naive",
    ]


@pytest.mark.usefixtures("children", "_forked")
def test_a_naive_form_that_takes_all_memory_leaves_the_form_itself_to_be_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_pool, "run_worker", is_slow_beside_naive)
    comparisons = [Comparison(TIMED, "naive"), COMPARISON]
    with WorkerPool(CONFIG, limit_s=30) as workers:
        beside_naive, against_base = workers.time(comparisons, base_first=False)
    assert (beside_naive.is_too_large, against_base.is_too_large) == (True, False)
    assert against_base.race is not None


@pytest.mark.usefixtures("children", "_forked")
@pytest.mark.parametrize(("step_s", "halvings"), [(0.3, 2), (0.6, 1), (2.0, 1), (0.07, 4), (0.001, None)])
def test_the_largest_size_within_a_time_is_found_from_below(
    monkeypatch: pytest.MonkeyPatch, step_s: float, halvings: int | None
) -> None:
    monkeypatch.setattr(worker_pool, "run_worker", grows)
    sizes = [TimedForm("shared_table", "medium", "train", halvings=number) for number in (5, 4, 3, 2, 1, 0)]
    with WorkerPool(CONFIG, limit_s=2.0) as workers:
        found = workers.largest_within(step_s, sizes, ["shared_table"])
    assert (found[0].halvings if found else None) == halvings


def test_sizes_are_timed_for_real_and_a_size_that_a_form_refuses_is_none() -> None:
    (rope,) = contracts(["rope"])
    task = SizingTask((TIMED, TimedForm("no_such_form", "small", "train")), ("shared_table", "naive"))
    assert task._seconds_at(TIMED, rope, "cpu") is not None
    assert SizingTask(task.sizes, ("no_such_form",))._seconds_at(TIMED, rope, "cpu") is None
