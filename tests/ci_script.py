"""Imports the Python scripts of ci/, which are no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parents[1] / "ci"


def ci_script(name: str) -> ModuleType:
    """``ci/NAME.py`` as a new module."""
    spec = importlib.util.spec_from_file_location(f"memfix_ci_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))  # as for a script that is run: ci/tables.py imports the package ci/manual
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their types there
    spec.loader.exec_module(module)
    return module
