"""``memfix gate --base`` in somebody else's repository: their laws at another commit, and their bytes."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from checkouts import commit_all
from their_repository import LOCK, Theirs

FORM, CONTRACT = "src/theirs/scan.py", "src/theirs/memory.py"


def against_base(theirs: Theirs, *arguments: str) -> subprocess.CompletedProcess[str]:
    return theirs.gate("their_scan", "their_norm", "--base", "HEAD", *arguments)


def findings(theirs: Theirs, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    ended = against_base(theirs, "--json", "-", *arguments)
    assert ended.stdout, ended.stderr
    return ended.returncode, json.loads(ended.stdout)["findings"]


def rows(found: list[dict[str, Any]], *checks: str) -> list[tuple[str, str, str, str]]:
    """Of these checks what did not pass."""
    return [
        (row["check"], row["subject"], row["status"], row["message"])
        for row in found
        if row["check"] in checks and row["status"] != "pass"
    ]


def test_an_unchanged_tree_passes_and_every_byte_is_that_of_the_base(theirs: Theirs) -> None:
    code, found = findings(theirs, "--no-lock")
    assert code == 0
    assert rows(found, "law", "base law", "base") == []
    compared = [row for row in found if row["check"] == "base"]
    assert {row["op"] for row in compared} == {"their_norm", "their_scan"}
    assert all(row["figures"]["bytes"] == row["figures"]["before_bytes"] for row in compared)


def test_a_loosened_budget_cannot_hide_the_change_that_needs_it(theirs: Theirs) -> None:
    theirs.edit(FORM, "twice(x)", "twice(x).clone()")
    theirs.edit(CONTRACT, 'bytes="N*e"', 'bytes="9*N*e"')
    assert theirs.gate("their_scan", "--update").returncode == 0, "under its own laws it passes"
    ended = against_base(theirs)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    said = " ".join(ended.stdout.split())
    budget = "chunked [every shape, forward]"
    assert f"law: their_scan: budget {budget} changed: {budget} at most 9*N*e; at HEAD: {budget} at most N*e" in said
    assert "their_scan/chunked [small, forward]: under the laws of HEAD: budget: peak" in said
    assert "their_norm/chunked [small, forward]: under the laws" not in said


def test_a_naive_that_follows_a_wrong_form_cannot_hide_it(theirs: Theirs) -> None:
    theirs.edit(FORM, "add_(1)", "add_(2)")
    theirs.edit("src/theirs/norm/kernel.py", "add_(1)", "add_(2)")
    theirs.edit("src/theirs/dense.py", "+ 1", "+ 2")
    assert theirs.gate("their_scan", "--no-lock").returncode == 0
    code, found = findings(theirs, "--no-lock")
    assert code == 1
    (row, *_) = rows(found, "base law")
    assert row[1:3] == ("their_scan/chunked", "fail")
    assert row[3].startswith("under the laws of HEAD: equality: float32: output is off by 1")
    assert ("law", "their_scan", "note", "the text of its naive form or contract differs from HEAD") in rows(
        found, "law"
    )


def test_growth_fails_where_there_is_no_lock_and_names_the_line(theirs: Theirs) -> None:
    theirs.edit(CONTRACT, 'bytes="N*e"', 'bytes="9*N*e"')
    commit_all(theirs.root)
    theirs.edit(FORM, "twice(x)", "twice(x).clone()")
    code, found = findings(theirs, "--no-lock")
    assert code == 1
    assert rows(found, "law", "base law") == [], "no law differs"
    grown = [row for row in found if (row["check"], row["status"]) == ("base", "fail")]
    (row,) = (row for row in grown if row["phase"] == "forward")
    assert row["message"] == "2,048 bytes (2.00 KiB), at HEAD 1,024 (1.00 KiB): +1,024 (2.0x over), meter simulated"
    assert row["source"] == f"{FORM}:5"
    assert row["details"][-1] == "  if this is meant, keep the bytes in a lock: run memfix gate --update and commit it"


def test_a_lock_holds_the_bytes_where_there_is_one_and_its_change_is_a_row(theirs: Theirs) -> None:
    theirs.edit(CONTRACT, 'bytes="N*e"', 'bytes="9*N*e"')
    assert theirs.gate("their_scan", "their_norm", "--update").returncode == 0
    commit_all(theirs.root)
    theirs.edit(FORM, "twice(x)", "twice(x).clone()")
    assert theirs.gate("their_scan", "--update").returncode == 0
    code, found = findings(theirs)
    assert code == 0
    assert rows(found, "base") == []
    assert ("law", "their_scan/chunked [small, forward]", "note", "lock raised: 2.00 KiB; at HEAD: 1.00 KiB") in rows(
        found, "law"
    )
    assert (theirs.root / LOCK).exists()


def test_ops_and_forms_come_and_go(theirs: Theirs) -> None:
    theirs.edit(
        CONTRACT, '    contract_of("their_norm", chunked_norm),\n', '    contract_of("new_norm", chunked_norm),\n'
    )
    theirs.edit(CONTRACT, 'forms={"chunked": form}', 'forms={"chunked": form, "again": form}')
    ended = theirs.gate("new_norm", "their_scan", "--base", "HEAD", "--no-lock", "--json", "-")
    found = rows(json.loads(ended.stdout)["findings"], "law")
    assert ("law", "new_norm", "note", "no law at HEAD: the op is new") in found
    assert ("law", "their_norm", "note", "the op is there at HEAD and gone now") in found
    assert any(message.startswith("form again added") for *_, message in found)


def test_a_package_that_cannot_be_imported_as_it_was_is_not_measured(theirs: Theirs) -> None:
    theirs.edit("src/theirs/dense.py", "def dense", "import gone_library\n\n\ndef dense")
    commit_all(theirs.root)
    theirs.edit("src/theirs/dense.py", "import gone_library\n\n\ndef dense", "def dense")
    ended = against_base(theirs, "--no-lock")
    assert ended.returncode == 2, ended.stdout
    said = "the package cannot be used as it was at HEAD: ModuleNotFoundError: No module named 'gone_library'"
    assert f"their_scan: {said}" in " ".join(ended.stdout.split())


def test_functions_of_another_package_are_not_said_to_be_those_of_the_base(theirs: Theirs) -> None:
    (theirs.root / "src/other.py").write_text("def dense(x):\n    return x * 2 + 1\n")
    theirs.edit(CONTRACT, "from theirs.dense import dense", "from other import dense")
    commit_all(theirs.root)
    theirs.append(CONTRACT)
    ended = against_base(theirs, "--no-lock")
    assert ended.returncode == 2, ended.stdout
    said = "other.dense is one and the same at HEAD: declare the contract in the package of its functions"
    assert f"their_scan: {said}" in ended.stdout


def test_an_unknown_commit_is_refused_before_anything_is_measured(theirs: Theirs) -> None:
    ended = theirs.gate("their_scan", "--base", "elsewhere")
    assert ended.returncode == 4
    assert f"--base: no commit 'elsewhere' in {theirs.root}" in ended.stderr


def test_what_is_only_installed_is_noted_beside_what_is_judged(theirs: Theirs) -> None:
    """Memfix's own op: the commit is one of their repository alone."""
    theirs.append("README.md")
    commit_all(theirs.root)
    ended = theirs.gate("affine", "their_scan", "--base", "HEAD~1", "--no-lock", "--json", "-")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (note,) = json.loads(ended.stdout)["notes"]
    assert note.startswith("memfix's own ops: held to today's laws only: --base: no commit 'HEAD~1' in ")
