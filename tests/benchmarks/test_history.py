"""Benchmarks come from the registry alone: every op, form and case by name, each figure measured once a run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from forked_python import forked_python

import memfix
from benchmarks.history import figures, ops
from benchmarks.walk import at_smallest_cases, of_fixes
from memfix.contract import Contract, Dim, Normal, TensorSpec
from memfix.laws import NAIVE
from memfix.meters.clock import Race
from memfix.registry import all_contracts

ROOT = Path(__file__).resolve().parents[2]


def test_every_op_form_and_case_is_a_class_with_the_methods_its_contract_gives_it() -> None:
    for contract in all_contracts().values():
        for form in (NAIVE, *contract.forms):
            for case in contract.cases:
                benchmark = getattr(ops, ops.class_name(contract.name, form, case))
                found = {name for name in vars(benchmark) if name.startswith(("time_", "track_"))}
                phases = figures.phases(contract.name)
                expected = {f"{kind}_{phase}" for kind in ("time", "track_peak") for phase in phases}
                if form != NAIVE:
                    expected |= {f"track_times_below_naive_{phase}" for phase in phases}
                    expected.add(f"track_overhead_{phases[-1]}")
                if contract.floor is not None:
                    expected.add(f"track_over_floor_{phases[-1]}")
                assert found == expected


def test_a_quick_walk_runs_every_form_at_one_case_that_is_quick() -> None:
    chosen = re.compile(at_smallest_cases())
    for contract in all_contracts().values():
        for form in (NAIVE, *contract.forms):
            names = {case: f"ops.{ops.class_name(contract.name, form, case)}.time_train" for case in contract.cases}
            cases = [case for case, name in names.items() if chosen.search(name)]
            assert cases == [contract.smallest_case.name], f"{contract.name}/{form}"


def test_a_walk_of_fixes_runs_each_at_one_case_and_nothing_that_was_reported() -> None:
    chosen = re.compile(of_fixes())
    for contract in all_contracts().values():
        for name, form in contract.forms.items():
            classes = {case: f"ops.{ops.class_name(contract.name, name, case)}" for case in contract.cases}
            cases = [case for case, found in classes.items() if chosen.search(f"{found}.track_peak_train")]
            assert cases == ([] if form.reported else [*contract.cases][:1]), f"{contract.name}/{name}"
            assert not any(chosen.search(f"{found}.time_train") for found in classes.values())


def test_an_op_that_this_commit_has_not_is_skipped() -> None:
    gone = ops.GoneNaiveSmall()
    for name in ("time_train", "track_peak_forward", "track_overhead_train", "track_over_floor_train"):
        assert hasattr(gone, name)
    with pytest.raises(NotImplementedError, match="this commit has no GoneNaiveSmall"):
        gone.setup(True)
    with pytest.raises(AttributeError):
        ops.no_class  # noqa: B018


def an_op(size: int = 4, **changed: Any) -> Contract:
    spec = TensorSpec("x", "N", **{"grad": True, **changed})
    return Contract(
        "own", naive=abs, forms={"same": abs}, dims={"N": Dim(1, 9)}, inputs=[spec], cases={"a": {"N": size}}
    )


def test_history_begins_anew_with_the_shape_or_the_inputs_and_not_with_a_default() -> None:
    def version(contract: Contract) -> str:
        return ops.fingerprint(contract, contract.cases["a"])

    assert version(an_op()) == version(an_op(values=Normal(), optional=False))
    assert (
        len(
            {
                version(an_op()),
                version(an_op(size=5)),
                version(an_op(values=Normal(scale=2.0))),
                version(an_op(grad=False)),
            }
        )
        == 4
    )


def test_an_op_of_the_host_has_peaks_and_keeps_its_history_from_process_to_process() -> None:
    def contract() -> Contract:
        def words(dims: Any, seed: int) -> list[int]:
            return [seed] * dims["N"]

        spec = memfix.ObjectSpec("words", "N", make=words)
        dims = {"N": Dim(1, 9)}
        return Contract(
            "own", naive=list, forms={"same": list}, dims=dims, inputs=[spec], cases={"a": {"N": 4}}, memory="host"
        )

    one, other = contract(), contract()
    assert ops.fingerprint(one, one.cases["a"]) == ops.fingerprint(other, other.cases["a"])
    assert figures.times_below_naive("batches", "streaming", "small", "forward") > 1


def test_two_names_that_make_one_class_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Contract(
        "own",
        naive=abs,
        forms={"a_b": abs, "aB": abs},
        dims={"N": Dim(1, 9)},
        inputs=[TensorSpec("x", "N")],
        cases={"a": {"N": 1}},
    )
    for module in (ops, figures):
        monkeypatch.setattr(module, "all_contracts", lambda: {"own": twins})
    with pytest.raises(ValueError, match="two benchmarks are named OwnABA"):
        ops._benchmark_classes()


# ---------------------------------------------------------------- figures
def test_a_peak_and_its_ratio_are_what_memfix_measures() -> None:
    readings = {f: memfix.peak(figures.step_of("rope", f, "small", "train")) for f in ("naive", "shared_table")}
    for form, reading in readings.items():
        if figures.device() == "cpu":
            assert figures.peak_bytes("rope", form, "small", "train") == reading.peak_bytes
    below = figures.peak_bytes("rope", "naive", "small", "train") / figures.peak_bytes(
        "rope", "shared_table", "small", "train"
    )
    assert figures.times_below_naive("rope", "shared_table", "small", "train") == round(below, 3)


@pytest.mark.parametrize(
    ("op", "form", "name", "others"),
    [
        ("rope", "shared_table", "overhead", ("naive", "train")),
        ("linear_cross_entropy", "naive", "over_floor", ("floor", "forward")),
    ],
)
def test_a_ratio_of_times_is_the_forms_train_step_over_naives_or_over_the_floor(
    monkeypatch: pytest.MonkeyPatch, op: str, form: str, name: str, others: tuple[str, str]
) -> None:
    raced: list[tuple[str, str]] = []

    def race(*steps: tuple[str, str], device: str, pairs: int) -> Race:
        raced.extend(steps)
        assert figures.LEAST_PAIRS <= pairs <= figures.MOST_PAIRS
        return Race(1.25, 1.0, pairs)

    monkeypatch.setattr(figures, "warm_step", lambda build: (build.form, build.phase))
    monkeypatch.setattr(figures, "elapsed_s", lambda step: 0.01)
    monkeypatch.setattr(figures, "race", race)
    assert figures.ratio(op, form, "small", name) == 1.25
    assert raced == [(form, "train"), others]


@pytest.mark.skipif("figures.device() == 'cuda'")
@pytest.mark.parametrize(
    ("op", "form", "case", "why"),
    [
        ("rope", "naive", "incident", "rope/naive needs 11.52 GiB, a CPU is given 64.00 MiB"),
        ("linear_cross_entropy", "triton", "small", "are interpreted on a CPU: their time says nothing"),
    ],
)
def test_what_a_cpu_cannot_time_is_not_available_with_the_reason(op: str, form: str, case: str, why: str) -> None:
    with pytest.raises(figures.NotMeasurable, match=why):
        figures.warm_step(figures.step_of(op, form, case, "train"))
    name = figures.ratios_of(op, form)
    if name:
        with pytest.raises(figures.NotMeasurable, match=why):
            figures.ratio(op, form, case, name[0])


def test_a_figure_is_measured_once_a_run_of_asv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def figure(*words: str) -> list[str]:
        measured.append(words)
        return list(words)

    monkeypatch.chdir(tmp_path)
    (tmp_path / "cache.pickle").touch()  # as ASV leaves it in the folder that a run's benchmarks share
    for _ in range(2):  # two processes
        kept = figures._cached_on_disk(figure)
        assert kept("rope", "naive") == kept("rope", "naive") == ["rope", "naive"]
    assert measured == [("rope", "naive")]
    assert figures._cached_on_disk(figure)("rope", "other") == ["rope", "other"]


def test_outside_of_asv_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    figures._cached_on_disk(lambda *words: 1)("a")
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- a fork server
WATCHED = """
import torch
asked = []
for name in ("is_available", "device_count", "init", "_lazy_init", "current_device"):
    setattr(torch.cuda, name, lambda *a, name=name, **k: asked.append(name) or False)
import benchmarks.history.ops
assert not asked, asked
"""

FORKED = """
import os, torch
import benchmarks.history.ops
if os.fork():
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
torch.ones(8, device="cuda").sum().item()
"""


def test_importing_the_benchmarks_asks_nothing_of_cuda() -> None:
    done = forked_python("-c", WATCHED, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_a_fork_after_the_import_can_use_the_gpu() -> None:
    done = forked_python("-c", FORKED, cwd=ROOT)
    assert done.returncode == 0, done.stderr
