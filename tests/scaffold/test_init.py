"""``memfix init`` and ``memfix new-op``: what they write passes, and what cannot be proved is not written."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from forked_python import forked_python
from sub_sessions import OPTIONS

from memfix.cli import cli

ROOT = Path(__file__).resolve().parents[2]
OPS = """
import torch

def dense(x, index, *, rows=4):
    return torch.nn.functional.one_hot(index, x.shape[0]).to(x.dtype) @ x

def gathered(x, index, *, rows):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))  # autograd adds the gradients of all parts up
    return torch.cat([_part(wide, part) for part in index.split(rows)]).to(x.dtype)

def _part(x, part):
    return torch.where(x.isnan().any(0), x.sum(0), x.index_select(0, part))

def doubled(x, index, *, rows):
    return 2 * gathered(x, index, rows=rows)

def call():
    return {"x": torch.randn(500, 6, requires_grad=True), "index": torch.randint(0, 500, (90,)), "rows": 30}

def raising():
    raise RuntimeError("no data here")

def nothing():
    return {"rows": 3}

def stranger():
    return {**call(), "y": torch.ones(2)}
"""
ASKED = ["rows_of", "--naive", "ops:dense", "--form", "gathered=ops:gathered", "--example", "ops.py:call"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ops.py").write_text(OPS)
    return tmp_path


def memfix(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MEMFIX_PROFILE": "dev"}
    return forked_python("-m", "memfix", *arguments, cwd=folder, env=environment)


def files_in(folder: Path) -> set[str]:
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return {path for path in found if "__pycache__" not in path} - {"ops.py"}


def test_what_init_writes_passes_and_is_never_overwritten(folder: Path) -> None:
    ended = memfix(folder, "init", *ASKED)
    assert (ended.returncode, ended.stderr) == (0, "")
    written = {
        "tests/memory/test_rows_of.py", "tests/memory/memory.lock", "tests/memory/memory.peaks.json",
        ".github/workflows/memfix.yml",
    }  # fmt: skip
    assert files_in(folder) == written
    source = (folder / "tests/memory/test_rows_of.py").read_text()
    for line in (
        'TensorSpec("x", "N D", grad=True),',
        'TensorSpec("index", "V", dtype="int64", values=Integers("N")),',
        'cases={"example": {"N": 500, "D": 6, "V": 90, "rows": 30, "dtype": "float32"}},',
        'Budget("gathered", phase="train", case="example", times_below_naive=',
    ):
        assert line in source
    assert "gathered: " in ended.stdout
    assert "x below naive's " in ended.stdout
    assert "above today at the example" in ended.stdout
    commands = [line.partition("  #")[0].split() for line in ended.stdout.partition("next:\n")[2].splitlines()]
    python, gate, selftest = commands[:3]
    assert python[:2] == ["python", "-m"]
    assert selftest[:3] == ["memfix", "selftest", "rows_of"]
    assert memfix(folder, *gate[1:]).returncode == 0
    # all of them pass in ci/examples; here those of one kind, which show that the file is a suite
    tested = forked_python(
        *python[1:], *OPTIONS, "-k", "grows", cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert tested.returncode == 0, tested.stdout
    assert "3 passed" in tested.stdout
    refused = memfix(folder, "init", *ASKED)
    assert refused.returncode == 4
    assert refused.stderr == "memfix: tests/memory/test_rows_of.py exists already; --force overwrites it\n"
    (folder / "tests/memory/test_rows_of.py").unlink()
    assert (
        "memory.lock has entries of rows_of already; --force overwrites them" in memfix(folder, "init", *ASKED).stderr
    )


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"ops:dense": "opps:dense"}, 4, "--naive: opps cannot be imported: ModuleNotFoundError: No module"),
        ({"ops:dense": "ops.dense"}, 4, "--naive must be package.module:function or path/to/file.py:function, got"),
        ({"ops.py:call": "opps.py:call"}, 4, "--example: there is no file opps.py"),
        ({"ops.py:call": "ops.py:cal"}, 4, "--example: ops.py has no function 'cal'; did you mean 'call'?"),
        ({"ops.py:call": "ops.py:raising"}, 2, "--example: ops.py:raising raises RuntimeError: no data here"),
        ({"ops.py:call": "ops.py:nothing"}, 4, "--example: ops.py:nothing must return the arguments, a dict or"),
        ({"ops.py:call": "ops.py:stranger"}, 4, "--example: naive takes no 'y'; it takes x, index, rows"),
        ({"gathered=ops:gathered": "ops:gathered"}, 4, "--form must be NAME=MODULE:FUNCTION, with a different NAME"),
        ({"rows_of": "rows-of"}, 4, "the name of an op must be a Python name, got 'rows-of'"),
        ({"gathered=ops:gathered": "twice=ops:doubled"}, 1, "ops:doubled is not equal to ops:dense, so nothing was w"),
    ],
)  # fmt: skip
def test_what_cannot_be_proved_is_one_message_and_no_file(
    folder: Path, change: dict[str, str], code: int, message: str
) -> None:
    ended = memfix(folder, "init", *[change.get(word, word) for word in ASKED])
    assert (ended.returncode, ended.stdout) == (code, "")
    assert ended.stderr.startswith(f"memfix: {message}")
    assert ("--dtypes float32,bfloat16" in ended.stderr) == (code == 1)
    assert files_in(folder) == set()


def test_what_is_missing_is_named_where_nobody_can_be_asked(folder: Path) -> None:
    ended = memfix(folder, "init", "rows_of", "--naive", "ops:dense")
    assert ended.returncode == 4
    assert "Missing option '--form'" in ended.stderr


def test_new_op_writes_a_folder_whose_contract_passes_and_a_page(folder: Path) -> None:
    checkout = folder / "checkout"
    shutil.copytree(ROOT / "memfix", checkout / "memfix", ignore=shutil.ignore_patterns("__pycache__"))
    (checkout / "docs/ops").mkdir(parents=True)
    shutil.copy(ROOT / "docs/ops/index.md", checkout / "docs/ops")
    environment = {**os.environ, "PYTHONPATH": str(checkout), "MEMFIX_PROFILE": "dev"}
    ended = forked_python("-m", "memfix", "new-op", *ASKED, cwd=folder, env=environment)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert sorted(path.name for path in (checkout / "memfix/ops/rows_of").glob("*.py")) == [
        "__init__.py", "contract.py", "gathered.py", "naive.py"
    ]  # fmt: skip
    assert "_part" in (checkout / "memfix/ops/rows_of/gathered.py").read_text()
    assert "_part" not in (checkout / "memfix/ops/rows_of/naive.py").read_text()
    assert "\nrows_of\n```" in (checkout / "docs/ops/index.md").read_text()
    call = "N=3,D=2,V=2,rows=1,dtype=float32"
    judged = forked_python("-m", "memfix", "check", "rows_of", "--at", call, cwd=folder, env=environment)
    assert judged.returncode == 0, judged.stdout
    assert judged.stdout.count("pass  budget") == 2
    call = "rows_of(torch.ones(3, 2), torch.tensor([1]), rows=1)"
    code = f"import torch; from memfix.ops.rows_of import rows_of; print({call})"
    assert forked_python("-c", code, cwd=folder, env=environment).stdout == "tensor([[1., 1.]])\n"


def test_what_is_missing_is_asked_for_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(question: str, **_: object) -> str:
        asked.append(question)
        return "somewhere:else"

    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(click, "prompt", answer)
    context = cli.commands["init"].make_context("init", ["rows_of", "--naive", "ops:dense"])
    assert asked == [
        "A function that computes the same in less memory. NAME=MODULE:FUNCTION",
        "A function that returns the arguments of one call. FILE.py:FUNCTION",
    ]
    given = {key: context.params[key] for key in ("naive", "forms", "example")}
    assert given == {"naive": "ops:dense", "forms": ("somewhere:else",), "example": "somewhere:else"}
