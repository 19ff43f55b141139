"""The manual is true: its tables come out of the data, its snippets run as they stand, its paths and links exist."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import torch
from forked_python import forked_python
from sub_sessions import OPTIONS

import memfix
from memfix.meters.hints import likely_cause
from memfix.meters.recorded import BEFORE_WATCH, Failure
from memfix.meters.timeline import Allocation, Line

ROOT = Path(__file__).resolve().parents[1]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in [
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))
]}  # fmt: skip
MARKED = re.compile(r"<!-- (file: \S+|run|contract) -->\n```python\n(.*?)```", re.S)


def marked(page: str) -> dict[str, str]:
    """The snippets of a page that are said to run, by their marks."""
    return dict(MARKED.findall(PAGES[page]))


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "ci/tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_those_of_the_lock_and_the_results(tables: ModuleType) -> None:
    assert not [path.name for path in tables.stale()], "run python ci/tables.py --write"


def test_a_table_without_a_place_and_a_place_without_a_table_are_refused(tables: ModuleType) -> None:
    page = Path("page.md")
    places = "".join(f"<!-- table: {name} -->\n<!-- end -->\n" for name in tables.TABLES)
    with pytest.raises(SystemExit, match=r"without a place: \['ops'\]; places without a table: \['opps'\]"):
        tables.filled({page: places.replace("table: ops", "table: opps")})


@pytest.mark.parametrize("page", PAGES)
def test_paths_and_links_of_a_page_exist(page: str) -> None:
    for path in re.findall(r"`((?:ci|benchmarks|tests|memfix)/[\w./]+)`", PAGES[page]):
        assert (ROOT / path).exists(), path
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", PAGES[page]):
        assert (ROOT / page).parent.joinpath(link).exists(), link


def test_the_first_proof_passes_as_it_stands_and_fails_as_it_says(tmp_path: Path) -> None:
    files = {mark.removeprefix("file: "): text for mark, text in marked("docs/start.md").items()}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert run_pytest(tmp_path).returncode == 0
    checkpointed = "checkpoint(dense_entropy, part, use_reentrant=False)"
    assert checkpointed in files["entropy.py"]
    (tmp_path / "entropy.py").write_text(files["entropy.py"].replace(checkpointed, "dense_entropy(part)"))
    broken = run_pytest(tmp_path, "-k", "small-policy")
    assert broken.returncode == 1
    told = re.search(r"entropy/chunked \[policy, held\]: .*?torch\.cat\(parts\)", PAGES["docs/start.md"], re.S)
    assert told is not None
    assert told[0] in broken.stdout


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}"}
    return forked_python("-m", "pytest", "-q", *OPTIONS, *arguments, "tests", cwd=folder, env=environment)


def test_the_step_on_the_page_about_peaks_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    exec(marked("docs/oracle.md")["run"], {})
    peak, exact = capsys.readouterr().out.split()[:2]
    assert (int(peak) > 100 << 30, exact) == (True, "True")


@pytest.mark.filterwarnings("ignore:memfix.watch does nothing here")
def test_the_training_loop_on_the_page_about_watching_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(marked("docs/watch.md")["run"], {})
    said = capsys.readouterr().out
    if torch.cuda.is_available():
        assert "memfix watch: 3 steps on" in said
        assert {"forward", "backward", "optimizer", "whole"} <= {line.split()[0] for line in said.splitlines()}
    else:
        assert said == "memfix watch: nothing was measured: torch sees no GPU\n"


def test_the_failure_on_the_page_about_watching_is_printed_so() -> None:
    def gib(size: float) -> int:
        return round(size * (1 << 30))

    kept = "cross_entropy, kept for backward"
    chunks = Allocation(gib(35.93), kept, "loss.py:41 in chunked_loss", "F.cross_entropy(logits, target)", 31)
    failure = Failure(
        bytes=gib(1.16), free_bytes=420 << 20, capacity_bytes=gib(79.15), live_bytes=gib(77.9), unused_bytes=0,
        line=Line("train.py", 88, "train"),
        alive=(chunks, Allocation(gib(29.8), BEFORE_WATCH, ""), Allocation(gib(12.17), "made in backward", "")),
        cause=likely_cause([chunks]), node="LogSoftmaxBackward0",
    )  # fmt: skip
    assert str(memfix.WatchReport(failure=failure, failed_in="step 3, stage backward")) in PAGES["docs/watch.md"]


def test_the_contract_of_the_readme_is_one() -> None:
    names: dict[str, object] = {
        "memfix": memfix, "Dim": memfix.Dim, "TensorSpec": memfix.TensorSpec, "Budget": memfix.Budget
    }  # fmt: skip
    exec(marked("docs/start.md")["file: entropy.py"] + marked("README.md")["contract"], names)
    assert isinstance(names["contract"], memfix.Contract)
