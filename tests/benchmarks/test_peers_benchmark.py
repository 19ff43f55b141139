"""The benchmark beside the peers: its rounds are fair, its troubles are rows, and its errors are seen."""

from __future__ import annotations

import importlib.util
import json
import statistics
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner

import memfix
from benchmarks.linear_cross_entropy import Setting, accuracy, main, make_inputs, race
from benchmarks.rounds import LEAST_ROUNDS, MOST_ROUNDS, Limits, enough_rounds, forget_gradients, run_rounds, train
from memfix.meters.base import Step
from memfix.registry import contracts

ROOT = Path(__file__).resolve().parents[2]
SMALL = Setting(width=32, vocabulary=500, dtype="float32", device="cpu")
SMALL_OPTIONS = "--device cpu --tokens 64 --vocabulary 500 --width 32 --dtype float32".split()


def dense(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(hidden @ weight.T, target)


def run(*options: str) -> Any:
    return CliRunner().invoke(main, [*SMALL_OPTIONS, *options])


# ---------------------------------------------------------------- the command
def test_every_form_and_peer_is_a_row_or_is_left_out_by_name(tmp_path: Path) -> None:
    result = run("--json", str(tmp_path / "out.json"))
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "out.json").read_text())
    (contract,) = contracts(["linear_cross_entropy"])
    here = {"naive", *contract.forms}
    assert {*data["sources"], *data["left_out"]} == {*here, "liger", "cce", "torch", "torch_4096"}
    assert {"liger", "cce"} <= data["left_out"].keys(), "their kernels need a GPU"
    (at_64,) = data["speed"]
    assert at_64["rows"].keys() == {"floor", *data["sources"]}
    floor = at_64["rows"]["floor"]
    for name in ("naive", "recompute"):
        row = at_64["rows"][name]
        assert len(row["times_s"]) == at_64["rounds"] >= LEAST_ROUNDS
        assert row["seconds"] == statistics.median(row["times_s"])
        assert row["times_floor"] == row["seconds"] / floor["seconds"]
    assert [check["regime"] for check in data["accuracy"]] == ["flat", "peaked"]
    for check in data["accuracy"]:
        for name in ("naive", "recompute", "reported"):
            assert 0 < max(check["rows"][name].values()) < 1e-5
    for name in (*data["sources"], *data["left_out"]):
        assert f"\n{name}" in result.output


def test_a_chosen_contender_runs_with_the_floor_alone(tmp_path: Path) -> None:
    result = run("--only", "recompute", "--accuracy-tokens", "0", "--json", str(tmp_path / "out.json"))
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "out.json").read_text())
    assert list(data["speed"][0]["rows"]) == ["floor", "recompute"]
    assert data["accuracy"] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "recompte"], "nobody is called 'recompte'; did you mean 'recompute'?"),
        (["--tokens", "64,0"], "must be at least 1, got 0"),
        (["--tokens", "64;128"], "must be a list of whole numbers such as 4096,8192, got '64;128'"),
    ],
)
def test_bad_options_are_refused_in_words(options: list[str], message: str) -> None:
    result = run(*options)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about machines without a GPU")
def test_without_a_gpu_the_command_says_what_to_use() -> None:
    result = run("--device", "cuda")
    assert result.exit_code == 2
    assert "torch sees no GPU; use --device cpu" in result.output


# ---------------------------------------------------------------- the rounds
def test_every_contender_runs_once_a_round_and_the_first_of_a_round_rotates() -> None:
    calls: list[str] = []
    names = ("a", "b", "c")
    contenders = {name: lambda *_, name=name: calls.append(name) for name in names}
    rows = run_rounds(contenders, [()], "cpu", deadline_s=float("inf"))
    timed = calls[2 * len(names) :]  # two warm-up runs each
    rounds = [tuple(timed[start : start + 3]) for start in range(0, len(timed), 3)]
    assert len(rounds) == MOST_ROUNDS
    assert rounds[:4] == [("a", "b", "c"), ("b", "c", "a"), ("c", "a", "b"), ("a", "b", "c")]
    assert {len(row.times_s) for row in rows.values()} == {MOST_ROUNDS}


def test_no_contender_is_returned_with_fewer_than_two_rounds() -> None:
    past = time.perf_counter() - 1
    rows = run_rounds({"a": lambda: None, "b": lambda: None}, [()], "cpu", deadline_s=past)
    assert {len(row.times_s) for row in rows.values()} == {2}


@pytest.mark.parametrize(
    ("done", "here_s", "left_s", "enough"),
    [
        (1, 100, -1, False),
        (2, 0, 0, True),
        (2, 100, 50, False),
        (3, 100, 50, True),
        (9, 1, 50, False),
        (10, 1, 50, True),
    ],
)
def test_rounds_end_by_count_by_time_at_a_size_and_by_the_budget(
    done: int, here_s: float, left_s: float, enough: bool
) -> None:
    assert enough_rounds(done, here_s, left_s) is enough


def test_out_of_memory_and_errors_are_rows_and_the_others_go_on() -> None:
    def greedy(*_: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 37.09 GiB. GPU 0 has a total capacity of")

    def broken(*_: torch.Tensor) -> torch.Tensor:
        raise TypeError("no kernel\nfor this dtype")

    rows = race(SMALL, 16, {"greedy": greedy, "dense": dense, "broken": broken}, deadline_s=0.0)["rows"]
    assert rows["greedy"]["trouble"] == "out of memory, asked for 37.09 GiB"
    assert rows["broken"]["trouble"] == "TypeError: no kernel for this dtype"
    assert len(rows["dense"]["times_s"]) == 2


def test_one_that_fails_after_its_warm_up_is_a_row_too() -> None:
    calls = 0

    def tiring() -> None:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise RuntimeError("no more")

    rows = run_rounds({"tiring": tiring, "steady": lambda: None}, [()], "cpu", deadline_s=float("inf"))
    assert rows["tiring"].trouble == "RuntimeError: no more"
    assert len(rows["steady"].times_s) == MOST_ROUNDS


UNASKED_BYTES = 8  # by which the allocator's blocks are larger than what was asked for, and thrice that at the peak


class CountingGpu:
    """As much of ``torch.cuda`` as the rounds use, with an allocator that contenders drive by hand."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.current = self.peak = 0
        self.calls: list[str] = []

    def take(self, size: int) -> None:
        self.current += size
        self.peak = max(self.peak, self.current)

    def stand_in_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Event:
            def __init__(self, enable_timing: bool) -> None: ...
            def record(self) -> None: ...
            def elapsed_time(self, end: object) -> float:
                return 5.0

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: self.calls.append("empty"))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, self.total_bytes))
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: setattr(self, "peak", self.current))
        monkeypatch.setattr(
            torch.cuda,
            "memory_stats",
            lambda: {
                "requested_bytes.all.current": self.current,
                "requested_bytes.all.peak": self.peak,
                "allocated_bytes.all.current": self.current + UNASKED_BYTES,
                "allocated_bytes.all.peak": self.peak + 3 * UNASKED_BYTES,
            },
        )


class Greedy:
    """Takes ``forward_bytes`` in the forward and holds them, as much again in the backward, and gives all back."""

    def __init__(self, gpu: CountingGpu, name: str, forward_bytes: int) -> None:
        self.gpu, self.name, self.forward_bytes = gpu, name, forward_bytes

    def __call__(self) -> Greedy:
        self.gpu.calls.append(self.name)
        self.gpu.take(self.forward_bytes)
        return self

    def backward(self, upstream: object) -> None:
        assert upstream is None, "a loss has no upstream gradient"
        self.gpu.take(self.forward_bytes)
        self.gpu.take(-2 * self.forward_bytes)


@pytest.mark.parametrize(("total_bytes", "crowded"), [(1000, False), (700, True)])
def test_on_a_gpu_peaks_are_above_the_inputs_and_a_crowded_one_starts_each_afresh(
    monkeypatch: pytest.MonkeyPatch, total_bytes: int, crowded: bool
) -> None:
    gpu = CountingGpu(total_bytes)
    gpu.take(100)  # the inputs
    gpu.stand_in_for(monkeypatch)
    monkeypatch.setattr("benchmarks.rounds.SUSTAINED_S", 0.0)
    contenders: Any = {"a": Greedy(gpu, "a", 150), "b": Greedy(gpu, "b", 50)}
    rows = run_rounds(contenders, [()], "cuda", deadline_s=0.0)
    a, b = rows["a"], rows["b"]
    assert (a.peak_bytes, a.allocated_bytes, a.held_bytes) == (300, 300 + 2 * UNASKED_BYTES, 150)
    assert (b.peak_bytes, b.allocated_bytes, b.held_bytes) == (100, 100 + 2 * UNASKED_BYTES, 50)
    assert rows["a"].times_s == [0.005, 0.005]
    first = ["empty"] if crowded else []
    warm_up = ["empty", "a", "a", "empty", "b", "b"]
    of_a, of_b = [*first, "a", "a"], [*first, "b", "b"]  # once untimed, once timed
    assert gpu.calls == [*warm_up, *of_a, *of_b, *of_b, *of_a]


def test_on_a_gpu_a_batch_of_steps_takes_the_inputs_in_turn_and_its_time_is_that_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    CountingGpu(1000).stand_in_for(monkeypatch)
    monkeypatch.setattr("benchmarks.rounds.SUSTAINED_S", 0.0)
    now_s = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    taken: list[int] = []
    inputs = [(torch.full((), number),) for number in range(3)]

    def of_ten_milliseconds(number: torch.Tensor) -> None:
        nonlocal now_s
        now_s += 0.010
        taken.append(int(number))

    rows = run_rounds({"a": of_ten_milliseconds}, inputs, "cuda", deadline_s=0.0, batch_s=0.035)
    warm_up = [0, 0]
    assert taken == [*warm_up, 1, 0, 1, 2, 0, 2, 1, 2, 0, 1], "an untimed step on the second, then four from the first"
    assert rows["a"].batch_steps == 4
    assert rows["a"].times_s == [0.005 / 4, 0.005 / 4]


def test_a_result_that_is_no_loss_has_its_upstream_gradient() -> None:
    seen: list[torch.Tensor] = []
    weight = torch.ones(3, requires_grad=True)
    weight.register_hook(seen.append)
    upstream = torch.tensor([1.0, 2.0, 3.0])
    run_rounds({"doubled": lambda weight: 2 * weight}, [(weight,)], "cpu", deadline_s=0.0, upstream=upstream)
    assert len(seen) == 2 + LEAST_ROUNDS
    assert all(torch.equal(gradient, 2 * upstream) for gradient in seen)
    assert weight.grad is None


def test_rounds_are_as_many_as_their_limits_say() -> None:
    rows = run_rounds({"a": lambda: None}, [()], "cpu", deadline_s=0.0, limits=Limits(least=12, fair=12, most=12))
    assert len(rows["a"].times_s) == 12


@pytest.mark.gpu
def test_a_peak_is_the_cuda_meters() -> None:
    setting = Setting(width=64, vocabulary=3000, dtype="bfloat16", device="cuda")

    def build(device: str) -> Step:
        inputs = make_inputs(setting, 500)

        def step() -> None:
            train(dense, inputs)
            forget_gradients(inputs)

        return step

    row = race(setting, 500, {"dense": dense}, deadline_s=0.0)["rows"]["dense"]
    assert row["peak_bytes"] == memfix.peak(build, meter="cuda").peak_bytes
    assert row["times_floor"] > 0


# ---------------------------------------------------------------- what is run
def test_inputs_are_random_and_as_many_are_ignored_as_asked() -> None:
    hidden, weight, target = make_inputs(Setting(32, 500, "bfloat16", "cpu", ignored=0.5), 4096)
    assert hidden.dtype == weight.dtype == torch.bfloat16
    assert abs(hidden.std().item() - 1) < 0.02
    assert abs(weight.std().item() - 0.02) < 0.001
    assert 0.45 < (target == -100).double().mean().item() < 0.55


def test_peaked_logits_are_tens_at_any_width() -> None:
    for width in (32, 512):
        hidden, weight, target = make_inputs(Setting(width, 500, "float32", "cpu"), 100, regime="peaked")
        logits = hidden @ weight.T
        assert logits.max() > 20
        assert (logits.argmax(-1) == target).sum() >= 90


def test_accuracy_sees_a_gradient_that_leaves_out_rows_no_target_hits() -> None:
    """The error that a filter of small probabilities makes: nearly nothing in the whole, everything in those rows."""

    def filtered(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        hit = torch.zeros(weight.shape[0], 1, dtype=weight.dtype).index_fill(0, target, 1)
        return dense(hidden, weight * hit + (weight * (1 - hit)).detach(), target)

    wide = Setting(width=32, vocabulary=20_000, dtype="float32", device="cpu")
    rows = accuracy(wide, 64, {"dense": dense, "filtered": filtered}, regime="flat")["rows"]
    assert rows["filtered"]["weight_untargeted"] == 1.0
    assert rows["filtered"]["weight"] < 0.2
    assert rows["filtered"]["hidden"] < 1e-5
    assert max(rows["dense"].values()) < 1e-5


def test_accuracy_sees_logits_that_were_rounded_to_16_bits() -> None:
    """At peaked logits a rounding of bfloat16 is a large part of 1 in the exponent."""

    def rounded(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy((hidden @ weight.T).bfloat16().float(), target)

    found = {regime: accuracy(SMALL, 256, {"rounded": rounded}, regime=regime) for regime in ("flat", "peaked")}
    flat, peaked = (found[regime]["rows"]["rounded"]["hidden"] for regime in ("flat", "peaked"))
    assert peaked > 1e-2
    assert flat < peaked / 5


# ---------------------------------------------------------------- the README's table
def readme_tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("readme_tables", ROOT / "ci/readme_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readmes_table_has_a_row_for_each_contender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(seconds: float, ratio: float, peak: int) -> dict[str, Any]:
        return {"seconds": seconds, "times_floor": ratio, "peak_bytes": peak, "held_bytes": 0, "times_s": [seconds] * 3}

    errors = {"loss": 1e-7, "hidden": 2e-3, "weight": 4e-4, "weight_untargeted": 4e-3}
    data = {
        "surroundings": {"gpu": "NVIDIA H200", "torch": "2.11.0", "date": "2026-11-15T08:00:00Z"},
        "setting": {"width": 2560, "vocabulary": 151_936, "dtype": "bfloat16", "device": "cuda", "ignored": 0.0},
        "sources": {"naive": "memfix 0.1.0", "liger": "liger-kernel 0.8.5"},
        "left_out": {"torch": "not in torch 2.11.0"},
        "accuracy": [
            {"regime": "flat", "rows": {"naive": errors, "liger": {**errors, "weight_untargeted": 7.9e-3}}},
            {"regime": "peaked", "rows": {"naive": {**errors, "weight_untargeted": None}, "liger": errors}},
        ],
        "speed": [
            {"tokens": 4096, "rows": {"floor": timed(0.0138, 1, 0), "naive": timed(0.0159, 1.152, 3 * 2**30),
                                      "liger": timed(0.035, 2.53, 2**29)}},
            {"tokens": 131_072, "rows": {"floor": timed(0.456, 1, 0),
                                         "naive": {"trouble": "out of memory, asked for 37.09 GiB"},
                                         "liger": timed(0.48, 1.06, 5 * 2**29)}},
        ],
    }  # fmt: skip
    (tmp_path / "linear_cross_entropy.json").write_text(json.dumps(data))
    tables = readme_tables()
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.loss_speed_table() == [
        "bfloat16, width 2,560, vocabulary 151,936, on NVIDIA H200 (torch 2.11.0, 2026-11-15); gradient errors are "
        "against float64.",
        "",
        "| train step | 4,096 tokens | 131,072 tokens | error, flat logits | error, peaked logits |",
        "|---|--:|--:|--:|--:|",
        "| three products alone | 13.8 ms | 456 ms | | |",
        "| `naive` | 1.15x, 3.00 GiB | out of memory, asked for 37.09 GiB | 4.0e-03 | 2.0e-03 |",
        "| liger, liger-kernel 0.8.5 | 2.53x, 512.00 MiB | 1.06x, 2.50 GiB | 7.9e-03 | 4.0e-03 |",
    ]


def test_the_readmes_table_is_made_from_what_the_command_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "linear_cross_entropy.json"
    assert run("--only", "naive,recompute", "--accuracy-tokens", "8", "--json", str(path)).exit_code == 0
    data = json.loads(path.read_text())
    for row in data["speed"][0]["rows"].values():  # what a GPU's allocator would have counted
        row["peak_bytes"] = 2**30
    path.write_text(json.dumps(data))
    tables = readme_tables()
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert [line.split(" | ")[0] for line in tables.loss_speed_table()[5:]] == ["| `naive`", "| `recompute`"]
