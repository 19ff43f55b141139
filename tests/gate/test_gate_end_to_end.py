"""The gate on a copy of memfix in which somebody broke something: exit code, and what is said."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git checkout of this memfix with its lock, all of it committed."""
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "memfix", folder / "memfix", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "benchmarks").mkdir()
    shutil.copy(ROOT / "benchmarks" / "memory.lock", folder / "benchmarks")
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "-A")
    git(folder, "-c", "user.name=memfix", "-c", "user.email=memfix@example.com", "commit", "-q", "-m", "all")
    return folder


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {path}"
    path.write_text(text.replace(old, new))


def gate(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "160", "MEMFIX_PROFILE": "dev"}
    environment.pop("GITHUB_ACTIONS", None)
    command = [sys.executable, "-m", "memfix", "gate", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def keep_the_widened_gradient(folder: Path) -> None:
    """The gradient is widened as before, and now stays alive while the sum is narrowed."""
    edit(
        folder / "memfix/ops/embedding/gather.py",
        "        sum_VD.index_add_(0, ids_N, grad_ND.to(sum_dtype))\n",
        "        wide_ND = grad_ND.to(sum_dtype).clone()\n        sum_VD.index_add_(0, ids_N, wide_ND)\n",
    )


def test_untouched_copy_passes_and_reports_its_readings(checkout: Path) -> None:
    done = gate(checkout, "embedding", "--json", "-")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["verdict"] == "pass"
    peaks = {(r["form"], r["case"], r["phase"]): r["bytes"] for r in report["readings"]}
    assert peaks["gather", "incident", "forward"] == 32_768 * 512 * 2


def test_one_extra_chunk_fails_and_the_form_case_bytes_and_line_are_named(checkout: Path) -> None:
    edit(
        checkout / "memfix/ops/linear_cross_entropy/recompute.py",
        "        in_place = wants_gradient and wide == weight_VD.dtype\n",
        "        in_place = wants_gradient and wide == weight_VD.dtype\n"
        "        self.extra_CV = weight_VD.new_empty(size_CV)\n",
    )
    done = gate(checkout, "linear_cross_entropy", "--profile", "dev")
    assert done.returncode == 1
    said = done.stdout
    assert "linear_cross_entropy/recompute [incident, train]: " in said
    assert "+1,244,659,712 (+30.4 %), meter simulated" in said
    assert "memfix/ops/linear_cross_entropy/recompute.py:" in said
    assert "self.extra_CV = weight_VD.new_empty(size_CV)" in said
    assert "if this is meant, run memfix gate --update and commit the lock file" in said
    assert "memfix gate: regression" in said


def test_loosened_budget_cannot_hide_the_change_that_needs_it(checkout: Path) -> None:
    keep_the_widened_gradient(checkout)
    edit(
        checkout / "memfix/ops/embedding/contract.py",
        'bytes="N*D*e + V*D*max(e, 4) + max(N*D*4, V*D*e)"',
        'bytes="9*(N*D*e + V*D*max(e, 4) + max(N*D*4, V*D*e))"',
    )
    assert gate(checkout, "embedding", "--update").returncode == 0, "under its own laws it passes"
    done = gate(checkout, "embedding", "--base", "HEAD")
    assert done.returncode == 1
    said = done.stdout
    assert "law: embedding: budget gather [every shape, train] changed: gather [every shape, train] at most 9*(" in said
    assert "law: embedding/gather [medium, train]: lock raised: " in said
    assert "under the laws of HEAD: budget: peak" in said


def test_base_without_a_change_of_law_judges_once(checkout: Path) -> None:
    done = gate(checkout, "embedding", "--base", "HEAD")
    assert done.returncode == 0, done.stdout
    assert "law:" not in done.stdout


def test_unknown_base_is_a_usage_error(checkout: Path) -> None:
    done = gate(checkout, "embedding", "--base", "no-such-ref")
    assert done.returncode == 4
    assert "memfix: --base: no commit 'no-such-ref'" in done.stderr


def test_gain_asks_for_an_update_and_update_keeps_other_ops(checkout: Path) -> None:
    lock = checkout / "benchmarks/memory.lock"
    before = lock.read_text()
    edit(lock, "embedding/gather [small, train] 774144 bytes", "embedding/gather [small, train] 800000 bytes")
    done = gate(checkout, "embedding")
    assert done.returncode == 0
    assert "25,856 bytes below the lock; run memfix gate --update to keep the gain" in done.stdout
    assert gate(checkout, "embedding", "--update").returncode == 0
    assert lock.read_text() == before


def test_missing_and_extra_entries_fail(checkout: Path) -> None:
    lock = checkout / "benchmarks/memory.lock"
    edit(lock, "embedding/gather [small, train] 774144 bytes", "embedding/gather [tiny, train] 774144 bytes")
    done = gate(checkout, "embedding")
    assert done.returncode == 1
    assert "embedding/gather [small, train]: 756.00 KiB measured, and no entry in the lock" in done.stdout
    assert "embedding/gather [tiny, train]: the lock has an entry that nothing measures any more" in done.stdout


def test_update_leaves_the_lock_alone_when_something_else_fails(checkout: Path) -> None:
    lock = checkout / "benchmarks/memory.lock"
    before = lock.read_text()
    edit(
        checkout / "memfix/ops/embedding/gather.py",
        "return weight_VD.index_select(0, ids_N)",
        "return weight_VD.index_select(0, ids_N) * 2",
    )
    done = gate(checkout, "embedding", "--update")
    assert done.returncode == 1
    assert "the lock was not updated: something else than the lock fails" in done.stdout
    assert "smallest call found: N=1,V=1,D=1," in done.stdout
    assert "reproduce: memfix check embedding --form gather --at N=1,V=1,D=1," in done.stdout
    assert lock.read_text() == before


def test_naive_that_raises_is_an_error_and_not_a_pass(checkout: Path) -> None:
    edit(
        checkout / "memfix/ops/embedding/naive.py", "    return one_hot_NV @ weight_VD", "    raise KeyError('planted')"
    )
    done = gate(checkout, "embedding")
    assert done.returncode == 2, done.stdout
    assert "naive itself fails at" in done.stdout
    assert "memfix gate: could not measure" in done.stdout


def test_gpu_meter_falls_back_with_a_note_where_there_is_no_gpu(checkout: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this is about machines without a GPU")
    done = gate(checkout, "embedding", "--meter", "cuda")
    assert done.returncode == 0
    assert "note: cuda meter unavailable: torch sees no GPU; use the simulated meter; used the simulated" in done.stdout
