"""``memfix gate --changed``: which ops a change touches."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from checkouts import commit_all, gate, git
from their_repository import LOCK, OPS, Theirs

ASK = """
import json, sys
from pathlib import Path
from memfix.errors import MemfixError
from memfix.gate.touched import touched_ops
try:
    touched = touched_ops(sys.argv[1], Path("benchmarks/memory.lock"))
    print(json.dumps([list(touched.ops), touched.note]))
except MemfixError as error:
    print(json.dumps([[], str(error)]))
"""


def touched(theirs: Theirs, ref: str = "HEAD") -> tuple[list[str], str]:
    ended = theirs.python("-c", ASK, ref)
    assert ended.returncode == 0, ended.stderr
    ops, note = json.loads(ended.stdout)
    return ops, note


# each of these files is changed for one question
CHANGED = {
    "src/theirs/scan.py": ["their_scan"],
    "src/theirs/arithmetic.py": ["their_scan"],
    "src/theirs/norm/kernel.py": ["their_norm"],
    "src/theirs/norm/__init__.py": ["their_norm"],
    "src/theirs/norm/kernel.cu": ["their_norm"],
    "src/theirs/norm/new.cu": ["their_norm"],
    "src/theirs/dense.py": [*OPS],
    "src/theirs/memory.py": [*OPS],
    "src/theirs/__init__.py": [*OPS],
    "src/theirs/tables/h200.json": [*OPS],
    "src/theirs/unrelated.py": [],
    "src/theirs/new_module.py": [],
    "notes/größe und mehr.md": [],
}
ASK_EACH = """
import json, sys
from pathlib import Path
from memfix.gate.touched import touched_ops
answers = {}
for name in json.loads(sys.argv[1]):
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    before = path.read_text() if path.exists() else None
    path.write_text((before or "") + "# changed\\n")
    answers[name] = list(touched_ops("HEAD", None).ops)
    path.unlink() if before is None else path.write_text(before)
print(json.dumps(answers))
"""


def test_an_op_is_touched_by_what_it_imports_and_by_what_lies_beside_that(theirs: Theirs) -> None:
    ended = theirs.python("-c", ASK_EACH, json.dumps([*CHANGED]))
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == CHANGED


def test_staged_and_committed_changes_count(theirs: Theirs) -> None:
    theirs.append("src/theirs/arithmetic.py")
    git(theirs.root, "add", "--all")
    note = "only what it touches: their_scan (src/theirs/arithmetic.py)"
    assert touched(theirs) == (["their_scan"], f"--changed HEAD: {note}")
    commit_all(theirs.root)
    assert touched(theirs) == ([], "no op is touched: nothing differs from HEAD")
    assert touched(theirs, "HEAD~1") == (["their_scan"], f"--changed HEAD~1: {note}")


def test_a_module_that_is_still_imported_and_was_deleted_touches_its_op(theirs: Theirs) -> None:
    theirs.edit("src/theirs/scan.py", "from theirs.arithmetic import twice", "twice = (2).__mul__")
    commit_all(theirs.root)
    (theirs.root / "src/theirs/arithmetic.py").unlink()
    assert touched(theirs)[0] == []
    git(theirs.root, "checkout", "--", ".")
    theirs.edit("src/theirs/scan.py", "twice = (2).__mul__", "def twice(x):\n    from theirs.arithmetic import twice\n")
    commit_all(theirs.root)
    (theirs.root / "src/theirs/arithmetic.py").unlink()
    assert touched(theirs)[0] == ["their_scan"]


def test_the_lock_touches_the_ops_whose_entries_changed(theirs: Theirs) -> None:
    (theirs.root / "benchmarks").mkdir()
    text = "# memfix lock 1: bytes\n\ngone/form [small, train] 1 bytes\n\ntheir_norm/chunked [small, train] 7 bytes\n"
    (theirs.root / LOCK).write_text(text)
    commit_all(theirs.root)
    theirs.edit(LOCK, "7 bytes", "8 bytes")
    assert touched(theirs) == (["their_norm"], f"--changed HEAD: only what it touches: their_norm ({LOCK})")
    theirs.edit(LOCK, "gone/form", "<<<<<<< HEAD")
    assert "merge conflict" in touched(theirs)[1]


def test_before_the_first_commit_every_file_is_new(theirs: Theirs) -> None:
    shutil.rmtree(theirs.root / ".git")
    git(theirs.root, "init", "-q")
    git(theirs.root, "add", "--all")
    assert touched(theirs)[0] == [*OPS]


def test_an_unknown_commit_is_refused(theirs: Theirs) -> None:
    assert touched(theirs, "elsewhere")[1].startswith("--changed: no commit 'elsewhere' in ")


def test_what_judges_every_form_touches_every_op(toy: Path) -> None:
    (toy / "memfix/checks/new_check.py").touch()
    ended = gate(toy, "--changed", "--no-lock")
    assert ended.returncode == 0, ended.stderr
    assert "note: --changed HEAD: every op: memfix/checks/new_check.py judges every form" in ended.stdout
    assert "memfix gate: pass: 1 op, 1 form" in ended.stdout


# ---------------------------------------------------------------- the command
def test_only_touched_ops_are_judged(theirs: Theirs) -> None:
    theirs.edit("src/theirs/scan.py", "add_(1)", "add_(2)")
    ended = theirs.gate("--changed", "--no-lock")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "note: --changed HEAD: only what it touches: their_scan (src/theirs/scan.py)" in ended.stdout
    assert "their_scan/chunked: float32: output is off by 1" in ended.stdout
    assert "memfix gate: regression: 1 op, 1 form" in ended.stdout
    named = theirs.gate("their_norm", "--changed", "HEAD", "--no-lock")
    assert (named.returncode, "no op is touched: 1 file differs from HEAD" in named.stdout) == (0, True)


def test_an_unknown_op_is_refused_where_nothing_is_touched(theirs: Theirs) -> None:
    ended = theirs.gate("their_nrom", "--changed")
    assert ended.returncode == 4
    assert "no op 'their_nrom'; did you mean 'their_norm'?" in ended.stderr


def test_where_nothing_is_touched_reports_are_written_and_torch_is_not_imported(theirs: Theirs) -> None:
    theirs.append("README.md")
    program = "import sys\nfrom memfix.cli import cli\n"
    program += "code = cli.main(['gate', '--changed', '--sarif', 'gate.sarif'], standalone_mode=False)\n"
    program += "print(code, 'torch' in sys.modules)"
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=theirs.root, env=theirs.environment, capture_output=True, text=True)
    assert ended.stdout.splitlines()[-1] == "0 False", ended.stderr
    assert "memfix gate: pass: nothing to judge" in ended.stdout
    assert json.loads((theirs.root / "gate.sarif").read_text())["runs"][0]["results"] == []
