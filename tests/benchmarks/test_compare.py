"""``benchmarks.compare``: everybody is a row or is left out by name, who is wrong is not timed, ratios are of pairs."""

from __future__ import annotations

import json
import math
import pkgutil
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from ci_script import ci_script
from click.testing import CliRunner

import benchmarks.peers
import memfix
from benchmarks import compare, contenders, measuring
from benchmarks.compare import Comparing, main
from benchmarks.contenders import Contenders
from benchmarks.measuring import Figures, Rows, attempt, first_call_and_peak, timed
from benchmarks.peers import Comparison, Entry, Peer, Table, Unavailable, comparison_of
from benchmarks.peers import linear_cross_entropy as loss_peers
from benchmarks.workload import Workload, draw_of, with_peers
from memfix.contract import Contract, Dim, Form, TensorSpec
from memfix.errors import UsageError
from memfix.meters.clock import Rounds
from memfix.registry import contracts

ROOT = Path(__file__).resolve().parents[2]
TWO = Rounds(2, 2)
Tensor = torch.Tensor
OPS_WITH_PEERS = [module.name for module in pkgutil.iter_modules(benchmarks.peers.__path__)]


def run(*options: str) -> Any:
    result = CliRunner().invoke(main, ["--device", "cpu", *options])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def a_contract(**forms: Any) -> Contract:
    return Contract(
        "scaled", naive=lambda x, w: x * w, forms={"same": lambda x, w: w * x, **forms}, dims={"N": Dim(1, 9)},
        inputs=[TensorSpec("x", "N", grad=True), TensorSpec("w", "N", grad=True)], cases={"a": {"N": 4}},
    )  # fmt: skip


def measured(work: Workload, rows: Rows, phase: str, device: str, rounds: Rounds) -> Figures:
    for name in rows:
        attempt(rows[name], device, first_call_and_peak, work, name, phase, device)
    return {"rounds": timed(work, rows, phase, device, rounds), "rows": rows}


# ---------------------------------------------------------------- the command
def test_every_form_and_peer_is_a_row_or_is_left_out_by_name(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    result = run(
        "linear_cross_entropy", "--case", "small", "N=64", "D=32", "V=500", "--seconds", "0", "--json", str(path)
    )
    assert result.exit_code == 0, result.output
    data = json.loads(path.read_text())
    (contract,) = contracts(["linear_cross_entropy"])
    peers = {"liger", "liger_rows", "cce", "torch", "torch_4096"}
    everybody = {"naive", *contract.forms, "triton_rows", *peers}
    assert {*data["sources"], *data["left_out"]} == everybody
    assert {"liger", "cce", "triton", "triton_rows"} <= data["left_out"].keys(), "their kernels need a GPU"
    assert {"torch", "triton", "gpu", "driver", "date", "commit"} <= data["surroundings"].keys()
    (entry,) = data["speed"]
    assert entry["dims"] == {"N": 64, "D": 32, "V": 500, "rows_per_chunk": 128}
    rows = entry["phases"]["train"]["rows"]
    assert rows.keys() == {"floor", *data["sources"]}
    for name in ("naive", "recompute", "auto"):
        row = rows[name]
        assert len(row["times_s"]) == entry["phases"]["train"]["rounds"] == 2
        assert row["seconds"] == statistics.median(row["times_s"])
        assert row["times_floor"] == row["seconds"] / rows["floor"]["seconds"]
        assert row["simulated_bytes"] > 0
        assert row["peak_bytes"] is None, "nobody counts on a CPU"
    (check,) = data["errors"]
    assert check["values"] == "flat"
    assert 0 < max(check["rows"]["recompute"].values()) < 1e-5
    for name in (*data["sources"], *data["left_out"]):
        assert f"\n{name}" in result.output


def test_an_op_without_a_peers_file_is_compared_form_against_form(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    options = ("--case", "small", "--rounds", "2", "--phase", "forward", "--json", str(path))
    result = run("one_hot_loss", *options)
    assert result.exit_code == 0, result.output
    data = json.loads(path.read_text())
    (contract,) = contracts(["one_hot_loss"])
    (entry,) = data["speed"]
    assert entry["phases"].keys() == {"forward"}
    rows = entry["phases"]["forward"]["rows"]
    assert rows.keys() == {"naive", *contract.forms}
    assert {len(row["times_s"]) for row in rows.values()} == {2}
    assert "simulated" in result.output


def test_another_packages_contract_is_compared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "contracts", lambda names: [a_contract()])
    path = tmp_path / "out.json"
    assert run("scaled", "--rounds", "2", "--json", str(path)).exit_code == 0
    (entry,) = json.loads(path.read_text())["speed"]
    assert entry["case"] == "a"
    assert entry["phases"]["train"]["rows"].keys() == {"naive", "same"}


def test_chosen_forms_and_peers_run_with_the_floor_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    size = ("--case", "small", "N=16", "D=8", "V=50")
    options = ("--forms", "recompute,triton", "--peers", "none", "--rounds", "2", "--json", str(path))
    assert run("linear_cross_entropy", *size, *options).exit_code == 0
    assert [*json.loads(path.read_text())["speed"][0]["phases"]["train"]["rows"]] == ["floor", "recompute"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["kdaa"], "no op 'kdaa'; did you mean 'kda'?"),
        (["kda", "--forms", "sequentail"], "--forms: kda has no 'sequentail'; did you mean 'sequential'?"),
        (["kda", "--forms", "fla"], "--forms: kda has no 'fla'"),
        (["kda", "--peers", "fal"], "--peers: kda has no 'fal'; did you mean 'fla'?"),
        (["kda", "--table", "shape"], "--table: kda has no table 'shape'; did you mean 'shapes'?"),
        (["kda", "--table", "shapes", "T=4"], "--table has its own shapes; leave out DIM=VALUE, or --table"),
        (
            ["kda", "--table", "shapes", "--case", "lang"],
            "--case: the table shapes has no 'lang'; did you mean 'long'?",
        ),
        (["kda", "T=0"], "T must be an int of at least 1, got 0"),
        (["kda", "--case", "smal"], "kda has no case 'smal'; did you mean 'small'?"),
        (["kda", "--case", "small", "--values", "wild"], "--values: kda has no values 'wild'; did you mean 'mild'?"),
        (["rope", "--table", "any"], "--table: rope has no table 'any'"),
        (["batches"], "batches takes host memory, and compare measures a device's; use memfix check batches"),
    ],
)
def test_bad_options_are_refused_in_words(options: list[str], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        run(*options)
    assert message in str(refused.value)


def test_an_op_without_gradients_has_no_train_step(monkeypatch: pytest.MonkeyPatch) -> None:
    contract = a_contract()
    frozen = replace(contract, inputs=[replace(spec, grad=False) for spec in contract.inputs])
    monkeypatch.setattr(compare, "contracts", lambda names: [frozen])
    with pytest.raises(UsageError, match="--phase: scaled has no gradients, so its only phase is forward"):
        run("scaled", "--phase", "train")
    assert run("scaled", "--rounds", "2").exit_code == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is about machines without a GPU")
def test_without_a_gpu_the_command_says_what_to_use() -> None:
    with pytest.raises(UsageError, match="torch sees no GPU; use --device cpu"):
        run("kda", "--device", "cuda")


# ---------------------------------------------------------------- tables
@pytest.mark.parametrize("op", OPS_WITH_PEERS)
def test_the_tables_of_a_peers_file_speak_of_what_there_is(op: str) -> None:
    (contract,) = contracts([op])
    comparison = comparison_of(op)
    forms = {"naive", *with_peers(contract, comparison, {}).forms}
    for table in comparison.tables.values():
        assert set(table.values) <= comparison.values.keys()
        draws = [
            draw_of(contract, entry.name if entry.name in contract.cases else None, entry.settings.split()).spelled()
            for entry in table.entries
        ]
        assert len(set(draws)) == len(draws), "a second entry of the same shape would replace the first"
        for entry in table.entries:
            assert {*(entry.forms or ())} <= forms
            assert {*(entry.peers or ())} <= comparison.peers.keys()


def test_a_table_may_be_measured_shape_by_shape() -> None:
    (contract,) = contracts(["kda"])
    table = compare.tables_of(contract, comparison_of("kda"), "shapes", "incident", ())["shapes"]
    assert [entry.name for entry in table.entries] == ["incident", "incident"], "in bfloat16 and in float32"


def test_all_tables_are_measured_in_one_run_and_each_has_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = {"a": Table([Entry("a")]), "b": Table([Entry("a", "N=7")], phases=("forward",), rounds=4)}
    monkeypatch.setattr(compare, "contracts", lambda names: [a_contract()])
    monkeypatch.setattr(contenders, "comparison_of", lambda op: Comparison(tables=tables))
    assert run("scaled", "--table", "all", "--rounds", "2", "--json", str(tmp_path)).exit_code == 0
    found = {path.name: json.loads(path.read_text())["speed"] for path in tmp_path.iterdir()}
    assert {name: [entry["dims"]["N"] for entry in of] for name, of in found.items()} == {
        "scaled_a.json": [4], "scaled_b.json": [7],
    }  # fmt: skip
    for options, message in ((["--case", "a"], "--table all has all shapes"), (["--json", "no"], "it is a folder")):
        with pytest.raises(UsageError, match=message):
            run("scaled", "--table", "all", *options)


def test_rows_are_on_disk_before_the_next_one_runs(tmp_path: Path, pretended_gpu: str) -> None:
    path, entry = tmp_path / "out.json", Entry("a")

    def measure(**forms: Any) -> None:
        everybody = replace(Contenders.of(a_contract(**forms), "cpu"), device=pretended_gpu)
        Comparing(everybody, path, add=True).measure(entry, Table([entry]), ["forward"], TWO)

    def cut_off(x: Tensor, w: Tensor) -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(last=cut_off)
    data = json.loads(path.read_text())
    assert data["speed"] == []
    rows = data["begun"]["phases"]["forward"]["rows"]
    assert [name for name, row in rows.items() if "first_call_s" in row] == ["naive", "same"]
    measure()
    data = json.loads(path.read_text())
    assert "begun" not in data
    assert len(data["speed"]) == 1


def test_a_slow_contender_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "SLOW_S", 0.2)
    calls = 0

    def slow(x: Tensor, w: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        time.sleep(0.25)
        return x * w

    contract = a_contract(slow=slow)
    work = Workload(contract, Comparison(), draw_of(contract, None, []))
    found = measured(work, {"naive": {}, "slow": {}}, "forward", "cpu", TWO)
    row = found["rows"]["slow"]
    assert calls == 1
    assert (len(row["times_s"]), row["note"], found["rounds"]) == (1, "timed once", 2)
    assert row["times_naive"] > 1
    assert "pairs_over_naive" not in row


def test_several_shapes_share_errors_that_come_down_to_one_size(tmp_path: Path) -> None:
    (contract,) = contracts(["linear_cross_entropy"])
    chosen = Contenders.of(contract, "cpu").chosen("naive,recompute", "none")
    chosen = replace(chosen, comparison=replace(chosen.comparison, error_at={"N": 8}))
    table = Table([Entry(f"{n}", f"N={n} D=8 V=50 dtype=float32") for n in (16, 32)], values=("flat", "peaked"))
    comparing = Comparing(chosen, tmp_path / "out.json", add=False)
    for entry in table.entries:
        comparing.measure(entry, table, ["train"], TWO)
    data = json.loads((tmp_path / "out.json").read_text())
    assert [entry["dims"]["N"] for entry in data["speed"]] == [16, 32]
    assert [(check["values"], check["dims"]["N"]) for check in data["errors"]] == [("flat", 8), ("peaked", 8)]


def written(path: Path, monkeypatch: pytest.MonkeyPatch, commit: str, *sizes: int, add: bool) -> list[int]:
    monkeypatch.setenv("MEMFIX_COMMIT", commit)
    comparing = Comparing(Contenders.of(a_contract(), "cpu"), path, add=add)
    for size in sizes:
        entry = Entry("a", f"N={size}")
        comparing.measure(entry, Table([entry]), ["forward"], TWO)
    return [entry["dims"]["N"] for entry in json.loads(path.read_text())["speed"]]


def test_a_second_part_of_a_run_is_added_to_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.json"
    assert written(path, monkeypatch, "a", 4, 5, add=True) == [4, 5]
    assert written(path, monkeypatch, "a", 5, 6, add=True) == [4, 5, 6]
    assert written(path, monkeypatch, "a", 5, add=False) == [5]


def test_figures_of_two_commits_are_not_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.json"
    written(path, monkeypatch, "a", 4, add=False)
    with pytest.raises(UsageError, match=r"has the commit 'a', this run 'b'; leave --add out to begin afresh"):
        written(path, monkeypatch, "b", 5, add=True)


# ---------------------------------------------------------------- peers that cannot run
def test_a_peer_says_why_it_cannot_run() -> None:
    def for_another_torch() -> Any:
        raise ImportError("undefined\nsymbol")

    with pytest.raises(Unavailable, match="no_such_package not installed"):
        Peer("none", lambda: abs, ("no_such_package",)).loaded("cuda")
    with pytest.raises(Unavailable, match="its kernels need a GPU"):
        Peer("click", lambda: abs, ("click",)).loaded("cpu")
    with pytest.raises(Unavailable, match="cannot be loaded: ImportError: undefined symbol"):
        Peer("click", for_another_torch).loaded("cpu")
    assert Peer("click", lambda: abs).loaded("cpu") is abs


# ---------------------------------------------------------------- who is wrong or fails
def naive_kda(*inputs: Any) -> Any:
    (contract,) = contracts(["kda"])
    return contract.naive(*inputs)


def without_beta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Any) -> Any:
    return naive_kda(q, k, v, g, 0 * beta + 1)


def with_half_a_gate_gradient(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Any) -> Any:
    return naive_kda(q, k, v, g / 2 + g.detach() / 2, beta)


def with_a_stale_state(*inputs: Any) -> Any:
    o, final_state = naive_kda(*inputs)
    return o, torch.zeros_like(final_state)


def with_nan(*inputs: Any) -> Any:
    o, final_state = naive_kda(*inputs)
    return o.where(o < o.max(), math.nan), final_state


def without_a_gate_gradient(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Any) -> Any:
    return naive_kda(q, k, v, g.detach(), beta)


def broken(*inputs: Any) -> Any:
    raise NotImplementedError("not written\nyet")


def out_of_memory(*inputs: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 GiB. GPU 0 has a total capacity of")


@pytest.mark.parametrize(
    ("culprit", "trouble"),
    [
        (without_beta, "wrong: output 0 is off by "),
        (with_half_a_gate_gradient, "wrong: gradient of g is off by 5.0e-01 of its norm"),
        (with_a_stale_state, "wrong: output 1 is off by 1.0e+00 of its norm"),
        (with_nan, "wrong: output 0 is off by nan of its norm"),
        (without_a_gate_gradient, "ValueError: no gradient of g"),
        (broken, "NotImplementedError: not written yet"),
        (out_of_memory, "out of memory, asked for 32.00 GiB"),
    ],
)
def test_who_is_wrong_or_fails_is_a_row_with_the_reason_and_is_not_timed(culprit: Any, trouble: str) -> None:
    (contract,) = contracts(["kda"])
    comparison = replace(comparison_of("kda"), forms={"culprit": culprit})
    everybody = Contenders(with_peers(contract, comparison, {}), comparison, "cpu", ("naive", "culprit"), (), {})
    comparing = Comparing(everybody, None, add=False)
    entry = Entry("tiny", "B=1 T=9 H=1 K=8 V=8 dtype=bfloat16")
    comparing.measure(entry, Table([entry], values=("mild",)), ["train", "forward"], TWO)
    for phase in comparing.data["speed"][0]["phases"].values():
        assert phase["rows"]["culprit"]["trouble"].startswith(trouble)
        assert "seconds" not in phase["rows"]["culprit"]
        assert phase["rows"]["naive"]["seconds"] > 0


def test_one_that_fails_while_it_is_timed_is_a_row_and_memory_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, released = 0, []
    monkeypatch.setattr(measuring, "_release", released.append)

    def tiring(x: Tensor, w: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 4:
            raise RuntimeError("no more")
        return x * w

    contract = a_contract(tiring=tiring)
    work = Workload(contract, Comparison(), draw_of(contract, None, []))
    found = measured(work, {"same": {}, "tiring": {}}, "forward", "cpu", Rounds(5, 5))
    assert found["rows"]["tiring"]["trouble"] == "RuntimeError: no more"
    assert len(found["rows"]["same"]["times_s"]) == 5
    assert released == ["cpu"]


def test_on_a_crowded_gpu_everybody_starts_with_an_empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[str] = []
    monkeypatch.setattr(measuring, "_release", released.append)
    monkeypatch.setattr(measuring, "_is_crowded", lambda rows, device: True)
    contract = a_contract()
    work = Workload(contract, Comparison(), draw_of(contract, None, []))
    measured(work, {"naive": {}, "same": {}}, "forward", "cpu", TWO)
    assert len(released) == 4


@pytest.mark.parametrize(("total_bytes", "crowded"), [(1000, False), (700, True)])
def test_a_gpu_is_crowded_where_all_peaks_do_not_fit_at_once(
    monkeypatch: pytest.MonkeyPatch, total_bytes: int, crowded: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 100)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, total_bytes))
    rows = {"a": {"peak_bytes": 300}, "b": {"peak_bytes": 100}, "c": {"trouble": "wrong"}}
    assert measuring._is_crowded(rows, "cuda") is crowded


def test_a_cpu_refuses_what_would_take_too_long(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    result = run("embedding", "--case", "incident", "--forms", "naive", "--json", str(path))
    assert result.exit_code == 0, result.output
    data = json.loads(path.read_text())
    row = data["speed"][0]["phases"]["train"]["rows"]["naive"]
    assert row["trouble"].endswith("a CPU is given 64.00 MiB")
    assert data["errors"] == []


def test_an_op_whose_naive_fails_in_float64_is_timed_and_the_reason_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def narrow_only(x: Tensor, w: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise TypeError("no float64")
        return x * w

    contract = replace(a_contract(), naive=narrow_only)
    monkeypatch.setattr(compare, "contracts", lambda names: [contract])
    result = run("scaled", "--rounds", "2", "--json", str(tmp_path / "out.json"))
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["speed"][0]["phases"]["train"]["rows"]["same"]["seconds"] > 0
    assert "naive in float64: TypeError: no float64" in " ".join(result.output.split())


# ---------------------------------------------------------------- ratios
def test_a_ratio_is_the_median_of_ratios_within_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is of another speed in each round: times of different rounds must not meet in a ratio."""
    now_s = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    calls = {"naive": 0, "slower": 0}

    def taking(name: str, factor: float) -> Any:
        def form(x: Tensor, w: Tensor) -> Tensor:
            nonlocal now_s
            calls[name] += 1
            # the first call at a shape, then two calls a round, of which one is timed
            now_s += factor * (1 + 7 * (calls[name] // 2) % 5)
            return x * w

        return form

    contract = replace(a_contract(), naive=taking("naive", 1.0), forms={"slower": Form(taking("slower", 1.05))})
    work = Workload(contract, Comparison(), draw_of(contract, None, []))
    found = measured(work, {"naive": {}, "slower": {}}, "forward", "cpu", Rounds(11, 11))["rows"]["slower"]
    pairs = found["pairs_over_naive"]
    assert (pairs["low"], pairs["median"], pairs["high"]) == pytest.approx((1.05, 1.05, 1.05))
    assert pairs["pairs"] == 11
    assert max(found["times_s"]) > 2 * min(found["times_s"])


# "cpu:0" is a CPU that the code takes for a GPU: it runs every line that needs one, with torch.cuda replaced
@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> str:
    def peak(build: Any, *, meter: str = "simulated") -> Any:
        if meter != "cuda":
            return memfix.measure.peak(build)
        step = build("cpu:0")
        step(), step()
        stages = [SimpleNamespace(name="held", start_bytes=9)]
        return SimpleNamespace(peak_bytes=5, allocated_bytes=6, base_bytes=2, stages=stages)

    monkeypatch.setattr(memfix, "peak", peak)
    monkeypatch.setattr(measuring, "SETTLE_S", 0.0)
    for name, value in {
        "synchronize": None,
        "empty_cache": None,
        "memory_allocated": 1,
        "mem_get_info": (1, 4),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    return "cpu:0"


def test_the_lines_for_a_gpu_run_every_form_of_the_tables_at_small_sizes(pretended_gpu: str, tmp_path: Path) -> None:
    for op, small in (
        ("linear_cross_entropy", "N=9 D=8 V=50 dtype=bfloat16"),
        ("kda", "B=1 T=9 H=1 K=8 V=8 chunk_size=4 dtype=bfloat16 dtype.g=float32"),
    ):
        (contract,) = contracts([op])
        path = tmp_path / f"{op}.json"
        everybody = replace(Contenders.of(contract, "cpu"), device=pretended_gpu)
        comparing = Comparing(everybody, path, add=False)
        for table in comparison_of(op).tables.values():
            entry = replace(table.entries[0], settings=small)
            comparing.measure(entry, replace(table, simulated=False), table.phases, Rounds(1, 1))
        data = json.loads(path.read_text())
        for of in (of for entry in data["speed"] for of in entry["phases"].values()):
            for name, row in of["rows"].items():
                assert "trouble" not in row, (op, name)
                assert (row["peak_bytes"], row["held_bytes"], len(row["times_s"])) == (5, 7, 1)
                assert "simulated_bytes" not in row, "nothing is simulated that the GPU measures"


@pytest.mark.gpu
def test_on_a_gpu_peaks_are_the_cuda_meters_and_short_steps_are_timed_in_batches() -> None:
    (contract,) = contracts(["kda"])
    comparison = comparison_of("kda")
    work = Workload(contract, comparison, draw_of(contract, "small", ["dtype=bfloat16"]), "mild")
    row = measured(work, {"naive": {}}, "train", "cuda", TWO)["rows"]["naive"]
    assert row["peak_bytes"] == memfix.peak(work.builder("naive", "train")).peak_bytes
    assert row["allocated_bytes"] >= row["peak_bytes"] > row["held_bytes"] > 0
    assert row["repeats"] > 1


# ---------------------------------------------------------------- the manual's tables
@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ci_script("tables")
    monkeypatch.setattr(sys.modules["manual.stored"], "RESULTS", tmp_path)
    (tmp_path / "h200").mkdir()
    return module


def filled_in(path: Path) -> None:
    """Peaks that a GPU's allocator would have counted."""
    data = json.loads(path.read_text())
    for entry in data["speed"]:
        for phase in entry["phases"].values():
            for row in phase["rows"].values():
                row["peak_bytes"] = 2**30
    path.write_text(json.dumps(data))


def test_the_losss_tables_are_made_from_what_the_command_writes(tmp_path: Path, tables: ModuleType) -> None:
    for name in ("tokens", "sizes"):
        path = tmp_path / "h200" / f"linear_cross_entropy_{name}.json"
        options = ("--case", "small", "N=16", "D=8", "V=50", "--forms", "naive,recompute", "--peers", "torch")
        assert run("linear_cross_entropy", *options, "--rounds", "2", "--json", str(path)).exit_code == 0
        filled_in(path)
    rows = ["| `naive`", "| `recompute`"]
    assert [line.split(" | ")[0] for line in tables.speed.loss_speed_table()[5:7]] == rows
    assert [line.split(" | ")[0] for line in tables.speed.loss_sizes_table()[3:5]] == rows


def test_the_losss_frontier_is_drawn_from_what_was_measured(tmp_path: Path, tables: ModuleType) -> None:
    def entry(rows: int, **times: float) -> dict[str, Any]:
        dims = {"N": 8192, "D": 4096, "V": 128_256, "rows_per_chunk": rows}
        figures = {name: {"times_floor": ratio, "peak_bytes": rows * 2**20} for name, ratio in times.items()}
        return {"dims": dims, "phases": {"train": {"rows": {"floor": {"seconds": 1.0}, **figures}}}}

    entries = [entry(512, triton_rows=1.3, auto=1.1, cce=4.0), entry(8192, triton_rows=1.05, liger_rows=1.4)]
    for name in ("frontier", "small_vocabulary"):
        (tmp_path / "h200" / f"linear_cross_entropy_{name}.json").write_text(json.dumps({"speed": entries}))
    (line,) = tables.pictures.loss_frontier()
    assert line.endswith("8,192 tokens](../pictures/loss_frontier_8192.svg)")
    svg = tables.pictures.all_pictures()["docs/pictures/loss_frontier_8192.svg"]()
    for shown in (">triton</text>", ">Liger</text>", "1.05x, 8.00 GiB", ">512</text>", "1.40x"):
        assert shown in svg
    assert tables.speed.loss_small_vocabulary_table()[2:] == [
        "| triton_rows, 512 rows | 1.30x, 512.00 MiB |",
        "| auto | 1.10x, 512.00 MiB |",
        "| cce | 4.00x, 512.00 MiB |",
        "| triton_rows, one chunk | 1.05x, 8.00 GiB |",
        "| liger_rows, one chunk | 1.40x, 8.00 GiB |",
    ]


def test_ropes_table_is_made_from_what_the_command_writes(tmp_path: Path, tables: ModuleType) -> None:
    path = tmp_path / "h200" / "rope_shapes.json"
    (contract,) = contracts(["rope"])
    comparing = Comparing(Contenders.of(contract, "cpu").chosen("naive,shared_table", "formula"), path, add=False)
    entry = Entry("tiny", "B=1 T=20 H=2 D=8 positions_per_chunk=8 dtype=float32")
    comparing.measure(entry, Table([entry]), ["train", "forward"], TWO)
    filled_in(path)
    found = tables.speed.rope_speed_table()
    assert found[2] == "| | B1 T20 H2 d8 | largest error |"
    assert [line.split(" | ")[0] for line in found[5:7]] == ["| `naive`", "| `shared_table`"]
    assert found[7].startswith("| formula, torch ")


def test_nsas_table_is_made_from_what_the_command_writes(tmp_path: Path, tables: ModuleType) -> None:
    path = tmp_path / "h200" / "nsa_shapes.json"
    (contract,) = contracts(["nsa"])
    comparing = Comparing(Contenders.of(contract, "cpu").chosen("chunked", "none"), path, add=False)
    entry = Entry(
        "tiny", "B=1 T=64 G=2 R=3 D=8 compress_block=8 compress_stride=8 select_block=8 num_selected=4 window=1"
    )
    comparing.measure(entry, Table([entry]), ["train", "forward"], TWO)
    filled_in(path)
    *_, heading, _, chunked = tables.speed.nsa_speed_table()
    assert heading == "| | two branches, T64 H6 over 2, d8 | largest error |"
    assert chunked.startswith("| `chunked` | ")
    assert chunked.count("<br>") == 1


@pytest.mark.parametrize(
    ("tokens", "asked", "factor", "rows"),
    [(8192, 1, 1, 256), (8192, 512, 2, 512), (8192, 8192, 32, 8192), (32_768, 512, 1, 1024), (8192, 10**6, 32, 8192)],
)
def test_liger_gets_the_smallest_factor_with_as_many_rows(tokens: int, asked: int, factor: int, rows: int) -> None:
    """As Liger 0.8.5 computes its rows, with 128,256 classes of width 4096."""
    assert loss_peers.liger_factor(tokens, 4096, 128_256, asked) == factor
    assert loss_peers.liger_rows(tokens, 4096, 128_256, factor) == rows


def test_kdas_table_is_made_from_what_the_command_writes(tmp_path: Path, tables: ModuleType) -> None:
    for name in ("shapes", "weak_gates", "strong_gates", "steep_gates", "chunks"):
        path = tmp_path / "h200" / f"kda_{name}.json"
        (contract,) = contracts(["kda"])
        comparing = Comparing(Contenders.of(contract, "cpu").chosen("naive,streamed", "none"), path, add=False)
        entry = Entry("tiny", "B=1 T=20 H=2 K=8 V=8 chunk_size=64")
        comparing.measure(entry, Table([entry], values=("mild",)), ["train", "forward"], TWO)
        filled_in(path)
    found = tables.speed.kda_speed_table()
    assert "float32, gates above -0.05 | " in found[2]
    assert [line.split(" | ")[0] for line in found[4:6]] == ["| `naive`", "| `streamed`"]
    assert found[4].count("<br>") == 4  # forward behind train, for each kind of gates
    assert found[-1].startswith("`streamed` in chunks of 64 over dense `naive`, float32: train ")


@pytest.mark.parametrize(
    ("trouble", "cell"), [("wrong: output 0 is off by nan of its norm", "wrong"), ("SomeError: no engine", "not taken")]
)
def test_a_peer_that_cannot_is_told_from_one_that_is_wrong(tables: ModuleType, trouble: str, cell: str) -> None:
    rows = {"rows": {"peer": {"trouble": trouble}}}
    assert tables.speed._times_and_peaks({"phases": {"train": rows, "forward": rows}}, "peer") == cell


def test_a_contender_that_is_left_out_somewhere_has_an_empty_cell(tmp_path: Path, tables: ModuleType) -> None:
    def timed(seconds: float, ratio: float, peak: int) -> dict[str, Any]:
        return {"seconds": seconds, "times_floor": ratio, "peak_bytes": peak}

    def entry(tokens: int, **rows: Any) -> dict[str, Any]:
        dims = {"N": tokens, "D": 2560, "V": 151_936}
        return {"dims": dims, "dtype": "bfloat16", "phases": {"train": {"rounds": 3, "rows": rows}}}

    errors = {"output": 1.0, "gradient of hidden": 2e-3, "gradient of weight": 4e-4}
    data = {
        "surroundings": {"gpu": "NVIDIA H200", "torch": "2.11.0", "date": "2026-11-15T08:00:00Z"},
        "sources": {"naive": "memfix 0.1.0", "liger": "liger-kernel 0.8.5"},
        "errors": [{"values": "flat", "rows": {"naive": errors, "liger": {"trouble": "no"}}}],
        "speed": [
            entry(4096, floor={"seconds": 0.0138}, naive=timed(0.0159, 1.152, 3 * 2**30)),
            entry(131_072, floor={"seconds": 0.456}, naive={"trouble": "out of memory, asked for 37.09 GiB"},
                  liger=timed(0.48, 1.06, 5 * 2**29)),
        ],
    }  # fmt: skip
    (tmp_path / "h200" / "linear_cross_entropy_tokens.json").write_text(json.dumps(data))
    assert tables.speed.loss_speed_table() == [
        "bfloat16, width 2,560, vocabulary 151,936, on NVIDIA H200 (torch 2.11.0, 2026-11-15); gradient errors are "
        "against float64.",
        "",
        "| train step | 4,096 tokens | 131,072 tokens | error, flat logits |",
        "|---|--:|--:|--:|",
        "| three products alone | 13.8 ms | 456 ms | |",
        "| `naive` | 1.15x, 3.00 GiB | out of memory, asked for 37.09 GiB | 2.0e-03 |",
        "| liger, liger-kernel 0.8.5 |  | 1.06x, 2.50 GiB |  |",
    ]
