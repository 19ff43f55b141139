"""Which packages are compared with another commit, and where their copies lie."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memfix.errors import MeasurementError, UsageError
from memfix.gate.commit import export_package
from memfix.gate.timing import base_checkout
from memfix.gate.timing.base_checkout import check_out_base
from memfix.registry import Source

Sources = Callable[..., list[Any]]


@pytest.fixture
def checkout(tmp_path: Path, commit_all: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """With a package below src, a single module, and another package that is only installed there."""
    for path in ("src/toy_package/__init__.py", "src/toy_package/memory.py", "toy_module.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("WHEN = 'then'\n")
    commit_all(tmp_path)
    (tmp_path / "site-packages/toy_installed").mkdir(parents=True)
    (tmp_path / "site-packages/toy_installed/__init__.py").write_text("")
    for folder in ("", "src", "site-packages"):
        monkeypatch.syspath_prepend(tmp_path / folder)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("toy_")]:
        del sys.modules[name]


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> Sources:
    """Contracts of these modules, each named like its module."""

    def declared(*modules: str) -> list[Any]:
        monkeypatch.setattr(base_checkout, "source_of", lambda name: Source(name, "contract", name))
        return [SimpleNamespace(name=module) for module in modules]

    return declared


def test_a_package_and_a_single_module_lie_under_another_name_as_they_were(checkout: Path, declared: Sources) -> None:
    (checkout / "src/toy_package/memory.py").write_text("WHEN = 'now'\n")
    (checkout / "src/toy_package/__pycache__").mkdir(exist_ok=True)
    (checkout / "src/toy_package/__pycache__/memory.cpython-311.pyc").write_bytes(b"of no interest")
    with check_out_base("main", declared("toy_package.memory", "toy_module")) as found:
        package = found.folders["toy_package.memory"]
        assert (package / "toy_package_at_base/memory.py").read_text() == "WHEN = 'then'\n"
        assert (found.folders["toy_module"] / "toy_module_at_base.py").read_text() == "WHEN = 'then'\n"
        assert found.ref == "main"
        assert found.gone_ops() == []
        (note,) = found.notes
        assert note.endswith("judged too: src/toy_package/memory.py")
    assert not package.exists()


def test_what_is_only_installed_is_noted_beside_what_is_compared(checkout: Path, declared: Sources) -> None:
    with check_out_base("main", declared("toy_installed", "toy_module")) as found:
        assert list(found.folders) == ["toy_module"]
        (note,) = found.notes
    assert note.startswith("toy_installed: held against naive only: --base needs a git checkout of toy_installed; ")


def test_where_nothing_is_in_git_a_base_is_refused(checkout: Path, declared: Sources) -> None:
    with pytest.raises(UsageError, match="does not track"), check_out_base("main", declared("toy_installed")):
        pass


def test_a_commit_that_is_not_there_is_refused(checkout: Path, declared: Sources) -> None:
    with pytest.raises(UsageError, match="no commit 'elsewhere'"), check_out_base("elsewhere", declared("toy_module")):
        pass


def test_a_commit_without_the_package_is_no_base(checkout: Path, tmp_path: Path) -> None:
    command = ["git", "-C", str(checkout), "hash-object", "-t", "tree", "-w", "/dev/null"]
    empty = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    with pytest.raises(MeasurementError, match="has no package toy_module"):
        export_package(checkout, empty, checkout / "toy_module.py", tmp_path)
