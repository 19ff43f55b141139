"""Random gates of unchanged code: what is asked and what is counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import false_alarms
from memfix.registry import all_contracts


def test_every_form_is_asked_in_every_dtype_where_it_is_not_known_to_be_wrong() -> None:
    plain, kernels = (false_alarms.checks_of(with_kernels=with_kernels) for with_kernels in (False, True))
    assert {(op, form) for op, form, _ in kernels} == {
        ("kda", "triton"), ("kda_packed", "triton"), ("linear_cross_entropy", "triton"),
    }  # fmt: skip
    asked = {*plain, *kernels}
    for op, contract in all_contracts().items():
        for name, form in contract.forms.items():
            for dtype in contract.dtypes:
                assert ((op, name, dtype) in asked) == (dtype not in form.known_unequal)


def test_the_checks_are_counted_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [("embedding", "gather", "float32")]
    monkeypatch.setattr(false_alarms, "checks_of", lambda *, with_kernels: [] if with_kernels else checks)
    path = tmp_path / "alarms.json"
    done = CliRunner().invoke(false_alarms.main, ["--gates", "2", "--jobs", "1", "--json", str(path)])
    assert done.exit_code == 0, done.output
    assert "0 of 2 checks of unchanged code failed" in done.output
    (row,) = json.loads(path.read_text())["forms"]
    assert row == {"op": "embedding", "form": "gather", "checks": 2, "alarms": 0}
