"""Another commit's package beside this one, in the same process, under a name of its own.

Modules of memfix import each other relatively, so a copy in a folder of another name is another package, with its own
functions, kernels and caches. What copies would share is a ``torch.library`` namespace: the later one would silently
replace the operators of the earlier, and a form be timed against itself.
"""

from __future__ import annotations

import functools
import importlib
import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...contract import Contract
from ...errors import MeasurementError
from ..base import Base

PACKAGE = "memfix_at_base"


@contextmanager
def exported(base: Base) -> Iterator[Path]:
    """A folder in which ``import memfix_at_base`` finds the base commit's package."""
    with tempfile.TemporaryDirectory(prefix="memfix-time-") as folder:
        take_package(base.root, base.commit, Path(folder)).rename(Path(folder) / PACKAGE)
        yield Path(folder)


def take_package(root: Path, commit: str, folder: Path) -> Path:
    """The folder ``memfix`` of a commit of the checkout ``root``, laid into ``folder``."""
    archive = subprocess.run(["git", "-C", str(root), "archive", "--format=tar", commit, "memfix"], capture_output=True)
    if archive.returncode != 0:
        why = archive.stderr.decode().strip().removeprefix("fatal: ")
        raise MeasurementError(f"commit {commit[:8]} has no package memfix: {why}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")
    return folder / "memfix"


class NotAtBase(Exception):
    """Why a form has no time at the base: it, or its op, is new."""


def form_at_base(folder: Path, op: str, form: str) -> Callable[..., Any]:
    """The function of that name in the copy."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    source = f"{PACKAGE}.ops.{op}.contract"
    if not (folder / PACKAGE / "ops" / op / "contract.py").exists():
        raise NotAtBase("the op is new")
    contract, namespaces_in_common = _contract_at_base(source)
    if namespaces_in_common:
        raise MeasurementError(
            f"both copies register operators in the torch.library namespace {', '.join(sorted(namespaces_in_common))}: "
            "the base would run today's code; derive the namespace from __name__"
        )
    if form not in contract.forms:
        raise NotAtBase("the form is new")
    return contract.function(form)


@functools.cache
def _contract_at_base(source: str) -> tuple[Contract, set[str]]:
    """And where its copy registers operators though this package does. Remembered: a module is run only once."""
    with _namespaces_watched() as met:
        return importlib.import_module(source).contract, met


@contextmanager
def _namespaces_watched() -> Iterator[set[str]]:
    """Those in which operators were before, and to which more are added inside."""
    import torch

    original, taken = torch.library.Library.__init__, _namespaces_of_operators()
    met: set[str] = set()

    def watched(self: Any, namespace: str, kind: str, *arguments: Any, **keywords: Any) -> None:
        if kind in ("DEF", "FRAGMENT") and namespace in taken:
            met.add(namespace)
        original(self, namespace, kind, *arguments, **keywords)

    torch.library.Library.__init__ = watched  # type: ignore[assignment, method-assign]
    try:
        yield met
    finally:
        torch.library.Library.__init__ = original  # type: ignore[method-assign]


def _namespaces_of_operators() -> set[str]:
    import torch

    return {name.split("::")[0] for name in torch._C._dispatch_get_all_op_names()}
