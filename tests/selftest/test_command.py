"""``memfix selftest`` on a user's small op, whose contract has a hole that is then closed; and every bad input."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from forked_python import forked_python

ROOT = Path(__file__).resolve().parents[2]

FORMS = """
import torch


def dense(x, *, negate=False):
    return -x.double().mul(2).to(x.dtype) if negate else x.double().mul(2).to(x.dtype)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows):
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        for start in range(0, len(x), rows):
            torch.add(x[start : start + rows], x[start : start + rows], out=out[start : start + rows])
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None


def chunked(x, *, rows, negate=False):
    if rows < 1:
        raise ValueError("rows must be at least 1")
    out = Twice.apply(x, rows)
    return -out if negate else out
"""

CONTRACT = """
from memfix import BadInput, Budget, Contract, Dim, TensorSpec
from memfix.contract import setting

from .forms import chunked, dense

contract = Contract(
    "twice",
    naive=dense,
    forms={"chunked": chunked},
    dims={"N": Dim(1, 9), "D": Dim(1, 5), "rows": Dim(1, 9)},
    CHOICES
    inputs=[TensorSpec("x", "N D", grad=True)],
    cases={"small": {"N": 64, "D": 8, "rows": 16}},
    dtypes=["float32"],
    budgets=[Budget("chunked", phase="forward", bytes="2*N*D*e"), Budget("chunked", phase="train", bytes="4*N*D*e")],
    bad_inputs=[BadInput("no rows", setting(rows=0), "rows must be at least 1")],
)
"""
DRAWN = 'choices={"negate": (False, True)},'


def package(folder: Path, name: str, *, forms: str = FORMS, contract: str = CONTRACT, choices: str = "") -> None:
    files = {
        f"{name}/__init__.py": "",
        f"{name}/forms.py": forms,
        f"{name}/law.py": contract.replace("CHOICES", choices),
        f"{name}-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{name}-1.0.dist-info/entry_points.txt": f"[memfix.contracts]\n{name} = {name}.law:contract\n",
    }
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)


@pytest.fixture
def selftest(tmp_path: Path) -> Any:
    """The command with the packages of ``tmp_path`` on the path. It leaves no file behind, but for those asked for."""

    def selftest(*arguments: str) -> subprocess.CompletedProcess[str]:
        before = {path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts}
        env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "COLUMNS": "200", "TMPDIR": str(tmp_path)}
        ended = forked_python("-m", "memfix", "selftest", *arguments, cwd=tmp_path, env=env)
        left = {path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts} - before
        assert {path.suffix for path in left} <= {".json"}
        return ended

    return selftest


def survivors(path: Path, verdict: str = "missed") -> list[str]:
    return [f"{s['kind']}: {s['diff']}" for s in json.loads(path.read_text())["survivors"] if s["verdict"] == verdict]


# one mutant of each kind; this seed plants early in what is unused
FEW = ("--profile", "dev", "--mutants", "14", "--seed", "4")


def test_what_no_call_and_no_check_reaches_is_missed_and_too_small_a_share_ends_with_1(
    selftest: Any, tmp_path: Path
) -> None:
    package(tmp_path, "twice", forms=FORMS + "\n\ndef unused(x):\n    return x[1:]\n")
    ended = selftest("twice", *FEW, "--least", "100", "--json", "blind.json")
    assert ended.returncode == 1, ended.stderr
    assert any("if negate is True" in survivor for survivor in survivors(tmp_path / "blind.json"))
    assert "missed: twice, wrong with one option: no call has this option" in ended.stdout
    assert "+    if negate is True:" in ended.stdout
    assert "off by one: no check runs this line" in ended.stdout


def test_an_option_that_another_op_draws_is_caught_by_it_where_both_use_the_same_modules(
    selftest: Any, tmp_path: Path
) -> None:
    package(tmp_path, "twice")
    other = CONTRACT.replace("from .forms", "from twice.forms").replace('"twice",', '"negated",')
    package(tmp_path, "negated", contract=other, choices=DRAWN)
    ended = selftest("twice", *FEW, "--json", "both.json")
    assert ended.returncode == 0, ended.stderr
    assert not any("negate is True" in survivor for survivor in survivors(tmp_path / "both.json")), ended.stdout
    data = json.loads((tmp_path / "both.json").read_text())
    kinds = data["ops"]["twice"]["kinds"]
    assert [kinds[name]["caught"] for name in ("skip the last chunk", "wrong with one option")] == [1, 1]
    assert data["all"]["planted"] == sum(data["all"][name] for name in ("caught", "equal", "undecided", "missed"))
    assert data["all"]["missed"] > 0, "without --least that is no failure"
    assert "equality" in data["all"]["caught_by"]


def test_the_time_limit_says_how_many_were_not_asked(selftest: Any, tmp_path: Path) -> None:
    package(tmp_path, "twice")
    ended = selftest("twice", "--profile", "dev", "--limit", "0", "--mutants", "7")
    assert ended.returncode == 0
    assert "the time limit was reached before anything was planted in twice" in ended.stdout


@pytest.mark.parametrize(
    ("changes", "arguments", "code", "message"),
    [
        ({}, ["twise"], 4, "memfix: no op 'twise'; did you mean 'twice'?\n"),
        ({}, ["twice", "--form", "chonked"], 4, "memfix: no form 'chonked'; did you mean 'chunked'?\n"),
        (
            {"contract": CONTRACT.replace('{"chunked": chunked}', "{}")},
            ["twice"],
            4,
            "memfix: no op 'twice': the entry point 'twice' (twice.law:contract) cannot be loaded: "
            "twice: a contract needs at least one form and one input\n",
        ),
        (
            {"contract": CONTRACT + "\nexec('def made(x, *, rows): return x * 2')\n"
             "contract = contract.with_form('made', made, like='chunked')\nmade.__module__ = 'nowhere'\n"},
            ["twice", "--form", "made"],
            4,
            "memfix: twice: a form is in the module nowhere, whose source cannot be read; put it in a .py file\n",
        ),
        (
            {"forms": FORMS.replace("return grad * 2, None", "return grad * 3, None")},
            ["twice", "--profile", "dev"],
            2,
            "memfix: twice fails with nothing planted, so a self-test would show nothing; run memfix gate twice: ",
        ),
    ],
    ids=["unknown op", "unknown form", "no form", "no source", "wrong already"],
)  # fmt: skip
def test_bad_input_is_one_sentence(
    selftest: Any, tmp_path: Path, changes: dict[str, str], arguments: list[str], code: int, message: str
) -> None:
    package(tmp_path, "twice", **changes)
    ended = selftest(*arguments)
    assert (ended.returncode, ended.stdout) == (code, "")
    assert ended.stderr.startswith(message)
    assert ended.stderr.count("\n") == 1
