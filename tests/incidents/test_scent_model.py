"""The decoder of the SCENT report: its layers, its decoders in every form, its images, and what its steps take."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import ALONE

from memfix.errors import UsageError
from memfix.incidents import profile_step
from memfix.incidents.config import RunConfig
from memfix.incidents.examples import Examples
from memfix.incidents.fit_step import fit_step, growth_of
from memfix.incidents.incident import load_config
from memfix.incidents.scent_decoder.images import image_batches, pixel_centres, psnr
from memfix.incidents.scent_decoder.incident import RUNS, incident, num_parameters
from memfix.incidents.scent_decoder.layers import Attention, FeedForward, FourierFeatures, PreNorm
from memfix.incidents.scent_decoder.model import DECODERS, ScentModel
from memfix.incidents.training import Run, train
from memfix.meters import get_meter
from memfix.units import parse_bytes

TINY = (
    "model.hidden_dim=16", "model.latent_dim=8", "model.latent_tokens=4", "model.heads=2", "model.feature_dim=8",
    "model.num_layers=2", "data.resolution=4", "training.batch_size=2", "training.device=cpu", "training.steps=3",
    "optimizer.warmup_steps=0", "optimizer.learning_rate=0.01",
)  # fmt: skip
OURS = ("model.attention=auto", "model.feed_forward=auto")
EVERY_DECODER = pytest.mark.parametrize("decoder", DECODERS)


def tiny(*overrides: str) -> RunConfig:
    return load_config(incident, "config.yaml", (*TINY, *overrides))


def gradients(*overrides: str) -> list[torch.Tensor]:
    """The loss of a tiny model in float64, and the gradient of every parameter."""
    config = tiny(*overrides)
    torch.manual_seed(0)
    model = incident.build(config).double()
    batch = image_batches(config)(Examples(range(config.batch_size), 0))
    loss = incident.loss(model, {name: tensor.double() for name, tensor in batch.items()})
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


# ---------------------------------------------------------------- layers
CROSS = 2 * 512 * 512 + 2 * 256 * 512 + 512  # parameters of an attention to a context of width 256


def layer_parameters(layer: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in layer.parameters())


def test_parameters_of_the_reports_layers() -> None:
    with torch.device("meta"):
        assert layer_parameters(Attention(512, heads=8)) == 4 * 512 * 512 + 512
        assert layer_parameters(Attention(512, context_dim=256, heads=8)) == CROSS
        assert layer_parameters(FeedForward(512, mult=4)) == 512 * 4096 + 4096 + 2048 * 512 + 512
        assert layer_parameters(PreNorm(512, Attention(512, 256), 256)) == 2 * 512 + 2 * 256 + CROSS


@pytest.mark.parametrize(
    ("decoder", "block"),
    [
        ("self", 2 * 1024 + 1_049_088 + 3_150_336),
        ("cross", 2 * 1024 + 512 + CROSS + 3_150_336),
        ("ff", 2 * (1024 + 3_150_336)),
        ("residual", 2 * (512 * 512 + 512)),
    ],
)
def test_parameters_of_the_decoders(decoder: str, block: int) -> None:
    attention, feed_forward = 4 * 256 * 256 + 256, 256 * 2048 + 2048 + 1024 * 256 + 256
    latents = 12 * 256 + 256 + 256 * 256 + 2 * (2 * 512 + attention + feed_forward)
    query = 64 * 512 + 512 + 1024 + 512 + CROSS
    encoders = 2 * (64 * 512 + 512) + 2 * (512 * 512 + 512)
    expected = latents + query + encoders + 9 * block + 2 * (512 * 3 + 3)
    assert num_parameters(load_config(incident, "config.yaml", [f"model.decoder={decoder}"])) == expected


def test_a_context_may_be_wider_than_it_is_long() -> None:
    layer = Attention(32, context_dim=96, heads=4)
    assert layer(torch.randn(2, 10, 32), torch.randn(2, 40, 96)).shape == (2, 10, 32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Attention(512, heads=7), "heads must divide the width 512, got 7"),
        (lambda: Attention(512, heads=0), "heads must be at least 1, got 0"),
        (lambda: Attention(8, form="flash"), "form must be one of"),
        (lambda: FeedForward(8, form="flash"), "form must be one of"),
        (lambda: FourierFeatures(6, 4.0), "feature_dim must be a multiple of 4, got 6"),
        (lambda: Attention(8, 4)(torch.ones(2, 3, 8)), "this attention has context_dim 4: pass a context"),
        (
            lambda: Attention(8, 4)(torch.ones(2, 3, 8), torch.ones(2, 5, 6)),
            "the context must have 4 features, got shape [2, 5, 6]",
        ),
        (
            lambda: Attention(8, 4)(torch.ones(2, 3, 8), torch.ones(1, 5, 4)),
            "the context must have the queries' batch size 2, got 1",
        ),
    ],
)
def test_layers_refuse(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.heads=3", "heads must divide the width 16, got 3"),
        ("model.latent_dim=9", "heads must divide the width 9, got 2"),
        ("model.query_chunk=0", "model.query_chunk must be at least 1, got 0"),
        ("model.query_chunk=2", "query_chunk in decoder self needs attention auto or query_chunks, got naive"),
        ("model.latent_tokens=5", "latent_tokens must be a square number, got 5"),
        ("model.feature_dim=6", "feature_dim must be a multiple of 4, got 6"),
        ("model.attention=flash", "model.attention must be one of auto, query_chunks, sdpa, naive, got 'flash'"),
        ("model.decoder=conv", "model.decoder must be one of self, cross, ff, residual, got 'conv'"),
        (
            "data.resolution=5",
            "data.resolution must be a multiple of 2, because 4 latent tokens are 2 x 2 patches of an image; got 5",
        ),
        ("data.highest=0.5", "highest must be at least lowest, 1.0, got 0.5"),
    ],
)
def test_configs_that_make_no_model(override: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        tiny(override)
    assert message in str(refused.value)


def test_fourier_features_are_half_cosines_and_half_sines() -> None:
    features = FourierFeatures(64, bandwidth=8.0)
    assert features.frequencies.tolist()[0] == 0.5
    assert features.frequencies.tolist()[-1] == pytest.approx(8)
    found = features(torch.tensor([[[0.0, 0.0], [0.25, 0.5]]]))
    assert found.shape == (1, 2, 64)
    assert torch.equal(found[0, 0], torch.tensor([1.0] * 32 + [0.0] * 32))
    assert found[0, 1, 0] == pytest.approx(2**-0.5)  # an eighth of a period


# ---------------------------------------------------------------- one function in every form
@EVERY_DECODER
@pytest.mark.parametrize(
    "forms",
    [
        OURS,
        ("model.attention=sdpa", "model.feed_forward=checkpoint"),
        ("model.attention=query_chunks", "model.feed_forward=token_chunks", "training.gradient_checkpointing=true"),
        ("training.gradient_checkpointing=true",),
        (*OURS, "model.query_chunk=5"),
    ],
)
def test_every_form_computes_the_naive_decoder(decoder: str, forms: tuple[str, ...]) -> None:
    chosen = f"model.decoder={decoder}"
    for found, true in zip(gradients(chosen, *forms), gradients(chosen), strict=True):
        torch.testing.assert_close(found, true, rtol=1e-9, atol=1e-12)


@EVERY_DECODER
def test_positions_in_chunks_are_exact_but_for_attention_among_them(decoder: str) -> None:
    config = tiny(f"model.decoder={decoder}")
    torch.manual_seed(0)
    model: Any = incident.build(config)
    batch = image_batches(config)(Examples(range(2), 0))
    latents = model.latents(batch["images"])
    whole = model.decode(latents, batch["coordinates"])
    parts = torch.cat([model.decode(latents, some) for some in batch["coordinates"].split(5, 1)], 1)
    assert torch.allclose(whole, parts, atol=1e-6) is (decoder != "self")


def test_one_position_of_one_image() -> None:
    model: Any = incident.build(tiny())
    assert model(torch.rand(1, 3, 4, 4), torch.rand(1, 1, 2)).shape == (1, 1, 3)


def test_the_reports_sequence_has_no_residuals() -> None:
    literal, residual = (gradients(f"model.residual={value}")[0] for value in ("false", "true"))
    assert not torch.allclose(literal, residual)


def test_a_checkpointed_step_draws_the_same_dropout() -> None:
    plain, kept = (
        gradients("model.dropout=0.5", f"training.gradient_checkpointing={value}") for value in ("false", "true")
    )
    assert all(map(torch.equal, plain, kept))


# ---------------------------------------------------------------- images and training
def test_images_depend_on_their_number_and_the_seed_alone() -> None:
    make = image_batches(tiny())
    both, second = make(Examples(range(2), 0)), make(Examples(range(1, 2), 0))
    assert torch.equal(both["pixels"][1:], second["pixels"])
    assert not torch.equal(image_batches(tiny("data.seed=1"))(Examples(range(2), 1))["pixels"], both["pixels"])
    again = image_batches(tiny("data.images=1"))(Examples(range(2), 0))["pixels"]
    assert torch.equal(again, both["pixels"][[0, 0]])
    assert 0 <= both["pixels"].min() < 0.5 < both["pixels"].max() <= 1
    assert torch.equal(both["images"][0, :, 1, 2], both["pixels"][0, 4 + 2])
    assert pixel_centres(4)[4 + 2].tolist() == [0.375, 0.625]


def test_psnr() -> None:
    assert psnr(1.0) == 0
    assert psnr(1e-3) == pytest.approx(30)


@EVERY_DECODER
def test_a_decoder_learns(decoder: str) -> None:
    config = tiny(f"model.decoder={decoder}", *OURS, "training.steps=12", "data.images=2")
    losses = [step.loss for step in train(incident, config, ALONE)]
    assert losses[-1] < 0.5 * losses[0]


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    def curve(*overrides: str, resume: Path | None = None) -> list[float]:
        config = tiny(*OURS, "optimizer.final_fraction=1", *overrides)
        return [step.loss for step in train(incident, config, ALONE, resume=resume)]

    first = curve("training.steps=2", f"checkpoint.path={tmp_path / 'run.pt'}")
    assert [*first, *curve(resume=tmp_path / "run.pt")] == curve()


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("precision", ["bfloat16", "autocast", "pure_bfloat16"])
def test_steps_in_16_bits(precision: str) -> None:
    run = Run(incident, tiny(*OURS, f"training.precision={precision}"), ALONE)
    whole = Run(incident, tiny(*OURS), ALONE)
    assert run.take_step().loss == pytest.approx(whole.take_step().loss, rel=0.1)


# ---------------------------------------------------------------- what steps take
def simulated(name: str, *overrides: str) -> int:
    (run,) = (run for run in RUNS if run.name == name)
    changed = dataclasses.replace(run, overrides=(*run.overrides, *overrides))
    return profile_step.run_bytes(incident, changed, get_meter("simulated"))


@pytest.mark.parametrize(
    ("name", "budget"), [("our attention and feed-forward", "12GiB"), ("both, checkpointed", "6GiB")]
)
def test_the_self_decoder_keeps_its_budget(name: str, budget: str) -> None:
    assert simulated(name) < parse_bytes(budget)


def test_the_reports_recommendation_does_not_fit() -> None:
    original, recommended = simulated("original"), simulated("1: feed-forwards alone")
    assert parse_bytes("40GiB") < recommended < original < 1.2 * recommended


def test_the_runs_are_steps_of_the_reports_config() -> None:
    assert {run.file for run in RUNS} == {None}
    assert len({run.name for run in RUNS}) == len(RUNS) == len({run.overrides for run in RUNS})
    assert not RUNS[0].overrides


@pytest.mark.parametrize(("forms", "times"), [(("model.attention=naive",), 16), (OURS, 4)])
def test_peaks_grow_with_positions_and_with_their_square_where_attention_is_naive(
    forms: tuple[str, ...], times: float
) -> None:
    """Four times the positions: differences of peaks, because parameters and optimizer states do not grow."""
    few_parts = ("model.layer_num=1", "model.latent_layers=1", "model.hidden_dim=16", "model.heads=2")
    small, middle, large = (
        simulated("original", *TINY, *few_parts, *forms, f"data.resolution={edge}") for edge in (16, 32, 64)
    )
    assert (large - middle) / (middle - small) == pytest.approx(times, rel=0.15)


def test_as_many_images_and_pixels_as_fit() -> None:
    small = ("model.hidden_dim=16", "model.latent_dim=16", "model.latent_tokens=16", "model.latent_layers=1")
    small += ("model.num_layers=1", "model.layer_num=1")
    (images,) = fit_step(incident, tiny(*small, *OURS), growth_of(incident, "training.batch_size"), ["1MiB"])
    assert images.value > 1
    (edge,) = fit_step(incident, tiny(*small, *OURS), growth_of(incident, "data.resolution"), ["2MiB"])
    assert edge.value > 4
    assert edge.value % 4 == 0


def test_the_model_is_described() -> None:
    words = " ".join(incident.describe(tiny()))
    assert "decoder self" in words
    assert f"{num_parameters(tiny()):,} parameters 2 x 4 x 4 pixels attention/naive geglu_feed_forward/naive" in words
    assert isinstance(incident.build(tiny()), ScentModel)
