"""Runs ``asv run`` over commits with the current interpreter: nothing is built or installed.

    python -m benchmarks.walk                      # HEAD
    python -m benchmarks.walk --quick              # every form once, at its op's smallest case
    python -m benchmarks.walk --fixes              # peak and ratios of every fix at its op's first case, as ci/gpu does
    python -m benchmarks.walk HEAD~3..HEAD --bench Rope --quick

Each commit's memfix is exported from git to a temporary folder, oldest first, and the benchmarks of the working tree
run with it. A working tree whose memfix differs from HEAD is refused. Results go to the folder named in
``asv.conf.json``, each with the state of the GPU before the measurement, as read from NVML.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memfix.cli.ending import run
from memfix.errors import EXIT_NOT_MEASURED, MeasurementError, MemfixError, UsageError
from memfix.gate.commit import export_package
from memfix.meters.readiness import ready_within
from memfix.provenance import gpu_and_driver, installed_version

from . import asv_results

if TYPE_CHECKING:
    from memfix.contract import Contract

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ("memfix", "benchmarks/history", "asv.conf.json")


def git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        raise MeasurementError("git is not installed, and results belong to commits") from None
    if done.returncode:
        raise UsageError(done.stderr.strip().removeprefix("fatal: ") or f"git {arguments[0]} failed")
    return done.stdout.strip()


def require_clean_history() -> None:
    try:
        top = git("rev-parse", "--show-toplevel")
    except UsageError as error:
        raise MeasurementError(f"results belong to commits, and {ROOT} is no git checkout: {error}") from None
    if Path(top) != ROOT:
        raise MeasurementError(f"results belong to commits of memfix, and {ROOT} lies inside the repository {top}")
    changed = git("status", "--porcelain", "--", *MEASURED).splitlines()
    if changed:
        names = ", ".join(line.split(maxsplit=1)[1] for line in changed[:3]) + (", ..." if changed[3:] else "")
        raise MeasurementError(f"the tree differs from HEAD, and its times belong to no commit: {names}; commit them")


def commits_of(revisions: str) -> list[str]:
    """Return the commits of ``revisions``, oldest first. ``A..B`` excludes A, as in git."""
    is_shallow = git("rev-parse", "--is-shallow-repository") == "true"
    how = ("--reverse", "--first-parent") if ".." in revisions else ("--max-count=1",)
    try:
        found = git("rev-list", *how, revisions, "--").split()
    except UsageError as error:
        if is_shallow:
            raise MeasurementError(f"{error}: this clone is shallow; run git fetch --unshallow") from None
        raise UsageError(f"{error}: name commits that this repository has") from None
    boundary = Path(git("rev-parse", "--git-path", "shallow"))
    cut = set((ROOT / boundary).read_text().split()) if is_shallow else set()
    if ".." in revisions and cut.intersection(found):
        raise MeasurementError(f"this clone is shallow and ends within {revisions}; run git fetch --unshallow")
    if not found:
        raise UsageError(f"{revisions} holds no commit; A..B is what B has and A has not")
    return found


class Walk:
    """A run of ASV commit by commit, which collects the lists of benchmarks and the failures."""

    def __init__(self, results: Path, machine: str, asv_options: list[str], wait_s: float) -> None:
        self.results, self.machine, self.asv_options, self.wait_s = results, machine, asv_options, wait_s
        self.before: asv_results.Listing = asv_results.listing_of(results)
        self.listed: asv_results.Listing = {}
        """The list of benchmarks of the last visited commit."""
        self.ever_listed: asv_results.Listing = dict(self.before)
        self.troubles: list[str] = []

    def visit(self, commit: str) -> None:
        click.secho(f"\n{commit[:8]} {git('show', '--no-patch', '--format=%s', commit)}", bold=True)
        gpu = self._ready_gpu()
        begin = time.perf_counter()
        code = self._run_asv(commit, self.asv_options)
        found = sorted((self.results / self.machine).glob(f"{commit[:8]}-existing-*.json"))
        if not found:
            self.troubles.append(f"{commit[:8]}: ASV saved nothing (its exit code {code}); see its messages above")
            return
        python = platform.python_version().rpartition(".")[0]
        kept = asv_results.file_under_versions(found[0], python, installed_version("torch"), readiness=gpu)
        self._say_drift(self.listed, commit)
        outcome = asv_results.Outcome.of(kept, self.listed)
        if outcome.raised:
            self.troubles.append(f"{commit[:8]}: raised, see above: {asv_results.named(outcome.raised)}")
        click.echo(
            f"{commit[:8]}: {outcome.measured} measured, {outcome.not_here} n/a here, {len(outcome.raised)} raised, "
            f"{time.perf_counter() - begin:.0f} s"
        )

    def finish(self, last: str) -> None:
        """Write HEAD's list of benchmarks, extended by the removed benchmarks that still have results."""
        head = git("rev-parse", "HEAD")
        if last != head:
            self._run_asv(head, ["--bench=just-discover"])
        self._say_drift(self.before, head)
        asv_results.keep_gone_benchmarks(self.results, self.ever_listed)

    def _say_drift(self, earlier: asv_results.Listing, commit: str) -> None:
        self.listed = asv_results.listing_of(self.results)
        self.ever_listed = {**self.ever_listed, **self.listed}
        for line in asv_results.Drift.between(earlier, self.listed).lines(commit[:8]):
            click.echo(line)

    def _ready_gpu(self) -> dict[str, Any] | None:
        """Return the state of the GPU before a commit is measured, from NVML; None without a GPU."""
        if gpu_and_driver() is None:
            return None
        reading = ready_within(self.wait_s)
        click.echo(reading.line())
        reading.require()
        return dataclasses.asdict(reading)

    def _run_asv(self, commit: str, options: list[str]) -> int:
        beside = os.environ.get("ASV_PYTHONPATH")
        command = [sys.executable, "-m", "asv", "run", "-E", f"existing:{sys.executable}", "--show-stderr"]
        command += ["--set-commit-hash", commit, "--machine", self.machine, *options]
        with tempfile.TemporaryDirectory(prefix="memfix-walk-") as package:
            # export memfix alone: the benchmarks come from the working tree
            export_package(ROOT, commit, ROOT / "memfix", Path(package))
            environment = {**os.environ, "ASV_PYTHONPATH": package + (f":{beside}" if beside else "")}
            environment.setdefault("OMP_NUM_THREADS", "1")
            environment.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # imports may check for a GPU before a fork
            return subprocess.run(command, cwd=ROOT, env=environment).returncode


def at_smallest_cases() -> str:
    """Return a regular expression for every form's benchmarks at its op's smallest case: a third of all benchmarks."""
    from memfix.laws import NAIVE

    return _classes_of(lambda contract: ((form, contract.smallest_case.name) for form in (NAIVE, *contract.forms)))


def of_fixes() -> str:
    """Return a regular expression for the peak and ratios of every fix's train step, at its op's first case."""

    def fixes(contract: Contract) -> Iterator[tuple[str, str]]:
        return ((name, next(iter(contract.cases))) for name, form in contract.forms.items() if not form.reported)

    return rf"{_classes_of(fixes)}track_(peak|overhead|over_floor)_train"


def _classes_of(chosen: Callable[[Contract], Iterable[tuple[str, str]]]) -> str:
    from memfix.registry import all_contracts

    from .history.figures import class_name

    ops = all_contracts().values()
    return rf"\b({'|'.join(class_name(op.name, form, case) for op in ops for form, case in chosen(op))})\."


def results_folder() -> Path:
    from asv.config import Config

    return ROOT / Config.load(str(ROOT / "asv.conf.json")).results_dir


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("revisions", default="HEAD")
@click.option("--bench", multiple=True, metavar="REGEX", help="Only these: Rope, 'Incident.*track_peak', ...")
@click.option(
    "--quick",
    is_flag=True,
    help="Each step timed once, without --bench at the smallest cases only: to see that all runs.",
)
@click.option(
    "--fixes", is_flag=True, help="Only the peak and the ratios of every fix's train step, at its op's first case."
)
@click.option("--launch-method", type=click.Choice(["forkserver", "spawn"]), help="spawn: where an import uses CUDA.")
@click.option("--wait", type=click.FloatRange(0), default=60.0, show_default=True, help="Seconds, for a busy GPU.")
def main(
    revisions: str, bench: tuple[str, ...], quick: bool, fixes: bool, launch_method: str | None, wait: float
) -> None:
    """Run the ASV benchmarks at REVISIONS: HEAD, another commit, or a range A..B.

    Exit codes: 0 fine, 2 could not measure, 4 usage.
    """
    if installed_version("asv") == "not installed":
        raise MemfixError("asv is not installed; pip install 'memfix[bench]', or ci/gpu-site for a machine offline")
    require_clean_history()
    commits = commits_of(revisions)
    results = results_folder()
    asv_results.require_whole(results)

    from .machine import write_machine_file

    chosen = bench or ((of_fixes(),) if fixes else (at_smallest_cases(),) if quick else ())
    options = [f"--bench={regex}" for regex in chosen] + ["--quick"] * quick
    options += [f"--launch-method={launch_method}"] if launch_method else []
    walk = Walk(results, write_machine_file(), options, wait)
    for commit in commits:
        walk.visit(commit)
    walk.finish(commits[-1])
    click.echo(f"\n{len(commits)} commit{'s' * (len(commits) > 1)} in {results.relative_to(ROOT)}/{walk.machine}")
    for trouble in walk.troubles:
        click.echo(f"walk: {trouble}", err=True)
    if walk.troubles:
        click.echo(f"walk: could not measure everything (exit {EXIT_NOT_MEASURED})", err=True)
        sys.exit(EXIT_NOT_MEASURED)


if __name__ == "__main__":
    run(main, "python -m benchmarks.walk")
