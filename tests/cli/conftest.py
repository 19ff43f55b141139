"""The command line, run in this process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import Ended

from memfix import cli


@pytest.fixture
def memfix(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """``memfix("gate", "--no-lock")`` in an empty folder, as the installed script does it."""
    monkeypatch.chdir(tmp_path)
    for variable in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "MEMFIX_PROFILE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def memfix(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["memfix", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return Ended(ended.value.code, printed.out, printed.err)

    return memfix


@pytest.fixture
def own_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty folder for the user's own tables of GPUs, wherever the real one is."""
    from memfix.meters.simulated.tables import own_tables, table_of

    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    own_tables().mkdir(parents=True)
    table_of.cache_clear()
    yield own_tables()
    table_of.cache_clear()
