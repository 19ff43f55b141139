"""The README's tables come out of the data, and its paths and names exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import memfix

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_tables_are_those_of_the_lock_and_the_results() -> None:
    spec = importlib.util.spec_from_file_location("readme_tables", ROOT / "ci/readme_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.filled(README) == README, "run python ci/readme_tables.py --write"


def test_paths_named_in_the_readme_exist() -> None:
    for path in re.findall(r"`((?:ci|benchmarks|tests|memfix)/[\w./]+)`", README):
        assert (ROOT / path).exists(), path


def test_contract_of_the_readme_is_one() -> None:
    block = next(b for b in re.findall(r"```python\n(.*?)```", README, re.S) if "memfix.Contract(" in b)
    stubs = "def dense_loss(hidden, weight, target): ...\ndef chunked_loss(hidden, weight, target, *, chunk): ...\n"
    names: dict[str, object] = {}
    exec(stubs + block, names)
    assert isinstance(names["contract"], memfix.Contract)
    assert callable(names["test_my_loss"])
