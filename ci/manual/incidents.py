"""Tables of the incidents: claims, stages of a train step, and the configurations that a report compares."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from typing import Any

from memfix.incidents import incident_names
from memfix.incidents.claims import VERDICTS, load_claims
from memfix.incidents.incident import Incident, load_config
from memfix.incidents.judging import decimal
from memfix.incidents.npt_weight_delta.incident import incident as npt
from memfix.incidents.profile import TEXT_COLUMNS, kept_runs, run_columns
from memfix.incidents.pythia_vocabulary.incident import incident as pythia
from memfix.incidents.pythia_vocabulary.incident import report_breakdown
from memfix.incidents.scent_decoder.incident import incident as scent
from memfix.units import format_bytes, parse_bytes

from .stored import RESULTS, all_results, cpu, gpu_of, h200


def incidents_table() -> list[str]:
    """The number of claims of every report by verdict."""
    lines = ["| incident | claims | hold | wrong | cannot be tested |", "|---|--:|--:|--:|--:|"]
    verdicts = {f"`{name}`": Counter(claim.verdict for claim in load_claims(name)) for name in incident_names()}
    for name, of_one in {**verdicts, "all": sum(verdicts.values(), Counter())}.items():
        lines.append(f"| {name} | {of_one.total()} | {' | '.join(str(of_one[verdict]) for verdict in VERDICTS)} |")
    return lines


def profile_table() -> list[str]:
    """The incident's train step by stages: the report's figures, simulated ones, and the H200's for dense attention."""
    simulated = {f"{name}, simulated": cpu(f"profile_{name.lower()}") for name in ("NSA", "dense")}
    return _stages_table({**simulated, "dense, H200": h200("profile")})


def pythia_profile_table() -> list[str]:
    """The Pythia's train step by stages: the report's figures, simulated ones, and the H200's."""
    return _stages_table({"simulated": cpu("profile_pythia"), "H200": h200("profile_pythia")})


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


def _runs_table(incident: Incident) -> list[str]:
    """The configurations that a report compares, as ``memfix profile`` prints them, and the versions on the H200."""
    name = f"profile_{incident.name}"
    simulated, real = (kept_runs(incident.runs, RESULTS / f"{place}/{name}.json") for place in ("cpu", "h200"))
    runs = [dataclasses.replace(run, kept=real.get(run_name)) for run_name, run in simulated.items()]
    columns = run_columns(runs, "simulated", parse_bytes(incident.capacity or 0))
    lines = [
        f"| {' | '.join(columns)} |",
        "|" + "".join("---|" if name in TEXT_COLUMNS else "--:|" for name in columns),
    ]
    lines += [f"| {' | '.join(cells)} |" for cells in zip(*columns.values(), strict=True)]
    return [*lines, "", f"{gpu_of(h200(name), 'torch', 'driver')}."]


def scent_psnr_table() -> list[str]:
    """The PSNR of every decoder by steps: the median over seeds, and its range."""
    lines: list[str] = []
    for data in all_results("*/psnr_scent_decoder.json"):
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
