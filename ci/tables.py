"""Generates the tables of the manual from the lock file and from stored results: ``python ci/tables.py --write``."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path

from manual import accuracy, incidents, locked, pictures, speed
from manual.stored import ROOT

TABLES = {
    "best": locked.best_table,
    "incidents": incidents.incidents_table,
    "ops": locked.ops_table,
    "one_hot": locked.one_hot_figure,
    "npt": locked.npt_table,
    "npt_speed": speed.npt_speed_table,
    "feed_forward_speed": speed.feed_forward_speed_table,
    "feed_forward": locked.feed_forward_table,
    "attention": locked.attention_table,
    "attention_speed": speed.attention_speed_table,
    "loss_speed": speed.loss_speed_table,
    "loss_sizes": speed.loss_sizes_table,
    "loss_frontier": pictures.loss_frontier,
    "loss_small_vocabulary": speed.loss_small_vocabulary_table,
    "kda_speed": speed.kda_speed_table,
    "rope_speed": speed.rope_speed_table,
    "rope_layers": functools.partial(speed.rope_speed_table, "layers"),
    "nsa_speed": speed.nsa_speed_table,
    "gate_power": accuracy.gate_power_table,
    "vocabulary_speed": speed.vocabulary_speed_table,
    "batches_speed": speed.batches_speed_table,
    "profile": incidents.profile_table,
    "matmul_speed": speed.matmul_table,
    "npt_configurations": incidents.npt_configurations_table,
    "scent_solutions": incidents.scent_solutions_table,
    "scent_psnr": incidents.scent_psnr_table,
    "pythia_breakdown": incidents.pythia_breakdown_table,
    "pythia_profile": incidents.pythia_profile_table,
    "agreement": accuracy.agreement_table,
    "third_party": accuracy.third_party_table,
    "architectures": accuracy.architectures_table,
    "packages": accuracy.packages_table,
    "ranks": accuracy.ranks_table,
    "oracle": accuracy.oracle_table,
    "cheats": accuracy.cheats_table,
    "selftest": accuracy.selftest_table,
    "versions": accuracy.versions_table,
}


def with_new_tables(texts: dict[Path, str]) -> dict[Path, str]:
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


def stale_files() -> dict[Path, str]:
    """Return the up-to-date text of every page and picture that is out of date."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    made = with_new_tables({path: path.read_text(encoding="utf-8") for path in pages})
    made |= {ROOT / name: picture() for name, picture in pictures.all_pictures().items()}
    return {path: text for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text}


def main() -> None:
    for path, text in stale_files().items():
        print(f"{path.relative_to(ROOT)} is stale")
        if "--write" in sys.argv[1:]:
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
