"""Another commit's package beside this one: other functions under the same names, and no operators in common."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from memfix.errors import MeasurementError
from memfix.gate.timing import import_base
from memfix.gate.timing.import_base import NotAtBase, form_at_base
from memfix.registry import Source

CONTRACT = """
class Contract:
    name = "toy"
    forms = {"fast": 1}
    def function(self, form):
        return step
contract = Contract()
"""
WITH_OPERATORS = """
import torch
library = torch.library.Library("memfix_test_taken", "FRAGMENT")
library.define("late(Tensor x) -> Tensor")
def step(): ...
"""
IMPORTS = {
    "relatively": "from . import parts\ndef step(): return parts.WHEN",
    "by_name": "from toy_package.parts import WHEN\ndef step(): return WHEN",
    "the_module": "import toy_package.parts\ndef step(): return toy_package.parts.WHEN",
    "under_another_name": "import toy_package.parts as other\ndef step(): return other.WHEN",
    "the_package": "import toy_package\nfrom toy_package import parts\ndef step(): return toy_package.parts.WHEN",
    "late": "def step():\n    from toy_package.parts import WHEN\n    return WHEN",
}
"""Ways in which a package finds its own parts."""

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """A package as it is today, and a copy of it as it was; the folder of the copy."""

    def write(memory: str) -> Path:
        for when, folder in (("today", "now/toy_package"), ("then", "base/toy_package_at_base")):
            (tmp_path / folder).mkdir(parents=True)
            (tmp_path / folder / "__init__.py").write_text("")
            (tmp_path / folder / "parts.py").write_text(f"WHEN = {when!r}\n")
            (tmp_path / folder / "memory.py").write_text(memory + "\n" + CONTRACT)
        monkeypatch.syspath_prepend(tmp_path / "now")
        return tmp_path / "base"

    hooks, path = sys.path_hooks[:], sys.path[:]
    yield write
    import_base._declared_at_base.cache_clear()
    sys.path_hooks[:], sys.path[:] = hooks, path
    for name in [name for name in sys.modules if name.startswith("toy_package")]:
        del sys.modules[name]


def source(module: str = "memory") -> Source:
    return Source(f"toy_package.{module}", "contract", "")


@pytest.mark.parametrize("how", IMPORTS)
def test_the_copy_meets_its_own_parts_however_it_imports_them(write: Write, how: str) -> None:
    folder = write(IMPORTS[how])
    today = importlib.import_module("toy_package.memory").contract.function("fast")
    then = form_at_base(folder, source(), "toy", "fast")
    assert (today(), then(), today()) == ("today", "then", "today")


def test_lines_are_where_they_were(write: Write) -> None:
    then = form_at_base(write("\n\n" + IMPORTS["by_name"]), source(), "toy", "fast")
    assert then.__code__.co_firstlineno == 4
    assert then.__code__.co_filename.endswith("toy_package_at_base/memory.py")


@pytest.mark.parametrize(
    ("module", "op", "form", "why"),
    [
        ("memory", "toy", "slow", "the form is new"),
        ("memory", "another", "fast", "the op is new"),
        ("gone", "toy", "fast", "the op is new"),
        ("gone.deeper", "toy", "fast", "the op is new"),
    ],
)
def test_what_the_base_has_not(write: Write, module: str, op: str, form: str, why: str) -> None:
    with pytest.raises(NotAtBase, match=why):
        form_at_base(write(IMPORTS["relatively"]), source(module), op, form)


def test_an_op_that_had_a_folder_of_its_own_is_found_there(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(IMPORTS["relatively"])
    then = Source("toy_package.memory", "contract", "")
    monkeypatch.setattr(import_base, "in_a_folder_of_its_own", lambda op: then)
    assert form_at_base(folder, source("another_contract"), "toy", "fast")() == "then"


def test_a_part_that_the_base_misses_itself_is_an_error_and_no_news(write: Write) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"toy_package_at_base\.nowhere"):
        form_at_base(write("import toy_package.nowhere"), source(), "toy", "fast")


def test_operators_in_a_common_namespace_are_refused(write: Write) -> None:
    mine = torch.library.Library("memfix_test_taken", "FRAGMENT")
    mine.define("early(Tensor x) -> Tensor")
    before, folder, sharing = torch.library.Library.__init__, write(WITH_OPERATORS), source()
    for _ in range(2):  # of two forms of an op the second finds the module run
        with pytest.raises(
            MeasurementError, match=r"the torch\.library namespace memfix_test_taken: the base would run"
        ):
            form_at_base(folder, sharing, "toy", "fast")
    assert torch.library.Library.__init__ is before
