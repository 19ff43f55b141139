"""``benchmarks.tuning``: configurations are compiled before the first is timed, and each is timed briefly."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.tuning import TIMED_MS, quick_tuning

triton = pytest.importorskip("triton")


class Kernel:
    """Stands for a compiled function: Triton's autotuner calls ``run`` to compile it and to launch it."""

    def __init__(self, fails: bool = False) -> None:
        self.events: list[tuple[str, int]] = []
        self.fails = fails

    @staticmethod
    def fn(x: int, BLOCK: int) -> None: ...

    def run(self, *args: Any, BLOCK: int, warmup: bool, **kwargs: Any) -> None:
        self.events.append(("compile" if warmup else "launch", BLOCK))
        if warmup and self.fails:
            raise RuntimeError("cannot be compiled")


def tuned(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What each configuration was timed for: warm-up and samples, in ms."""
    asked = []

    def do_bench(call: Any, warmup: int = 25, rep: int = 100, quantiles: Any = None) -> list[float]:
        asked.append((warmup, rep))
        call()
        return [1.0, 1.0, 1.0]

    monkeypatch.setattr(triton.testing, "do_bench", do_bench)
    configs = [triton.Config({"BLOCK": size}) for size in (16, 32)]
    autotuner = triton.runtime.autotuner.Autotuner(kernel, ["x", "BLOCK"], configs, ["x"], None, None)
    with quick_tuning():
        autotuner.run(7, grid=(1,), warmup=False)
    return asked


@pytest.mark.parametrize("fails", [False, True])
def test_all_configurations_are_compiled_before_the_first_is_timed(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel(fails)
    asked = tuned(kernel, monkeypatch)
    compiled = [("compile", 16)] if fails else [("compile", 16), ("compile", 32)]
    assert kernel.events == [*compiled, ("launch", 16), ("launch", 32), ("launch", 16)]
    assert {rep for _, rep in asked} == {TIMED_MS}


def test_outside_autotuners_are_as_before() -> None:
    autotuner = triton.runtime.autotuner.Autotuner
    before = autotuner.prune_configs, autotuner.do_bench
    with quick_tuning():
        assert autotuner.prune_configs is not before[0]
    assert (autotuner.prune_configs, autotuner.do_bench) == before
