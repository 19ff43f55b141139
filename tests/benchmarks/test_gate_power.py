"""How often the time gate fails: what is counted, what is kept, and what a broken file says. The gates are told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from benchmarks import gate_power
from memfix.checks.finding import Finding, Status
from memfix.checks.measured import Ratio
from memfix.gate.judge import Verdict

Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Gates that see 5 % and more, and once blame a form that nobody slowed."""
    blamed = iter(["sequential"])

    def judged(contracts: Any, *, slower_by: dict[str, float], **_: Any) -> Verdict:
        ((form, share),) = slower_by.items()

        def row(name: str, status: Status, ratio: float) -> Finding:
            return Finding("time", "kda", name, status, "", measured=Ratio(ratio, 1e-3, "base", 1.03, 60, processes=2))

        wrongly = next(blamed, None) if share >= 0.1 else None
        rows = [row(form, "fail" if share >= 0.05 else "pass", 1 + share)]
        return Verdict((), (*rows, *([row(wrongly, "fail", 1.04)] if wrongly else [])), "clock, cpu")

    monkeypatch.setattr(gate_power, "run_time_gate", judged)
    return lambda *arguments: CliRunner().invoke(gate_power.main, ["--device", "cpu", "--gates", "3", *arguments])


def test_gates_are_counted_by_share_and_a_form_that_is_wrongly_blamed_too(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "power.json"
    ended = run("--planted", "0,5,10", "--json", str(path))
    assert ended.exit_code == 0, ended.output
    rows = json.loads(path.read_text())["planted_percent"]
    assert {share: (row["passed"], row["failed"], row["blamed_another_form"]) for share, row in rows.items()} == {
        "0": (3, 0, 0),
        "5": (0, 3, 0),
        "10": (0, 3, 1),
    }
    assert rows["5"]["ratio"] == 1.05
    assert "among all forms, on cpu" in ended.output


def test_shares_that_are_there_stay_if_they_are_of_the_same_form(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "power.json"
    run("--planted", "0", "--json", str(path))
    run("--planted", "5", "--json", str(path))
    assert list(json.loads(path.read_text())["planted_percent"]) == ["0", "5"]
    run("--planted", "5", "--only", "--json", str(path))
    assert list(json.loads(path.read_text())["planted_percent"]) == ["5"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--form", "triton"), "kda/triton is not timed on cpu"),
        (("--planted", "few"), "percentages, got 'few'"),
        (("--json", "broken.json"), "broken.json is there and is no file of this benchmark"),
    ],
)
def test_what_cannot_be_is_said(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "broken.json").write_text("{")
    monkeypatch.chdir(tmp_path)
    ended = run(*arguments)
    assert ended.exit_code == 2
    assert message in ended.output
