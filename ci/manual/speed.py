"""Tables of times: every op beside its peers, on the H200 and on a CPU."""

from __future__ import annotations

import re
from typing import Any

from memfix.contract import FLOOR
from memfix.laws import NAIVE
from memfix.units import format_bytes, format_seconds

from .stored import cpu, gpu_of, h200, train_rows


def loss_speed_table() -> list[str]:
    """Linear cross entropy beside the peers on the H200: time over the three products alone, peak, gradient error."""
    data = h200("linear_cross_entropy_tokens")
    entries = data["speed"]
    dims = entries[0]["dims"]
    errors = {check["values"]: check["rows"] for check in data["errors"]}
    headings = [f"{entry['dims']['N']:,} tokens" for entry in entries]
    headings += [f"error, {values} logits" for values in errors]
    lines = [
        f"{entries[0]['dtype']}, width {dims['D']:,}, vocabulary {dims['V']:,}, on {gpu_of(data)}; "
        "gradient errors are against float64.",
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
    data = h200("linear_cross_entropy_sizes")
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


def loss_small_vocabulary_table() -> list[str]:
    """Small vocabularies on the H200 over rows per chunk."""
    entries = h200("linear_cross_entropy_small_vocabulary")["speed"]
    shapes: dict[tuple[int, ...], dict[str, str]] = {}
    for entry in entries:
        dims = entry["dims"]
        cells = shapes.setdefault((dims["N"], dims["D"], dims["V"]), {})
        for name in train_rows(entry):
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
    data = h200("geglu_feed_forward_incident")
    entries = data["speed"]
    headings = [f"{re.findall('activation=([a-z]+)', entry['settings'])[0]}, {entry['dtype']}" for entry in entries]
    errors = [check["rows"] for check in data["errors"] if check["dtype"] == "bfloat16"]
    lines = [
        f"Train step, and its peak above the inputs, on {gpu_of(data, 'torch', 'triton')}; errors are against float64.",
        "",
        f"| | {' | '.join(headings)} | largest error, bfloat16 |",
        "|---|" + "--:|" * (len(headings) + 1),
    ]
    for name, source in data["sources"].items():
        cells = [_over_naive_cell(train_rows(entry)[name]) for entry in entries]
        lines.append(f"| {_label(name, source)} | {' | '.join(cells)} | {_largest_error(errors, name)} |")
    return lines


def _over_naive_cell(row: dict[str, Any]) -> str:
    over = f", {row['times_naive']:.2f}x" if "times_naive" in row else ""
    return f"{format_seconds(row['seconds'])}{over}, {format_bytes(row['peak_bytes'])}"


def attention_speed_table() -> list[str]:
    """Attention on the H200: naive, memfix's forms, and the fastest of torch's own backends."""
    data = h200("attention_shapes")
    lines = [
        f"Train step / forward on {gpu_of(data)}.",
        "",
        "| | `naive` | `sdpa` | torch's fastest | `sdpa` over it |",
        "|---|--:|--:|--:|--:|",
    ]
    for entry in data["speed"]:
        columns = []
        for rows in both_rows(entry):
            seconds = {name: row["seconds"] for name, row in rows.items() if "seconds" in row}
            fastest = min(time for name, time in seconds.items() if name.startswith("torch"))
            columns.append((*map(format_seconds, (seconds[NAIVE], seconds["sdpa"], fastest)),
                            f"{seconds['sdpa'] / fastest:.2f}x"))  # fmt: skip
        cells = " | ".join(" / ".join(pair) for pair in zip(*columns, strict=True))
        lines.append(f"| {entry['case'].replace('_bf16', '').partition(',')[0]}, {entry['dtype']} | {cells} |")
    return lines


def npt_speed_table() -> list[str]:
    """The modulated layer beside its peers on the H200: eight layers in one step, over the products with the weight."""
    both = [h200(f"npt_linear_{name}") for name in ("layers", "lora")]
    entries = both[0]["speed"]
    headings = [_npt_shape(entry["dims"]) for entry in entries]
    floors = " | ".join(" / ".join(format_seconds(rows[FLOOR]["seconds"]) for rows in both_rows(e)) for e in entries)
    lines = [
        f"Train step / forward of a layer over the products with its weight alone, and the train step's peak, on "
        f"{gpu_of(both[0])}, bfloat16, weight frozen, "
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


_KDA_GATES = {
    "shapes": "",
    "weak_gates": ", gates above -0.05",
    "strong_gates": ", gates evenly down to -5",
    "steep_gates": ", gates evenly down to -20",
}
"""The text about the gates in the column headings, by table of ``benchmarks.compare``."""


def kda_speed_table() -> list[str]:
    """KDA beside its peers on the H200: times, peaks and errors; and the time of ``streamed`` over dense ``naive``."""
    tables = {table: h200(f"kda_{table}") for table in _KDA_GATES}
    data = tables["shapes"]
    errors = [check for table in tables.values() for check in table["errors"]]
    entries = {
        f"{_kda_shape(entry['dims'])}, {entry['dtype']}{gates}": entry
        for table, gates in _KDA_GATES.items()
        for entry in tables[table]["speed"]
    }
    dtypes = list(dict.fromkeys(entry["dtype"] for entry in entries.values()))
    headings = [*entries, *(f"error, {dtype}" for dtype in dtypes)]
    lines = [
        "Train step, and forward alone, each with its peak above the inputs, "
        f"on {gpu_of(data, 'torch', 'triton')}. g is float32; "
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
    chunks = h200("kda_chunks")
    (at_64,) = (entry for entry in chunks["speed"] if entry["dims"]["chunk_size"] == 64)
    spreads = [f"{phase} {_over_naive(of['rows']['streamed'])}" for phase, of in at_64["phases"].items()]
    return [*lines, "", f"`streamed` in chunks of 64 over dense `naive`, float32: {', '.join(spreads)}."]


def _kda_shape(dims: dict[str, int]) -> str:
    return f"B{dims['B']} T{dims['T']} H{dims['H']} d{dims['K']}"


def _over_naive(row: dict[str, Any]) -> str:
    if "trouble" in row:
        return str(row["trouble"])
    pairs = row["pairs_over_naive"]
    return f"{pairs['median']:.2f}x ({pairs['low']:.2f} to {pairs['high']:.2f})"


def rope_speed_table(name: str = "shapes") -> list[str]:
    """Rope beside its peers on the H200, over a copy of the same bytes."""
    data = h200(f"rope_{name}")
    entries = data["speed"]
    dtypes = {entry["dtype"] for entry in entries}
    floors = " | ".join(" / ".join(format_seconds(rows[FLOOR]["seconds"]) for rows in both_rows(e)) for e in entries)
    lines = [
        f"Train step / forward over a copy of the same bytes, and the train step's peak above its inputs, on "
        f"{gpu_of(data)}, {', '.join(sorted(dtypes))}; errors are "
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
    data = h200("nsa_shapes")
    entries = data["speed"]
    errors = [check["rows"] for check in data["errors"]]
    lines = [
        "Train step, and forward alone, each with its peak above the inputs, "
        f"on {gpu_of(data, 'torch', 'triton')}, bfloat16; errors "
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


def matmul_table() -> list[str]:
    """The products from 512 to 8192 on the H200, and the speedup of tiles over one thread per element."""
    data = h200("matmul_sizes")
    lines = [
        f"{gpu_of(data, 'torch', 'driver')}.",
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


def vocabulary_speed_table() -> list[str]:
    """Counting words beside other implementations."""
    return _host_table("vocabulary", "words")


def batches_speed_table() -> list[str]:
    """Streamed batches beside a list of all of them."""
    return _host_table("batches", "tokens")


def _host_table(op: str, items: str) -> list[str]:
    data = cpu(op)
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


def _label(name: str, source: str) -> str:
    return f"`{name}`" if source.startswith("memfix") else f"{name}, {source}"


def _floor_line(entries: list[dict[str, Any]]) -> str:
    cells = " | ".join(format_seconds(train_rows(entry)[FLOOR]["seconds"]) for entry in entries)
    return f"| three products alone | {cells} |"


def _over_floor(entry: dict[str, Any], name: str) -> str:
    row = train_rows(entry).get(name)
    if row is None:
        return ""
    return row.get("trouble") or f"{row['times_floor']:.2f}x, {format_bytes(row['peak_bytes'])}"


def _times_floor_cell(entry: dict[str, Any], name: str) -> str:
    """The times of train step and forward over the floor, and the train step's peak; or why there are none."""
    train, forward = (rows.get(name) for rows in both_rows(entry))
    if train is None or forward is None:
        return ""
    trouble = train.get("trouble") or forward.get("trouble")
    if trouble is not None:
        return str(trouble)
    return f"{train['times_floor']:.2f}x / {forward['times_floor']:.2f}x, {format_bytes(train['peak_bytes'])}"


def _times_and_peaks(entry: dict[str, Any], name: str) -> str:
    rows = [entry["phases"][phase]["rows"].get(name) for phase in ("train", "forward")]
    if rows[0] is None:
        return ""
    cells = [
        ("wrong" if row["trouble"].startswith("wrong") else "not taken")
        if "trouble" in row
        else f"{format_seconds(row['seconds'])}, {format_bytes(row['peak_bytes'])}"
        for row in rows
    ]
    return "<br>".join(dict.fromkeys(cells))


def both_rows(entry: dict[str, Any]) -> list[dict[str, dict[str, Any]]]:
    return [entry["phases"][phase]["rows"] for phase in ("train", "forward")]


def _largest_error(checks: list[dict[str, Any]], name: str, kind: str = "") -> str:
    """The largest error of one contender, over tensors whose name starts with ``kind``."""
    rows = [check[name] for check in checks if name in check and "trouble" not in check[name]]
    found = [error for row in rows for tensor, error in row.items() if tensor.startswith(kind)]
    return f"{max(found):.1e}" if found else ""
