"""Another commit beside this one: which laws differ, and what is laid over what."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memfix.checks.finding import Finding
from memfix.checks.measured import Bytes
from memfix.contract import Contract, Dim, TensorSpec
from memfix.errors import EXIT_NOT_MEASURED, EXIT_USAGE, LockError, MemfixError, UsageError
from memfix.gate.base import JUDGED, Base, examine_under, judge_changes, law_changes, laws_under, lock_at, lock_changes
from memfix.gate.lock import write_lock
from memfix.gate.their_base import under_laws_of
from memfix.laws import Budget

ROOT = Path(__file__).resolve().parents[2]


class Checkout:
    """A git repository with ops of two files each, and whatever else a test writes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.git("init", "--quiet", "--initial-branch=main")
        self.git("config", "user.name", "memfix")
        self.git("config", "user.email", "memfix@example.org")
        self.git("config", "commit.gpgsign", "false")

    def git(self, *arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(self.root), *arguments], check=True, capture_output=True, text=True)
        return done.stdout

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text, encoding="utf-8")

    def write_op(self, op: str, *, naive: str = "naive 1\n", contract: str = "contract 1\n") -> None:
        self.write(f"memfix/ops/{op}/naive.py", naive)
        self.write(f"memfix/ops/{op}/contract.py", contract)

    def commit(self) -> str:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "state")
        return self.git("rev-parse", "HEAD").strip()

    def base(self, ref: str = "HEAD") -> Base:
        return Base.of(ref, self.root / "memfix")


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    made = Checkout(tmp_path)
    made.write("memfix/ops/__init__.py", "")
    for op in ("embedding", "loss", "old"):
        made.write_op(op)
    made.write("memfix/ops/loss/chunked.py", "form 1\n")
    made.commit()
    return made


# ---------------------------------------------------------------- the commit
@pytest.mark.parametrize("ref", ["HEAD", "main"])
def test_a_ref_is_resolved_to_its_commit_and_kept_for_the_messages(checkout: Checkout, ref: str) -> None:
    head = checkout.git("rev-parse", "HEAD").strip()
    assert checkout.base(ref) == Base(checkout.root, head, ref)


def test_a_whole_hash_is_short_in_the_messages(checkout: Checkout) -> None:
    head = checkout.git("rev-parse", "HEAD").strip()
    assert checkout.base(head) == Base(checkout.root, head, head[:12])


@pytest.mark.parametrize("ref", ["origin/main", "-x", ""])
def test_an_unknown_ref_is_refused_with_the_checkout_it_is_missing_from(checkout: Checkout, ref: str) -> None:
    with pytest.raises(UsageError) as refused:
        checkout.base(ref)
    assert str(refused.value) == f"--base: no commit {ref!r} in {checkout.root}; fetch it, or name another"
    assert refused.value.exit_code == EXIT_USAGE


def test_a_package_outside_of_git_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(
        UsageError, match=r"^--base needs a git checkout of memfix, and .* is none: .*not a git repository"
    ):
        Base.of("HEAD", tmp_path / "memfix")


def test_a_missing_git_is_said(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(checkout.root))
    with pytest.raises(MemfixError, match=r"^--base and --changed need git, and there is none") as failed:
        checkout.base()
    assert failed.value.exit_code == EXIT_NOT_MEASURED


@pytest.fixture
def shallow(checkout: Checkout, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of the last commit alone."""
    checkout.write_op("loss", contract="contract 2\n")
    checkout.commit()
    folder = tmp_path_factory.mktemp("shallow") / "clone"
    checkout.git("clone", "--quiet", "--depth=1", checkout.root.as_uri(), str(folder))
    return folder


def test_a_commit_that_a_shallow_clone_has_not_is_not_called_unknown(checkout: Checkout, shallow: Path) -> None:
    before = checkout.git("rev-parse", "HEAD~1").strip()
    with pytest.raises(MemfixError) as failed:
        Base.of(before, shallow / "memfix")
    assert str(failed.value) == (
        f"--base: {shallow} is a shallow clone without the commit {before!r}; "
        "run git fetch --unshallow, or check out with fetch-depth: 0"
    )
    assert failed.value.exit_code == EXIT_NOT_MEASURED


def test_a_commit_that_a_shallow_clone_has_is_compared_with(shallow: Path) -> None:
    assert Base.of("HEAD", shallow / "memfix").ops_with_other_laws() == []


def test_uncommitted_changes_of_what_is_judged_are_said(checkout: Checkout) -> None:
    assert checkout.base().notes(*JUDGED) == []
    checkout.write("notes.txt", "not judged")
    assert checkout.base().notes(*JUDGED) == []
    checkout.write("memfix/ops/loss/chunked.py", "form 2\n")
    checkout.write("memfix/ops/loss/new.py", "")
    assert checkout.base().notes(*JUDGED) == [
        "the working tree has uncommitted changes, and they are judged too: "
        "memfix/ops/loss/chunked.py, memfix/ops/loss/new.py"
    ]
    for number in range(3):
        checkout.write(f"memfix/{number}.py", "")
    assert checkout.base().notes(*JUDGED)[0].endswith(", ...")


def test_a_package_that_is_not_at_the_root_of_the_checkout_is_refused(tmp_path: Path) -> None:
    outer = Checkout(tmp_path)
    outer.write(".venv/site-packages/memfix/ops/loss/contract.py", "contract 1\n")
    outer.commit()
    with pytest.raises(UsageError):
        Base.of("HEAD", tmp_path / ".venv/site-packages/memfix")


# ---------------------------------------------------------------- which laws differ
def test_an_unchanged_tree_has_no_other_laws(checkout: Checkout) -> None:
    assert checkout.base().ops_with_other_laws() == []
    assert checkout.base().gone_ops("law") == []


def test_a_changed_contract_and_a_changed_naive_form_are_other_laws_and_a_changed_form_is_not(
    checkout: Checkout,
) -> None:
    checkout.write_op("embedding", contract="contract 2\n")
    checkout.write_op("old", naive="naive 2\n")
    checkout.write("memfix/ops/loss/chunked.py", "form 2\n")
    assert checkout.base().ops_with_other_laws() == ["embedding", "old"]


def test_committed_changes_count_against_an_older_base(checkout: Checkout) -> None:
    before = checkout.git("rev-parse", "HEAD").strip()
    checkout.write_op("loss", contract="contract 2\n")
    checkout.commit()
    assert checkout.base(before).ops_with_other_laws() == ["loss"]
    assert checkout.base("HEAD").ops_with_other_laws() == []


def test_letters_outside_of_ascii_are_no_difference_in_any_locale(checkout: Checkout) -> None:
    checkout.write_op("loss", naive="# σ = Σ exp(x)\n")
    checkout.commit()
    code = "import sys; from pathlib import Path; from memfix.gate.base import Base; "
    code += "print(Base.of('HEAD', Path(sys.argv[1])).ops_with_other_laws())"
    child = subprocess.run(
        [sys.executable, "-c", code, str(checkout.root / "memfix")],
        cwd=ROOT,
        env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        text=True,
    )
    assert (child.stdout, child.stderr) == ("[]\n", "")


def test_a_naive_form_that_was_deleted_is_another_law(checkout: Checkout) -> None:
    (checkout.root / "memfix/ops/loss/naive.py").unlink()
    assert checkout.base().ops_with_other_laws() == ["loss"]


def test_ops_come_and_go(checkout: Checkout) -> None:
    checkout.write_op("new")
    for path in (checkout.root / "memfix/ops/old").iterdir():
        path.unlink()
    base = checkout.base()
    assert [(note.op, note.message) for note in base.gone_ops("law")] == [
        ("old", "the op is there at HEAD and gone now")
    ]
    assert (base.is_new("new"), base.is_new("loss"), base.is_new("old")) == (True, False, False)
    assert base.ops_with_other_laws() == ["new"]


def test_a_folder_may_declare_several_ops(checkout: Checkout) -> None:
    checkout.write("memfix/ops/loss/log_probabilities_contract.py", "contract of another op\n")
    base = checkout.base()
    assert base.ops_here() == ["embedding", "log_probabilities", "loss", "old"]
    assert base.is_new("log_probabilities")
    assert base.ops_with_other_laws() == ["log_probabilities"]
    checkout.commit()
    assert checkout.base().ops_with_other_laws() == []
    checkout.write("memfix/ops/loss/naive.py", "naive 2\n")
    assert checkout.base().ops_with_other_laws() == ["log_probabilities", "loss"], "both are held against it"


def moved(checkout: Checkout) -> Base:
    """The op ``old`` is declared in the folder of ``loss`` now, and its own folder is gone."""
    (checkout.root / "memfix/ops/old/contract.py").rename(checkout.root / "memfix/ops/loss/old_contract.py")
    (checkout.root / "memfix/ops/old/naive.py").unlink()
    return checkout.base()


def test_an_op_that_had_a_folder_of_its_own_is_neither_new_nor_gone(checkout: Checkout) -> None:
    base = moved(checkout)
    assert (base.gone_ops("law"), base.is_new("old")) == ([], False)
    assert [op for op in base.ops_here() if base.has_moved(op)] == ["old"]
    assert base.ops_with_other_laws() == ["old"]


# ---------------------------------------------------------------- laid over
def test_the_laws_of_an_op_that_moved_are_laid_where_they_were(checkout: Checkout) -> None:
    base = moved(checkout)
    checkout.write("memfix/ops/loss/contract.py", "contract 2\n")
    for op in ("old", "loss"):  # whichever is asked for: contracts of one folder import each other
        with base.laid_over([op]) as overlay:
            ops = overlay / "memfix/ops"
            assert (ops / "old/contract.py").read_text() == "contract 1\n"
            assert (ops / "old/naive.py").read_text() == "naive 1\n"
            assert (ops / "loss/contract.py").read_text() == "contract 1\n"
            assert not (ops / "loss/old_contract.py").exists()
            assert (ops / "loss/chunked.py").read_text() == "form 1\n"


def test_the_laws_of_the_base_are_laid_over_a_copy_of_the_tree(checkout: Checkout) -> None:
    for op in ("embedding", "loss"):
        checkout.write_op(op, naive="naive 2\n", contract="contract 2\n")
    checkout.write("memfix/ops/loss/chunked.py", "form 2\n")
    checkout.write("memfix/ops/loss/__pycache__/naive.pyc", "stale")
    checkout.write("memfix/new_module.py", "not in git\n")
    with checkout.base().laid_over(["loss"]) as overlay:
        ops = overlay / "memfix/ops"
        assert (ops / "loss/naive.py").read_text() == "naive 1\n"
        assert (ops / "loss/contract.py").read_text() == "contract 1\n"
        assert (ops / "loss/chunked.py").read_text() == "form 2\n"
        assert (ops / "embedding/contract.py").read_text() == "contract 2\n"
        assert (overlay / "memfix/new_module.py").read_text() == "not in git\n"
        assert not (ops / "loss/__pycache__").exists()
    assert not overlay.exists()
    assert (checkout.root / "memfix/ops/loss/contract.py").read_text() == "contract 2\n"


def test_an_op_that_the_base_has_not_keeps_its_own_laws(checkout: Checkout) -> None:
    checkout.write_op("new", contract="contract of today\n")
    with checkout.base().laid_over(["new"]) as overlay:
        assert (overlay / "memfix/ops/new/contract.py").read_text() == "contract of today\n"


# ---------------------------------------------------------------- the child that judges there
@pytest.fixture
def overlay(tmp_path: Path) -> Any:
    """A folder whose memfix is only this program."""

    def overlay(program: str) -> Path:
        (tmp_path / "memfix").mkdir()
        (tmp_path / "memfix/__init__.py").touch()
        (tmp_path / "memfix/__main__.py").write_text(program)
        return tmp_path

    return overlay


def test_the_child_runs_the_overlaid_package_and_leaves_github_to_the_parent(
    overlay: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    there = overlay(
        "import json, os, sys\n"
        "github = sorted({'GITHUB_ACTIONS', 'GITHUB_STEP_SUMMARY'} & os.environ.keys())\n"
        "print(json.dumps({'arguments': sys.argv[1:], 'github': github}))\n"
        "sys.exit(1)\n"
    )
    assert examine_under(there, ["loss"], "dev", "simulated") == {
        "arguments": ["gate", "loss", "--profile", "dev", "--meter", "simulated", "--no-lock", "--json", "-"],
        "github": [],
    }


def test_the_laws_of_the_overlaid_package_are_listed_by_op(overlay: Any) -> None:
    there = overlay("""print('{"ops": [{"name": "loss", "laws": {"dim N": "1 to 3"}, "forms": []}]}')""")
    assert laws_under(there, ["loss"]) == {"loss": {"dim N": "1 to 3"}}


@pytest.mark.parametrize(
    ("program", "last"),
    [
        ("import sys; sys.exit('first\\nImportError: no chunked.py')", "ImportError: no chunked.py"),
        ("print('no JSON')", "no output"),
    ],
    ids=["an error", "no error"],
)
def test_a_child_that_gives_no_verdict_is_not_measured(overlay: Any, program: str, last: str) -> None:
    with pytest.raises(MemfixError) as failed:
        examine_under(overlay(program), ["loss"], "dev", "simulated")
    assert str(failed.value) == f"today's forms cannot be judged under the base's laws: {last}"
    assert failed.value.exit_code == EXIT_NOT_MEASURED


# ---------------------------------------------------------------- the base's lock
KEY = ("loss", "chunked", "small", "train")


def test_the_lock_of_the_base_is_read_from_its_commit(checkout: Checkout) -> None:
    path = checkout.root / "benchmarks/memory.lock"
    write_lock(path, {KEY: 1024})
    checkout.commit()
    write_lock(path, {KEY: 2048})
    assert lock_at(checkout.base(), path) == {KEY: 1024}


def test_a_broken_lock_of_the_base_is_named_with_its_commit(checkout: Checkout) -> None:
    checkout.write("benchmarks/memory.lock", "not a lock\n")
    checkout.commit()
    with pytest.raises(LockError, match=r"^HEAD:benchmarks/memory\.lock:1: not a memfix lock file of version 1"):
        lock_at(checkout.base(), checkout.root / "benchmarks/memory.lock")


def test_a_lock_that_the_base_has_not_is_empty(checkout: Checkout, tmp_path_factory: pytest.TempPathFactory) -> None:
    base = checkout.base()
    assert lock_at(base, checkout.root / "benchmarks/memory.lock") == {}
    outside = tmp_path_factory.mktemp("outside") / "memory.lock"
    write_lock(outside, {KEY: 1024})
    assert lock_at(base, outside) == {}


def test_raised_and_lowered_entries_are_a_row_each() -> None:
    def key(case: str) -> tuple[str, str, str, str]:
        return ("loss", "chunked", case, "train")

    before = {key("raised"): 1024, key("lowered"): 1024, key("same"): 7}
    now = {key("raised"): 2048, key("lowered"): 512, key("same"): 7}
    lowered, raised = lock_changes(before, now, "main")
    assert (raised.subject, raised.message) == (
        "loss/chunked [raised, train]", "lock raised: 2.00 KiB; at main: 1.00 KiB"
    )  # fmt: skip
    assert (lowered.subject, lowered.message) == (
        "loss/chunked [lowered, train]", "lock lowered: 512 B; at main: 1.00 KiB"
    )  # fmt: skip
    assert {(row.check, row.status) for row in (lowered, raised)} == {("law", "note")}
    assert dict(raised.figures) == {"bytes": 2048, "before_bytes": 1024}


def test_an_op_that_was_renamed_is_gone_and_new() -> None:
    before = {("loss", "chunked", case, "train"): 1 for case in ("small", "big")}
    now = {("new_loss", form, "small", "train"): 1 for form in ("chunked", "other")}
    assert [(row.subject, row.message) for row in lock_changes(before, now, "main")] == [
        ("loss/chunked", "gone from the lock; at main it has 2 entries"),
        ("new_loss/chunked", "new in the lock since main: 1 entry"),
        ("new_loss/other", "new in the lock since main: 1 entry"),
    ]


# ---------------------------------------------------------------- rows for laws
def contract(**changes: Any) -> Contract:
    parts: dict[str, Any] = {
        "naive": lambda x: x,
        "forms": {"same": lambda x: x},
        "dims": {"N": Dim(1, 3)},
        "inputs": [TensorSpec("x", "N")],
        "cases": {"small": {"N": 2}},
        "budgets": [Budget("same", bytes="N*e")],
    }
    return Contract("loss", **{**parts, **changes})


def test_a_law_that_is_loosened_removed_or_added_is_a_row_each() -> None:
    at_base = contract(cases={"small": {"N": 2}, "big": {"N": 9}}).laws()
    now = contract(budgets=[Budget("same", bytes="2*N*e"), Budget("same", phase="held", bytes="N")])
    rows = law_changes(now, at_base, "main")
    assert [row.message for row in rows] == [
        "case big removed; at main: N=9,dtype=float32",
        "budget same [every shape, train] changed: same [every shape, train] at most 2*N*e; "
        "at main: same [every shape, train] at most N*e",
        "budget same [every shape, held] added: same [every shape, held] at most N",
    ]
    assert {(row.check, row.op, row.form, row.status) for row in rows} == {("law", "loss", "", "note")}


def test_a_text_that_differs_under_equal_laws_is_a_row_too() -> None:
    assert law_changes(contract(), contract().laws(), "main") == [
        Finding("law", "loss", "", "note", "the text of its naive form or contract differs from main")
    ]


def test_findings_of_the_base_keep_their_bytes_and_what_is_known_but_not_their_command() -> None:
    known = Finding(
        "budget", "loss", "reported", "pass", "peak 3 B", "small", "train", ("  detail",), "memfix check loss",
        Bytes(3, 2, "budget"), "loss.py:7", "breaks its budget",
    )  # fmt: skip
    of_an_earlier_memfix = known.as_dict()
    del of_an_earlier_memfix["known"]
    note = Finding("budget", "loss", "chunked", "note", "not judged")
    rows = under_laws_of("main", [*map(Finding.from_dict, (known.as_dict(), of_an_earlier_memfix, note.as_dict()))])
    message = "under the laws of main: budget: peak 3 B"
    expected = replace(known, check="base law", message=message, reproduce="")
    assert rows == [expected, replace(expected, known="")]


def test_files_that_judge_are_found_and_forms_and_laws_are_none(checkout: Checkout) -> None:
    checkout.write("memfix/checks/comparing.py", "FACTOR = 2\n")
    checkout.write("ci/gate", "memfix gate\n")
    checkout.commit()
    assert checkout.base().judges_changed() == []
    checkout.write("memfix/checks/comparing.py", "FACTOR = 20\n")
    checkout.write("memfix/checks/excused.py", "ALL = True\n")
    checkout.write("memfix/ops/loss/chunked.py", "form 2\n")
    checkout.write("memfix/ops/loss/contract.py", "contract 2\n")
    (checkout.root / "ci/gate").unlink()
    changed = checkout.base().judges_changed()
    assert changed == ["ci/gate", "memfix/checks/comparing.py", "memfix/checks/excused.py"]
    rows = [row.message for row in judge_changes(changed, "main")]
    assert rows == [
        "what judges a form differs from main: ci/ gate",
        "what judges a form differs from main: memfix/checks/ comparing.py, excused.py",
    ]


def test_todays_forms_are_laid_over_the_checks_and_laws_of_the_base(checkout: Checkout) -> None:
    checkout.write("memfix/checks/comparing.py", "FACTOR = 2\n")
    checkout.commit()
    checkout.write("memfix/checks/comparing.py", "FACTOR = 20\n")
    checkout.write("memfix/ops/loss/chunked.py", "form 2\n")
    checkout.write("memfix/ops/loss/contract.py", "contract 2\n")
    checkout.write("memfix/ops/loss/another_contract.py", "contract of today\n")
    checkout.write_op("new")
    with checkout.base().with_todays_forms() as overlay:
        assert not (overlay / "memfix/ops/loss/another_contract.py").exists()
        assert (overlay / "memfix/checks/comparing.py").read_text() == "FACTOR = 2\n"
        assert (overlay / "memfix/ops/loss/contract.py").read_text() == "contract 1\n"
        assert (overlay / "memfix/ops/loss/chunked.py").read_text() == "form 2\n"
        assert not (overlay / "memfix/ops/new").exists()
    assert not overlay.exists()
