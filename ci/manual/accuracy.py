"""Tables about memfix itself: how accurate its predictions are, what its checks catch, and what they cost."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from memfix.contract import FLOOR
from memfix.units import format_bytes

from .stored import all_results, cpu, gpu_of, h200, train_rows


def agreement_table() -> list[str]:
    """Peaks of the loss's train steps as counted by the H200's allocator, beside the simulated peaks."""
    data = h200("linear_cross_entropy_tokens")
    rows = [
        (entry["dims"]["N"], name, row["simulated_bytes"], row["peak_bytes"])
        for entry in data["speed"]
        for name, row in train_rows(entry).items()
        if name != FLOOR and "simulated_bytes" in row and row.get("peak_bytes") is not None
    ]
    same = sum(simulated == counted for *_, simulated, counted in rows)
    lines = [
        f"{same} of {len(rows)} train steps agree to the byte on {gpu_of(data, 'torch', 'driver')}.",
        "",
        "| train step at 131,072 tokens | simulated bytes | H200 allocator | difference |",
        "|---|--:|--:|--:|",
    ]
    for tokens, name, simulated, counted in rows:
        if tokens == 131_072:
            lines.append(f"| `{name}` | {simulated:,} | {counted:,} | {simulated - counted:+,} |")
    return lines


def third_party_table() -> list[str]:
    """Other people's code by package: how close the predictions are to the H200's bytes."""
    data = h200("third_party")
    rows = [row for row in data["workloads"].values() if "measured" in row]
    return _outcomes("package", "steps", [(f"{row['package']} {row['version']}", row) for row in rows])


def architectures_table() -> list[str]:
    """The architectures of transformers by task: how close the predictions are to the H200's bytes."""
    data = h200("architectures")
    rows = data["workloads"].values()
    left_out = sum("left_out" in row for row in rows)
    where = f"transformers {data['measured_on']['transformers']}, {gpu_of(data, 'torch', 'driver')}"
    return [
        f"{where}. {left_out} of {len(rows)} do not run in a small configuration.",
        "",
        *_outcomes("task", "architectures", [(row["task"], row) for row in rows if "left_out" not in row]),
    ]


def packages_table() -> list[str]:
    """The architectures of other packages by task: how close the predictions are to the H200's bytes. Empty until they
    were measured."""
    found = all_results("h200/architectures_*.json")
    lines, rows = [], []
    for data in found:
        ((package, version),) = data["measured_on"].items()
        of_package = data["workloads"].values()
        ran = [row for row in of_package if "measured" in row]
        where = gpu_of(data, "torch", "driver")
        left_out = len(of_package) - len(ran)
        lines.append(f"- {package} {version}, {where}: {left_out} of {len(of_package)} do not run in what was tried.")
        rows += [(f"{package}, {row['task']}", row) for row in ran]
    return [*lines, "", *_outcomes("package and task", "architectures", rows)] if found else []


def _outcomes(heading: str, counted: str, rows: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Return a table of the outcomes of ``rows``, each with the name of its group, and of all together."""
    lines = [
        f"| {heading} | {counted} | byte-exact | within 5 % or its bounds | further off | wrongly exact | refused |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    groups = dict.fromkeys(group for group, _ in rows)
    for name in (*groups, "all"):
        outcomes = Counter(_outcome(row) for group, row in rows if name in (group, "all"))
        counts = [outcomes[each] for each in ("equal", "near", "off", "wrong", "refused")]
        lines.append(f"| {name} | {outcomes.total()} | {' | '.join(map(str, counts))} |")
    return lines


def _outcome(row: dict[str, Any]) -> str:
    """Return the column in which a step of other people's code counts."""
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
    data = h200("ranks")
    lines = [
        f"On {gpu_of(data)}; bytes above what is there before the step.",
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
    data = cpu("oracle")
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


def gate_power_table() -> list[str]:
    """How often the time gate fails, by how much slower the code was made, on each measured machine."""
    measured = all_results("*/gate_power*.json")
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
    measured = all_results("cpu/cheat_margins_*.json")
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
    machines: dict[str, None] = {}
    for data in all_results("cpu/selftest/*.json"):
        where = data["surroundings"]
        machines[f"{where['machine']}, torch {where['torch']}, {where['date'][:10]}"] = None
        for op, row in data["ops"].items():
            by_name[f"`{op}`"] = _counts(row)
            for kind, some in row["kinds"].items():
                of_kinds.setdefault(kind, Counter()).update(_counts(some))
    rows = {**by_name, **of_kinds, "all": sum(by_name.values(), Counter())}
    lines = [
        f"{'; '.join(machines)}.",
        "",
        f"| regression | {' | '.join(columns)} | share caught |",
        "|---|" + "--:|" * (len(columns) + 1),
    ]
    for name, row in rows.items():
        decided = row["caught"] + row["missed"]
        share = f"{100 * row['caught'] / decided:.1f} %" if decided else ""
        lines.append(f"| {name} | {' | '.join(str(row[column]) for column in columns)} | {share} |")
    return lines


def _counts(row: dict[str, Any]) -> Counter[str]:
    counts = Counter({name: number for name, number in row.items() if isinstance(number, int)})
    counts["planted"] -= counts.pop("not asked")
    return counts


def versions_table() -> list[str]:
    """The test results with every torch that ``ci/versions`` was run with."""
    found = all_results("versions/*.json")
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
