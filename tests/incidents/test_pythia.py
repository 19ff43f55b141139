"""The Pythia of the vocabulary's report: its attention, its counts, its calculator, and its run on the shared loop."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy import ALONE

from memfix.errors import UsageError
from memfix.incidents.config import RunConfig
from memfix.incidents.examples import Examples
from memfix.incidents.incident import load_config
from memfix.incidents.profile import LATER_STEP, PARAMETERS
from memfix.incidents.profile_step import profile
from memfix.incidents.pythia_vocabulary import create_pythia_70m
from memfix.incidents.pythia_vocabulary.attention import dense_attention, window_attention
from memfix.incidents.pythia_vocabulary.calculator import breakdown
from memfix.incidents.pythia_vocabulary.checks import SHRUNKEN
from memfix.incidents.pythia_vocabulary.incident import ONE_HOT_LOSS, incident
from memfix.incidents.pythia_vocabulary.model import Pythia, PythiaConfig
from memfix.incidents.training import Run, train

SCALARS = range(17)  # bytes of losses and counts, which the calculator leaves out


def shrunken(*overrides: str) -> RunConfig:
    of_run = ("training.steps=4", "optimizer.learning_rate=0.01", "optimizer.warmup_steps=0")
    return load_config(incident, "report.yaml", (*SHRUNKEN, *of_run, *overrides))


# ---------------------------------------------------------------- attention
def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """All scores, of which those outside the window are hidden."""
    place = torch.arange(q.shape[-2])
    behind = place[:, None] - place
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return scores.masked_fill((behind < 0) | (behind >= window), -math.inf).softmax(-1) @ v


@given(num_tokens=st.integers(1, 20), window=st.integers(1, 24), seed=st.integers(0, 99))
def test_a_window_is_a_mask(num_tokens: int, window: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(2, 2, num_tokens, 3, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(3)]
    ours, true = window_attention(*inputs, window=window), masked(*inputs, window)
    torch.testing.assert_close(ours, true)
    upstream = torch.randn(true.shape, generator=draw, dtype=torch.float64)
    for got, wanted in zip(*(torch.autograd.grad(out, inputs, upstream) for out in (ours, true)), strict=True):
        torch.testing.assert_close(got, wanted)


def test_dropout_draws_the_same_numbers_again_in_a_checkpointed_layer() -> None:
    ids_BT, losses = torch.arange(8).reshape(1, 8), []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = Pythia(
            PythiaConfig(vocab_size=9, layers=2, width=8, heads=2, dropout=0.5), gradient_checkpointing=checkpointing
        )
        torch.manual_seed(1)
        model(ids_BT, ids_BT).backward()
        losses.append(
            torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
        )
    assert torch.equal(*losses)


# ---------------------------------------------------------------- counts
@given(
    words=st.integers(1, 300), layers=st.integers(1, 3), heads=st.integers(1, 3), head_width=st.sampled_from([2, 4, 6]),
    positions=st.sampled_from([None, "learned", "rotary"]), rows=st.integers(1, 9), is_sparse=st.booleans(),
)  # fmt: skip
def test_the_count_is_the_sum_over_tensors(
    words: int, layers: int, heads: int, head_width: int, positions: str | None, rows: int, is_sparse: bool
) -> None:
    model, config = create_pythia_70m(
        words, is_sparse, "meta",
        layers=layers, heads=heads, width=heads * head_width, positions=positions, max_positions=rows,
    )  # fmt: skip
    assert config.get_total_params() == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("words", "count"), [(10_000, 29_220_864), (50_000, 70_180_864), (50_304, 70_426_624)])
def test_the_counts_of_three_vocabularies(words: int, count: int) -> None:
    model, config = create_pythia_70m(vocab_size=words, use_sparse_attention=False, device="meta")
    assert config.get_total_params() == count == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ({"width": 10, "heads": 3}, "width must be a multiple of heads, 3, got 10"),
        ({"width": 6, "heads": 2, "positions": "rotary"}, "rotary positions need heads of even width, got 3"),
        ({"window": 0}, "window must be at least 1, got 0"),
    ],
)
def test_a_config_that_makes_no_model(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_pythia_70m(**settings)


def test_more_tokens_than_positions() -> None:
    model, _ = create_pythia_70m(5, device="meta", layers=1, width=4, heads=1, max_positions=3)
    ids_BT = torch.zeros(1, 4, dtype=torch.int64, device="meta")
    with pytest.raises(UsageError, match="at most 3 tokens, the rows of the table of positions, got 4: raise model"):
        model(ids_BT, ids_BT)


# ---------------------------------------------------------------- the calculator
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model.use_sparse_attention=false", "model.dropout=0"),
        ("model.vocab_size=50304", "training.batch_size=5"),
        ("model.window=24", "training.batch_size=4", "training.precision=pure_bfloat16"),
        ("model.use_sparse_attention=false", "training.batch_size=1", "training.precision=pure_bfloat16"),
    ],
    ids=" ".join,
)
def test_the_calculator_comes_to_the_simulated_bytes(overrides: tuple[str, ...]) -> None:
    config = load_config(incident, "report.yaml", ("model.layers=2", *overrides))
    of_step = breakdown(
        config.model, batch_size=config.batch_size, context_length=config.data.context_length,
        precision=config.training.precision,
    )  # fmt: skip
    timeline = profile(incident, config).reading.timeline
    assert timeline is not None
    live = {name: timeline.live_bytes[start - 1 : end] for start, end, name in timeline.stage_spans()}
    assert live[PARAMETERS][-1] == of_step.parameters + of_step.batch_and_tables
    assert live[Pythia.loss_stage][-1] - live[PARAMETERS][-1] - of_step.activations - of_step.logits // 3 in SCALARS
    assert max(live[LATER_STEP]) - of_step.peak in SCALARS


@pytest.mark.parametrize(
    ("settings", "precision", "message"),
    [
        ({}, "autocast", "the calculator counts one dtype: float32 or pure_bfloat16, got autocast"),
        (
            {"loss_form": "chunked"},
            "float32",
            "counts embedding_form gather and loss_form standard, got gather and chunked",
        ),
    ],
)
def test_what_the_calculator_does_not_count(settings: dict[str, Any], precision: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        breakdown(PythiaConfig(**settings), batch_size=1, context_length=8, precision=precision)


def test_one_hot_rows_take_more_than_the_step() -> None:
    found = profile(incident, load_config(incident, "report.yaml", ["model.layers=1", "model.vocab_size=50000"]))
    rows = {row.stage.name: row for row in found.rows}
    assert rows[ONE_HOT_LOSS].aside
    assert rows[ONE_HOT_LOSS].stage.peak_bytes > found.peak_bytes
    assert not any("in the report" in sentence for sentence in found.conclusions)


# ---------------------------------------------------------------- the run
def curve(*overrides: str) -> list[float]:
    return [step.loss for step in train(incident, shrunken(*overrides), ALONE)]


def test_every_form_gives_the_same_curve() -> None:
    expected = curve()
    for form in ("one_hot", "index", "chunked"):
        assert curve(f"model.loss_form={form}", "model.embedding_form=one_hot") == pytest.approx(expected, rel=1e-4)
    assert curve("training.gradient_checkpointing=true") == pytest.approx(expected, rel=1e-4)
    assert curve("model.window=12") == pytest.approx(curve("model.use_sparse_attention=false"), rel=1e-6)


def test_an_epoch_has_every_example_once() -> None:
    run = Run(incident, shrunken("training.steps=null", "training.epochs=2", "data.tokens=121"), ALONE)
    assert run.steps == 5  # 10 examples twice, 4 a step
    assert Run(incident, shrunken("training.epochs=2", "data.tokens=121"), ALONE).steps == 4


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    settings = ("model.dropout=0.1", "optimizer.final_fraction=1")  # one rate, whatever the steps in all
    saved = (*settings, "training.steps=2", f"checkpoint.path={tmp_path / 'run.pt'}")
    first = curve(*saved)
    rest = [step.loss for step in train(incident, shrunken(*settings), ALONE, resume=tmp_path / "run.pt")]
    assert [*first, *rest] == curve(*settings)


# ---------------------------------------------------------------- text
def of_text(path: Path, *overrides: str) -> RunConfig:
    return shrunken(f"data.path={path}", "data.context_length=3", *overrides)


def test_a_text_is_read_by_its_most_frequent_words(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("a b a c a b\nd a b a\n")
    ids_BT, target_BT = incident.data(of_text(path, "model.vocab_size=3"))(Examples(range(3), 0))
    rows = torch.cat([ids_BT, target_BT[:, -1:]], 1).tolist()
    assert sorted(rows) == [[0, 1, 2, 0], [0, 1, 2, 1], [1, 2, 1, 0]]
    path.write_text("d " * 40)
    ids_BT, _ = incident.data(of_text(path, "model.vocab_size=3"))(Examples(range(3), 0))
    assert ids_BT.unique().tolist() == [1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "data.path: cannot read .*text.txt: No such file"),
        (b" \n ", "data.path: .*text.txt has no words"),
        (b"a \xff b c d e", "is not UTF-8: invalid start byte at byte 2"),
        (b"a b \x00 c", "is a binary file: byte 4 is zero"),
        (b"a b c", "the corpus has 3 tokens, and one example takes 4"),
    ],
)
def test_a_text_that_cannot_be_read(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        incident.data(of_text(path))(Examples(range(1), 0))


def test_dense_attention_is_causal() -> None:
    q, k, v = torch.randn(3, 1, 1, 5, 2, generator=torch.Generator().manual_seed(0))
    changed = k.clone()
    changed[..., -1, :] = 9
    assert torch.equal(dense_attention(q, k, v)[..., :-1, :], dense_attention(q, changed, v)[..., :-1, :])
