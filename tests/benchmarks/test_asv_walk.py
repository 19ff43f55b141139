"""ASV over commits: each measured as it is, what is gone still shown, and every trouble one line with its exit code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forked_python import forked_python

from benchmarks.asv_results import Drift, Outcome, file_under_versions, named
from memfix.errors import MemfixError

pytest.importorskip("asv")

ROOT = Path(__file__).resolve().parents[2]
OPS = ("embedding", "rope")
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(where: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    return subprocess.run(
        ["git", "-C", str(where), *identity, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def commit(where: Path, message: str) -> str:
    git(where, "add", "-A")
    git(where, "commit", "-qm", message)
    return git(where, "rev-parse", "HEAD")


@pytest.fixture(scope="session")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is measured, as a repository's last commit, with two ops: ASV imports all that there are."""
    where = tmp_path_factory.mktemp("walk") / "checkout"
    left_out = shutil.ignore_patterns("*.pyc.*", "results")
    for folder in ("memfix", "benchmarks"):
        shutil.copytree(ROOT / folder, where / folder, ignore=left_out)
    for op in (where / "memfix/ops").iterdir():
        if op.is_dir() and op.name not in OPS:
            shutil.rmtree(op)
    shutil.copy(ROOT / "asv.conf.json", where)
    (where / ".gitignore").write_text("__pycache__/\n.asv/\n")
    git(where.parent, "init", "-q", "checkout")
    git(where, "commit", "-q", "--allow-empty", "-m", "nothing yet")
    commit(where, "first")
    return where


@pytest.fixture
def checkout(committed: Path, tmp_path: Path) -> Path:
    """A copy for one test; ASV's machine file goes to a home of its own."""
    return shutil.copytree(committed, tmp_path / "checkout")


def run(where: Path, module: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # the folder of an editable installation comes after this one, as in a checkout of one's own
    settings = {**os.environ, "HOME": str(where.parent), "PYTHONPATH": str(where), "OMP_NUM_THREADS": "1"}
    return forked_python("-m", f"benchmarks.{module}", *arguments, cwd=where, env={**settings, **environment})


def walk(where: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(where, "walk", *arguments, **environment)


def results_of(where: Path) -> Path:
    return where / "benchmarks/results/asv"


@needs_git
@pytest.mark.slow
def test_commits_are_measured_as_they_are_and_a_renamed_form_is_still_shown(checkout: Path) -> None:
    contract, gather = (checkout / "memfix/ops" / name for name in ("rope/contract.py", "embedding/gather.py"))
    first = git(checkout, "rev-parse", "HEAD")
    contract.write_text(contract.read_text().replace('"reported_low_precision": Form(', '"renamed": Form('))
    gather.write_text(gather.read_text().replace("return _Gather.apply(", "return 1 / 0 * _Gather.apply("))
    second = commit(checkout, "rename a form, break another")

    which = r"Rope(Reported|Renamed)\w*Small.track_peak_train|EmbeddingGatherSmall.track_peak_train"
    done = walk(checkout, "HEAD~2..HEAD", "--bench", which, "--quick")
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"{first[:8]}: 2 measured, 0 n/a here, 0 raised" in done.stdout
    assert f"{second[:8]}: 1 measured, 0 n/a here, 1 raised" in done.stdout
    assert "ZeroDivisionError" in done.stdout + done.stderr
    assert f"walk: {second[:8]}: raised, see above: EmbeddingGatherSmall (1)" in done.stderr
    assert f"renamed or removed at {second[:8]}, shown as far as it was measured: RopeReported" in done.stdout

    (machine,) = (path for path in results_of(checkout).iterdir() if path.is_dir())
    facts = json.loads((machine / "machine.json").read_text())
    assert {"gpu", "driver", "torch", "triton", "cudnn"} <= facts.keys()
    files = {path.name[:8]: json.loads(path.read_text()) for path in machine.glob("*-py3*.json")}
    assert files.keys() == {first[:8], second[:8]}
    for data in files.values():
        assert str(sys.executable) not in json.dumps(data), "the path of an interpreter says nothing elsewhere"
    listing = json.loads((results_of(checkout) / "benchmarks.json").read_text())
    assert "ops.RopeReportedLowPrecisionSmall.track_peak_train" in listing
    assert "ops.RopeReportedLowPrecisionMedium.track_peak_train" not in listing, "it has no results to show"
    assert "ops.RopeRenamedSmall.track_peak_train" in listing


# ---------------------------------------------------------------- bad input
@needs_git
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nosuch..HEAD"], 4, "bad revision 'nosuch..HEAD': name commits that this repository has"),
        (["HEAD..HEAD"], 4, "HEAD..HEAD holds no commit"),
        (["--nope"], 4, "No such option"),
    ],
)
def test_a_range_that_holds_nothing_is_a_usage_error(
    checkout: Path, arguments: list[str], code: int, message: str
) -> None:
    done = walk(checkout, *arguments)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr


@needs_git
@pytest.mark.parametrize("name", ["memfix/units.py", "memfix/ops/another.py", "benchmarks/history/ops.py"])
def test_a_tree_that_differs_from_head_belongs_to_no_commit(checkout: Path, name: str) -> None:
    with (checkout / name).open("a") as file:
        file.write("# changed\n")
    done = walk(checkout)
    assert done.returncode == 2
    assert f"the tree differs from HEAD, and its times belong to no commit: {name}; commit them" in done.stderr


@needs_git
def test_a_shallow_clone_is_told_how_to_get_the_rest(checkout: Path, tmp_path: Path) -> None:
    (checkout / "memfix/units.py").open("a").write("# one more\n")
    commit(checkout, "second")
    git(tmp_path, "clone", "-q", "--depth=1", f"file://{checkout}", "shallow")
    for revisions in ("HEAD~1..HEAD", "HEAD~9..HEAD"):
        done = walk(tmp_path / "shallow", revisions)
        assert done.returncode == 2
        assert "this clone is shallow; run git fetch --unshallow" in done.stderr


@needs_git
@pytest.mark.parametrize("text", ['{"commit_hash": "12', "[]", "{}"])
def test_a_broken_result_file_is_named(checkout: Path, text: str) -> None:
    broken = results_of(checkout) / "some-machine" / "12345678-py3.11.json"
    broken.parent.mkdir(parents=True)
    broken.write_text(text)
    for module in ("walk", "pages"):
        done = run(checkout, module)
        assert done.returncode == 2
        assert str(broken) in done.stderr
        assert "restore it from git, or delete it" in done.stderr


@needs_git
def test_without_history_or_without_git_nothing_is_measured(checkout: Path) -> None:
    done = walk(checkout, PATH="/nonexistent")
    assert done.returncode == 2
    assert "git is not installed, and results belong to commits" in done.stderr
    shutil.rmtree(checkout / ".git")
    done = walk(checkout)
    assert done.returncode == 2
    assert "is no git checkout" in done.stderr


# ---------------------------------------------------------------- the results folder
def result_file(path: Path, results: dict[str, Any]) -> Path:
    data = {"commit_hash": "12345678abcdef", "params": {"python": "/usr/bin/python"}, "result_columns": ["result"]}
    path.write_text(json.dumps({**data, "python": "/usr/bin/python", "env_name": "existing-x", "results": results}))
    return path


def test_a_second_run_of_a_commit_keeps_what_it_did_not_measure(tmp_path: Path) -> None:
    found = result_file(tmp_path / "12345678-existing-x.json", {"a": [[1]], "b": [[2]]})
    kept = file_under_versions(found, "3.12", "2.11.0+cu130")
    assert kept.name == "12345678-py3.12-torch2.11.0.json"
    assert not found.exists()
    found = result_file(tmp_path / "12345678-existing-x.json", {"b": [[3]]})
    data = json.loads(file_under_versions(found, "3.12", "2.11.0+cu130", readiness={"gpu": "G"}).read_text())
    assert data["results"] == {"a": [[1]], "b": [[3]]}
    assert data["readiness"] == {"gpu": "G"}
    assert data["python"] == data["params"]["python"] == "3.12"


def test_what_raised_is_told_from_what_is_not_available(tmp_path: Path) -> None:
    results = {"fine": [[1.5]], "raised": [None], "raised_too": [[None]], "not_here": [[float("nan")]]}
    outcome = Outcome.of(result_file(tmp_path / "x.json", results), [*results, "never_run"])
    assert outcome == Outcome(1, 1, ("raised", "raised_too"))


def test_drift_tells_the_gone_from_the_changed() -> None:
    earlier = {"ops.A.time_train": {"version": "1"}, "ops.B.time_train": {"version": "1"}, "version": 2}
    drift = Drift.between(earlier, {"ops.B.time_train": {"version": "2"}, "ops.C.time_train": {"version": "1"}})
    assert drift == Drift(("ops.A.time_train",), ("ops.B.time_train",))
    assert not Drift.between(earlier, earlier).lines("here")
    assert named(["ops.A.time_train", "ops.A.time_forward", "ops.B.x"]) == "A (2), B (1)"


def test_a_file_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("3")
    with pytest.raises(MemfixError, match="it is no JSON object"):
        Outcome.of(tmp_path / "x.json", [])
