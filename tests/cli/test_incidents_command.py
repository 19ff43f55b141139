"""``memfix incidents``: the list, the table of claims, JSON, exit codes."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from command_line import Ended

from memfix.incidents import claims as recording
from memfix.incidents import judging
from memfix.incidents.claims import load_claims
from memfix.incidents.judging import check
from memfix.incidents.long_context_loss.checks import loss_values

CHEAP = ("--claim", "LOG-01", "--claim", "LOG-06", "--claim", "LOG-52")


@pytest.fixture
def _no_judging(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal must come before anything is measured."""

    def judged(*_: object, **__: object) -> None:
        raise AssertionError("something was judged")

    monkeypatch.setattr(judging, "judge_claims", judged)


def planted(monkeypatch: pytest.MonkeyPatch, name: str, **changed: Any) -> None:
    """One claim of the report, recorded otherwise than it is."""
    claims = [
        dataclasses.replace(claim, **changed) if claim.id == name else claim
        for claim in load_claims("long_context_loss")
    ]
    monkeypatch.setattr(recording, "load_claims", lambda _: claims)


# ---------------------------------------------------------------- what is printed
def test_incidents_are_listed_with_their_verdicts(memfix: Any) -> None:
    ended = memfix("incidents")
    assert (ended.exit_code, ended.err) == (0, "")
    heading, *rows, note = ended.out.splitlines()
    assert heading.split() == ["incident", "claims", "holds", "wrong", "not", "testable"]
    assert [row.split() for row in rows] == [
        ["kda_transitions", "34", "24", "6", "4"],
        ["long_context_loss", "57", "26", "26", "5"],
        ["npt_weight_delta", "35", "25", "9", "1"],
        ["pythia_vocabulary", "44", "25", "18", "1"],
        ["scent_decoder", "44", "23", "17", "4"],
        ["all", "214", "123", "76", "15"],
    ]
    assert note == "these verdicts are recorded; memfix incidents NAME computes them again"


def test_a_claim_says_what_the_report_says_and_what_is_true(memfix: Any) -> None:
    ended = memfix("incidents", "long_context_loss", *CHEAP)
    assert (ended.exit_code, ended.err) == (0, "")
    *rows, summary = ended.out.splitlines()
    assert [re.split(r"  +", row.strip()) for row in rows] == [
        ["claim", "the report says", "verdict", "what is true"],
        [
            "LOG-01",
            "The logits take 37.09 GB per GPU (lines 7, 18-19)",
            "wrong",
            "37.09 GiB, which is 39.83 GB: its GB are GiB [B*T*V*e]",
        ],
        ["LOG-06", "GPU 0 has 94.97 GiB (line 25)", "not testable", "a property of their card; here it is a cap"],
        [
            "LOG-52",
            "It prints: seq_len=4096, logits=1.16GB, should_chunk=False; standard (lines 186-187)",
            "holds",
            "byte for byte; the figure is GiB (LOG-17) [printed anew]",
        ],
    ]
    assert summary == "3 claims: holds 1, wrong 1, not testable 1"


def test_the_table_is_at_most_as_wide_as_the_terminal(memfix: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    ended = memfix("incidents", "long_context_loss", *CHEAP, "--claim", "LOG-27")
    assert max(map(len, ended.out.splitlines())) <= 100
    assert "1,409 of 131,072" in " ".join(ended.out.split())


def test_json_has_the_claim_as_recorded_and_as_computed(memfix: Any, tmp_path: Path) -> None:
    ended = memfix("incidents", "long_context_loss", *CHEAP, "--json", "claims.json")
    assert ended.exit_code == 0
    data = json.loads((tmp_path / "claims.json").read_text())
    assert (data["incident"], data["left_out"]) == ("long_context_loss", [])
    first = data["claims"][0]
    assert (first["id"], first["verdict"], first["computed_verdict"]) == ("LOG-01", "wrong", "wrong")
    assert first["figures"] == {"bytes": 39829110784, "binary": "37.09 GiB", "decimal": "39.83 GB"}
    assert first["true"] == "37.09 GiB, which is 39.83 GB: its GB are GiB"


def test_json_on_standard_output_leaves_the_table_to_standard_error(memfix: Any) -> None:
    ended = memfix("incidents", "--json", "-")
    recorded = {incident["name"]: incident["recorded"] for incident in json.loads(ended.out)["incidents"]}
    assert recorded["long_context_loss"] == {"holds": 26, "wrong": 26, "not testable": 5}
    assert "long_context_loss" in ended.err
    ended = memfix("incidents", "long_context_loss", "--claim", "LOG-01", "--json", "-")
    assert [claim["id"] for claim in json.loads(ended.out)["claims"]] == ["LOG-01"]
    assert "1 claim: holds 0, wrong 1, not testable 0" in ended.err


def test_quick_leaves_out_the_slow_ones_and_says_so(memfix: Any) -> None:
    ended = memfix("incidents", "long_context_loss", "--quick", "--claim", "LOG-33", "--claim", "LOG-01", "--json", "-")
    assert ended.exit_code == 0
    data = json.loads(ended.out)
    assert ([claim["id"] for claim in data["claims"]], data["left_out"]) == (["LOG-01"], ["LOG-33"])
    assert "left out by --quick: LOG-33" in ended.err


# ---------------------------------------------------------------- drift
def test_another_verdict_than_recorded_ends_with_1(memfix: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, "LOG-01", verdict="holds")
    ended = memfix("incidents", "long_context_loss", *CHEAP)
    assert ended.exit_code == 1
    assert ended.out.splitlines()[-2:] == [
        "the results differ from the recorded ones: the replay has drifted",
        "  LOG-01: recorded holds, now wrong",
    ]


def test_another_figure_than_recorded_ends_with_1(memfix: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, "LOG-01", expected={"bytes": 1})
    ended = memfix("incidents", "long_context_loss", *CHEAP)
    assert ended.exit_code == 1
    assert ended.out.splitlines()[-1] == "  LOG-01: bytes: recorded 1, now 39829110784"


def test_a_check_that_breaks_ends_with_1(memfix: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    @check("LOG-52", "LOG-53")
    def broken(_: object) -> Any:
        raise ValueError("no [N, V] here")

    monkeypatch.setattr(loss_values, "printed_lines", broken)
    ended = memfix("incidents", "long_context_loss", *CHEAP)
    assert ended.exit_code == 1
    assert ended.out.splitlines()[-1] == "  LOG-52: ValueError: no [N, V] here"


# ---------------------------------------------------------------- refusals
@pytest.mark.usefixtures("_no_judging")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["long_context_los"], "no incident 'long_context_los'; did you mean 'long_context_loss'?"),
        (["long_context_loss", "--claim", "LOG12"], "no claim 'LOG12'; did you mean 'LOG-12'?"),
        (
            ["long_context_loss", "--quick", "--claim", "LOG-33", "--claim", "LOG-48"],
            "--quick leaves out every chosen claim: LOG-33, LOG-48",
        ),
    ],
)
def test_what_does_not_exist_ends_with_4(memfix: Any, arguments: list[str], message: str) -> None:
    assert memfix("incidents", *arguments) == Ended(4, "", f"memfix: {message}\n")


@pytest.mark.usefixtures("_no_judging")
def test_a_file_that_cannot_be_written_is_refused_first(memfix: Any, tmp_path: Path) -> None:
    ended = memfix("incidents", "long_context_loss", "--json", "missing/claims.json")
    assert ended == Ended(
        4, "", f"memfix: cannot write the report missing/claims.json: no folder {tmp_path / 'missing'}\n"
    )


@pytest.mark.usefixtures("_no_judging")
@pytest.mark.parametrize("option", [["--quick"], ["--claim", "LOG-01"]])
def test_options_of_one_incident_need_its_name(memfix: Any, option: list[str]) -> None:
    ended = memfix("incidents", *option)
    assert ended.exit_code == 4
    assert "--claim and --quick choose among the claims of one incident: give its NAME" in ended.err


def test_an_incident_without_claims_is_refused(memfix: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "CLAIMS_FILE", "nobody_wrote_them.toml")
    assert memfix("incidents", "long_context_loss") == Ended(
        4, "", "memfix: incident long_context_loss has no claims\n"
    )
