"""Another commit's package beside this one: other functions under the same names, and no operators in common."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from memfix.errors import MeasurementError
from memfix.gate.base import Base
from memfix.gate.timing.copies import PACKAGE, NotAtBase, exported, form_at_base

CONTRACT = """
class Contract:
    forms = {"fast": 1}
    def function(self, form):
        return lambda: "of the base"
contract = Contract()
"""
WITH_OPERATORS = """
import torch
library = torch.library.Library("memfix_test_taken", "FRAGMENT")
library.define("late(Tensor x) -> Tensor")
"""


@pytest.fixture
def base(tmp_path: Path) -> Base:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=memfix", "-c", "user.email=memfix@example.org", "-c", "commit.gpgsign=false"]
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    for path, text in {"": "", "ops": "", "ops/toy": "", "ops/sharing": ""}.items():
        (tmp_path / "memfix" / path).mkdir(parents=True, exist_ok=True)
        (tmp_path / "memfix" / path / "__init__.py").write_text(text)
    (tmp_path / "memfix/ops/toy/contract.py").write_text(CONTRACT)
    (tmp_path / "memfix/ops/sharing/contract.py").write_text(WITH_OPERATORS + CONTRACT)
    git("init", "--quiet", "--initial-branch=main")
    git("add", "--all")
    git("commit", "--quiet", "--message", "state")
    return Base(tmp_path, git("rev-parse", "HEAD"), "main")


@pytest.fixture
def folder(base: Base) -> Iterator[Path]:
    with exported(base) as found:
        yield found
    for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
        del sys.modules[name]
    sys.path.remove(str(found))


def test_the_copy_has_a_name_and_functions_of_its_own(folder: Path) -> None:
    assert form_at_base(folder, "toy", "fast")() == "of the base"
    assert f"{PACKAGE}.ops.toy.contract" in sys.modules


@pytest.mark.parametrize(("op", "form", "why"), [("gone", "fast", "the op is new"), ("toy", "slow", "the form is new")])
def test_what_the_base_has_not(folder: Path, op: str, form: str, why: str) -> None:
    with pytest.raises(NotAtBase, match=why):
        form_at_base(folder, op, form)


def test_operators_in_a_common_namespace_are_refused(folder: Path) -> None:
    mine = torch.library.Library("memfix_test_taken", "FRAGMENT")
    mine.define("early(Tensor x) -> Tensor")
    before = torch.library.Library.__init__
    for _ in range(2):  # of two forms of an op the second finds the module run
        with pytest.raises(
            MeasurementError, match=r"the torch\.library namespace memfix_test_taken: the base would run"
        ):
            form_at_base(folder, "sharing", "fast")
    assert torch.library.Library.__init__ is before


def test_a_commit_without_the_package_is_no_base(base: Base, tmp_path: Path) -> None:
    empty = subprocess.run(
        ["git", "-C", str(tmp_path), "hash-object", "-t", "tree", "-w", "/dev/null"], capture_output=True, text=True
    ).stdout.strip()
    with (
        pytest.raises(MeasurementError, match="has no package memfix"),
        exported(Base(tmp_path, empty, "main")),
    ):
        pass
