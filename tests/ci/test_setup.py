"""ci/setup and ci/python: what each need installs, what a machine may lack, and the search path."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., subprocess.CompletedProcess[str]]
# the Python of the machine: its venv module copies this script, and its pip notes what it is asked for
BASE = """#!/usr/bin/env bash
here={folder}
case "$*" in
  --version) echo "Python ${{FAKE_VERSION:-3.11.7}}" ;;
  *version_info*) [ -z "${{FAKE_VERSION:-}}" ] ;;
  *ensurepip*) exit 1 ;;
  "-m venv"*)
    echo "venv $*" >> "$here/calls"
    rm -rf .venv && mkdir -p .venv/bin .venv/lib/python3.11/site-packages/torch
    echo "__version__ = '2.13.0+cpu'" > .venv/lib/python3.11/site-packages/torch/version.py
    cp "$0" .venv/bin/python && touch .venv/bin/pip ;;
  "-c import pip") [ -e .venv/bin/pip ] ;;
  "-m pip install"*)
    sleep "${{FAKE_SECONDS:-0}}"
    echo "pip $*" >> "$here/calls"
    if [ -n "${{FAKE_ERROR:-}}" ]; then echo "ERROR: $FAKE_ERROR" >&2; exit 1; fi
    if [ -n "${{FAKE_KILL:-}}" ]; then kill -9 $$; fi ;;
  *) exec {real} "$@" ;;
esac
"""


class Machine:
    """A checkout without .venv, and a PATH with a stand-in for Python and nothing else that matters."""

    def __init__(self, folder: Path) -> None:
        self.root, self.tools, self.calls = folder / "checkout", folder / "tools", folder / "calls"
        (self.root / "ci").mkdir(parents=True)
        for name in ("ci/setup", "ci/python", "ci/constraints.txt", "pyproject.toml"):
            shutil.copy(ROOT / name, self.root / name)
        (self.root / "memfix").mkdir()
        shutil.copy(ROOT / "memfix/versions.py", self.root / "memfix")
        self.tools.mkdir()
        names = "bash cat cksum cp dirname env grep head mkdir paste readlink rm sed sleep tail touch tr"
        for name in names.split():
            (self.tools / name).symlink_to(str(shutil.which(name)))
        self.put("python3", BASE.format(folder=folder, real=sys.executable))

    def put(self, name: str, text: str) -> Path:
        path = self.tools / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def start(self, *needs: str, **environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["ci/setup", *needs], cwd=self.root, env={"PATH": str(self.tools), **environment},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def setup(self, *needs: str, **environment: str) -> tuple[int, str, str]:
        process = self.start(*needs, **environment)
        out, err = process.communicate(timeout=60)
        return process.returncode, out.strip(), err.strip()

    def called(self) -> list[str]:
        """The calls of venv and pip since the last time."""
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        self.calls.unlink(missing_ok=True)
        return lines

    @property
    def python(self) -> str:
        return str(self.root / ".venv/bin/python")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# ---------------------------------------------------------------- by need
def test_the_gate_gets_no_linters_and_the_same_venv_grows(machine: Machine) -> None:
    code, out, err = machine.setup("gate")
    assert (code, out) == (0, machine.python)
    assert err.splitlines() == [
        "ci/setup: making .venv with Python 3.11.7, once",
        "ci/setup: installing into .venv: gate",
        "ci/setup: torch 2.13.0+cpu",
    ]
    venv, *_, gate = machine.called()
    assert venv.startswith("venv -m venv --clear")
    assert all(name in gate for name in ("torch==2.13.0 ", "triton==", "numpy>=", "opt_einsum>=", "click>="))
    assert not any(name in gate for name in ("torch>=", "triton>=", "ruff", "asv", "zizmor", "matplotlib", "-e ."))
    assert machine.setup("gate") == (0, machine.python, "")
    assert machine.called() == []
    code, _, err = machine.setup("test", "lint")
    assert code == 0
    assert err.splitlines()[0] == "ci/setup: installing into .venv: test lint"
    *_, grown = machine.called()
    assert all(name in grown for name in ("pytest-xdist", "ruff", "mypy", "matplotlib", "zizmor", "-e ."))
    assert not any(name in grown for name in ("torch==", "asv"))
    assert machine.setup("gate", "test", "lint") == (0, machine.python, "")


def test_torch_is_unpacked_beside_the_others_and_the_last_call_asks_for_everything(machine: Machine) -> None:
    assert machine.setup("gate", "test")[0] == 0
    _, *beside, last = machine.called()
    pins, others = sorted(beside, key=lambda call: "torch==" not in call)
    assert "--no-deps torch==2.13.0 triton==" in pins
    assert not any(name in others for name in ("torch==", "triton==", "-e ."))
    assert all(name in others for name in ("numpy>=", "ruff", "hatchling>="))
    assert all(name in last for name in ("torch==", "triton==", "numpy>=", "ruff", "-e . --no-build-isolation"))
    assert "--no-deps" not in last


def test_memfix_is_built_apart_where_what_builds_it_could_not_be_installed(machine: Machine) -> None:
    assert machine.setup("gate", "test", FAKE_ERROR="No matching distribution found for hatchling>=1.24")[0] == 2
    assert machine.called()[-1].endswith(" -e .")


def test_without_arguments_everything_is_installed(machine: Machine) -> None:
    assert machine.setup()[0] == 0
    *_, everything = machine.called()
    assert all(name in everything for name in ("torch==", "numpy", "ruff", "zizmor", "asv==", "pytest-benchmark"))


def test_the_linters_need_no_torch(machine: Machine) -> None:
    assert machine.setup("lint")[0] == 0
    assert "torch" not in machine.called()[1]
    machine.setup("gate")
    assert [call.split()[0] for call in machine.called()] == ["pip", "pip", "pip"]


def test_a_changed_pyproject_installs_again_into_the_same_venv(machine: Machine) -> None:
    machine.setup("gate")
    machine.called()
    with (machine.root / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    machine.setup("gate")
    assert [call.split()[0] for call in machine.called()] == ["pip", "pip", "pip"]


def test_dev_is_the_sum_for_people() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert extras["dev"] == ["memfix[gate,test,lint,docs]"]


# ---------------------------------------------------------------- a venv that is not whole
def test_a_set_up_that_was_killed_is_made_again(machine: Machine) -> None:
    code, _, err = machine.setup("gate", FAKE_KILL="1")
    assert code == 2
    assert "pip could not install gate (exit 137, see .venv.log)" in err
    machine.called()
    assert machine.setup("gate")[:2] == (0, machine.python)
    assert [call.split()[0] for call in machine.called()] == ["venv", "pip", "pip", "pip"]


@pytest.mark.parametrize("harm", ["no pip", "no interpreter", "moved"])
def test_a_broken_venv_is_made_again(machine: Machine, harm: str) -> None:
    machine.setup("gate")
    machine.called()
    if harm == "no pip":
        (machine.root / ".venv/bin/pip").unlink()
    elif harm == "no interpreter":
        (machine.root / ".venv/bin/python").unlink()
        (machine.root / ".venv/bin/python").symlink_to("/no/such/python")
    else:
        machine.root = machine.root.rename(machine.root.with_name("moved"))
    assert machine.setup("gate", "lint")[:2] == (0, machine.python)
    assert [call.split()[0] for call in machine.called()] == ["venv", "pip", "pip", "pip"]


def test_two_set_ups_at_once_make_one_venv(machine: Machine) -> None:
    first = machine.start("gate", FAKE_SECONDS="1")
    while not machine.calls.exists():
        time.sleep(0.02)
    second = machine.start("gate")
    said = [process.communicate(timeout=60) for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [0, 0]
    assert [out.strip() for out, _ in said] == [machine.python] * 2
    assert said[1][1] == "ci/setup: waiting for another set-up of .venv\n"
    assert [call.split()[0] for call in machine.called()] == ["venv", "pip", "pip", "pip"]


# ---------------------------------------------------------------- what a machine may lack
def test_without_network_one_sentence_says_what_to_do_and_a_later_run_works(machine: Machine) -> None:
    code, out, err = machine.setup("gate", FAKE_ERROR="No matching distribution found for torch==2.13.0")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == (
        "ci/setup: pip could not install gate (exit 1, No matching distribution found for torch==2.13.0); check the "
        "network, or set PIP_INDEX_URL or PIP_FIND_LINKS, and run it again; its output is in .venv.log"
    )
    assert machine.setup("gate")[0] == 0
    assert not (machine.root / ".venv.log").exists()


def test_an_old_python_on_the_path_is_refused(machine: Machine) -> None:
    assert machine.setup("gate", FAKE_VERSION="3.8.18") == (
        2, "", "ci/setup: memfix needs Python 3.11 or later, and none is on the PATH (Python 3.8.18); install one"
    )  # fmt: skip
    (machine.tools / "python3").unlink()
    assert machine.setup("gate")[2].endswith("none is on the PATH (there is no python3); install one")


def test_a_need_that_is_not_there_is_a_usage_error(machine: Machine) -> None:
    assert machine.setup("speed") == (
        4, "", "ci/setup: unknown need speed; there are gate, test, lint, bench, docs, pip and gpu"
    )  # fmt: skip


# ---------------------------------------------------------------- MEMFIX_PYTHON
def test_an_interpreter_that_is_named_is_used_as_it_is(machine: Machine) -> None:
    assert machine.setup("gate", "test", MEMFIX_PYTHON=sys.executable) == (0, sys.executable, "")
    assert machine.called() == []


def test_what_is_no_interpreter_or_an_old_one_is_a_usage_error(machine: Machine) -> None:
    assert machine.setup("gate", MEMFIX_PYTHON="nope") == (
        4, "", "ci/setup: MEMFIX_PYTHON=nope is no interpreter; name one, such as python3"
    )  # fmt: skip
    assert machine.setup("gate", MEMFIX_PYTHON="rm") == (
        4, "", "ci/setup: MEMFIX_PYTHON=rm is no interpreter that runs; name one, such as python3"
    )  # fmt: skip
    assert machine.setup("gate", MEMFIX_PYTHON="python3", FAKE_VERSION="3.10.13") == (
        4, "", "ci/setup: memfix needs Python 3.11 or later, and MEMFIX_PYTHON=python3 is Python 3.10.13; name another"
    )  # fmt: skip


def test_an_interpreter_without_torch_is_refused(machine: Machine, tmp_path: Path) -> None:
    bare = machine.put("bare", f'#!/usr/bin/env bash\nexec {sys.executable} -S "$@"\n')
    found = {"PYTHONPATH": str(tmp_path / "packages")}
    for name in ("hypothesis", "pytest", "click", "yaml"):
        (tmp_path / "packages" / name).mkdir(parents=True)
    assert machine.setup("gate", MEMFIX_PYTHON=str(bare), **found) == (
        2, "", f"ci/setup: MEMFIX_PYTHON={bare} has no torch, rich; install what is missing (pip install torch rich), "
        "or name another interpreter"
    )  # fmt: skip
    assert machine.setup("lint", MEMFIX_PYTHON=str(bare)) == (0, str(bare), "")


@pytest.mark.parametrize(("version", "code"), [("2.10.1", 2), ("2.11.0", 0), ("2.99.0+cu140", 0)])
def test_a_torch_that_is_too_old_is_refused(machine: Machine, tmp_path: Path, version: str, code: int) -> None:
    (tmp_path / "other/torch").mkdir(parents=True)
    (tmp_path / "other/torch/__init__.py").touch()
    (tmp_path / "other/torch/version.py").write_text(f"__version__ = '{version}'\n")
    done = machine.setup("gate", MEMFIX_PYTHON=sys.executable, PYTHONPATH=str(tmp_path / "other"))
    assert done[0] == code
    if code:
        assert done[2].startswith(
            f"ci/setup: MEMFIX_PYTHON={sys.executable} has torch {version}, and memfix was tested with"
        )
        assert done[2].endswith("; install a newer torch, or name another interpreter")


# ---------------------------------------------------------------- a GPU that torch does not see
def test_a_build_that_leaves_the_gpu_unused_is_named_after_set_up_and_where_a_gpu_is_asked_for(
    machine: Machine,
) -> None:
    machine.put("nvidia-smi", "#!/usr/bin/env bash\n")
    line = (
        "ci/setup: torch 2.13.0+cpu does not see your NVIDIA GPU; for a run that uses it, name a Python with a CUDA "
        "build of torch: MEMFIX_PYTHON=python3"
    )
    assert machine.setup("gate")[2].splitlines()[-1] == line
    assert machine.setup("gate")[2] == ""
    assert machine.setup("gate", "gpu") == (0, machine.python, line)
    version = machine.root / ".venv/lib/python3.11/site-packages/torch/version.py"
    version.write_text("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\n")
    assert machine.setup("gate", "gpu") == (0, machine.python, "")


# ---------------------------------------------------------------- ci/python
@pytest.fixture
def searched(machine: Machine) -> Callable[..., list[str]]:
    """The search paths that a command has after it sourced ci/python, twice, as a command in a command does."""
    variables = ("PYTHONPATH", "ASV_PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    show = ". ci/python pip; . ci/python pip; " + "; ".join(f'echo "${{{name}:-}}"' for name in variables)

    def searched(**environment: str) -> list[str]:
        settings = {"PATH": str(machine.tools), "PYTHONDONTWRITEBYTECODE": "1", **environment}
        command = [str(machine.tools / "bash"), "-c", show]
        done = subprocess.run(command, cwd=machine.root, env=settings, capture_output=True, text=True)
        return done.stdout.splitlines()

    return searched


def test_the_packages_of_a_gpu_machine_are_found_by_every_command(
    machine: Machine, searched: Callable[..., list[str]]
) -> None:
    here, site = str(machine.root), str(machine.root / ".gpu-site")
    assert searched(PYTHONPATH="/mine") == [f"{here}:/mine", "", ""]
    (machine.root / ".gpu-site").mkdir()
    assert searched() == [here, "", ""]
    assert searched(MEMFIX_PYTHON="python3", PYTHONPATH="/mine") == [f"{here}:{site}:/mine", site, ""]


def test_a_command_ends_as_the_set_up_did(machine: Machine) -> None:
    script = machine.put("command", "#!/usr/bin/env bash\n. ci/python gate\necho went on\n")
    done = subprocess.run(
        [script],
        cwd=machine.root,
        env={"PATH": str(machine.tools), "MEMFIX_PYTHON": "nope"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (4, "")


def test_every_command_takes_its_python_from_one_place() -> None:
    for path in (ROOT / "ci").iterdir():
        if path.is_file() and path.name not in ("setup", "python"):
            assert "$(ci/setup" not in path.read_text(encoding="utf-8"), path.name


# ---------------------------------------------------------------- the workers of ci/test
@pytest.mark.parametrize(
    ("cores", "gpu", "arguments", "workers"),
    [(2, False, "", 2), (16, False, "-m gpu", 4), (16, True, "", 4), (16, True, "-m gpu", 16), (8, True, "-m gpu", 8)],
)
def test_gpu_tests_have_more_workers(machine: Machine, cores: int, gpu: bool, arguments: str, workers: int) -> None:
    shutil.copy(ROOT / "ci/test", machine.root / "ci")
    machine.put("nproc", f"#!/usr/bin/env bash\necho {cores}\n")
    if gpu:
        machine.put("nvidia-smi", "#!/usr/bin/env bash\n")
    fake = machine.put("fake", textwrap.dedent(f"""\
        #!/usr/bin/env bash
        case "$*" in
          "-m pytest"*) echo "$*" ;;
          *find_spec\\(\\'xdist*) exit 0 ;;
          *find_spec\\(\\'*) exit 1 ;;
          *) exec {sys.executable} "$@" ;;
        esac
        """))  # fmt: skip
    settings = {"PATH": str(machine.tools), "MEMFIX_PYTHON": str(fake)}
    command = ["ci/test", *arguments.split()]
    done = subprocess.run(command, cwd=machine.root, env=settings, capture_output=True, text=True)
    assert f" -n {workers} " in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("is_new", "has_xdist", "arguments", "compiles"),
    [
        (True, True, [], True),
        (True, True, ["tests/gate"], False),
        (True, False, [], False),
        (False, True, [], False),
    ],
)
def test_in_a_new_checkout_one_process_compiles_the_tests_before_the_workers(
    machine: Machine, is_new: bool, has_xdist: bool, arguments: list[str], compiles: bool
) -> None:
    shutil.copy(ROOT / "ci/test", machine.root / "ci")
    (machine.root / "tests").mkdir()
    if not is_new:
        (machine.root / "tests/__pycache__").mkdir()
    fake = machine.put("fake", textwrap.dedent(f"""\
        #!/usr/bin/env bash
        case "$*" in
          "-m pytest"*) echo "$*" >> {machine.calls}; [[ "$*" != *collect-only* ]] ;;
          *find_spec\\(\\'xdist*) exit {int(not has_xdist)} ;;
          *find_spec\\(\\'*) exit 1 ;;
          *) exec {sys.executable} "$@" ;;
        esac
        """))  # fmt: skip
    settings = {"PATH": str(machine.tools), "MEMFIX_PYTHON": str(fake)}
    command = ["ci/test", *arguments]
    done = subprocess.run(command, cwd=machine.root, env=settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *before, run = machine.called()
    assert ["--collect-only" in call for call in before] == [True] * compiles
    assert ("--collect-only" in run, " -n " in run) == (False, has_xdist)
