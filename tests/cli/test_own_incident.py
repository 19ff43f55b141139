"""A new incident is one folder: with continuous inputs it trains, profiles, fits and judges claims, without a list."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memfix import incidents

FOLDER = Path(__file__).parents[1] / "incidents" / "own"
NAME = "drawn_images"


@pytest.fixture(autouse=True)
def _found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder's parent, as one more place where incidents are."""
    monkeypatch.setattr(incidents, "__path__", [*incidents.__path__, str(FOLDER)])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_it_takes_under_100_lines() -> None:
    """With whatever else an incident's folder has: claims.toml and checks.py count too."""
    files = [path for path in (FOLDER / NAME).rglob("*") if path.suffix in (".py", ".yaml", ".toml")]
    assert sum(len(path.read_text().splitlines()) for path in files) < 100
    assert NAME in incidents.incident_names()


def test_it_trains_and_resumes(memfix: Any, tmp_path: Path) -> None:
    run = ("train", NAME, "--config", "small.yaml", "checkpoint.path=run.pt", "--json", "steps.jsonl")
    ended = memfix(*run)
    assert (ended.exit_code, ended.err) == (0, "")
    assert " examples/s  peak " in ended.out
    assert memfix(*run, "training.steps=31", "--resume", "run.pt").exit_code == 0
    steps = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    losses = [step["loss"] for step in steps if step["event"] == "step"]
    assert len(losses) == 31
    assert losses[-1] < losses[0] / 4
    assert {step["num_targets"] for step in steps if step["event"] == "step"} == {16}


def test_it_is_profiled_by_its_own_stages(memfix: Any) -> None:
    ended = memfix("profile", NAME, "--json", "-")
    assert ended.exit_code == 0
    data = json.loads(ended.out)
    assert data["subject"] == "drawn_images small, float32, H200"
    stages = {stage["name"]: stage for stage in data["stages"]}
    assert [*stages] == [
        "parameters", "pixels", "brightness", "backward", "later forwards", "optimizer step", "every later step",
    ]  # fmt: skip
    kinds = stages["parameters"]["kinds_at_peak"]
    num_parameters = (64 * 16 + 16) + (16 + 1)
    # 8 images of 64 pixels, and a number for each
    assert (kinds["parameters"], kinds["batch and tables"]) == (4 * num_parameters, 4 * 8 * (64 + 1))
    assert data["exact"]


def test_what_it_grows_is_fitted(memfix: Any) -> None:
    for growth, unit in (("training.batch_size", "images"), ("model.width", "channels")):
        ended = memfix("fit", NAME, "--over", growth, "--capacity", "100KiB", "--json", "-")
        assert ended.exit_code == 0
        (found,) = json.loads(ended.out)[growth]
        fits = {row["value"]: row["fits"] for row in found["tried"]}
        assert (fits[found["largest"]], fits[found["largest"] + 1]) == (True, False)
        assert f"100.00 KiB: {found['largest']:,} {unit}" in ended.err


def test_its_claims_are_judged(memfix: Any) -> None:
    ended = memfix("incidents", NAME, "--json", "-")
    assert ended.exit_code == 0
    verdicts = {claim["id"]: (claim["computed_verdict"], claim["true"]) for claim in json.loads(ended.out)["claims"]}
    assert verdicts == {"IMG-01": ("holds", "1,057"), "IMG-02": ("wrong", "2.03 KiB"), "IMG-03": ("holds", "4.06 KiB")}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "training.batch_tokens=64",
            "training.batch_tokens counts tokens, but these data are not tokens: use training.bat",
        ),
        ("data.pixel=9", "override data.pixel=9: unknown key data.pixel; did you mean 'pixels'?"),
        ("data.context_length=9", "override data.context_length=9: unknown key data.context_length"),
    ],
)
def test_keys_of_other_data_are_refused(memfix: Any, override: str, message: str) -> None:
    ended = memfix("profile", NAME, override, *(["training.batch_size=1"] if "tokens" in override else []))
    assert ended.exit_code == 4
    assert ended.err.startswith(f"memfix: {message}")
