"""Git checkouts of memfix for the gate to judge: the package as it is, and one whose only op is a toy."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from forked_python import forked_python

ROOT = Path(__file__).resolve().parents[2]

# x * 2 + 1, in place after the product; the gradient needs nothing kept, and clones a 16-bit x
TOY = {
    "__init__.py": "",
    "naive.py": "def naive_affine(x):\n    return x * 2 + 1\n",
    "in_place.py": "def in_place_affine(x):\n    doubled = x * 2\n    return doubled.add_(1)\n",
    "contract.py": """\
from ...contract import Contract, Dim, TensorSpec
from ...laws import Budget
from .in_place import in_place_affine
from .naive import naive_affine

contract = Contract(
    "affine",
    naive=naive_affine,
    forms={"in_place": in_place_affine},
    dims={"N": Dim(1, 9)},
    inputs=[TensorSpec("x", "N", grad=True)],
    cases={"small": {"N": 256}, "large": {"N": 4096}},
    dtypes=("float32",),
    budgets=[Budget("in_place", phase="forward", bytes="N*e"), Budget("in_place", bytes="2*N*e")],
)
""",
}
OTHER_OP = "other/form [small, train] 7 bytes"
"""An entry of the toy's lock that belongs to another op."""


def copy_package(folder: Path) -> None:
    """memfix as it is, compiled modules included: no process of a copy compiles them again."""
    # a .pyc that another process writes just now has a name with a number at its end; pytest's are for sessions only
    shutil.copytree(ROOT / "memfix", folder / "memfix", ignore=shutil.ignore_patterns("*.pyc.*", "*-pytest-*.pyc"))
    (folder / ".gitignore").write_text("__pycache__/\n")


def make_checkout(folder: Path) -> Path:
    """This memfix with its lock, all of it committed."""
    copy_package(folder)
    (folder / "benchmarks").mkdir()
    for name in ("memory.lock", "memory.peaks.json"):
        shutil.copy(ROOT / "benchmarks" / name, folder / "benchmarks")
    commit_all(folder)
    pack(folder)
    return folder


def make_toy_checkout(folder: Path) -> Path:
    """This memfix with one op that takes no time, and its lock, all of it committed."""
    copy_package(folder)
    ops = folder / "memfix/ops"
    for path in ops.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    (ops / "affine").mkdir()
    for name, text in TOY.items():
        (ops / "affine" / name).write_text(text)
    (folder / "benchmarks").mkdir()
    done = gate(folder, "affine", "--update")
    assert done.returncode == 0, done.stderr
    lock = folder / "benchmarks/memory.lock"
    lock.write_text(lock.read_text() + f"\n{OTHER_OP}\n")
    commit_all(folder)
    pack(folder)
    return folder


def commit_all(folder: Path) -> None:
    git(folder, "init", "-q", "-b", "main", "--template=")
    git(folder, "add", "-A")
    git(folder, "-c", "user.name=memfix", "-c", "user.email=memfix@example.com", "commit", "-q", "-m", "all")


def pack(folder: Path) -> None:
    """Put git's hundreds of small files into one: each test copies them."""
    git(folder, "repack", "-a", "-d", "-q")


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {path}"
    path.write_text(text.replace(old, new))


def leave_only(folder: Path, op: str, *forms: str) -> None:
    """Take other forms, and dtypes but bfloat16, out of the contract: they take longer than all the rest."""
    with (folder / f"memfix/ops/{op}/contract.py").open("a") as file:
        file.write(ONLY.format(forms=forms))


ONLY = """
from dataclasses import replace

forms = {{name: contract.forms[name] for name in {forms}}}
laws = {{name: getattr(contract, name) for name in ("budgets", "scaling", "speed")}}
laws = {{name: [law for law in laws[name] if law.form in forms] for name in laws}}
contract = replace(contract, forms=forms, dtypes=("bfloat16",), **laws)
"""


def gate(folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """``memfix gate`` with the memfix of ``folder``; ``more`` are variables of its environment."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "160", "MEMFIX_PROFILE": "dev"}
    environment.pop("GITHUB_ACTIONS", None)
    # the gate of a base runs others
    forks = "--base" in arguments
    return forked_python("-m", "memfix", "gate", *arguments, cwd=folder, env={**environment, **more}, forks=forks)
