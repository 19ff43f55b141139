"""Random gates of unchanged code: what is asked and what is counted."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from benchmarks import false_alarms
from memfix.registry import all_contracts


def test_every_form_is_asked_in_every_dtype_where_it_is_not_known_to_be_wrong() -> None:
    for contract in all_contracts().values():
        plain, kernels = (false_alarms.checks_of(contract, of_kernels=of_kernels) for of_kernels in (False, True))
        assert {contract.forms[form].has_kernels for _, form in kernels} <= {True}
        for name, form in contract.forms.items():
            for dtype in contract.dtypes:
                assert ((dtype, name) in {*plain, *kernels}) == (dtype not in form.known_unequal)


def test_the_checks_are_counted_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "alarms.json"
    options = ["--gates", "2", "--kernels", "0", "--jobs", "1", "--json", str(path)]
    done = CliRunner().invoke(false_alarms.main, ["embedding", *options])
    assert done.exit_code == 0, done.output
    assert "0 of 8 checks of unchanged code failed, in 2 gates and 0 of kernels" in done.output
    (row,) = json.loads(path.read_text())["forms"]
    assert row == {"op": "embedding", "form": "gather", "checks": 8, "alarms": 0}


def test_gates_that_the_time_did_not_reach_are_not_counted() -> None:
    done = CliRunner().invoke(
        false_alarms.main, ["embedding", "--gates", "30", "--kernels", "0", "--jobs", "1", "--limit", "0"]
    )
    assert done.exit_code == 0, done.output
    number = int(done.output.partition(" failed, in ")[2].split()[0])
    assert 1 <= number < 30
