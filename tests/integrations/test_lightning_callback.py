"""The callback for Lightning's Trainer: stages by its hooks, on stand-ins for its two packages and on the real ones."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from fake_gpu import FakeGpu

import memfix
from memfix.errors import UsageError

MiB = 1 << 20
PACKAGES = ("lightning.pytorch", "pytorch_lightning")
INSTALLED = [name for name in PACKAGES if importlib.util.find_spec(name.partition(".")[0]) is not None]
STAGES = {"forward": 5, "backward": 6, "optimizer": 3, "whole step": 6, "validation: validation": 17, "validation": 17}
Load = Callable[..., ModuleType]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    gpu = FakeGpu()
    gpu.install(monkeypatch)
    return gpu


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Imports ``memfix.integrations.lightning`` in a program that has imported the given stand-ins for packages."""

    def load(*names: str) -> ModuleType:
        for name in PACKAGES:
            monkeypatch.delitem(sys.modules, name, raising=False)
        for name in names:
            stand_in = types.ModuleType(name)
            stand_in.Callback = type(f"Callback of {name}", (), {})  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, name, stand_in)
        sys.modules.pop("memfix.integrations.lightning", None)
        return importlib.import_module("memfix.integrations.lightning")

    yield load
    sys.modules.pop("memfix.integrations.lightning", None)


class Memory:
    """What a module on the CPU takes of the fake GPU in each stage; 1 MiB of weights are there all the time."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu, self.kept = gpu, list[int]()
        gpu.take(MiB)

    def forward(self) -> None:
        self.kept.append(self.gpu.take(4 * MiB))

    def backward(self) -> None:
        self.gpu.drop(self.gpu.take(MiB), *self.kept)
        self.kept.clear()

    def optimizer_step(self) -> None:
        self.gpu.drop(self.gpu.take(2 * MiB))

    def validation(self) -> None:
        self.gpu.drop(self.gpu.take(16 * MiB))


class Trainer:
    """Calls a callback in the order of Lightning's Trainer: a sanity check, two batches, a validation."""

    is_global_zero = True

    def __init__(self, callback: Any, memory: Memory) -> None:
        self.callback, self.memory = callback, memory

    def fit(self) -> None:
        try:
            self._fit()
        except BaseException as error:
            self.call("on_exception", error)
            raise

    def _fit(self) -> None:
        self.call("on_fit_start")
        self._validate()
        for number in range(2):
            self.call("on_train_batch_start", None, number)
            self.memory.forward()
            self.call("on_before_backward", None)
            self.memory.backward()
            self.call("on_after_backward")
            self.call("on_before_optimizer_step", None)
            self.memory.optimizer_step()
            self.call("on_train_batch_end", None, None, number)
        self._validate()
        self.call("on_fit_end")

    def _validate(self) -> None:
        self.call("on_validation_start")
        self.memory.validation()
        self.call("on_validation_end")

    def call(self, hook: str, *values: Any) -> None:
        getattr(self.callback, hook)(self, None, *values)


def peaks(report: memfix.WatchReport) -> dict[str, int]:
    return {one.name: one.peak_bytes // MiB for one in report.peaks}


def test_forward_backward_optimizer_and_validation_are_stages(gpu: FakeGpu, load: Load) -> None:
    said: list[str] = []
    callback = load("lightning.pytorch").WatchCallback(say=said.append)
    Trainer(callback, Memory(gpu)).fit()
    assert (callback.report.num_steps, peaks(callback.report)) == (2, STAGES)
    assert said == [str(callback.report)]


def test_an_out_of_memory_error_carries_the_report(gpu: FakeGpu, load: Load) -> None:
    said: list[str] = []
    callback = load("pytorch_lightning").WatchCallback(say=said.append)
    memory = Memory(gpu)
    memory.validation = lambda: None  # type: ignore[method-assign]
    gpu.capacity = 5 * MiB
    with pytest.raises(torch.OutOfMemoryError) as caught:
        Trainer(callback, memory).fit()
    (note,) = caught.value.__notes__
    assert note.startswith("memfix: out of memory in step 1, stage backward: 1.00 MiB could not be allocated")
    assert "self.kept.append(self.gpu.take(4 * MiB))" in note
    assert (said, gpu.recording) == ([], None)


def test_the_callback_is_one_of_every_package_that_the_program_has_imported(load: Load) -> None:
    both = load(*PACKAGES).WatchCallback
    assert all(issubclass(both, sys.modules[name].Callback) for name in PACKAGES)
    one = load("pytorch_lightning").WatchCallback
    assert [base.__name__ for base in one.__bases__] == ["WatchingCallback", "Callback of pytorch_lightning"]


def test_without_lightning_the_import_says_what_to_install(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="install lightning or pytorch_lightning"):
        load()


@pytest.mark.parametrize(
    ("peaks_of_ranks", "line"),
    [
        ([3 * MiB], []),
        ([0, 0], []),
        ([3 * MiB, 5 * MiB], ["peaks, highest first: rank 1 5.00 MiB, rank 0 3.00 MiB"]),
        (
            [n * MiB for n in range(1, 11)],
            [
                "peaks, highest first: rank 9 10.00 MiB, rank 8 9.00 MiB, rank 7 8.00 MiB, rank 6 7.00 MiB, "
                "rank 5 6.00 MiB, rank 4 5.00 MiB, rank 3 4.00 MiB, rank 0 1.00 MiB (2 between them left out)"
            ],
        ),
    ],
)
def test_the_report_has_the_peak_of_every_rank(
    gpu: FakeGpu, load: Load, monkeypatch: pytest.MonkeyPatch, peaks_of_ranks: list[int], line: list[str]
) -> None:
    def gather(answers: list[Any], mine: int) -> None:
        answers[:] = peaks_of_ranks

    fakes = {"is_initialized": lambda: True, "get_world_size": lambda: len(peaks_of_ranks), "all_gather_object": gather}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.distributed, name, fake)
    said: list[str] = []
    Trainer(load("lightning.pytorch").WatchCallback(say=said.append), Memory(gpu)).fit()
    assert [text for text in said[0].splitlines() if "rank" in text] == line


def test_only_the_first_rank_reports(gpu: FakeGpu, load: Load) -> None:
    said: list[str] = []
    trainer = Trainer(load("lightning.pytorch").WatchCallback(say=said.append), Memory(gpu))
    trainer.is_global_zero = False
    trainer.fit()
    assert said == []


# ---------------------------------------------------------------- the real packages
@pytest.mark.parametrize("package", PACKAGES)
def test_the_real_trainer_calls_in_the_expected_order(gpu: FakeGpu, package: str, tmp_path: Any) -> None:
    if package not in INSTALLED:
        pytest.skip(f"{package} is not installed")
    pl = importlib.import_module(package)
    sys.modules.pop("memfix.integrations.lightning", None)
    from memfix.integrations.lightning import WatchCallback

    memory = Memory(gpu)

    class Optimizer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = closure()
            memory.optimizer_step()
            return loss

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            memory.forward()
            return (self.weight * batch).sum()

        def backward(self, loss: torch.Tensor) -> None:
            loss.backward()
            memory.backward()

        def validation_step(self, batch: Any, number: int) -> None:
            memory.validation()

        def configure_optimizers(self) -> Any:
            return Optimizer(self.parameters(), lr=0.1)

    said: list[str] = []
    callback = WatchCallback(say=said.append)
    data = torch.utils.data.DataLoader(torch.ones(2, 2))
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[callback],
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(tmp_path),
    )  # fmt: skip
    trainer.fit(Net(), data, data)
    assert (callback.report.num_steps, peaks(callback.report)) == (2, STAGES)
    assert len(said) == 1
