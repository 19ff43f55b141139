"""Generates the tables of the manual from the lock file and from stored results: ``python ci/tables.py --write``."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memfix.contract import FLOOR
from memfix.gate.lock import Key, read_lock
from memfix.incidents import incident_names
from memfix.incidents.claims import VERDICTS, load_claims
from memfix.incidents.config import load_config
from memfix.incidents.incident import Incident
from memfix.incidents.judging import decimal
from memfix.incidents.npt_weight_delta.incident import incident as npt
from memfix.incidents.npt_weight_delta.model import SIZES
from memfix.incidents.profile import WORDS, kept_runs, run_columns
from memfix.incidents.pythia_vocabulary.calculator import breakdown
from memfix.incidents.pythia_vocabulary.incident import incident as pythia
from memfix.incidents.pythia_vocabulary.incident import report_breakdown
from memfix.incidents.pythia_vocabulary.model import PythiaConfig
from memfix.incidents.scent_decoder.incident import incident as scent
from memfix.laws import NAIVE, PHASES
from memfix.pictures.bars import Bar, as_svg
from memfix.pictures.frontier import Curve, Point
from memfix.pictures.frontier import as_svg as as_frontier_svg
from memfix.units import format_bytes, format_seconds, parse_bytes

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/h200"


def ops_table() -> list[str]:
    """Every form at its incident: simulated bytes, and the ratio to naive."""
    lock = read_lock(ROOT / "benchmarks/memory.lock")
    lines = ["| op | form | forward | held | train | train below naive |", "|---|---|--:|--:|--:|--:|"]
    for op, form in dict.fromkeys((op, form) for op, form, case, _ in _naive_first(lock) if case == "incident"):
        lines.append(f"| `{op}` | `{form}` | {_sizes(lock, op, form, 'incident')} |")
    return lines


def npt_table() -> list[str]:
    """The modulated linear layer at both widths of a feed-forward layer."""
    return _cases_table("npt_linear", "columns F", {"11,008": "incident", "14,336": "llama_8b"})


def feed_forward_table() -> list[str]:
    """The gated feed-forward layer at its incident, in both dtypes."""
    return _cases_table("geglu_feed_forward", "dtype", {"float32": "incident", "bfloat16": "incident_bf16"})


def attention_table() -> list[str]:
    """Attention at its incident: with and without its map, in both dtypes, and with fewer keys."""
    cases = {
        "1,024 keys, float32": "incident",
        "with the map": "incident_with_map",
        "1,024 keys, bfloat16": "incident_bf16",
        "256 keys, float32": "cross",
    }
    return _cases_table("attention", "1,024 queries to", cases)


def _cases_table(op: str, heading: str, cases: dict[str, str]) -> list[str]:
    """Every form of an op at some of its cases; ``cases`` maps the names in the table to cases."""
    lock = read_lock(ROOT / "benchmarks/memory.lock")
    lines = [f"| {heading} | form | forward | held | train | train below naive |", "|--:|---|--:|--:|--:|--:|"]
    forms = dict.fromkeys(form for o, form, *_ in _naive_first(lock) if o == op)
    for name, case in cases.items():
        lines += [f"| {name} | `{form}` | {_sizes(lock, op, form, case)} |" for form in forms]
    return lines


def _sizes(lock: dict[Key, int], op: str, form: str, case: str) -> str:
    """The cells of a row: the bytes of each phase, and the ratio of naive's train step to this one."""
    forward, train, held = (lock[op, form, case, phase] for phase in PHASES)
    below = "" if form == NAIVE else f"{lock[op, NAIVE, case, 'train'] / train:.1f}x"
    return " | ".join([*map(format_bytes, (forward, held, train)), below])


def best_table() -> list[str]:
    """Every op at its incident: naive, and the form with the smallest peak in training."""
    lock = read_lock(ROOT / "benchmarks/memory.lock")
    train = {
        (op, form): size for (op, form, case, phase), size in lock.items() if (case, phase) == ("incident", "train")
    }
    lines = ["| op | naive, train | smallest form | its train step | below naive |", "|---|--:|---|--:|--:|"]
    for op in sorted({op for op, _ in train}):
        form, size = min(((f, size) for (o, f), size in train.items() if o == op), key=lambda found: found[1])
        naive = train[op, NAIVE]
        sizes = f"{format_bytes(naive)} | `{form}` | {format_bytes(size)}"
        lines.append(f"| [`{op}`](docs/ops/{op}.md) | {sizes} | {naive / size:.1f}x |")
    return lines


def incidents_table() -> list[str]:
    """The number of claims of every report by verdict."""
    lines = ["| incident | claims | hold | wrong | cannot be tested |", "|---|--:|--:|--:|--:|"]
    verdicts = {f"`{name}`": Counter(claim.verdict for claim in load_claims(name)) for name in incident_names()}
    for name, of_one in {**verdicts, "all": sum(verdicts.values(), Counter())}.items():
        lines.append(f"| {name} | {of_one.total()} | {' | '.join(str(of_one[verdict]) for verdict in VERDICTS)} |")
    return lines


def one_hot_figure() -> list[str]:
    """The bytes of one-hot rows at the report's sizes: a bar for every form of the embedding and of the loss."""
    lock = read_lock(ROOT / "benchmarks/memory.lock")
    largest = max(lock["embedding", NAIVE, "report", "train"], lock["one_hot_loss", NAIVE, "incident", "train"])
    lines = ["```text"]
    for words, cases in (("50,000", ("report", "incident")), ("10,000", ("capped", "capped"))):
        for phase in ("forward", "train"):
            lines.append(f"{words} words, {phase}")
            for op, case in zip(("embedding", "one_hot_loss"), cases, strict=True):
                for form in [form for o, form, c, p in _naive_first(lock) if (o, c, p) == (op, case, phase)]:
                    size = lock[op, form, case, phase]
                    bar = "█" * max(1, round(60 * size / largest))
                    lines.append(f"  {op:12} {form:6} {format_bytes(size):>11}  {bar}")
    return [*lines, "```"]


def agreement_table() -> list[str]:
    """Peaks of the loss's train steps as counted by the H200's allocator, beside the simulated peaks."""
    data = json.loads((RESULTS / "linear_cross_entropy_tokens.json").read_text())
    where = data["surroundings"]
    rows = [
        (entry["dims"]["N"], name, row["simulated_bytes"], row["peak_bytes"])
        for entry in data["speed"]
        for name, row in _train(entry).items()
        if name != FLOOR and "simulated_bytes" in row and row.get("peak_bytes") is not None
    ]
    same = sum(simulated == counted for *_, simulated, counted in rows)
    lines = [
        f"{same} of {len(rows)} train steps agree to the byte on {where['gpu']} "
        f"(torch {where['torch']}, driver {where['driver']}, {where['date'][:10]}).",
        "",
        "| train step at 131,072 tokens | simulated bytes | H200 allocator | difference |",
        "|---|--:|--:|--:|",
    ]
    for tokens, name, simulated, counted in rows:
        if tokens == 131_072:
            lines.append(f"| `{name}` | {simulated:,} | {counted:,} | {simulated - counted:+,} |")
    return lines


def profile_table() -> list[str]:
    """The incident's train step by stages: the report's figures, simulated ones, and the H200's for dense attention."""
    nsa, dense = (json.loads((ROOT / f"benchmarks/results/cpu/profile_{a}.json").read_text()) for a in ("nsa", "dense"))
    real = json.loads((RESULTS / "profile.json").read_text())
    return _stages_table({"NSA, simulated": nsa, "dense, simulated": dense, "dense, H200": real})


def pythia_profile_table() -> list[str]:
    """The Pythia's train step by stages: the report's figures, simulated ones, and the H200's."""
    profiles = (
        json.loads((folder / "profile_pythia.json").read_text()) for folder in (RESULTS.parent / "cpu", RESULTS)
    )
    return _stages_table(dict(zip(("simulated", "H200"), profiles, strict=True)))


def _stages_table(profiles: dict[str, Any]) -> list[str]:
    """The stages of several profiles of one step, side by side."""
    columns = " | ".join(profiles)
    lines = [f"| stage, highest bytes in it | report | {columns} |", "|---|--:|" + "--:|" * len(profiles)]
    for stages in zip(*(profile["stages"] for profile in profiles.values()), strict=True):
        first = stages[0]
        cells = ["out of memory" if stage["failed"] else format_bytes(stage["peak_bytes"]) for stage in stages]
        report = first["report"]["figure"] if first["report"] else ""
        lines.append(f"| {'· ' if first['aside'] else ''}{first['name']} | {report} | {' | '.join(cells)} |")
    return lines


def matmul_table() -> list[str]:
    """The products from 512 to 8192 on the H200, and the speedup of tiles over one thread per element."""
    data = json.loads((RESULTS / "matmul_sizes.json").read_text())
    where = data["surroundings"]
    lines = [
        f"{where['gpu']}, torch {where['torch']}, driver {where['driver']}, {where['date'][:10]}.",
        "",
        "| rows, columns, terms | cuBLAS | `one_thread` | `tiled` | `triton` | `one_thread` over `tiled` |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    for entry in data["speed"]:
        seconds = {name: row["seconds"] for name, row in entry["phases"]["forward"]["rows"].items()}
        cells = [format_seconds(seconds[name]) for name in (NAIVE, "one_thread", "tiled", "triton")]
        times = seconds["one_thread"] / seconds["tiled"]
        lines.append(f"| {entry['dims']['M']:,} | {' | '.join(cells)} | {times:.2f}x |")
    return lines


def pythia_breakdown_table() -> list[str]:
    """The breakdown in the Pythia's report beside the right numbers, by arithmetic."""
    lines = ["| part | the report | right | claim |", "|---|--:|--:|---|"]
    for name, figure, size, claim in report_breakdown(load_config(pythia, pythia.config)):
        lines.append(f"| {name} | {figure} | {decimal(size, 'MB')} | {claim} |")
    return lines


def npt_configurations_table() -> list[str]:
    """The NPT report's table of configurations."""
    return _runs_table(npt)


def scent_solutions_table() -> list[str]:
    """The solutions of the decoder's report, and those of memfix."""
    return _runs_table(scent)


def scent_psnr_table() -> list[str]:
    """The PSNR of every decoder by steps: the median over seeds, and its range."""
    lines: list[str] = []
    for path in sorted(RESULTS.parent.glob("*/psnr_scent_decoder.json")):
        data = json.loads(path.read_text())
        where, decoders, training = data["surroundings"], data["decoders"], data["settings"]["training"]
        images = f"{training['batch_size']} of {data['settings']['data']['images']} images a step"
        curves = {name: [list(of_seed.items()) for of_seed in row["psnr_db"]] for name, row in decoders.items()}
        steps = [step for step, _ in next(iter(curves.values()))[0]]
        at = [0, len(steps) // 2, len(steps) - 1]
        machine = where["gpu"] if where["gpu"] != "none" else f"CPU, {where['machine']}"
        lines += [
            f"`--config {data['config']}`, {images}, {training['precision']}, {machine}, "
            f"torch {where['torch']}, {where['date'][:10]}:",
            "",
            f"| decoder | parameters | {' | '.join(f'step {int(steps[index]):,}' for index in at)} |",
            "|---|--:|" + "--:|" * len(at),
        ]
        for name, of_seeds in curves.items():
            cells = [_decibels([curve[index][1] for curve in of_seeds]) for index in at]
            lines.append(f"| `{name}` | {decoders[name]['parameters']:,} | {' | '.join(cells)} |")
        lines.append("")
    return lines[:-1]


def _decibels(of_seeds: list[float]) -> str:
    spread = f" ({min(of_seeds):.1f} to {max(of_seeds):.1f})" if len(of_seeds) > 1 else ""
    return f"{statistics.median(of_seeds):.1f} dB{spread}"


def _runs_table(incident: Incident) -> list[str]:
    """The configurations that a report compares, as ``memfix profile`` prints them, and the versions on the H200."""
    files = [folder / f"profile_{incident.name}.json" for folder in (RESULTS.parent / "cpu", RESULTS)]
    simulated, real = (kept_runs(incident.runs, file) for file in files)
    runs = [dataclasses.replace(run, kept=real.get(name)) for name, run in simulated.items()]
    columns = run_columns(runs, "simulated", parse_bytes(incident.capacity or 0))
    lines = [f"| {' | '.join(columns)} |", "|" + "".join("---|" if name in WORDS else "--:|" for name in columns)]
    lines += [f"| {' | '.join(cells)} |" for cells in zip(*columns.values(), strict=True)]
    where = json.loads(files[1].read_text())["surroundings"]
    return [*lines, "", f"{where['gpu']}, torch {where['torch']}, driver {where['driver']}, {where['date'][:10]}."]


def npt_picture() -> str:
    """A picture of the report's figures of its configurations beside a simulated step of each."""
    simulated = json.loads((RESULTS.parent / "cpu/profile_npt_weight_delta.json").read_text())["runs"]
    peaks = {run["name"]: run["peak_bytes"] for run in simulated}
    bars = []
    for name, gigabytes, size, item_size in (
        ("+ CPU offload", 78, "llama_8b", 4),
        ("+ fp16", 40, "llama_8b", 2),
        ("+ fewer layers", 35, "llama_8b", 2),
        ("small model", 2, "gpt2", 4),
    ):
        weights = SIZES[size].num_parameters * item_size
        parts = (("frozen weights", weights), ("the rest of a step", peaks[name] - weights))
        bars.append(Bar(f"the report: {name}", (("the report", gigabytes * 10**9),), f"~{gigabytes} GB"))
        bars.append(Bar("a step of the same run", parts, decimal(peaks[name])))
    return as_svg("What the report says, and what a step takes", bars)


def scent_picture() -> str:
    """A picture of a step of every solution of the decoder's report and of memfix beside the report's figures."""
    simulated = json.loads((RESULTS.parent / "cpu/profile_scent_decoder.json").read_text())["runs"]
    peaks = {run["name"]: run["peak_bytes"] for run in simulated}
    bars = []
    for name, gigabytes in (("original", 40), ("1: feed-forwards alone", 5), ("3: batch 16", 10)):
        bars.append(Bar(f"the report: {name}", (("the report", gigabytes * 10**9),), f"{gigabytes} GB"))
        bars.append(Bar("a step of the same run", (("a step", peaks[name]),), decimal(peaks[name])))
    others = dict.fromkeys(("2: attention to 256 latents", "4: checkpointing"), "a step")
    others |= dict.fromkeys(("our attention", "our attention and feed-forward", "both, checkpointed"), "our forms")
    bars += [Bar(f"a step: {name}", ((kind, peaks[name]),), decimal(peaks[name])) for name, kind in others.items()]
    return as_svg("What the report expects of its solutions, and what a step takes", bars)


def pythia_picture() -> str:
    """A picture of what the Pythia's report blamed and what its train steps take."""
    blamed = (("parameters", 5_500_000_000), ("gradients and Adam's states", 40_000_000_000))
    bars = [Bar("the report, before its fix: 50,000 words, batch 8", blamed, "5-6 GB and 40 GB+")]
    for words, batch_size in ((50_000, 8), (50_000, 32), (10_000, 32)):
        of = breakdown(PythiaConfig(vocab_size=words, dropout=0.1), batch_size=batch_size, context_length=128)
        parts = (
            ("parameters", of.parameters),
            ("gradients and Adam's states", of.adam_states),
            ("activations", of.activations),
            ("logits", of.logits),
        )
        bars.append(Bar(f"a step of the same model: {words:,} words, batch {batch_size}", parts, decimal(of.peak)))
    return as_svg("What the report blamed, and what takes the memory", bars)


def third_party_table() -> list[str]:
    """Other people's code by package: how close the predictions are to the H200's bytes."""
    data = json.loads((RESULTS / "third_party.json").read_text())
    rows = [row for row in data["workloads"].values() if "measured" in row]
    lines = [
        "| package | steps | byte-exact | within 5 % or its bounds | further off | wrongly exact | refused |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for package in dict.fromkeys(f"{row['package']} {row['version']}" for row in rows):
        outcomes = Counter(_outcome(row) for row in rows if f"{row['package']} {row['version']}" == package)
        counts = [outcomes[each] for each in ("equal", "near", "off", "wrong", "refused")]
        lines.append(f"| {package} | {outcomes.total()} | {' | '.join(map(str, counts))} |")
    return lines


def _outcome(row: dict[str, Any]) -> str:
    """The column of the table that a step of other people's code counts in."""
    if "error" in row:
        return "refused"
    predicted, measured = row["predicted"], row["measured"]
    if predicted == measured:
        return "equal"
    if row["exact"]:
        return "wrong"
    is_near = abs(predicted - measured) <= 0.05 * measured
    return "near" if is_near or row.get("at_least", predicted) <= measured <= row.get("at_most", predicted) else "off"


def ranks_table() -> list[str]:
    """The bytes of one rank of eight, predicted and measured in the same run on the H200."""
    data = json.loads((RESULTS / "ranks.json").read_text())
    where = data["surroundings"]
    lines = [
        f"On {where['gpu']} (torch {where['torch']}, {where['date'][:10]}); bytes above what is there before the step.",
        "",
        "| rank 0 of 8 | predicted | measured | off by |",
        "|---|--:|--:|--:|",
    ]
    for name, row in data["workloads"].items():
        kind = "" if row["exact"] else ", an estimate"
        off = row["predicted"] - row["measured"]
        lines.append(f"| {name} | {row['predicted']:,}{kind} | {row['measured']:,} | {off:+,} |")
    return lines


def oracle_table() -> list[str]:
    """The time and memory that the simulated meter itself takes."""
    data = json.loads((ROOT / "benchmarks/results/cpu/oracle.json").read_text())
    decoder = data["decoder"]
    lines = [
        "A 4B decoder (36 layers, width 2560, vocabulary 151,936) at 131,072 tokens, checkpointed, AdamW, two steps: "
        f"{decoder['seconds']:.1f} s and {format_bytes(decoder['process_peak_bytes'])} of RAM, for a predicted peak of "
        f"{format_bytes(decoder['base_bytes'] + decoder['peak_bytes'])}.",
        "",
        "| one small train step on fake tensors | operators | per operator |",
        "|---|--:|--:|",
    ]
    for name, row in data["overhead"].items():
        lines.append(f"| {name} | {row['operators']:,} | {row['microseconds_per_operator']:.0f} us |")
    return lines


def loss_speed_table() -> list[str]:
    """Linear cross entropy beside the peers on the H200: time over the three products alone, peak, gradient error."""
    data = json.loads((RESULTS / "linear_cross_entropy_tokens.json").read_text())
    entries, where = data["speed"], data["surroundings"]
    dims = entries[0]["dims"]
    errors = {check["values"]: check["rows"] for check in data["errors"]}
    headings = [f"{entry['dims']['N']:,} tokens" for entry in entries]
    headings += [f"error, {values} logits" for values in errors]
    lines = [
        f"{entries[0]['dtype']}, width {dims['D']:,}, vocabulary {dims['V']:,}, on {where['gpu']} "
        f"(torch {where['torch']}, {where['date'][:10]}); gradient errors are against float64.",
        "",
        f"| train step | {' | '.join(headings)} |",
        "|---|" + "--:|" * len(headings),
        _floor_line(entries) + " |" * len(errors),
    ]
    for name, source in data["sources"].items():
        cells = [_over_floor(entry, name) for entry in entries]
        cells += [_largest_error([rows], name, kind="gradient of") for rows in errors.values()]
        lines += [f"| {_label(name, source)} | {' | '.join(cells)} |"] if any(cells) else []
    return lines


def loss_sizes_table() -> list[str]:
    """The loss's forms on the H200 at other vocabularies and in float32."""
    data = json.loads((RESULTS / "linear_cross_entropy_sizes.json").read_text())
    entries = data["speed"]
    headings = [f"{entry['dims']['V']:,} classes, {entry['dtype']}" for entry in entries]
    lines = [
        f"| train step at {entries[0]['dims']['N']:,} tokens | {' | '.join(headings)} |",
        "|---|" + "--:|" * len(entries),
        _floor_line(entries),
    ]
    for name, source in data["sources"].items():
        cells = [_over_floor(entry, name) for entry in entries]
        lines += [f"| {_label(name, source)} | {' | '.join(cells)} |"] if any(cells) else []
    return lines


def _frontier() -> list[dict[str, Any]]:
    """The measurements of the loss over rows per chunk."""
    entries: list[dict[str, Any]] = json.loads((RESULTS / "linear_cross_entropy_frontier.json").read_text())["speed"]
    return entries


def _frontier_tokens() -> list[int]:
    return list(dict.fromkeys(entry["dims"]["N"] for entry in _frontier()))


def loss_frontier() -> list[str]:
    """Links to the pictures of time against peak, one for each number of tokens."""
    return [
        f"![Time against peak over rows per chunk, {tokens:,} tokens](../pictures/loss_frontier_{tokens}.svg)"
        for tokens in _frontier_tokens()
    ]


def loss_frontier_picture(tokens: int) -> str:
    """A picture of time against peak: memfix's and Liger's over rows per chunk, and Liger's at its default rows."""
    entries = [entry for entry in _frontier() if entry["dims"]["N"] == tokens]
    names = {"triton_rows": "triton", "liger_rows": "Liger", "liger": "Liger, rows of its own choice"}
    curves = [Curve(shown, _frontier_points(entries, name)) for name, shown in names.items()]
    dims = entries[0]["dims"]
    title = f"{tokens:,} tokens, width {dims['D']:,}, {dims['V']:,} classes, by rows per chunk"
    return as_frontier_svg(title, [curve for curve in curves if curve.points], floor="the three products alone")


def _frontier_points(entries: list[dict[str, Any]], name: str) -> tuple[Point, ...]:
    """The points of one curve in the order of ``entries``; a point with the peak of an earlier one is left out."""
    is_by_rows = name.endswith("_rows")
    found: dict[int, Point] = {}
    for entry in entries:
        row = _train(entry).get(name, {})
        if "times_floor" in row:
            rows = f"{min(entry['dims']['rows_per_chunk'], entry['dims']['N']):,}" if is_by_rows else ""
            found.setdefault(row["peak_bytes"], Point(row["peak_bytes"], row["times_floor"], rows))
    return tuple(found.values())


def loss_small_vocabulary_table() -> list[str]:
    """Small vocabularies on the H200 over rows per chunk."""
    entries = json.loads((RESULTS / "linear_cross_entropy_small_vocabulary.json").read_text())["speed"]
    shapes: dict[tuple[int, ...], dict[str, str]] = {}
    for entry in entries:
        dims = entry["dims"]
        cells = shapes.setdefault((dims["N"], dims["D"], dims["V"]), {})
        for name in _train(entry):
            if name == FLOOR:
                continue
            shown = f"{name}, {dims['rows_per_chunk']:,} rows" if "_rows" in name else name
            shown = f"{name}, one chunk" if "_rows" in name and dims["rows_per_chunk"] == dims["N"] else shown
            cells.setdefault(shown, _over_floor(entry, name))
    columns = list(dict.fromkeys(name for cells in shapes.values() for name in cells))
    headings = [f"{n:,} tokens, width {d:,}, {v:,} classes" for n, d, v in shapes]
    lines = [f"| train step over the three products | {' | '.join(headings)} |", "|---|" + "--:|" * len(headings)]
    lines += [f"| {name} | {' | '.join(cells.get(name, '') for cells in shapes.values())} |" for name in columns]
    return lines


def feed_forward_speed_table() -> list[str]:
    """The gated feed-forward layer beside its peers on the H200: train step over naive's, peak, largest error."""
    data = json.loads((RESULTS / "geglu_feed_forward_incident.json").read_text())
    where, entries = data["surroundings"], data["speed"]
    headings = [f"{re.findall('activation=([a-z]+)', entry['settings'])[0]}, {entry['dtype']}" for entry in entries]
    errors = [check["rows"] for check in data["errors"] if check["dtype"] == "bfloat16"]
    lines = [
        f"Train step, and its peak above the inputs, on {where['gpu']} (torch {where['torch']}, "
        f"triton {where['triton']}, {where['date'][:10]}); errors are against float64.",
        "",
        f"| | {' | '.join(headings)} | largest error, bfloat16 |",
        "|---|" + "--:|" * (len(headings) + 1),
    ]
    for name, source in data["sources"].items():
        cells = [_over_naive_cell(_train(entry)[name]) for entry in entries]
        lines.append(f"| {_label(name, source)} | {' | '.join(cells)} | {_largest_error(errors, name)} |")
    return lines


def attention_speed_table() -> list[str]:
    """Attention on the H200: naive, memfix's forms, and the fastest of torch's own backends."""
    data = json.loads((RESULTS / "attention_shapes.json").read_text())
    where = data["surroundings"]
    lines = [
        f"Train step / forward on {where['gpu']} (torch {where['torch']}, {where['date'][:10]}).",
        "",
        "| | `naive` | `sdpa` | torch's fastest | `sdpa` over it |",
        "|---|--:|--:|--:|--:|",
    ]
    for entry in data["speed"]:
        columns = []
        for rows in _both(entry):
            seconds = {name: row["seconds"] for name, row in rows.items() if "seconds" in row}
            fastest = min(time for name, time in seconds.items() if name.startswith("torch"))
            columns.append((*map(format_seconds, (seconds[NAIVE], seconds["sdpa"], fastest)),
                            f"{seconds['sdpa'] / fastest:.2f}x"))  # fmt: skip
        cells = " | ".join(" / ".join(pair) for pair in zip(*columns, strict=True))
        lines.append(f"| {entry['case'].replace('_bf16', '').partition(',')[0]}, {entry['dtype']} | {cells} |")
    return lines


def _over_naive_cell(row: dict[str, Any]) -> str:
    over = f", {row['times_naive']:.2f}x" if "times_naive" in row else ""
    return f"{format_seconds(row['seconds'])}{over}, {format_bytes(row['peak_bytes'])}"


def npt_speed_table() -> list[str]:
    """The modulated layer beside its peers on the H200: eight layers in one step, over the products with the weight."""
    both = [json.loads((RESULTS / f"npt_linear_{name}.json").read_text()) for name in ("layers", "lora")]
    where, entries = both[0]["surroundings"], both[0]["speed"]
    headings = [_npt_shape(entry["dims"]) for entry in entries]
    floors = " | ".join(" / ".join(format_seconds(rows[FLOOR]["seconds"]) for rows in _both(e)) for e in entries)
    lines = [
        f"Train step / forward of a layer over the products with its weight alone, and the train step's peak, on "
        f"{where['gpu']} (torch {where['torch']}, {where['date'][:10]}), bfloat16, weight frozen, "
        f"{entries[0]['calls']} layers in a step.",
        "",
        f"| | {' | '.join(headings)} |",
        "|---|" + "--:|" * len(headings),
        f"| products with the weight | {floors} |",
    ]
    for data in both:
        for name, source in data["sources"].items():
            cells = [_times_floor_cell(entry, name) for entry in data["speed"]]
            if any(cells) and (data is both[0] or name not in both[0]["speed"][0]["phases"]["train"]["rows"]):
                lines.append(f"| {_label(name, source)} | {' | '.join(cells)} |")
    return lines


def _npt_shape(dims: dict[str, int]) -> str:
    return f"{dims['B'] * dims['S']:,} tokens, F {dims['F']:,}, R {dims['R']}"


def _times_floor_cell(entry: dict[str, Any], name: str) -> str:
    """The times of train step and forward over the floor, and the train step's peak; or why there are none."""
    train, forward = (rows.get(name) for rows in _both(entry))
    if train is None or forward is None:
        return ""
    trouble = train.get("trouble") or forward.get("trouble")
    if trouble is not None:
        return str(trouble)
    return f"{train['times_floor']:.2f}x / {forward['times_floor']:.2f}x, {format_bytes(train['peak_bytes'])}"


def _both(entry: dict[str, Any]) -> list[dict[str, dict[str, Any]]]:
    return [entry["phases"][phase]["rows"] for phase in ("train", "forward")]


def _train(entry: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows of the train step that ``benchmarks.compare`` measured at one shape."""
    rows: dict[str, dict[str, Any]] = entry["phases"]["train"]["rows"]
    return rows


def _label(name: str, source: str) -> str:
    return f"`{name}`" if source.startswith("memfix") else f"{name}, {source}"


def _floor_line(entries: list[dict[str, Any]]) -> str:
    cells = " | ".join(format_seconds(_train(entry)[FLOOR]["seconds"]) for entry in entries)
    return f"| three products alone | {cells} |"


def _over_floor(entry: dict[str, Any], name: str) -> str:
    row = _train(entry).get(name)
    if row is None:
        return ""
    return row.get("trouble") or f"{row['times_floor']:.2f}x, {format_bytes(row['peak_bytes'])}"


def _largest_error(checks: list[dict[str, Any]], name: str, kind: str = "") -> str:
    """The largest error of one contender, over tensors whose name starts with ``kind``."""
    rows = [check[name] for check in checks if name in check and "trouble" not in check[name]]
    found = [error for row in rows for tensor, error in row.items() if tensor.startswith(kind)]
    return f"{max(found):.1e}" if found else ""


def kda_speed_table() -> list[str]:
    """KDA beside its peers on the H200: times, peaks and errors; and the time of ``streamed`` over dense ``naive``."""
    tables = {table: json.loads((RESULTS / f"kda_{table}.json").read_text()) for table in _KDA_GATES}
    data = tables["shapes"]
    where, errors = data["surroundings"], [check for table in tables.values() for check in table["errors"]]
    entries = {
        f"{_kda_shape(entry['dims'])}, {entry['dtype']}{gates}": entry
        for table, gates in _KDA_GATES.items()
        for entry in tables[table]["speed"]
    }
    dtypes = list(dict.fromkeys(entry["dtype"] for entry in entries.values()))
    headings = [*entries, *(f"error, {dtype}" for dtype in dtypes)]
    lines = [
        "Train step, and forward alone, each with its peak above the inputs, "
        f"on {where['gpu']} (torch {where['torch']}, triton {where['triton']}, {where['date'][:10]}). g is float32; "
        "errors are the largest of o, the final state and all gradients, against float64.",
        "",
        f"| | {' | '.join(headings)} |",
        "|---|" + "--:|" * len(headings),
    ]
    for name, source in data["sources"].items():
        cells = [_times_and_peaks(entry, name) for entry in entries.values()]
        cells += [
            _largest_error([check["rows"] for check in errors if check["dtype"] == dtype], name) for dtype in dtypes
        ]
        if any(cells):
            lines.append(f"| {_label(name, source)} | {' | '.join(cells)} |")
    chunks = json.loads((RESULTS / "kda_chunks.json").read_text())
    (at_64,) = (entry for entry in chunks["speed"] if entry["dims"]["chunk_size"] == 64)
    spreads = [f"{phase} {_over_naive(of['rows']['streamed'])}" for phase, of in at_64["phases"].items()]
    return [*lines, "", f"`streamed` in chunks of 64 over dense `naive`, float32: {', '.join(spreads)}."]


_KDA_GATES = {
    "shapes": "",
    "weak_gates": ", gates above -0.05",
    "strong_gates": ", gates evenly down to -5",
    "steep_gates": ", gates evenly down to -20",
}
"""The text about the gates in the column headings, by table of ``benchmarks.compare``."""


def _kda_shape(dims: dict[str, int]) -> str:
    return f"B{dims['B']} T{dims['T']} H{dims['H']} d{dims['K']}"


def _over_naive(row: dict[str, Any]) -> str:
    if "trouble" in row:
        return str(row["trouble"])
    pairs = row["pairs_over_naive"]
    return f"{pairs['median']:.2f}x ({pairs['low']:.2f} to {pairs['high']:.2f})"


def _times_and_peaks(entry: dict[str, Any], name: str) -> str:
    rows = [entry["phases"][phase]["rows"].get(name) for phase in ("train", "forward")]
    if rows[0] is None:
        return ""
    told = [
        ("wrong" if row["trouble"].startswith("wrong") else "not taken")
        if "trouble" in row
        else f"{format_seconds(row['seconds'])}, {format_bytes(row['peak_bytes'])}"
        for row in rows
    ]
    return "<br>".join(dict.fromkeys(told))


def rope_speed_table(name: str = "shapes") -> list[str]:
    """Rope beside its peers on the H200, over a copy of the same bytes."""
    data = json.loads((RESULTS / f"rope_{name}.json").read_text())
    where, entries = data["surroundings"], data["speed"]
    dtypes = {entry["dtype"] for entry in entries}
    floors = " | ".join(" / ".join(format_seconds(rows[FLOOR]["seconds"]) for rows in _both(e)) for e in entries)
    lines = [
        f"Train step / forward over a copy of the same bytes, and the train step's peak above its inputs, on "
        f"{where['gpu']} (torch {where['torch']}, {where['date'][:10]}), {', '.join(sorted(dtypes))}; errors are "
        "against float64.",
        "",
        f"| | {' | '.join(_rope_shape(entry['dims']) for entry in entries)} | largest error |",
        "|---|" + "--:|" * (len(entries) + 1),
        f"| a copy for each direction / one copy | {floors} | |",
    ]
    errors = [check["rows"] for check in data["errors"]]
    for name, source in data["sources"].items():
        cells = [_times_floor_cell(entry, name) for entry in entries]
        if any(cells):
            lines.append(f"| {_label(name, source)} | {' | '.join(cells)} | {_largest_error(errors, name)} |")
    return lines


def _rope_shape(dims: dict[str, int]) -> str:
    return f"B{dims['B']} T{dims['T']} H{dims['H']} d{dims['D']}"


def nsa_speed_table() -> list[str]:
    """Native sparse attention beside flash-linear-attention on the H200: times, peaks and errors."""
    data = json.loads((RESULTS / "nsa_shapes.json").read_text())
    where, entries = data["surroundings"], data["speed"]
    errors = [check["rows"] for check in data["errors"]]
    lines = [
        "Train step, and forward alone, each with its peak above the inputs, "
        f"on {where['gpu']} (torch {where['torch']}, triton {where['triton']}, {where['date'][:10]}), bfloat16; errors "
        "are against float64.",
        "",
        f"| | {' | '.join(_nsa_shape(entry) for entry in entries)} | largest error |",
        "|---|" + "--:|" * (len(entries) + 1),
    ]
    for name, source in data["sources"].items():
        cells = [_times_and_peaks(entry, name) for entry in entries]
        lines.append(f"| {_label(name, source)} | {' | '.join(cells)} | {_largest_error(errors, name)} |")
    return lines


def _nsa_shape(entry: dict[str, Any]) -> str:
    dims = entry["dims"]
    branches = "two branches" if dims["window"] == 1 else "three branches"
    return f"{branches}, T{dims['T']} H{dims['G'] * dims['R']} over {dims['G']}, d{dims['D']}"


def vocabulary_speed_table() -> list[str]:
    """Counting words beside other implementations."""
    return _host_table("vocabulary", "words")


def batches_speed_table() -> list[str]:
    """Streamed batches beside a list of all of them."""
    return _host_table("batches", "tokens")


def _host_table(op: str, items: str) -> list[str]:
    data = json.loads((RESULTS.parent / f"cpu/{op}.json").read_text())
    lines = [f"| input | contender | {items} a second | time | CPU time | memory | ratio of times | of CPU times |"]
    lines.append("|---|---|--:|--:|--:|--:|--:|--:|")
    for result in data["results"]:
        for name, row in result["rows"].items():
            times = " | ".join(format_seconds(row[key]) for key in ("seconds", "cpu_seconds"))
            rate = f"{row['items'] / row['seconds'] / 1e6:.1f} M" if row["items"] else ""
            ratios = f"{row['ratio_seconds']:.2f} | {row['ratio_cpu_seconds']:.2f}"
            memory = format_bytes(int(row["resident_bytes"]))
            lines.append(f"| {result['title']} | `{name}` | {rate} | {times} | {memory} | {ratios} |")
    where = data["surroundings"]
    lines += [
        "",
        f"{where['machine']}, Python {where['python']}, torch {where['torch']}, tokenizers {where['tokenizers']}.",
    ]
    return lines


def gate_power_table() -> list[str]:
    """How often the time gate fails, by how much slower the code was made, on each measured machine."""
    measured = [json.loads(path.read_text()) for path in sorted(RESULTS.parent.glob("*/gate_power*.json"))]
    shares = sorted({share for data in measured for share in data["planted_percent"]}, key=float)
    headings = [f"{share} % slower" if float(share) else "identical" for share in shares]
    lines = [f"| gates that fail (the longest took) | {' | '.join(headings)} |", "|---|" + "--:|" * len(headings)]
    for data in measured:
        rows = data["planted_percent"]
        where = next(iter(rows.values()))["surroundings"]
        machine = where["gpu"] if data["device"] == "cuda" else f"CPU, {where['machine']}"
        cells = [
            f"{rows[share]['failed']} of {rows[share]['gates']} ({rows[share]['longest_s']:.0f} s)"
            if share in rows
            else ""
            for share in shares
        ]
        what = f"`{data['form']}` of `{data['op']}`" + (" alone" if data["only"] else "")
        lines.append(f"| {what}, {machine} | {' | '.join(cells)} |")
    return lines


def cheats_table() -> list[str]:
    """In how many places of the gate every cheat is caught, on each measured machine."""
    measured = [json.loads(path.read_text()) for path in sorted(RESULTS.parent.glob("cpu/cheat_margins_*.json"))]
    machines = [f"{data['machine']}, torch {data['surroundings']['torch']}" for data in measured]
    lines = [f"| cheat | op | caught by | {' | '.join(machines)} |", "|---|---|---|" + "--:|" * len(machines)]
    counts = [{row["cheat"]: f"{row['shows']} of {row['places']}" for row in data["cheats"]} for data in measured]
    rows = {row["cheat"]: row for data in measured for row in data["cheats"]}
    for row in sorted(rows.values(), key=lambda row: (row["op"], row["cheat"])):
        cells = " | ".join(of_machine.get(row["cheat"], "") for of_machine in counts)
        lines.append(f"| `{row['cheat']}` | `{row['op']}` | {row['check']} | {cells} |")
    return lines


def selftest_table() -> list[str]:
    """The verdicts on regressions that were planted in every op, by op and by kind."""
    columns = ("planted", "caught", "equal", "undecided", "missed", "never run")
    by_name: dict[str, Counter[str]] = {}
    of_kinds: dict[str, Counter[str]] = {}
    told: dict[str, None] = {}
    for path in sorted((RESULTS.parent / "cpu/selftest").glob("*.json")):
        data = json.loads(path.read_text())
        where = data["surroundings"]
        told[f"{where['machine']}, torch {where['torch']}, {where['date'][:10]}"] = None
        for op, row in data["ops"].items():
            by_name[f"`{op}`"] = _asked(row)
            for kind, some in row["kinds"].items():
                of_kinds.setdefault(kind, Counter()).update(_asked(some))
    rows = {**by_name, **of_kinds, "all": sum(by_name.values(), Counter())}
    lines = [
        f"{'; '.join(told)}.",
        "",
        f"| regression | {' | '.join(columns)} | share caught |",
        "|---|" + "--:|" * (len(columns) + 1),
    ]
    for name, row in rows.items():
        decided = row["caught"] + row["missed"]
        share = f"{100 * row['caught'] / decided:.1f} %" if decided else ""
        lines.append(f"| {name} | {' | '.join(str(row[column]) for column in columns)} | {share} |")
    return lines


def _asked(row: dict[str, Any]) -> Counter[str]:
    counts = Counter({name: number for name, number in row.items() if isinstance(number, int)})
    counts["planted"] -= counts.pop("not asked")
    return counts


def versions_table() -> list[str]:
    """The test results with every torch that ``ci/versions`` was run with."""
    found = [json.loads(path.read_text()) for path in sorted((RESULTS.parent / "versions").glob("*.json"))]
    keys = ("torch", "python", "numpy", "triton")
    found.sort(key=lambda data: [[int(number) for number in re.findall(r"\d+", data[key])[:3]] for key in keys])
    lines = [
        "| torch | Python | numpy | Triton | machine | passed | failed | skipped | date |",
        "|---|---|---|---|---|--:|--:|--:|---|",
    ]
    for data in found:
        machine = data["machine"] + ("" if data["gpu"] == "none" else f", {data['gpu']}")
        versions = " | ".join(data[key] for key in keys)
        counts = " | ".join(f"{data[key]:,}" for key in ("passed", "failed", "skipped"))
        lines.append(f"| {versions} | {machine} | {counts} | {data['date'][:10]} |")
    return lines


def _naive_first(keys: Any) -> list[tuple[str, str, str, str]]:
    return sorted(keys, key=lambda key: (key[0], key[1] != NAIVE, *key[1:]))


TABLES = {
    "best": best_table,
    "incidents": incidents_table,
    "ops": ops_table,
    "one_hot": one_hot_figure,
    "npt": npt_table,
    "npt_speed": npt_speed_table,
    "feed_forward_speed": feed_forward_speed_table,
    "feed_forward": feed_forward_table,
    "attention": attention_table,
    "attention_speed": attention_speed_table,
    "loss_speed": loss_speed_table,
    "loss_sizes": loss_sizes_table,
    "loss_frontier": loss_frontier,
    "loss_small_vocabulary": loss_small_vocabulary_table,
    "kda_speed": kda_speed_table,
    "rope_speed": rope_speed_table,
    "rope_layers": functools.partial(rope_speed_table, "layers"),
    "nsa_speed": nsa_speed_table,
    "gate_power": gate_power_table,
    "vocabulary_speed": vocabulary_speed_table,
    "batches_speed": batches_speed_table,
    "profile": profile_table,
    "matmul_speed": matmul_table,
    "npt_configurations": npt_configurations_table,
    "scent_solutions": scent_solutions_table,
    "scent_psnr": scent_psnr_table,
    "pythia_breakdown": pythia_breakdown_table,
    "pythia_profile": pythia_profile_table,
    "agreement": agreement_table,
    "third_party": third_party_table,
    "ranks": ranks_table,
    "oracle": oracle_table,
    "cheats": cheats_table,
    "selftest": selftest_table,
    "versions": versions_table,
}


PICTURES = {
    "docs/pictures/npt_weight_delta.svg": npt_picture,
    "docs/pictures/pythia_vocabulary.svg": pythia_picture,
    "docs/pictures/scent_decoder.svg": scent_picture,
}


def pictures() -> dict[str, Callable[[], str]]:
    """Return the functions that draw the manual's pictures, by path."""
    of_tokens = {
        f"docs/pictures/loss_frontier_{tokens}.svg": functools.partial(loss_frontier_picture, tokens)
        for tokens in _frontier_tokens()
    }
    return {**PICTURES, **of_tokens}


def filled(texts: dict[Path, str]) -> dict[Path, str]:
    """Return ``texts`` (by page) with every table between its markers regenerated. A table may be in several places."""
    found = {path: set(re.findall(r"<!-- table: (\w+) -->", text)) for path, text in texts.items()}
    placed = set().union(*found.values())
    if placed != set(TABLES):
        lost, unknown = sorted(set(TABLES) - placed), sorted(placed - set(TABLES))
        raise SystemExit(f"tables without a place: {lost}; places without a table: {unknown}")
    blocks = {name: "\n".join([f"<!-- table: {name} -->", *table(), "<!-- end -->"]) for name, table in TABLES.items()}
    return {
        path: re.sub(r"<!-- table: (\w+) -->.*?<!-- end -->", lambda match: blocks[match[1]], text, flags=re.S)
        for path, text in texts.items()
    }


def stale() -> dict[Path, str]:
    """Return the up-to-date text of every page and picture that is out of date."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    made = filled({path: path.read_text(encoding="utf-8") for path in pages})
    made |= {ROOT / name: picture() for name, picture in pictures().items()}
    return {path: text for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text}


def main() -> None:
    for path, text in stale().items():
        print(f"{path.relative_to(ROOT)} is stale")
        if "--write" in sys.argv[1:]:
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
