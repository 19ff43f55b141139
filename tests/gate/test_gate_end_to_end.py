"""The gate on a checkout in which somebody broke something: exit code, and what is said.

One test breaks an op of memfix's own; the others break a toy.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkouts import OTHER_OP, commit_all, edit, gate, leave_only

FORM = "memfix/ops/affine/in_place.py"
LOCK = "benchmarks/memory.lock"


# ---------------------------------------------------------------- an op of memfix's own
def test_one_extra_chunk_fails_and_the_form_case_bytes_and_line_are_named(checkout: Path) -> None:
    edit(
        checkout / "memfix/ops/linear_cross_entropy/recompute.py",
        "        in_place = wants_gradient and wide == weight_VD.dtype\n",
        "        in_place = wants_gradient and wide == weight_VD.dtype\n"
        "        self.extra_CV = weight_VD.new_empty(size_CV)\n",
    )
    leave_only(checkout, "linear_cross_entropy", "reported", "recompute")
    done = gate(checkout, "linear_cross_entropy")
    assert done.returncode == 1
    said = done.stdout
    assert "linear_cross_entropy/recompute [incident, train]: " in said
    assert "+1,244,659,712 (+30.4 %), meter simulated" in said
    assert "memfix/ops/linear_cross_entropy/recompute.py:" in said
    assert "self.extra_CV = weight_VD.new_empty(size_CV)" in said
    assert "if this is meant, run memfix gate --update and commit the lock file" in said
    assert "memfix gate: regression" in said


# ---------------------------------------------------------------- a toy
def test_untouched_copy_passes_and_reports_its_readings(toy: Path) -> None:
    done = gate(toy, "affine", "--json", "-")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["verdict"] == "pass"
    peaks = {(r["form"], r["case"], r["phase"]): r["bytes"] for r in report["readings"]}
    assert peaks["in_place", "large", "forward"] == 4096 * 4


def test_base_without_a_change_of_law_judges_once(toy: Path) -> None:
    done = gate(toy, "affine", "--base", "HEAD")
    assert done.returncode == 0, done.stdout
    assert "law:" not in done.stdout


def test_loosened_budget_cannot_hide_the_change_that_needs_it(toy: Path) -> None:
    edit(toy / FORM, "doubled = x * 2\n", "doubled = (x * 2).clone()\n")
    edit(toy / "memfix/ops/affine/contract.py", 'phase="forward", bytes="N*e"', 'phase="forward", bytes="9*N*e"')
    assert gate(toy, "affine", "--update").returncode == 0, "under its own laws it passes"
    done = gate(toy, "affine", "--base", "HEAD")
    assert done.returncode == 1
    said = done.stdout
    assert (
        "law: affine: budget in_place [every shape, forward] changed: in_place [every shape, forward] at most 9*"
        in said
    )
    assert "law: affine/in_place [large, forward]: lock raised: " in said
    assert "under the laws of HEAD: budget: peak" in said


def test_loosened_check_cannot_hide_the_change_that_needs_it(toy: Path) -> None:
    edit(toy / FORM, "return doubled.add_(1)", "return doubled.add_(2)")
    edit(
        toy / "memfix/checks/equality.py",
        "        compare(answer, reference, tolerance, call.rounded_to)\n",
        "        pass\n",
    )
    assert gate(toy, "affine").returncode == 0, "under its own checks it passes"
    done = gate(toy, "affine", "--base", "HEAD")
    assert done.returncode == 1, done.stdout
    assert "what judges a form differs from HEAD: memfix/checks/ equality.py" in done.stdout
    assert "under the laws of HEAD: equality: float32: output is off by 1" in done.stdout


def test_base_whose_contract_has_an_old_spelling_is_told_the_new_one(toy: Path) -> None:
    contract = toy / "memfix/ops/affine/contract.py"
    edit(contract, 'TensorSpec("x", "N", grad=True)', 'TensorSpec("x", "N", grad=True, scale=2.0)')
    commit_all(toy)
    edit(contract, "scale=2.0", "values=Normal(scale=2.0)")
    edit(contract, "Dim, TensorSpec", "Dim, Normal, TensorSpec")
    done = gate(toy, "affine", "--base", "HEAD")
    assert done.returncode == 2, done.stdout
    said = " ".join(done.stdout.split())
    assert (
        "today's forms cannot be judged under the base's laws: memfix: input 'x': scale=2.0 is spelled values=" in said
    )
    assert "Normal(scale=2.0)" in said


def test_an_op_that_moved_into_another_folder_is_noted_and_judged_by_its_own_laws(toy: Path) -> None:
    (toy / "memfix/ops/affine").rename(toy / "memfix/ops/maps")
    (toy / "memfix/ops/maps/contract.py").rename(toy / "memfix/ops/maps/affine_contract.py")
    done = gate(toy, "affine", "--base", "HEAD")
    assert done.returncode == 0, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert "law: affine: was declared elsewhere at HEAD: today's forms cannot be judged under the base's laws" in said
    assert "No module named 'memfix.ops.affine.in_place'" in said
    assert "gone now" not in said


def test_loosened_budget_of_an_op_that_moved_is_found_where_its_forms_are_still_there(toy: Path) -> None:
    edit(toy / "memfix/ops/affine/contract.py", 'bytes="2*N*e"', 'bytes="20*N*e"')
    (toy / "memfix/ops/maps").mkdir()
    moved = toy / "memfix/ops/maps/affine_contract.py"
    (toy / "memfix/ops/affine/contract.py").rename(moved)
    edit(moved, "from .in_place", "from ..affine.in_place")
    edit(moved, "from .naive", "from ..affine.naive")
    done = gate(toy, "affine", "--base", "HEAD")
    assert done.returncode == 0, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert (
        "law: affine: budget in_place [every shape, train] changed: in_place [every shape, train] at most 20*N*e"
        in said
    )


def test_unknown_base_is_a_usage_error(toy: Path) -> None:
    done = gate(toy, "affine", "--base", "no-such-ref")
    assert done.returncode == 4
    assert "memfix: --base: no commit 'no-such-ref'" in done.stderr


def test_gain_asks_for_an_update_and_update_keeps_other_ops(toy: Path) -> None:
    lock = toy / LOCK
    before = lock.read_text()
    assert OTHER_OP in before
    edit(lock, "affine/in_place [small, train] 2048 bytes", "affine/in_place [small, train] 2500 bytes")
    done = gate(toy, "affine")
    assert done.returncode == 0
    assert "452 bytes below the lock; run memfix gate --update to keep the gain" in done.stdout
    assert gate(toy, "affine", "--update").returncode == 0
    assert lock.read_text() == before


def test_missing_and_extra_entries_fail(toy: Path) -> None:
    edit(toy / LOCK, "affine/in_place [small, train] 2048 bytes", "affine/in_place [tiny, train] 2048 bytes")
    done = gate(toy, "affine")
    assert done.returncode == 1
    assert "affine/in_place [small, train]: 2.00 KiB measured, and no entry in the lock" in done.stdout
    assert "affine/in_place [tiny, train]: the lock has an entry that nothing measures any more" in done.stdout


def test_a_first_gate_says_once_which_file_to_write_and_commit(toy: Path) -> None:
    (toy / LOCK).unlink()
    done = gate(toy)
    assert done.returncode == 1
    assert done.stdout.count("lock FAILED") == 1
    assert (
        f"gate: there is no lock file {LOCK}: run memfix gate --update, which writes today's bytes to it, and commit "
        "it with memory.peaks.json; --no-lock judges without one" in done.stdout
    )
    assert gate(toy, "--update").returncode == 0
    assert gate(toy).returncode == 0


def test_an_op_that_the_lock_does_not_know_fails_once(toy: Path) -> None:
    (toy / LOCK).write_text(f"# memfix lock 1: bytes\n\n{OTHER_OP}\n")
    done = gate(toy, "affine")
    assert done.returncode == 1
    assert done.stdout.count("lock FAILED") == 1
    assert (
        "affine: the lock has no entry of this op; if this is meant, run memfix gate affine --update and commit"
        in done.stdout
    )


def test_an_update_of_all_ops_resolves_a_merge_conflict(toy: Path) -> None:
    lock = toy / LOCK
    edit(lock, OTHER_OP, "")
    clean = lock.read_text().rstrip() + "\n"
    lock.write_text(f"<<<<<<< HEAD\n{clean}=======\n{clean}>>>>>>> branch\n")
    for arguments in ((), ("affine", "--update")):
        done = gate(toy, *arguments)
        assert done.returncode == 4
        assert (
            f"memfix: {LOCK}:1: the lock file has a merge conflict; run memfix gate --update for all ops" in done.stderr
        )
    assert gate(toy, "--update").returncode == 0
    assert lock.read_text() == clean


def test_a_merge_conflict_is_still_said_where_an_update_fails(toy: Path) -> None:
    edit(toy / FORM, "return doubled.add_(1)", "return doubled.add_(2)")
    edit(toy / LOCK, OTHER_OP, "<<<<<<< HEAD")
    done = gate(toy, "--update")
    assert done.returncode == 1
    assert "the lock file has a merge conflict" in done.stdout
    assert done.stdout.count("lock FAILED") == 1


def test_update_leaves_the_lock_alone_when_something_else_fails(toy: Path) -> None:
    before = (toy / LOCK).read_text()
    edit(toy / FORM, "return doubled.add_(1)", "return doubled.add_(2)")
    done = gate(toy, "affine", "--update")
    assert done.returncode == 1
    assert "the lock was not updated: something else than the lock fails" in done.stdout
    assert "smallest call found: N=1," in done.stdout
    assert "reproduce: memfix check affine --form in_place --at N=1," in done.stdout
    assert (toy / LOCK).read_text() == before


def test_naive_that_raises_is_an_error_and_not_a_pass(toy: Path) -> None:
    edit(toy / "memfix/ops/affine/naive.py", "    return x * 2 + 1", "    raise KeyError('planted')")
    done = gate(toy, "affine")
    assert done.returncode == 2, done.stdout
    assert "naive itself fails at" in done.stdout
    assert "memfix gate: could not measure" in done.stdout


@pytest.mark.parametrize("meter", ["cuda", "nvml"])
def test_a_gpu_meter_could_not_measure_where_there_is_no_gpu(toy: Path, meter: str) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this is about machines without a GPU")
    done = gate(toy, "affine", "--meter", meter)
    assert done.returncode == 2
    assert f"memfix: {meter} meter unavailable: torch sees no GPU; use the simulated meter" in done.stderr
