"""The report's run on the shared loop: its configs, its batch in tokens, and one loss curve for every form."""

from __future__ import annotations

import warnings

import pytest
import torch
from kda_runs import shrunken
from toy import ALONE

from memfix.errors import UsageError
from memfix.incidents.incident import load_config
from memfix.incidents.kda_transitions.incident import incident
from memfix.incidents.training import Run, train

CURVES = [
    ("model.kda_mode=sequential",),
    ("model.kda_form=naive",),
    ("model.kda_form=reported", "model.kda_memory_chunk_size=7"),
    ("model.kda_form=streamed", "model.kda_memory_chunk_size=16"),
    ("model.kda_form=wy", "model.kda_memory_chunk_size=32"),
]


def curve(*overrides: str) -> list[float]:
    with warnings.catch_warnings(action="ignore"):
        return [step.loss for step in train(incident, shrunken(*overrides), ALONE)]


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return curve()


# ---------------------------------------------------------------- one curve
@pytest.mark.parametrize("overrides", CURVES, ids=" ".join)
def test_every_form_and_chunk_gives_the_same_curve(overrides: tuple[str, ...], expected: list[float]) -> None:
    assert curve(*overrides) == pytest.approx(expected, rel=1e-4)


def test_the_loss_falls() -> None:
    losses = curve("training.steps=25", "data.branching=2")
    assert losses[0] == pytest.approx(torch.tensor(64.0).log().item(), abs=0.1)
    assert losses[-1] < 0.7 * losses[0]


def test_bfloat16_trains_alike(expected: list[float]) -> None:
    assert curve("training.precision=bfloat16") == pytest.approx(expected, rel=0.02)


# ---------------------------------------------------------------- configs
@pytest.mark.parametrize(("name", "shape"), [("hn_xs.yaml", (16, 256, 8, 64)), ("hn_s.yaml", (6, 4096, 12, 64))])
def test_the_configs_have_the_reports_keys(name: str, shape: tuple[int, ...]) -> None:
    config = load_config(incident, name)
    model = config.model
    assert (config.batch_size, config.data.context_length, model.heads, model.head_width) == shape
    assert (model.kda_memory_chunk_size, model.kda_mode) == (64, "scan")
    assert config.training.batch_tokens == shape[0] * shape[1]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.kda_chunk_size=64", "unknown key model.kda_chunk_size; did you mean 'kda_memory_chunk_size'?"),
        ("model.kda_memory_chunk_size=0", "model.kda_memory_chunk_size must be at least 1, got 0"),
        ("model.kda_memory_chunk_size=-1", "model.kda_memory_chunk_size must be at least 1, got -1"),
        ("model.kda_memory_chunk_size=64.5", "model.kda_memory_chunk_size must be an int, got '64.5'"),
        ("model.kda_mode=parallel", "model.kda_mode must be one of scan, sequential, got 'parallel'"),
        ("training.batch_size=2", "training: batch_tokens replaces batch_size: give one of them"),
        (
            "training.batch_tokens=30",
            "training.batch_tokens must be a multiple of data.context_length, 20, got 30: a forward takes whole",
        ),
    ],
)
def test_what_a_config_cannot_say_is_refused(override: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        shrunken(override)
    assert message in str(refused.value)


def test_half_the_batch_tokens_are_half_the_sequences() -> None:
    run = Run(incident, shrunken("training.batch_tokens=20"), ALONE)
    assert run.take_step().num_targets == 20
    assert run.examples == 1


def test_a_size_outside_the_range_warns_when_the_model_is_built() -> None:
    with pytest.warns(UserWarning, match="memory_chunk_size 16 is outside the recommended 32 to 128"):
        Run(incident, shrunken("model.kda_memory_chunk_size=16"), ALONE)
