"""The ops of a gate side by side, one process a core, where nothing but time is shared: on the simulated meter."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from ..checks.effort import Effort, get_effort
from ..checks.examine import Examination, examine
from ..checks.interpreter import take_one_core
from ..contract import Contract
from ..meters import get_meter
from ..meters.base import Meter
from ..registry import all_contracts

Say = Callable[[str], None]


def examine_all(contracts: Sequence[Contract], meter: Meter, effort: Effort, say: Say) -> list[Examination]:
    """Every check but speed of ``contracts``, in their order.

    A GPU is measured by one process at a time, and a contract that is not the registry's own cannot be found in another
    process: these are examined here.
    """
    registered = all_contracts()
    travels = meter.name == "simulated" and all(registered.get(c.name) is c for c in contracts)
    num_workers = min(len(contracts), os.cpu_count() or 1)
    if not travels or num_workers < 2:
        return [examine(contract, meter, effort, say) for contract in contracts]
    found: dict[str, Examination] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, context, initializer=take_one_core) as workers:
        # those with most to do first, so that the last to end is not one that began late
        by_work = sorted(contracts, key=lambda c: len(c.forms) * len(c.cases) + len(c.inputs), reverse=True)
        asked = [workers.submit(_examine_by_name, contract.name, effort.name) for contract in by_work]
        for done in as_completed(asked):
            examination = done.result()
            found[examination.op] = examination
            waiting = [contract.name for contract in contracts if contract.name not in found]
            say(f"{examination.op} is examined" + (f"; still at {', '.join(waiting)}" if waiting else ""))
    return [found[contract.name] for contract in contracts]


def _examine_by_name(op: str, effort: str) -> Examination:
    return examine(all_contracts()[op], get_meter("simulated"), get_effort(effort))
