"""``memfix init``: writes the contract and suite of an op, its lock, and the workflow that judges them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..checks.effort import Effort
from ..checks.examine import Examination
from ..checks.memory import bytes_of
from ..contract import Contract
from ..errors import UsageError
from ..gate.judge import lockable_readings
from ..gate.lock import Key, read_lock, spelled, write_lock
from ..gate.peaks import peaks_path, read_peaks, write_peaks
from ..laws import NAIVE
from ..meters import usable_meter
from ..progress import Say, silent
from .files import refuse_files_that_exist, write_files
from .first_contract import Request, first_contract
from .references import Reference
from .source import contract_source, filled_template, import_lines, names_used

WORKFLOW = Path(".github/workflows/memfix.yml")
ACTION = "OWNER/memfix@v1"


@dataclass(frozen=True)
class Written:
    """The files that were written, those that were kept unchanged, notes, and where the tests and the lock are."""

    files: tuple[Path, ...]
    kept: tuple[Path, ...]
    notes: tuple[str, ...]
    folder: Path
    lock: Path

    def commands(self, name: str) -> dict[str, str]:
        """Return the commands to run next, each with what it does."""
        judged = f"--from {self.folder} --lock {self.lock}"
        commands = {
            f"python -m pytest {self.folder}": "runs the contract as tests",
            f"memfix gate {judged}": "checks it and the lock, as the workflow does",
            f"memfix selftest {name} {judged}": "plants regressions in the forms: which does it miss?",
        }
        if WORKFLOW in self.files:
            commands[f"git add {self.folder} {WORKFLOW}"] = f"replace OWNER in {WORKFLOW.name} by memfix's owner first"
        return commands


def init(request: Request, folder: Path, effort: Effort, *, force: bool, say: Say = silent) -> Written:
    """Write all files, if all checks pass. An existing workflow is kept; an existing lock gets new entries."""
    test, lock = folder / f"test_{request.name}.py", folder / "memory.lock"
    refuse_files_that_exist([test], force)
    if not force and any(key[0] == request.name for key in read_lock(lock)):
        raise UsageError(f"{lock} has entries of {request.name} already; --force overwrites them")
    meter = usable_meter("simulated")
    first = first_contract(request, meter, effort, say)
    _write_lock(lock, first.examination)
    files = {test: _test_file(request, first.contract)}
    if not WORKFLOW.exists() or force:
        install = "          install: -e .\n" if Path("pyproject.toml").exists() else ""
        files[WORKFLOW] = filled_template(
            "workflow.yml.txt", folder=str(folder), lock=str(lock), action=ACTION, install=install
        )
    write_files(files)
    kept = () if WORKFLOW in files else (WORKFLOW,)
    return Written((test, lock, *[path for path in files if path != test]), kept, first.notes, folder, lock)


def _write_lock(path: Path, examination: Examination) -> None:
    """Add the measured bytes to the lock, and what was alive at each peak to the file of peaks."""
    readings = lockable_readings([examination])
    entries: dict[Key, int] = {key: bytes_of(reading, key[3]) for key, reading in readings.items()}
    alive = {spelled(key): reading.alive_at_peak for key, reading in readings.items() if key[3] != "held"}
    others = {key: size for key, size in read_lock(path).items() if key[0] != examination.op}
    write_lock(path, {**others, **entries})
    write_peaks(peaks_path(path), {**read_peaks(peaks_path(path)), **alive})


def _test_file(request: Request, contract: Contract) -> str:
    references = {key: Reference.parse(text) for key, text in {NAIVE: request.naive, **request.forms}.items()}
    source = contract_source(contract, {key: reference.name for key, reference in references.items()})
    return filled_template(
        "test_op.py.txt", name=request.name, example=request.example, names=", ".join(names_used(source)),
        imports=import_lines(references.values()), contract=source,
    )  # fmt: skip
