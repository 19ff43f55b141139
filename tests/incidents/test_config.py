"""The schema of a training run: what is read, and how each fault is named."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from toy import run_config, toy

from memfix.errors import UsageError
from memfix.incidents.config import DataConfig, RunConfig
from memfix.incidents.incident import load_config, sections
from memfix.incidents.schema import described, differences, setting


@dataclass(frozen=True)
class ModelConfig:
    """Another incident's section: the schema knows its keys from here alone."""

    kda_memory_chunk_size: int = setting(64, low=1, about="tokens of a chunk")
    kda_mode: str = setting("scan", choices=("scan", "sequential"), about="how states are made")


INCIDENT = dataclasses.replace(toy, model_schema=ModelConfig)
LEAST = "data:\n  context_length: 8\ntraining:\n  steps: 3\n"


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def load(text: str, *overrides: str) -> RunConfig:
        Path("run.yaml").write_text(text)
        return load_config(INCIDENT, "run.yaml", overrides)

    return load


@pytest.fixture
def refusal(load: Any) -> Any:
    def refusal(text: str, *overrides: str) -> str:
        with pytest.raises(UsageError) as refused:
            load(text, *overrides)
        return str(refused.value)

    return refusal


# ---------------------------------------------------------------- what is read
def test_what_is_not_given_has_its_default(load: Any) -> None:
    config = load(LEAST)
    assert (config.data.context_length, config.training.steps) == (8, 3)
    assert config.model == ModelConfig(kda_memory_chunk_size=64, kda_mode="scan")
    assert (config.optimizer.clip_norm, config.checkpoint.path) == (1.0, None)


def test_every_kind_of_value_is_read(load: Any) -> None:
    config = load(
        "model: {kda_memory_chunk_size: 32, kda_mode: sequential}\n"
        "data: {context_length: 131_072, source: file, path: 'null', dtype: int32}\n"
        "training:\n  steps: 10\n  gradient_checkpointing: True\n"
        "optimizer:\n  learning_rate: 1e-3\n  clip_norm: null\n  beta1: 0\n"
        "checkpoint:\n"
    )
    assert (config.model.kda_memory_chunk_size, config.model.kda_mode) == (32, "sequential")
    # a quoted null is the word
    assert (config.data.context_length, config.data.path) == (131_072, "null")
    assert config.training.gradient_checkpointing is True
    # YAML 1.1 itself takes 1e-3 for a string
    assert (config.optimizer.learning_rate, config.optimizer.clip_norm, config.optimizer.beta1) == (1e-3, None, 0.0)


def test_overrides_replace_what_the_file_says_and_the_last_one_holds(load: Any) -> None:
    config = load(
        LEAST, "training.steps=7", "training.steps=9", "model.kda_memory_chunk_size=16", "optimizer.clip_norm=null"
    )
    assert (config.training.steps, config.data.context_length) == (9, 8)
    assert (config.model.kda_memory_chunk_size, config.optimizer.clip_norm) == (16, None)


def test_an_override_can_give_what_the_file_lacks(load: Any) -> None:
    assert load("training:\n", "training.steps=2", "data.context_length=5").data.context_length == 5


def test_every_key_is_described_with_what_it_takes_and_its_default() -> None:
    rows = {key: (takes, about) for key, takes, about in described(sections(INCIDENT))}
    assert rows["model.kda_memory_chunk_size"] == ("an int, at least 1  [64]", "tokens of a chunk")
    assert rows["model.kda_mode"][0] == "scan | sequential  [scan]"
    assert rows["training.steps"][0] == "an int, at least 1 or null  [null]"
    assert rows["optimizer.clip_norm"][0] == "a number, more than 0 or null  [1.0]"
    assert rows["training.gradient_checkpointing"][0] == "true or false  [false]"


def test_differences_of_two_runs_are_named_by_key(load: Any) -> None:
    old, new = load(LEAST).as_dict(), load(LEAST, "training.steps=4", "checkpoint.path=a").as_dict()
    assert differences(old, new) == {"training.steps": "3 -> 4", "checkpoint.path": "null -> a"}
    assert differences(old, old) == {}
    assert differences({"model": {}}, {"model": {"a": None}}) == {"model.a": "absent -> null"}


# ---------------------------------------------------------------- how faults are named
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model:\n  kda_memory_chunk_siz: 32\n" + LEAST,
            "run.yaml:2: unknown key model.kda_memory_chunk_siz; did you mean 'kda_memory_chunk_size'?",
        ),
        (
            LEAST + "  context_length: 4\n",
            "run.yaml:5: unknown key training.context_length; did you mean 'data.context_length'?",
        ),
        ("trainig:\n  steps: 3\n" + LEAST, "run.yaml:1: unknown section 'trainig'; did you mean 'training'?"),
        (LEAST + "  batch_size: 0\n", "run.yaml:5: training.batch_size must be at least 1, got 0"),
        (LEAST + "  batch_size: 1.5\n", "run.yaml:5: training.batch_size must be an int, got '1.5'"),
        (LEAST + "  batch_size: true\n", "run.yaml:5: training.batch_size must be an int, got 'true'"),
        # ninety, if YAML 1.1 had its way
        (LEAST + "  batch_size: 1:30\n", "run.yaml:5: training.batch_size must be an int, got '1:30'"),
        (LEAST + "  batch_size:\n", "run.yaml:5: training.batch_size must be an int, got ''"),
        (LEAST + "  batch_size: [1]\n", "run.yaml:5: training.batch_size must not be a list"),
        (LEAST + "  batch_size:\n    each: 1\n", "run.yaml:5: training.batch_size must be an int, got keys of its own"),
        (
            "model: &m\n  kda_mode:\n    again: *m\n" + LEAST,
            "run.yaml:2: model.kda_mode must be a string, got keys of its own",
        ),
        ("data: &d\n  <<: *d\n  context_length: 8\ntraining: {steps: 1}\n", "run.yaml:2: unknown key data.<<; "),
        (
            LEAST + "  gradient_checkpointing: 1\n",
            "run.yaml:5: training.gradient_checkpointing must be true or false, got '1'",
        ),
        (
            LEAST + "  precision: fp8\n",
            "run.yaml:5: training.precision must be one of float32, bfloat16, float16, autocast, pure_bfloat16, "
            "got 'fp8'",
        ),
        (
            LEAST + "optimizer:\n  clip_norm: .inf\n",
            "run.yaml:6: optimizer.clip_norm must be a number or null, got '.inf'",
        ),
        (
            LEAST + "optimizer:\n  learning_rate: nan\n",
            "run.yaml:6: optimizer.learning_rate must be a number, got 'nan'",
        ),
        (
            LEAST + "optimizer:\n  learning_rate: 0\n",
            "run.yaml:6: optimizer.learning_rate must be more than 0, got 0.0",
        ),
        (LEAST + "optimizer:\n  beta1: 1\n", "run.yaml:6: optimizer.beta1 must be less than 1, got 1.0"),
        (LEAST + "  steps: 4\n", "run.yaml:5: training.steps is given twice, first in line 4"),
        (LEAST + "model: large\n", "run.yaml:5: model must be a section of keys, got 'large'"),
        (
            "data:\n  context_length: 8\n  source: file\n" + "training:\n  steps: 3\n",
            "run.yaml:1: data: give path, the file to read, if source is file, and only then",
        ),
        ("data:\n  context_length: 8\ntraining:\n", "run.yaml:3: training: give steps, the number of optimizer steps"),
        ("data:\n  context_length: 8\n", "run.yaml: training: give steps, the number of optimizer steps"),
        ("- 1\n", "run.yaml:1: a config must not be a list"),
        ("tiny\n", "run.yaml:1: a config is sections of keys, got 'tiny'"),
        ("", "run.yaml: the file is empty; write sections such as model, data, training"),
        ("model: {\n" + LEAST, "run.yaml:3: not YAML: "),
        ("model: *m\n", "run.yaml:1: not YAML: found undefined alias 'm'"),
    ],
)
def test_a_fault_is_named_with_file_line_and_key(refusal: Any, text: str, message: str) -> None:
    assert refusal(text).startswith(message)


def test_all_faults_are_named_at_once(refusal: Any) -> None:
    message = refusal("modl:\n  x: 1\n" + LEAST.replace("8", "0") + "  batch_siz: 1\n")
    assert message.splitlines() == [
        "run.yaml:1: unknown section 'modl'; did you mean 'model'?",
        "run.yaml:4: data.context_length must be at least 1, got 0",
        "run.yaml:7: unknown key training.batch_siz; did you mean 'batch_size'?",
    ]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.stepps=3", "override training.stepps=3: unknown key training.stepps; did you mean 'steps'?"),
        ("training.steps=few", "override training.steps=few: training.steps must be an int or null, got 'few'"),
        ("optimiser.eps=1", "override optimiser.eps=1: unknown section 'optimiser'; did you mean 'optimizer'?"),
        ("steps=3", "an override is section.key=value, such as training.steps=10; got 'steps=3'"),
        ("training.steps", "an override is section.key=value, such as training.steps=10; got 'training.steps'"),
    ],
)
def test_a_fault_in_an_override_is_named_with_the_override(refusal: Any, override: str, message: str) -> None:
    assert refusal(LEAST, override) == message


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"^no config file .*none.yaml, and kda_transitions comes with none of that name"
    ):
        load_config(dataclasses.replace(INCIDENT, package="memfix.incidents.kda_transitions"), tmp_path / "none.yaml")
    with pytest.raises(UsageError, match=r"^cannot read the config file .*: Is a directory$"):
        load_config(INCIDENT, tmp_path)
    (tmp_path / "image.yaml").write_bytes(b"a: \xff\xfe")
    with pytest.raises(UsageError, match=r"image.yaml: not text: byte 3 is not UTF-8$"):
        load_config(INCIDENT, tmp_path / "image.yaml")


# ---------------------------------------------------------------- a run with other values
def test_values_are_read_and_replaced_by_their_keys() -> None:
    config = run_config()
    changed = config.replaced({"data.context_length": 5, "model.width": 3})
    assert (changed.value("data.context_length"), changed.value("model.width")) == (5, 3)
    assert config.value("model.width") == 8
    assert "name" not in config.as_dict()


def test_a_value_that_its_section_refuses_is_named_with_its_key() -> None:
    config = run_config(batch_tokens=12)
    with pytest.raises(UsageError, match=r"^training.batch_size=2: batch_tokens replaces batch_size"):
        config.replaced({"training.batch_size": 2})


def test_data_without_tokens_has_no_batch_tokens() -> None:
    config = run_config(batch_tokens=12)
    with pytest.raises(UsageError, match=r"^training.batch_tokens counts tokens, but these data are not tokens"):
        dataclasses.replace(config, data=DataConfig())
