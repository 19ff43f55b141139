"""The training loop: what a step's loss is, its arithmetic, and a run taken up again from its file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from toy import ALONE, ToyConfig, run_config, toy

from memfix.errors import MeasurementError, UsageError
from memfix.incidents import checkpoint_file, get_incident, loss_scale
from memfix.incidents.config import OptimizerConfig, RunConfig
from memfix.incidents.examples import Examples
from memfix.incidents.incident import load_config
from memfix.incidents.tokens import num_token_targets, open_tokens, token_batches
from memfix.incidents.training import Run, StepReport, learning_rate, train


def steps_of(resume: Path | None = None, said: list[str] | None = None, **settings: Any) -> list[StepReport]:
    say = (lambda _: None) if said is None else said.append
    return list(train(toy, run_config(**settings), ALONE, resume=resume, say=say))


def losses_of(**settings: Any) -> list[float]:
    return [step.loss for step in steps_of(**settings)]


def parameters_after_a_step(**settings: Any) -> torch.Tensor:
    run = Run(toy, run_config(**settings), ALONE)
    run.take_step()
    return torch.cat([parameter.detach().flatten() for parameter in run.model.parameters()])


# ---------------------------------------------------------------- the loss of a step
def test_accumulated_forwards_are_one_batch() -> None:
    """However the step's sequences are cut into forwards, its loss and its gradient are the same."""
    cuts = [{"batch_size": size, "gradient_accumulation_steps": 12 // size} for size in (1, 4, 12)]
    losses = [losses_of(steps=4, **cut) for cut in cuts]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[2] == pytest.approx(losses[0], rel=1e-6)
    # Adam's first step hardly depends on the size of a gradient: look at it with an eps that makes it do so
    parameters = [parameters_after_a_step(eps=1.0, clip_norm=None, learning_rate=1.0, **cut) for cut in cuts]
    torch.testing.assert_close(parameters[1], parameters[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(parameters[2], parameters[0], rtol=0, atol=1e-6)


def test_the_loss_is_the_mean_over_targets_and_not_the_mean_of_means() -> None:
    config = run_config(gradient_accumulation_steps=6, clip_norm=None)
    run = Run(toy, config, ALONE)
    with torch.no_grad():
        run.model.head.weight.mul_(8)  # surer of some targets than of others
    sums, counts = [], []
    for number in range(6):
        batch = token_batches(config.data, 40)(Examples(range(number, number + 1), seed=0))
        sums.append(run.model(*batch))
        counts.append(num_token_targets(batch))
    mean = torch.stack(sums).sum() / sum(counts)
    mean_of_means = torch.stack([total / count for total, count in zip(sums, counts, strict=True)]).mean()
    right, wrong = (
        torch.autograd.grad(loss, run.model.head.weight, retain_graph=True)[0] for loss in (mean, mean_of_means)
    )
    taken = []
    run.optimizer.register_step_pre_hook(lambda *_: taken.append(run.model.head.weight.grad.clone()))
    step = run.take_step()
    assert step.num_targets == sum(counts) < 6 * 12
    assert step.loss == pytest.approx(mean.item(), rel=1e-6)
    torch.testing.assert_close(taken[0], right, rtol=1e-5, atol=1e-7)
    # what it would be otherwise is far away
    assert abs(mean_of_means.item() - mean.item()) > 0.05
    assert (wrong - right).norm() > 0.2 * right.norm()


def test_every_sequence_is_used_once() -> None:
    run = Run(toy, run_config(batch_size=2, gradient_accumulation_steps=3), ALONE)
    seen: list[torch.Tensor] = []
    run.train_step._pass.register_forward_pre_hook(lambda _, arguments: seen.extend(arguments[0][0]))
    run.take_step()
    run.take_step()
    assert run.examples == 12
    expected = [open_tokens(run.config.data, 40)(number)[:-1] for number in range(12)]
    assert torch.equal(torch.stack(seen), torch.stack(expected))


def test_the_norm_is_told_as_it_was_and_clipped_to_what_was_asked() -> None:
    norms = []

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        gradients = [p.grad.flatten() for group in optimizer.param_groups for p in group["params"]]
        norms.append(torch.cat(gradients).norm().item())

    run = Run(toy, run_config(clip_norm=0.01), ALONE)
    run.optimizer.register_step_pre_hook(note)
    step = run.take_step()
    assert step.gradient_norm > 0.1
    assert norms == [pytest.approx(0.01, rel=1e-3)]
    unclipped = Run(toy, run_config(clip_norm=None), ALONE)
    unclipped.optimizer.register_step_pre_hook(note)
    assert unclipped.take_step().gradient_norm == step.gradient_norm
    assert norms[1] == pytest.approx(step.gradient_norm)


def test_the_rate_rises_in_a_line_and_falls_in_a_cosine() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=4, final_fraction=0.2)
    rates = [learning_rate(config, 9, step) for step in range(9)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:] == pytest.approx([1.0, 0.8828427, 0.6, 0.3171573, 0.2])
    assert [step.learning_rate for step in steps_of(warmup_steps=2, learning_rate=0.5)][:2] == [0.25, 0.5]


def test_only_matrices_decay() -> None:
    run = Run(toy, run_config(weight_decay=0.3), ALONE)
    decays = {p: group["weight_decay"] for group in run.optimizer.param_groups for p in group["params"]}
    assert {name: decays[p] for name, p in run.model.named_parameters()} == {
        "embedding.weight": 0.3, "layer.weight": 0.3, "layer.bias": 0.0, "head.weight": 0.3, "head.bias": 0.0,
    }  # fmt: skip


def test_a_loss_that_is_not_a_number_stops_the_run_before_it_reaches_the_parameters() -> None:
    run = Run(toy, run_config(broken_after=1), ALONE)
    run.take_step()
    before = [parameter.detach().clone() for parameter in run.model.parameters()]
    with pytest.raises(MeasurementError, match=r"^step 2: loss nan, gradient norm nan; training stopped$"):
        run.take_step()
    for parameter, kept in zip(run.model.parameters(), before, strict=True):
        assert torch.equal(parameter, kept)


# ---------------------------------------------------------------- arithmetic
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_compute_in_16_bits_and_keep_all_else_in_float32(
    dtype: torch.dtype, gradient_checkpointing: bool
) -> None:
    settings = {"gradient_accumulation_steps": 2, "gradient_checkpointing": gradient_checkpointing}
    precision = str(dtype).removeprefix("torch.")
    run = Run(toy, run_config(precision=precision, **settings), ALONE)
    kept = []
    run.optimizer.register_step_pre_hook(lambda *_: kept.extend(p.grad.dtype for p in run.model.parameters()))
    run.take_step()
    # also where a checkpointed layer runs again, in backward
    assert run.model.seen == [dtype] * (4 if gradient_checkpointing else 2)
    assert set(kept) == {torch.float32}
    assert {parameter.dtype for parameter in run.model.parameters()} == {torch.float32}
    exact, rounded = losses_of(**settings), losses_of(precision=precision, **settings)
    assert rounded == pytest.approx(exact, rel=5e-3)
    assert rounded != exact


def frozen_embedding(config: RunConfig) -> torch.nn.Module:
    model = toy.build(config)
    model.embedding.requires_grad_(False)  # type: ignore[union-attr, operator]
    return model


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_a_frozen_parameter_has_no_float32_copy(precision: str) -> None:
    run = Run(dataclasses.replace(toy, build=frozen_embedding), run_config(precision=precision), ALONE)
    run.take_step()
    dtypes = {name: parameter.dtype for name, parameter in run.model.named_parameters()}
    assert dtypes.pop("embedding.weight") == getattr(torch, precision)
    assert set(dtypes.values()) == {torch.float32}


def test_a_step_that_overflows_is_skipped_and_the_scale_halves() -> None:
    run = Run(toy, run_config(precision="float16"), ALONE)
    assert run.train_step.loss_scale is not None
    run.train_step.loss_scale.scale = 2.0**30
    before = [parameter.clone() for parameter in run.model.parameters()]
    skipped = run.take_step()
    assert (skipped.skipped, skipped.loss_scale, run.train_step.loss_scale.scale) == (True, 2.0**30, 2.0**29)
    assert all(map(torch.equal, run.model.parameters(), before))
    run.train_step.loss_scale.scale = 2.0**10
    taken = run.take_step()
    assert (taken.skipped, taken.loss_scale) == (False, 2.0**10)
    assert not all(map(torch.equal, run.model.parameters(), before))


def test_a_resumed_run_has_the_scale_of_the_saved_one(tmp_path: Path) -> None:
    config = run_config(precision="float16")
    saved = Run(toy, config, ALONE)
    saved.train_step.loss_scale = loss_scale.LossScale(2.0**10, finite_steps=5)
    saved.save(tmp_path / "run.pt")
    resumed = Run(toy, config, ALONE)
    resumed.resume(tmp_path / "run.pt")
    assert resumed.train_step.loss_scale == saved.train_step.loss_scale


def test_no_scale_helps_a_loss_that_is_not_a_number() -> None:
    with pytest.raises(MeasurementError, match=r"step 17: loss nan, gradient norm nan, loss scale 1; training stopped"):
        steps_of(precision="float16", broken_after=0, steps=20)


def test_the_scale_changes_as_that_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "GROWS_AFTER", 3)
    ours, theirs = loss_scale.LossScale(), torch.amp.GradScaler("cpu", growth_interval=3)
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight])
    for overflows in (False, True, False, False, False, False, True, True, False, False, False):
        theirs.scale(weight.sum()).backward()
        assert weight.grad is not None
        weight.grad.fill_(float("inf") if overflows else 1.0)
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        ours.update(overflowed=overflows)
        assert ours.scale == theirs.get_scale()


def test_autocast_keeps_float32_parameters() -> None:
    run = Run(toy, run_config(precision="autocast"), ALONE)
    run.take_step()
    assert run.model.seen == [torch.float32]
    assert {parameter.dtype for parameter in run.model.parameters()} == {torch.float32}
    exact, rounded = losses_of(), losses_of(precision="autocast")
    assert rounded == pytest.approx(exact, rel=5e-3)
    assert rounded != exact


@pytest.mark.parametrize("fused", [False, True])
def test_pure_bfloat16_keeps_nothing_in_float32_but_counts(fused: bool) -> None:
    run = Run(toy, run_config(precision="pure_bfloat16", fused=fused), ALONE)
    kept = []
    run.optimizer.register_step_pre_hook(lambda *_: kept.extend(p.grad.dtype for p in run.model.parameters()))
    run.take_step()
    assert set(kept) == {torch.bfloat16}
    assert {parameter.dtype for parameter in run.model.parameters()} == {torch.bfloat16}
    states = list(run.optimizer.state.values())
    assert {state[name].dtype for state in states for name in ("exp_avg", "exp_avg_sq")} == {torch.bfloat16}
    assert losses_of(precision="pure_bfloat16", fused=fused) == pytest.approx(losses_of(), rel=2e-2)


def test_gradient_checkpointing_changes_nothing_but_memory() -> None:
    assert losses_of(gradient_checkpointing=True) == losses_of()


def test_small_updates_are_not_lost_in_bfloat16() -> None:
    """A step of 1e-4 on a parameter of about 1 is below the digits of bfloat16."""
    parameters = [
        parameters_after_a_step(precision="bfloat16", learning_rate=rate, weight_decay=0.0) for rate in (1e-4, 1e-9)
    ]
    moved = (parameters[0] - parameters[1]).abs()
    assert ((moved > 5e-5) & (moved < 2e-4)).float().mean() > 0.3


# ---------------------------------------------------------------- taken up again
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_a_resumed_run_is_the_run_that_was_not_interrupted(tmp_path: Path, precision: str) -> None:
    settings = {"steps": 7, "dropout": 0.3, "batch_size": 2, "precision": precision}
    whole = steps_of(**settings)
    path = tmp_path / "run.pt"
    started = train(toy, run_config(**settings, checkpoint_path=str(path), every=3), ALONE)
    first = [next(started) for _ in range(5)]  # killed after step 5; the file is that of step 3
    torch.manual_seed(99)
    said: list[str] = []
    second = steps_of(resume=path, said=said, **settings)
    assert [step.step for step in second] == [4, 5, 6, 7]
    assert said == [
        f"resumed from {path} after step 3, {sum(step.num_targets for step in whole[:3])} targets",
        f"changed since: checkpoint.path {path} -> null",
        "changed since: checkpoint.every 3 -> 100",
    ]
    curves = [[(s.loss, s.gradient_norm, s.learning_rate) for s in part] for part in (whole, first[:3] + second)]
    assert curves[0] == curves[1]


def test_the_last_step_is_always_saved(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    steps_of(steps=2, checkpoint_path=str(path))
    assert checkpoint_file.read_checkpoint(path).step == 2


def test_changed_settings_of_the_optimizer_hold_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    steps_of(steps=1, checkpoint_path=str(path))
    run = Run(toy, run_config(weight_decay=0.5, beta2=0.7), ALONE)
    assert "changed since: optimizer.weight_decay 0.1 -> 0.5" in run.resume(path)
    assert [group["weight_decay"] for group in run.optimizer.param_groups] == [0.5, 0.0]
    assert run.optimizer.param_groups[0]["betas"] == (0.9, 0.7)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "run.pt"
    steps_of(steps=1, checkpoint_path=str(path))
    return path


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data_seed": 1}, "saved with other data, in which its position has no meaning: data.seed 0 -> 1"),
        ({"steps": 1}, "1 of 1 steps are done; raise training.steps"),
        ({"width": 9}, "saved with another model: embedding.weight is [40, 8] in the file, [40, 9] in this model"),
    ],
)
def test_a_file_of_another_run_is_refused(saved: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        steps_of(resume=saved, **settings)
    assert str(refused.value) == f"{saved}: {message}"


def test_a_file_of_another_incident_is_refused(saved: Path) -> None:
    with pytest.raises(UsageError, match=r"run.pt: saved by a run of toy, not of other$"):
        Run(dataclasses.replace(toy, package="other"), run_config(), ALONE).resume(saved)


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


def test_a_file_cut_short_is_refused_in_words(saved: Path, tmp_path: Path) -> None:
    whole = saved.read_bytes()
    cut = tmp_path / "cut.pt"
    for length in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        cut.write_bytes(whole[:length])
        with pytest.raises(UsageError) as refused:
            steps_of(resume=cut)
        assert str(refused.value).startswith(
            f"{cut}: cannot be read as the checkpoint file: it was cut short, or another program wrote it ("
        )
        assert "\n" not in str(refused.value)


def test_a_file_with_a_wrong_byte_is_refused(saved: Path, tmp_path: Path) -> None:
    content = bytearray(saved.read_bytes())
    weight = bytes(torch.load(saved)["model"]["embedding.weight"].view(torch.uint8).flatten().tolist())
    content[content.index(weight) + 5] ^= 1
    path = tmp_path / "damaged.pt"
    path.write_bytes(content)
    with pytest.raises(
        UsageError, match=r"damaged.pt: the checkpoint file is damaged: .*/data/\d+ does not match its checksum$"
    ):
        steps_of(resume=path)


@pytest.mark.parametrize("version", [0, 2, "one"])
def test_a_file_of_another_version_is_refused(saved: Path, tmp_path: Path, version: Any) -> None:
    path = tmp_path / "other.pt"
    torch.save({**torch.load(saved), "version": version}, path)
    with pytest.raises(UsageError, match=f"version {version} of the checkpoint file; this memfix reads version 3$"):
        steps_of(resume=path)


def test_a_file_that_is_not_ours_is_refused_and_runs_nothing(saved: Path, tmp_path: Path) -> None:
    path, sprung = tmp_path / "other.pt", tmp_path / "sprung"
    for content, message in (
        (torch.zeros(3), "a file of torch, but not a memfix training checkpoint"),
        ({"model": {}}, "a file of torch, but not a memfix training checkpoint"),
        (Trap(str(sprung)), "cannot be read as the checkpoint file: "),
    ):
        torch.save(content, path)
        with pytest.raises(UsageError) as refused:
            steps_of(resume=path)
        assert str(refused.value).startswith(f"{path}: {message}")
    assert not sprung.exists()
    content = torch.load(saved)
    del content["random"]
    torch.save(content, path)
    with pytest.raises(UsageError, match=r"the checkpoint file lacks random$"):
        steps_of(resume=path)
    with pytest.raises(UsageError, match=r"^no checkpoint file "):
        steps_of(resume=tmp_path / "none.pt")


def test_a_save_that_fails_leaves_the_old_file(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.pt"
    path.write_bytes(saved.read_bytes())
    checkpoint = checkpoint_file.read_checkpoint(path)

    def full_disk(_: Any, file: Any) -> None:
        file.write(b"half of it")
        raise RuntimeError("unexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(UsageError, match=r"^cannot write the checkpoint file .*run.pt: unexpected pos 64 vs 0$"):
        checkpoint_file.write_checkpoint(path, dataclasses.replace(checkpoint, step=5))
    assert path.read_bytes() == saved.read_bytes()
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.pt"]


# ---------------------------------------------------------------- incidents
def test_an_incident_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match=r"^no incident 'long_context_los'; did you mean 'long_context_loss'[?]$"):
        get_incident("long_context_los")


def test_the_loop_knows_an_incident_by_what_it_brings_alone() -> None:
    assert run_config(width=3).model == ToyConfig(width=3)
    folder = Path(checkpoint_file.__file__).parent
    names = [entry.name for entry in folder.iterdir() if entry.is_dir() and (entry / "__init__.py").exists()]
    assert "long_context_loss" in names
    for file in folder.glob("*.py"):
        assert not [name for name in names if name in file.read_text()], file


def test_the_loss_of_a_16_bit_decoder_has_all_its_digits() -> None:
    incident = get_incident("long_context_loss")
    config = load_config(incident, "tiny.yaml", ["training.gradient_checkpointing=false"])
    model = incident.build(config)
    ids = torch.randint(512, (2, 41), generator=torch.Generator().manual_seed(0))
    exact = incident.loss(model, (ids, ids))
    rounded = incident.loss(model.to(torch.bfloat16), (ids, ids))
    assert rounded.dtype == torch.float32
    assert rounded.item() == pytest.approx(exact.item(), rel=5e-4)  # half a digit of bfloat16 is 2e-3
