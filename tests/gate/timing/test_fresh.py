"""Fresh processes: each times once, and what becomes of one is said."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from memfix.gate.timing import child, fresh
from memfix.gate.timing.child import Station, Task, Timed
from memfix.gate.timing.fresh import FreshProcesses
from memfix.gate.timing.places import BASE, CANARY, NAIVE_FORM, Place
from memfix.meters.clock import Race
from memfix.registry import contracts

PLACE = Place("shared_table", "small", "train")
SUBJECT = (PLACE, BASE)
STATION = Station("rope", "cpu", None, (PLACE,))


def says_who_it_is(connection: Connection, station: Station) -> None:
    connection.send("ready")
    task: Task = connection.recv()
    connection.send([Timed(subject, Race(float(os.getpid()), 1.0, 1.0, 2)) for subject in task.subjects])
    time.sleep(60)  # it is not waited for


def dies_at_once(connection: Connection, station: Station) -> None:
    os._exit(7)


def dies_when_asked(connection: Connection, station: Station) -> None:
    connection.send("ready")
    connection.recv()
    os._exit(8)


@pytest.fixture
def children() -> Iterator[None]:
    before = set(multiprocessing.active_children())
    yield
    assert set(multiprocessing.active_children()) == before


@pytest.mark.usefixtures("children")
@pytest.mark.parametrize("together", [1, 3])
def test_each_process_times_once_and_none_is_left(monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    monkeypatch.setattr(fresh, "stand_by", says_who_it_is)
    monkeypatch.setitem(fresh.TOGETHER, "cpu", together)
    with FreshProcesses(STATION) as processes:
        read = [processes.timed([SUBJECT], base_first=False) for _ in range(2)]
        assert len(multiprocessing.active_children()) >= together - 2
    races = [timed.race for batch in read for timed in batch]
    assert len({race.ratio for race in races if race is not None}) == 2


@pytest.mark.usefixtures("children")
@pytest.mark.parametrize(("life", "code"), [(dies_at_once, 7), (dies_when_asked, 8)])
def test_a_process_that_dies_is_trouble_with_its_code(monkeypatch: pytest.MonkeyPatch, life: object, code: int) -> None:
    monkeypatch.setattr(fresh, "stand_by", life)
    with FreshProcesses(STATION) as processes:
        (timed,) = processes.timed([SUBJECT], base_first=False)
    assert (timed.race, timed.trouble) == (None, f"the process that was to time it ended with {code}")


@pytest.mark.usefixtures("children")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_real_one_times_a_form_against_itself_slowed(device: str) -> None:
    with FreshProcesses(Station("rope", device, None, (PLACE,))) as processes:
        (timed,) = processes.timed([(PLACE, CANARY)], base_first=True)
    assert timed.race is not None
    assert timed.race.ratio > 1.03


@pytest.mark.parametrize("base_first", [False, True])
def test_who_is_timed_first_is_as_the_task_says(monkeypatch: pytest.MonkeyPatch, base_first: bool) -> None:
    began: list[bool] = []

    def noted(*steps: object, second_begins: bool, **_: object) -> Race:
        began.append(second_begins)
        return Race(1.0, 1.0, 1.0, 2)

    monkeypatch.setattr(child, "race", noted)
    child._timed(contracts(["rope"])[0], (PLACE, NAIVE_FORM), STATION, base_first)
    assert began == [base_first]
