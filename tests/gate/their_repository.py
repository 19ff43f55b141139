"""Somebody else's repository: a package below ``src`` with two ops, registered by an entry point."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from checkouts import commit_all, edit
from forked_python import forked_python

FILES = {
    ".gitignore": "__pycache__/\n",
    "README.md": "Theirs.\n",
    "pyproject.toml": '[project]\nname = "theirs"\n',
    "src/theirs/__init__.py": "from theirs.norm import chunked_norm\nfrom theirs.scan import chunked\n",
    "src/theirs/arithmetic.py": "def twice(x):\n    return x * 2\n",
    "src/theirs/unrelated.py": "",
    "src/theirs/dense.py": "def dense(x):\n    return x * 2 + 1\n",
    "src/theirs/scan.py": """\
from theirs.arithmetic import twice


def chunked(x):
    doubled = twice(x)
    return doubled.add_(1)
""",
    "src/theirs/norm/__init__.py": "from .kernel import chunked_norm\n",
    "src/theirs/norm/kernel.py": "def chunked_norm(x):\n    return x.mul(2).add_(1)\n",
    "src/theirs/norm/kernel.cu": "// beside it\n",
    "src/theirs/memory.py": """\
from memfix import Budget, Contract, Dim, TensorSpec

from theirs.dense import dense
from theirs.norm.kernel import chunked_norm
from theirs.scan import chunked


def contract_of(name, form):
    return Contract(
        name=name,
        naive=dense,
        forms={"chunked": form},
        dims={"N": Dim(1, 9)},
        inputs=[TensorSpec("x", "N", grad=True)],
        cases={"small": {"N": 256}},
        dtypes=("float32",),
        budgets=[Budget("chunked", phase="forward", bytes="N*e")],
    )


contracts = [
    contract_of("their_norm", chunked_norm),
    contract_of("their_scan", chunked),
]
""",
    "src/theirs-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n",
    "src/theirs-1.0.dist-info/entry_points.txt": "[memfix.contracts]\ntheirs = theirs.memory:contracts\n",
}
OPS = ("their_norm", "their_scan")
LOCK = "benchmarks/memory.lock"


class Theirs:
    """Their repository, beside the memfix of another checkout, which has no changes of its own."""

    def __init__(self, root: Path, memfix: Path) -> None:
        self.root, self._memfix = root, memfix

    @property
    def environment(self) -> dict[str, str]:
        others = {name: value for name, value in os.environ.items() if not name.startswith("GITHUB_")}
        places = os.pathsep.join(map(str, [self.root / "src", self._memfix]))
        return {
            **others,
            "PYTHONPATH": places,
            "PYTHONDONTWRITEBYTECODE": "1",
            "COLUMNS": "160",
            "MEMFIX_PROFILE": "dev",
        }

    def python(self, *command: str) -> subprocess.CompletedProcess[str]:
        return forked_python(*command, cwd=self.root, env=self.environment)

    def gate(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "memfix", "gate", *arguments)

    def append(self, path: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        with (self.root / path).open("a") as file:
            file.write("# changed\n")

    def edit(self, path: str, old: str, new: str) -> None:
        edit(self.root / path, old, new)


def make_repository(folder: Path) -> Path:
    for path, text in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    commit_all(folder)
    return folder
