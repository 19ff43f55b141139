"""The KDA benchmark: who is wrong is not timed, splits are put together only where they belong, ratios are of pairs."""

from __future__ import annotations

import collections
import importlib.util
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import memfix
from benchmarks.kda import Figures, main
from benchmarks.kda_fields import (
    FAST,
    IN_FLOAT32,
    LEAST_GATE,
    PAIRS,
    SHAPES,
    SLOW,
    SMOKE_SHAPES,
    Shape,
    errors_of,
    forward_of,
    make_inputs,
    measured,
    overhead,
    train_of,
    upstream_of,
)  # fmt: skip
from benchmarks.rounds import forget_gradients, train
from memfix.meters.base import Step
from memfix.registry import contracts

ROOT = Path(__file__).resolve().parents[2]
TINY = Shape(batch=1, tokens=20, heads=2, width=8)


def naive(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    (contract,) = contracts(["kda"])
    return contract.naive(*inputs)


def run(*options: str) -> Any:
    return CliRunner().invoke(main, options)


# ---------------------------------------------------------------- the command
def test_everybody_is_a_row_or_is_left_out_by_name(tmp_path: Path) -> None:
    path = tmp_path / "kda.json"
    result = run("--smoke", "--seconds", "0", "--json", str(path))
    assert result.exit_code == 0, result.output
    data = json.loads(path.read_text())
    assert {*data["sources"], *data["left_out"]} == {*SLOW, *FAST}
    assert {"fla", "fla_safe_gate"} <= data["left_out"].keys(), "their kernels need a GPU"
    assert {"torch", "triton", "gpu", "driver", "date", "commit"} <= data["surroundings"].keys()
    narrow, wide = data["fields"]
    assert (narrow["dtype"], wide["dtype"]) == ("bfloat16", "float32")
    assert narrow["train"].keys() == narrow["forward"].keys() == data["sources"].keys()
    assert wide["train"].keys() == data["sources"].keys() & {*IN_FLOAT32}
    for field, bound in ((narrow, 1e-2), (wide, 1e-5)):
        for name in ("naive", "sequential", "streamed", "wy"):
            if name in field["train"]:
                assert 0 < max(field["errors"][name].values()) < bound
                assert field["first_step_s"][name] > 0
            for phase in ("train", "forward"):
                row = field[phase].get(name)
                assert row is None or row["seconds"] == statistics.median(row["times_s"])
    for phase in ("train", "forward"):
        found = data["overhead"][phase]
        assert found["low"] <= found["median"] <= found["high"]
        assert found["pairs"] == PAIRS >= 10
    assert data["streamed_by_chunk"].keys() == {"32", "64", "128"}
    assert all(row.keys() == {"forward_ms", "train_ms"} for row in data["streamed_by_chunk"].values())
    for name in (*data["sources"], *data["left_out"]):
        assert f"\n{name}" in result.output


def test_a_chosen_contender_runs_alone_and_nothing_is_written_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.kda.write_whole", None)
    result = run("--smoke", "--only", "sequential", "--seconds", "0")
    assert result.exit_code == 0, result.output
    assert "naive: " not in result.output
    assert "streamed over naive" not in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--smoke", "--only", "sequentail"], "nobody is called 'sequentail'; did you mean 'sequential'?"),
        (["--smoke", "--shape", "smok"], "no shape 'smok'; did you mean 'smoke'?"),
        (["--smoke", "--shape", "long"], "no shape 'long'"),
    ],
)
def test_bad_options_are_refused_in_words(options: list[str], message: str) -> None:
    result = run(*options)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about machines without a GPU")
def test_without_a_gpu_the_command_says_what_runs() -> None:
    result = run("--shape", "long")
    assert result.exit_code == 2
    assert "torch sees no GPU; --smoke runs without one" in result.output


def written(path: Path, monkeypatch: pytest.MonkeyPatch, commit: str, *fields: tuple[str, float], add: bool) -> Any:
    monkeypatch.setenv("MEMFIX_COMMIT", commit)
    figures = Figures(path, {"wy": "memfix"}, {}, add=add)
    for shape, seconds in fields:
        figures.put({"shape": shape, "dtype": "bfloat16", "seconds": seconds})
    data = json.loads(path.read_text())
    return {field["shape"]: field["seconds"] for field in data["fields"]}


def test_a_second_part_of_a_run_is_added_to_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kda.json"
    assert written(path, monkeypatch, "a", ("incident", 1), ("long", 2), add=True) == {"incident": 1, "long": 2}
    assert written(path, monkeypatch, "a", ("long", 3), ("context", 4), add=True) == {
        "incident": 1, "long": 3, "context": 4,
    }  # fmt: skip
    assert written(path, monkeypatch, "a", ("long", 5), add=False) == {"long": 5}


def test_figures_of_two_commits_are_not_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kda.json"
    written(path, monkeypatch, "a", ("long", 1), add=False)
    with pytest.raises(Exception, match=r"has the commit 'a', this run 'b'; leave --add out to begin afresh"):
        written(path, monkeypatch, "b", ("incident", 2), add=True)


# ---------------------------------------------------------------- what is run
def test_inputs_are_such_that_every_contender_may_take_them() -> None:
    q, k, v, g, beta = inputs = make_inputs(Shape(2, 500, 3, 16), "bfloat16", "cpu")
    assert {tensor.dtype for tensor in (q, k, v, beta)} == {torch.bfloat16}
    assert g.dtype == torch.float32
    torch.testing.assert_close(k.float().norm(dim=-1), torch.ones(2, 500, 3), rtol=0, atol=1e-2)
    assert g.min() >= LEAST_GATE
    assert g.max() < 0
    assert 0 <= beta.min() < 0.1 < 0.9 < beta.max() <= 1
    assert all(tensor.requires_grad and tensor.count_nonzero() > 0.99 * tensor.numel() for tensor in inputs)
    assert not torch.equal(make_inputs(TINY, "bfloat16", "cpu", seed=1)[0], make_inputs(TINY, "bfloat16", "cpu")[0])


def test_the_shapes_are_the_issues() -> None:
    spelled = {name: shape.spelled() for name, shape in SHAPES.items()}
    assert spelled == {
        "incident": "B16 T256 H8 d64",
        "long": "B1 T8192 H32 d128",
        "batched": "B8 T2048 H16 d128",
        "context": "B1 T65536 H16 d128",
    }
    assert [name for name, shape in SHAPES.items() if "naive" in shape.fields()["bfloat16"]] == ["incident"]


def test_a_train_step_is_both_passes_and_a_forward_leaves_no_graph() -> None:
    inputs = make_inputs(TINY, "float32", "cpu")
    upstream = upstream_of(inputs)
    train(train_of(naive), inputs, upstream)
    expected = torch.autograd.grad(naive(*inputs)[0], inputs, upstream)
    for tensor, gradient in zip(inputs, expected, strict=True):
        assert tensor.grad is not None
        torch.testing.assert_close(tensor.grad, gradient)
    seen: list[bool] = []

    def spying(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        o, final_state = naive(*given)
        seen.append(o.requires_grad)
        return o, final_state

    train(forward_of(spying), inputs, upstream)
    assert seen == [False]


# ---------------------------------------------------------------- who is wrong
def without_beta(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return naive(q, k, v, g, 0 * beta + 1)


def with_half_a_gate_gradient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return naive(q, k, v, g / 2 + g.detach() / 2, beta)


def with_a_stale_state(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    o, final_state = naive(*inputs)
    return o, torch.zeros_like(final_state)


def with_nan(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    o, final_state = naive(*inputs)
    return o.where(o < o.max(), math.nan), final_state


def without_a_gate_gradient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return naive(q, k, v, g.detach(), beta)


def broken(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    raise NotImplementedError("not written\nyet")


def too_large(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 GiB. GPU 0 has a total capacity of")


@pytest.mark.parametrize(
    ("culprit", "trouble"),
    [
        (without_beta, "wrong: o is off by "),
        (with_half_a_gate_gradient, "wrong: the gradient of g is off by 5.0e-01 of its norm"),
        (with_a_stale_state, "wrong: final_state is off by 1.0e+00 of its norm"),
        (with_nan, "wrong: o is off by nan of its norm"),
        (without_a_gate_gradient, "ValueError: no gradient of g"),
        (broken, "NotImplementedError: not written yet"),
        (too_large, "out of memory, asked for 32.00 GiB"),
    ],
)
def test_who_is_wrong_or_fails_is_a_row_with_the_reason_and_is_not_timed(culprit: Any, trouble: str) -> None:
    field = measured(TINY, "bfloat16", {"culprit": culprit, "naive": naive}, "cpu", seconds=0)
    for phase in ("train", "forward"):
        assert field[phase]["culprit"]["trouble"].startswith(trouble)
        assert "seconds" not in field[phase]["culprit"]
        assert field[phase]["naive"]["seconds"] > 0
        assert field["rounds"][phase] == len(field[phase]["naive"]["times_s"])


@pytest.mark.parametrize(("dtype", "low", "high"), [("float32", 1e-9, 1e-6), ("bfloat16", 1e-4, 1e-2)])
def test_naives_error_is_the_rounding_of_its_dtype(dtype: str, low: float, high: float) -> None:
    errors = errors_of({"naive": naive}, TINY, dtype, "cpu")["naive"]
    assert errors.keys() == {"o", "final_state", "q", "k", "v", "g", "beta"}
    assert low < max(errors.values()) < high


# ---------------------------------------------------------------- "about 5 % slower"
class Clock:
    """Advances only when a contender says how long it took."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now_s)

    def contender(self, seconds_of: Callable[[int], float]) -> Any:
        def kda_of(*inputs: torch.Tensor, chunk_size: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
            self.now_s += seconds_of(chunk_size)
            return inputs[2] * inputs[0], inputs[1]

        return kda_of


def test_the_overhead_is_the_median_of_ratios_within_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is of another speed in each round: times of different rounds must not meet in a ratio."""
    clock = Clock(monkeypatch)
    round_of = collections.Counter[int]()

    def seconds_of(chunk_size: int) -> float:
        round_of[chunk_size] += 1
        speed = 1 + 7 * round_of[chunk_size] % 5
        if chunk_size == 0:
            return speed
        return (1.06 if round_of[chunk_size] % 2 else 1.04) * speed * 64 / chunk_size

    found = overhead(clock.contender(seconds_of), clock.contender(seconds_of), TINY, "cpu")
    # after two calls to warm up, the third to the thirteenth are timed, then the sixteenth to the twenty-sixth
    for phase, median in (("train", 1.06), ("forward", 1.04)):
        spread = found["overhead"][phase]
        assert (spread["low"], spread["median"], spread["high"]) == pytest.approx((1.04, median, 1.06))
    by_chunk = found["streamed_by_chunk"]
    assert by_chunk["32"]["train_ms"] > by_chunk["64"]["train_ms"] > by_chunk["128"]["train_ms"]


def test_an_overhead_that_cannot_be_measured_says_why() -> None:
    def out_of_memory(*inputs: torch.Tensor, chunk_size: int) -> Any:
        return too_large(*inputs)

    found = overhead(naive, out_of_memory, TINY, "cpu")
    assert found["overhead"]["train"] == {"trouble": "out of memory, asked for 32.00 GiB"}
    assert found["streamed_by_chunk"]["64"]["forward_trouble"] == "out of memory, asked for 32.00 GiB"


@pytest.mark.gpu
def test_on_a_gpu_peaks_are_the_cuda_meters_and_short_steps_are_timed_in_batches() -> None:
    shape = SMOKE_SHAPES["smoke"]

    def build(device: str) -> Step:
        inputs = make_inputs(shape, "bfloat16", device)
        upstream = upstream_of(inputs)

        def step() -> None:
            train(train_of(naive), inputs, upstream)
            forget_gradients(inputs)

        return step

    row = measured(shape, "bfloat16", {"naive": naive}, "cuda", seconds=0)["train"]["naive"]
    assert row["peak_bytes"] == memfix.peak(build, meter="cuda").peak_bytes
    assert row["allocated_bytes"] >= row["peak_bytes"]
    assert row["batch_steps"] > 1


# ---------------------------------------------------------------- the README's table
def readme_tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("readme_tables", ROOT / "ci/readme_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readmes_table_has_a_row_for_each_contender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(seconds: float, peak_bytes: int) -> dict[str, Any]:
        return {"seconds": seconds, "peak_bytes": peak_bytes, "held_bytes": 0, "times_s": [seconds] * 3}

    def errors(largest: float) -> dict[str, float]:
        return {"o": largest / 4, "final_state": largest / 5, "q": largest, "g": largest / 2}

    trouble = {"trouble": "wrong: o is off by nan of its norm"}
    data = {
        "surroundings": {"gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "date": "2026-11-15T08:00:00Z"},
        "sources": {"naive": "memfix 0.1.0", "triton": "memfix 0.1.0", "fla": "flash-linear-attention 0.6.0"},
        "left_out": {},
        "fields": [
            {"spelled": "B16 T256 H8 d64", "dtype": "bfloat16",
             "train": {"naive": timed(0.085, 3 * 2**30), "triton": timed(0.0009, 2**26), "fla": timed(0.00322, 2**27)},
             "forward": {"naive": timed(0.033, 2**31), "triton": timed(0.0003, 2**25), "fla": timed(0.00127, 2**25)},
             "errors": {"naive": errors(2e-3), "triton": errors(3e-3), "fla": errors(4e-3)}},
            {"spelled": "B1 T8192 H32 d128", "dtype": "bfloat16",
             "train": {"triton": timed(0.0049, 2**30), "fla": trouble},
             "forward": {"triton": timed(0.00099, 2**29), "fla": trouble},
             "errors": {"triton": errors(5e-3), "fla": {"trouble": "no"}}},
            {"spelled": "B16 T256 H8 d64", "dtype": "float32",
             "train": {"naive": timed(0.084, 3 * 2**30)},
             "forward": {"naive": {"trouble": "out of memory, asked for 2.00 GiB"}},
             "errors": {"naive": errors(3e-7)}},
        ],
        "overhead": {"train": {"median": 1.912, "low": 1.9, "high": 1.956, "pairs": 11},
                     "forward": {"median": 1.018, "low": 1.01, "high": 1.032, "pairs": 11}},
    }  # fmt: skip
    (tmp_path / "kda.json").write_text(json.dumps(data))
    tables = readme_tables()
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.kda_speed_table() == [
        "Train step / forward alone, and the train step's peak above its inputs, on NVIDIA H200 (torch 2.11.0, triton "
        "3.6.0, 2026-11-15). g is float32; errors are the largest of o, the final state and all gradients, against "
        "float64.",
        "",
        "| | B16 T256 H8 d64, bfloat16 | B1 T8192 H32 d128, bfloat16 | B16 T256 H8 d64, float32 | error, bfloat16 | "
        "error, float32 |",
        "|---|--:|--:|--:|--:|--:|",
        "| `naive` | 85 ms / 33 ms, 3.00 GiB |  | 84 ms / out of memory, asked for 2.00 GiB, 3.00 GiB | 2.0e-03 | "
        "3.0e-07 |",
        "| `triton` | 900 us / 300 us, 64.00 MiB | 4.9 ms / 990 us, 1.00 GiB |  | 5.0e-03 |  |",
        "| fla, flash-linear-attention 0.6.0 | 3.22 ms / 1.27 ms, 128.00 MiB | wrong: o is off by nan of its norm |  | "
        "4.0e-03 |  |",
        "",
        "`streamed` in chunks of 64 over dense `naive`, float32: train 1.91x (1.90 to 1.96), forward 1.02x (1.01 to "
        "1.03).",
    ]


def test_the_readmes_table_is_made_from_what_the_command_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kda.json"
    assert run("--smoke", "--only", "naive,streamed", "--seconds", "0", "--json", str(path)).exit_code == 0
    data = json.loads(path.read_text())
    for field in data["fields"]:
        for row in field["train"].values():  # what a GPU's allocator would have counted
            row["peak_bytes"] = 2**30
    path.write_text(json.dumps(data))
    tables = readme_tables()
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert [line.split(" | ")[0] for line in tables.kda_speed_table()[4:6]] == ["| `naive`", "| `streamed`"]
