"""The callback for transformers' Trainer: stages by its hooks, on a stand-in for the package and on the real one."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from fake_gpu import FakeGpu

import memfix

MiB = 1 << 20
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    gpu = FakeGpu()
    gpu.install(monkeypatch)
    return gpu


@pytest.fixture
def integration(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """``memfix.integrations.transformers`` with a stand-in for transformers, which takes seconds to import."""
    stand_in = types.ModuleType("transformers")
    stand_in.TrainerCallback = type("TrainerCallback", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", stand_in)
    monkeypatch.delitem(sys.modules, "memfix.integrations.transformers", raising=False)
    yield importlib.import_module("memfix.integrations.transformers")
    sys.modules.pop("memfix.integrations.transformers", None)


class Net(torch.nn.Module):
    """A model on the CPU whose forward takes memory of the fake GPU."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self.gpu, self.kept = gpu, list[int]()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor | None = None, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        self.kept.append(self.gpu.take(4 * MiB if self.training else 16 * MiB))
        return {"loss": (self.weight * (1 if x is None else x)).sum()}

    def drop(self) -> None:
        self.gpu.drop(*self.kept)
        self.kept.clear()


class Trainer:
    """Calls a callback in the order of transformers' Trainer: two micro-batches a step, a validation after the last."""

    def __init__(self, callback: Any, gpu: FakeGpu, *, compiled: bool = False, first_rank: bool = True) -> None:
        self.callback, self.gpu, self.model = callback, gpu, Net(gpu)
        self.args = SimpleNamespace(torch_compile=compiled)
        self.state = SimpleNamespace(is_world_process_zero=first_rank)
        self.control = SimpleNamespace(should_evaluate=False)

    def call(self, event: str) -> None:
        getattr(self.callback, event)(self.args, self.state, self.control, model=self.model)

    def train(self, steps: int = 3, validate_after: str = "on_step_end") -> None:
        self.call("on_train_begin")
        for number in range(steps):
            self.call("on_step_begin")
            for micro_batch in range(2):
                self.model.train()
                self.model()
                gradient = self.gpu.take(MiB)
                self.model.drop()
                self.gpu.drop(gradient)
                if micro_batch == 0:
                    self.call("on_substep_end")
            self.call("on_pre_optimizer_step")
            self.gpu.drop(self.gpu.take(2 * MiB))
            self.call("on_optimizer_step")
            self.control.should_evaluate = number == steps - 1 and validate_after == "on_step_end"
            self.call("on_step_end")
        if validate_after == "on_epoch_end":
            self.control.should_evaluate = True
            self.call("on_epoch_end")
        self.model.eval()
        self.model()
        self.model.drop()
        self.call("on_evaluate")
        self.call("on_train_end")


def peaks(report: memfix.WatchReport) -> dict[str, int]:
    return {one.name: one.peak_bytes // MiB for one in report.peaks}


@pytest.mark.parametrize("validate_after", ["on_step_end", "on_epoch_end"])
def test_forward_backward_optimizer_and_validation_are_stages(
    gpu: FakeGpu, integration: ModuleType, validate_after: str
) -> None:
    said: list[str] = []
    callback = integration.WatchCallback(say=said.append)
    trainer = Trainer(callback, gpu)
    trainer.train(validate_after=validate_after)
    assert callback.report.num_steps == 3
    assert peaks(callback.report) == {
        "forward": 4, "backward": 5, "optimizer": 2, "whole step": 5, "validation: validation": 16, "validation": 16
    }  # fmt: skip
    assert said == [str(callback.report)]
    assert not trainer.model._forward_hooks
    assert not trainer.model._forward_pre_hooks
    assert gpu.recording is None


def test_a_compiled_model_gets_no_hooks(gpu: FakeGpu, integration: ModuleType) -> None:
    callback = integration.WatchCallback(say=lambda text: None)
    Trainer(callback, gpu, compiled=True).train()
    assert peaks(callback.report)["forward and backward"] == 5
    assert "forward" not in peaks(callback.report)


def test_only_the_first_rank_reports(gpu: FakeGpu, integration: ModuleType) -> None:
    said: list[str] = []
    Trainer(integration.WatchCallback(say=said.append), gpu, first_rank=False).train()
    assert said == []


def test_a_failure_is_explained_at_once_and_the_next_watch_takes_over(
    gpu: FakeGpu, integration: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu.capacity = 4 * MiB
    with pytest.raises(torch.OutOfMemoryError):
        Trainer(integration.WatchCallback(), gpu).train()
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("memfix: out of memory in step 1, stage backward: 1.00 MiB could not be allocated")
    assert "gradient = self.gpu.take(MiB)" in told[1]
    assert "self.kept.append(self.gpu.take(4 * MiB if self.training" in told[3]
    with memfix.watch():  # the trainer did not say that it failed, so its watch is still open
        pass
    assert gpu.recording is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about machines without a GPU")
def test_without_a_gpu_training_goes_on(integration: ModuleType) -> None:
    said: list[str] = []
    with pytest.warns(UserWarning, match="does nothing here"):
        Trainer(integration.WatchCallback(say=said.append), FakeGpu()).train()
    assert said == ["memfix watch: nothing was measured: torch sees no GPU"]


# ---------------------------------------------------------------- the real package
def real_trainer(model: Any, tmp_path: Any, callback: Any, *, use_cpu: bool, **options: Any) -> Any:
    import transformers

    data = [{"x": torch.ones(2)} for _ in range(4)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=1, max_steps=2, gradient_accumulation_steps=2,
        eval_strategy="steps", eval_steps=2, save_strategy="no", report_to=[], use_cpu=use_cpu, disable_tqdm=True,
        remove_unused_columns=False, **options,
    )  # fmt: skip
    return transformers.Trainer(
        model=model, args=arguments, train_dataset=data, eval_dataset=data, callbacks=[callback]
    )


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="transformers is not installed")
def test_the_real_trainer_calls_in_the_expected_order(gpu: FakeGpu, tmp_path: Any) -> None:
    from memfix.integrations.transformers import WatchCallback

    class Freed(Net):
        def forward(self, x: torch.Tensor | None = None, labels: Any = None) -> dict[str, torch.Tensor]:
            self.drop()
            return super().forward(x)

    said: list[str] = []
    callback = WatchCallback(say=said.append)
    real_trainer(Freed(gpu), tmp_path, callback, use_cpu=True).train()
    assert callback.report.num_steps == 2
    assert peaks(callback.report) == {
        "forward": 4, "backward": 4, "optimizer": 4, "whole step": 4, "validation: validation": 16, "validation": 16
    }  # fmt: skip
    assert len(said) == 1


@pytest.mark.gpu(use="beside")
@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="transformers is not installed")
def test_a_tiny_model_is_watched_on_a_gpu(tmp_path: Any) -> None:
    import transformers

    from memfix.integrations.transformers import WatchCallback

    config = transformers.GPT2Config(vocab_size=512, n_positions=64, n_embd=64, n_layer=2, n_head=2)
    data = [{"input_ids": torch.arange(64), "labels": torch.arange(64)} for _ in range(8)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=2, max_steps=3, eval_strategy="steps", eval_steps=3,
        save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    said: list[str] = []
    callback = WatchCallback(say=said.append)
    trainer = transformers.Trainer(
        model=transformers.GPT2LMHeadModel(config), args=arguments, train_dataset=data, eval_dataset=data,
        callbacks=[callback],
    )  # fmt: skip
    trainer.train()
    report = callback.report
    assert report.num_steps == 3
    assert {"forward", "backward", "optimizer", "whole step", "validation"} <= peaks(report).keys()
    assert report.reading is not None
    assert report.reading.notes == ()
    assert any("modeling_gpt2.py" in row.place for row in report.reading.alive_at_peak)
    assert len(said) == 1


@pytest.mark.gpu(use="beside")
@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="transformers is not installed")
def test_a_trainer_that_runs_out_of_memory_is_explained(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from memfix.integrations.transformers import WatchCallback

    class Hungry(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            hunger = torch.empty(1 << 45, dtype=torch.uint8, device=x.device)
            return {"loss": (self.weight * x).sum() + hunger.sum()}

    trainer = real_trainer(Hungry(), tmp_path, WatchCallback(), use_cpu=False)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    told = capsys.readouterr().err
    assert "memfix: out of memory in step 1, stage forward: 32.00 TiB could not be allocated" in told
    assert "hunger = torch.empty(1 << 45" in told
    with memfix.watch():
        pass
