"""The manual is true: its tables come out of the data, its snippets run as they stand, its paths and links exist."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import os
import re
import subprocess
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from ci_script import ci_script
from forked_python import forked_python
from readers import names_of_the_reader
from snippets import PAGES, ROOT, blocks, command_lines, commands_in_prose, fault_of
from sub_sessions import OPTIONS

import memfix
from memfix import registry
from memfix.meters.hints import likely_cause
from memfix.meters.recorded import BEFORE_WATCH, Failure
from memfix.meters.timeline import Allocation, Line

ORACLE = "docs/oracle.md"
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return ci_script("tables")


def test_tables_are_those_of_the_lock_and_the_results(tables: ModuleType) -> None:
    assert not [path.name for path in tables.stale_files()], "run python ci/tables.py --write"


def test_a_table_without_a_place_and_a_place_without_a_table_are_refused(tables: ModuleType) -> None:
    page = Path("page.md")
    places = "".join(f"<!-- table: {name} -->\n<!-- end -->\n" for name in tables.TABLES)
    with pytest.raises(SystemExit, match=r"without a place: \['ops'\]; places without a table: \['opps'\]"):
        tables.with_new_tables({page: places.replace("table: ops", "table: opps")})


@pytest.mark.parametrize("page", PAGES)
def test_paths_and_links_of_a_page_exist(page: str) -> None:
    for path in re.findall(r"`((?:ci|benchmarks|tests|memfix)/[\w./]+)`", PAGES[page]):
        assert (ROOT / path).exists(), path
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", PAGES[page]):
        assert (ROOT / page).parent.joinpath(link).exists(), link


# ---------------------------------------------------------------- snippets
def write_files(page: str, folder: Path) -> dict[str, str]:
    """Write the blocks of a page that are files of the reader."""
    files = {block.file: block.text for block in blocks(page, "python", "cuda", "toml", "yaml") if block.file}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return files


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # python -m pytest adds the working directory
    return forked_python("-m", "pytest", "-q", *OPTIONS, *arguments, "tests", cwd=folder, env=environment)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python") and page != ORACLE])
def test_the_python_of_a_page_runs_as_it_stands(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks with tests are run by pytest, beside the op of the first proof; the others run in order."""
    monkeypatch.chdir(tmp_path)
    write_files(page, tmp_path)
    loose = [block.text for block in blocks(page, "python") if not block.file]
    tests = [text for text in loose if re.search(r"^(def )?test_", text, re.M)]
    with names_of_the_reader(page) as names:
        for text in loose:
            if text not in tests:
                exec(compile(text, page, "exec"), names)
    if tests:
        (tmp_path / "tests").mkdir()
        write_files("docs/start.md", tmp_path)
        (tmp_path / "tests/test_entropy.py").write_text("\n\n".join(tests))
        ended = run_pytest(tmp_path)
        assert ended.returncode == 0, ended.stdout


def test_the_first_proof_fails_as_it_says(tmp_path: Path) -> None:
    files = write_files("docs/start.md", tmp_path)
    assert run_pytest(tmp_path).returncode == 0
    checkpointed = "checkpoint(dense_entropy, part, use_reentrant=False)"
    assert checkpointed in files["entropy.py"]
    (tmp_path / "entropy.py").write_text(files["entropy.py"].replace(checkpointed, "dense_entropy(part)"))
    broken = run_pytest(tmp_path, "-k", "small-policy")
    assert broken.returncode == 1
    told = re.search(r"entropy/chunked \[policy, held\]: .*?torch\.cat\(parts\)", PAGES["docs/start.md"], re.S)
    assert told is not None
    assert told[0] in broken.stdout


def test_the_step_on_the_page_about_peaks_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    first, *_ = blocks(ORACLE, "python")
    exec(first.text, {})
    peak, exact = capsys.readouterr().out.split()[:2]
    assert (int(peak) > 100 << 30, exact) == (True, "True")


@pytest.mark.filterwarnings("ignore:memfix.watch does nothing here")
def test_the_training_loop_on_the_page_about_watching_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(blocks("docs/watch.md", "python")[0].text, {})
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


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "toml", "yaml")])
def test_the_settings_of_a_page_can_be_read_and_name_what_exists(page: str) -> None:
    for block in blocks(page, "toml"):
        project = tomllib.loads(block.text).get("project", {})
        assert set(project.get("entry-points", {})) <= {registry.ENTRY_POINT_GROUP, "pytest11"}
    for block in blocks(page, "yaml"):
        for step in steps_of(yaml.safe_load(block.text)):
            if "/memfix@" in step.get("uses", ""):
                assert set(step.get("with", {})) <= set(ACTION["inputs"])


def steps_of(found: Any) -> list[dict[str, Any]]:
    """The steps of a workflow, of a list of steps, or of anything else none."""
    if isinstance(found, dict):
        return [step for job in found.get("jobs", {}).values() for step in job.get("steps", [])]
    return found


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_exist_with_their_options(page: str) -> None:
    faults = {line: fault_of(line) for line in command_lines(page)}
    faults |= {line: fault_of(line, whole=False) for line in commands_in_prose(page)}
    assert not {line: fault for line, fault in faults.items() if fault is not None}


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("memfix gait", "memfix has no command gait"),
        ("memfix gate my_op --updat", "memfix gate has no option --updat"),
        ("memfix gate --profile huge  # comment", "Invalid value for '--profile'"),
        ("ci/gait", "there is no ci/gait"),
        ("ci/gate my_op --updat", "memfix gate has no option --updat"),
        ("X=1 ci/gpu --wlak", "ci/gpu has no --wlak"),
        ("pytest tests --memfix-lokc memory.lock", "pytest has no option --memfix-lokc"),
        (".venv/bin/python -m benchmarks.wlak", "there is no module benchmarks.wlak"),
        ("rm -rf .", "rm is no command"),
    ],
)
def test_a_command_that_does_not_exist_is_found(line: str, fault: str) -> None:
    assert str(fault_of(line)).startswith(fault)


# ---------------------------------------------------------------- docstrings
def examples_in_docstrings() -> Iterator[Any]:
    """The indented blocks of docstrings that are Python, each with its module."""
    for path in sorted((ROOT / "memfix").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "::\n\n" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                for found in re.finditer(r"::\n\n((?: {4}.*\n|\n)+)", (ast.get_docstring(node) or "") + "\n"):
                    code = textwrap.dedent(found[1])
                    with contextlib.suppress(SyntaxError):  # maths
                        compile(code, path, "exec")
                        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
                        yield pytest.param(module, code, id=f"{module}-{getattr(node, 'name', '')}")


@pytest.mark.parametrize(("module", "code"), [*examples_in_docstrings()])
def test_the_example_of_a_docstring_runs_beside_the_names_of_its_module(module: str, code: str) -> None:
    public = {name: getattr(memfix, name) for name in memfix.__all__}
    exec(code, {**public, **vars(importlib.import_module(module))})
