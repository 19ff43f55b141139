"""The command line: exit codes, messages, and what is left untouched."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import types
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from command_line import Ended
from forked_python import forked_python

from memfix import registry
from memfix.checks.finding import Finding
from memfix.cli.options import with_from_option
from memfix.contract import Contract, Dim, TensorSpec
from memfix.gate import run, touched
from memfix.gate.judge import Verdict
from memfix.gate.lock import HEADER
from memfix.laws import Budget
from memfix.registry import FILES_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
SMALL_CALL = "N=3,V=2,D=1,dtype=float32"


@pytest.fixture
def _no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal must come before minutes are spent."""

    def measured(*_: object, **__: object) -> None:
        raise AssertionError("an op was examined")

    monkeypatch.setattr(run, "examine_all", measured)


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize("command", ["gate", "check", "list"])
def test_an_unknown_op_ends_with_4_and_the_nearest_one(memfix: Any, command: str) -> None:
    assert memfix(command, "embeding") == Ended(4, "", "memfix: no op 'embeding'; did you mean 'embedding'?\n")


def test_an_unknown_option_ends_with_4_and_the_nearest_one(memfix: Any) -> None:
    ended = memfix("gate", "--updat")
    assert (ended.exit_code, ended.out) == (4, "")
    # click changed its quotes between versions
    assert "Error: No such option --updat. Did you mean --update?" in ended.err.replace("'", "").replace(
        "option:", "option"
    )


def test_an_unknown_command_ends_with_4(memfix: Any) -> None:
    ended = memfix("gait")
    assert ended.exit_code == 4
    assert "No such command 'gait'" in ended.err


@pytest.mark.parametrize("option", ["--meter", "--profile"])
def test_an_unknown_value_ends_with_4_and_lists_the_known_ones(memfix: Any, option: str) -> None:
    ended = memfix("gate", option, "huge")
    assert ended.exit_code == 4
    known = {"--meter": "'simulated', 'cuda', 'nvml'", "--profile": "'dev', 'ci', 'thorough'"}[option]
    assert f"Invalid value for '{option}': 'huge' is not one of {known}" in ended.err


def test_an_unknown_profile_of_the_environment_ends_with_4(memfix: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIX_PROFILE", "dve")
    assert memfix("gate") == Ended(4, "", "memfix: unknown profile 'dve'; did you mean 'dev'?\n")


@pytest.mark.usefixtures("_no_measuring")
def test_update_without_the_lock_is_refused(memfix: Any) -> None:
    ended = memfix("gate", "--update", "--no-lock")
    assert ended.exit_code == 4
    assert "Error: --update writes the lock and --no-lock ignores it: give one of them" in ended.err


@pytest.mark.usefixtures("_no_measuring")
def test_two_reports_on_standard_output_are_refused(memfix: Any) -> None:
    ended = memfix("gate", "--json", "-", "--md", "-")
    assert ended.exit_code == 4
    assert "Error: only one report can go to standard output" in ended.err


@pytest.mark.usefixtures("_no_measuring")
@pytest.mark.parametrize("option", ["--json", "--md", "--junit", "--sarif"])
def test_a_report_that_cannot_be_written_is_refused_before_anything_is_measured(
    memfix: Any, option: str, tmp_path: Path
) -> None:
    assert memfix("gate", option, "missing/gate.json") == Ended(
        4, "", f"memfix: cannot write the report missing/gate.json: no folder {tmp_path / 'missing'}\n"
    )


@pytest.mark.usefixtures("_no_measuring")
@pytest.mark.parametrize("arguments", [[], ["embedding", "--update"]], ids=["judging", "updating"])
def test_a_corrupt_lock_ends_with_4_and_stays_as_it_is(memfix: Any, tmp_path: Path, arguments: list[str]) -> None:
    lock = tmp_path / "memory.lock"
    corrupt = f"{HEADER}\n\n<<<<<<< HEAD\nembedding/gather [small, train] 7 bytes\n"
    lock.write_text(corrupt)
    ended = memfix("gate", "--lock", str(lock), *arguments)
    assert (ended.exit_code, ended.out) == (4, "")
    assert ended.err.startswith(
        f"memfix: {lock}:3: the lock file has a merge conflict; run memfix gate --update for all"
    )
    assert lock.read_text() == corrupt
    assert list(tmp_path.iterdir()) == [lock]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this copy of memfix is not a git checkout")
@pytest.mark.usefixtures("_no_measuring")
def test_an_unknown_base_ends_with_4(memfix: Any) -> None:
    assert memfix("gate", "--no-lock", "--base", "no-such-ref") == Ended(
        4, "", f"memfix: --base: no commit 'no-such-ref' in {ROOT}; fetch it, or name another\n"
    )


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ("N", "--at is a list of name=value, got 'N'"),
        ("", "--at is a list of name=value, got ''"),
        ("N=many", "--at: cannot read 'N=many'"),
        ("N=3,layout.weight=round", "--at: cannot read 'layout.weight=round'"),
        ("N=3,layout.wight=strided", "--at: embedding has no input 'wight'; did you mean 'weight'?"),
        ("N=3,frozen=bias", "--at: embedding has no input 'bias'; did you mean 'ids'?"),
        ("N=3", "embedding, case 'drawn': missing V, D"),
        ("N=0,V=2,D=1", "embedding, case 'drawn': N must be an int of at least 1, got 0"),
        ("N=3,V=2,D=1,Q=1", "embedding, case 'drawn': no dim or choice 'Q'; known: D, N, V"),
        (
            "N=3,V=2,D=1,dtype=int8",
            "embedding, case 'drawn': dtype must be one of ('float64', 'float32', 'bfloat16', 'float16'), got 'int8'",
        ),
    ],
)
def test_a_call_that_cannot_be_read_ends_with_4(memfix: Any, at: str, message: str) -> None:
    assert memfix("check", "embedding", "--at", at) == Ended(4, "", f"memfix: {message}\n")


@pytest.mark.parametrize("ops", [[], ["embedding", "linear_cross_entropy"]])
def test_a_call_of_several_ops_is_refused(memfix: Any, ops: list[str]) -> None:
    ended = memfix("check", *ops, "--at", SMALL_CALL)
    assert ended.exit_code == 4
    assert "Error: --at needs exactly one OP" in ended.err


def test_an_unknown_form_ends_with_4_and_the_nearest_one(memfix: Any) -> None:
    assert memfix("check", "embedding", "--form", "gathr") == Ended(
        4, "", "memfix: no form 'gathr'; did you mean 'gather'?\n"
    )


def test_no_examples_are_refused(memfix: Any) -> None:
    ended = memfix("check", "embedding", "--examples", "0")
    assert ended.exit_code == 4
    assert "0 is not in the range x>=1" in ended.err


def test_an_interrupt_ends_with_130(memfix: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(registry, "contracts", interrupted)
    assert memfix("list").exit_code == 130


# ---------------------------------------------------------------- what is shown
def test_the_list_is_valid_json_with_every_law(memfix: Any) -> None:
    ended = memfix("list", "--json", "-")
    assert (ended.exit_code, ended.err) == (0, "")
    ops = {op["name"]: op for op in json.loads(ended.out)["ops"]}
    assert list(ops) == list(registry.all_contracts())
    for name, contract in registry.all_contracts().items():
        assert ops[name]["laws"] == contract.laws()
        assert ops[name]["forms"] == ["naive", *contract.forms]
        assert ops[name]["cases"] == list(contract.cases)


def test_the_list_of_one_op_is_printed_and_written(memfix: Any, tmp_path: Path) -> None:
    ended = memfix("list", "embedding", "--json", "ops.json")
    assert ended.exit_code == 0
    assert ended.out.splitlines()[0] == "embedding"
    assert "  form gather                                  saves memory" in ended.out.splitlines()
    assert [op["name"] for op in json.loads((tmp_path / "ops.json").read_text())["ops"]] == ["embedding"]


def test_help_names_the_exit_codes_and_every_command(memfix: Any) -> None:
    ended = memfix("--help")
    assert ended.exit_code == 0
    assert "Exit codes: 0 pass, 1 regression, 2 could not measure, 4 usage." in ended.out
    commands = [line.split()[0] for line in ended.out.split("Commands:\n")[1].splitlines()]
    assert {"gate", "check", "list"} <= set(commands)


# ---------------------------------------------------------------- one call
def test_one_call_is_checked_for_equality_and_every_budget(memfix: Any, tmp_path: Path) -> None:
    ended = memfix("check", "embedding", "--form", "gather", "--at", SMALL_CALL, "--json", "found.json")
    assert ended.exit_code == 0
    found = json.loads((tmp_path / "found.json").read_text())["findings"]
    assert [(f["check"], f["form"], f["phase"], f["status"]) for f in found] == [
        ("equality", "gather", None, "pass"),
        ("budget", "gather", "saved", "pass"),
        ("budget", "gather", "forward", "pass"),
        ("budget", "gather", "held", "pass"),
        ("budget", "gather", "train", "pass"),
    ]
    # 3 rows of one float32
    assert found[2]["message"] == "peak 12 B, budget 12 B, meter simulated"
    assert [line.split()[0] for line in ended.out.splitlines()] == ["pass"] * 5


def test_the_module_runs_as_the_script_does() -> None:
    child = forked_python("-m", "memfix", "check", "embedding", "--form", "gather", "--at", SMALL_CALL, cwd=ROOT)
    assert child.returncode == 0
    assert [line.split()[:2] for line in child.stdout.splitlines()] == [["pass", "equality"]] + [["pass", "budget"]] * 4


# ---------------------------------------------------------------- the lock
def naive_affine(x: Any) -> Any:
    return x * 2 + 1


def in_place_affine(x: Any) -> Any:
    return (x * 2).add_(1)


AFFINE = Contract(
    "affine",
    naive=naive_affine,
    forms={"in_place": in_place_affine},
    dims={"N": Dim(1, 9)},
    inputs=[TensorSpec("x", "N", grad=True)],
    cases={"small": {"N": 256}},
    dtypes=("float32",),
    budgets=[Budget("in_place", phase="forward", bytes="N*e")],
)
LOCKED = f"""\
{HEADER}

affine/in_place [small, forward] 1024 bytes

affine/in_place [small, held] 1024 bytes

affine/in_place [small, train] 2048 bytes

affine/naive [small, forward] 2048 bytes

affine/naive [small, held] 1024 bytes

affine/naive [small, train] 2048 bytes
"""


@pytest.fixture
def gate(memfix: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The gate over one small op, with the lock in the folder where it runs."""

    def gate(*arguments: str, contract: Contract = AFFINE) -> Ended:
        monkeypatch.setattr(registry, "contracts", lambda names=(): [contract])
        return memfix("gate", "--profile", "dev", "--lock", "memory.lock", *arguments)

    return gate


def test_update_writes_the_lock_and_the_next_gate_passes(gate: Any, tmp_path: Path) -> None:
    assert gate("--update").exit_code == 0
    assert (tmp_path / "memory.lock").read_text() == LOCKED
    ended = gate("--json", "-")
    assert ended.exit_code == 0
    assert json.loads(ended.out)["verdict"] == "pass"
    assert "memfix gate: pass: 1 op, 1 form," in ended.err


def test_a_byte_above_the_lock_ends_with_1_and_leaves_the_lock(gate: Any, tmp_path: Path) -> None:
    lock = tmp_path / "memory.lock"
    lowered = LOCKED.replace("in_place [small, forward] 1024", "in_place [small, forward] 1023")
    lock.write_text(lowered)
    ended = gate()
    assert ended.exit_code == 1
    assert (
        "affine/in_place [small, forward]: 1,024 bytes (1.00 KiB), lock 1,023 (1023 B): +1 (+0.1 %), meter simulated"
    ) in ended.out
    assert lock.read_text() == lowered


def test_an_update_says_what_it_raises(gate: Any, tmp_path: Path) -> None:
    (tmp_path / "memory.lock").write_text(
        LOCKED.replace("in_place [small, forward] 1024", "in_place [small, forward] 512")
    )
    ended = gate("--update")
    assert ended.exit_code == 0
    assert "note: this update raises affine/in_place [small, forward]: 512 B -> 1.00 KiB (2.0x over)" in ended.out
    assert (tmp_path / "memory.lock").read_text() == LOCKED


def test_a_broken_budget_is_not_taken_into_the_lock(gate: Any, tmp_path: Path) -> None:
    ended = gate("--update", contract=AFFINE.with_form("wasteful", naive_affine, like="in_place"))
    assert ended.exit_code == 1
    assert "note: the lock was not updated: something else than the lock fails" in ended.out
    assert "lock FAILED" not in ended.out  # it would ask for the update that was just tried
    assert not (tmp_path / "memory.lock").exists()


def test_an_op_that_is_only_in_the_lock_fails(gate: Any, tmp_path: Path) -> None:
    (tmp_path / "memory.lock").write_text(LOCKED + "\ngone/form [small, train] 7 bytes\n")
    ended = gate()
    assert ended.exit_code == 1
    assert "gone: the lock has entries of an op that is not there any more; run memfix gate --update" in ended.out


def test_reports_are_written_where_they_were_asked_for(gate: Any, tmp_path: Path) -> None:
    (tmp_path / "memory.lock").write_text(LOCKED)
    assert gate("--json", "gate.json", "--md", "gate.md", "--junit", "gate.xml").exit_code == 0
    assert json.loads((tmp_path / "gate.json").read_text())["exit_code"] == 0
    row = "| affine | in_place | small | 1.00 KiB | 1.00 KiB | 2.00 KiB | 1.0x | pass |"
    assert row in (tmp_path / "gate.md").read_text().splitlines()
    assert (tmp_path / "gate.xml").read_text().startswith('<?xml version="1.0" encoding="utf-8"?>\n<testsuites>')


# ---------------------------------------------------------------- a package among the installed ones
@pytest.mark.parametrize(
    "command", [("explain",), ("fit", "--over", "N", "--capacity", "4MiB")], ids=lambda command: command[0]
)
def test_a_command_for_one_op_takes_a_package_of_one_and_asks_which_of_several(
    memfix: Any, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    entries = [
        EntryPoint("one", "theirs_alone", registry.ENTRY_POINT_GROUP),
        EntryPoint("two", "theirs", registry.ENTRY_POINT_GROUP),
    ]
    contracts = {name: dataclasses.replace(registry.all_contracts()["embedding"], name=name) for name in "abc"}
    for module, names in {"theirs_alone": "a", "theirs": "bc"}.items():
        monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**{name: contracts[name] for name in names}))
    monkeypatch.setattr(registry, "entry_points", lambda *, group: entries)
    registry.registered.cache_clear()
    try:
        ended = memfix(*command, "two")
        assert (ended.exit_code, ended.err) == (4, "memfix: two is a package of several ops; name one of b, c\n")
        ended = memfix(*command, "one", "--form", "gather", "--case", "small")
        assert ended.exit_code == 0
        assert ended.out.startswith("a/gather [small, train]")
    finally:
        registry.registered.cache_clear()


@pytest.fixture
def broken_package(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    entry = EntryPoint("theirs", "nowhere.contracts", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda *, group: [entry])
    registry.registered.cache_clear()
    said = "cannot be loaded: ModuleNotFoundError: No module named 'nowhere'"
    yield f"the entry point 'theirs' (nowhere.contracts) {said}"
    registry.registered.cache_clear()


def test_a_broken_package_is_told_once_and_the_other_ops_are_judged(memfix: Any, broken_package: str) -> None:
    ended = memfix("check", "embedding", "--form", "gather", "--at", SMALL_CALL)
    assert (ended.exit_code, ended.err) == (0, f"memfix: left out: {broken_package}\n")


def test_a_gate_of_what_changed_ends_with_2_where_a_package_is_broken(
    memfix: Any, broken_package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The change may be what broke it, and no op of it is known then."""
    monkeypatch.setattr(touched, "touched_ops", lambda *_: touched.Touched((), "no op is touched", ("theirs",)))
    ended = memfix("gate", "--changed", "--no-lock")
    assert ended.exit_code == 2
    assert f"theirs: {broken_package}" in ended.out


def test_a_gate_of_a_package_ends_with_2_where_one_of_its_ops_is_left_out(
    memfix: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedding = registry.all_contracts()["embedding"]
    theirs = types.SimpleNamespace(
        one=dataclasses.replace(embedding, name="one"), rope=dataclasses.replace(embedding, name="rope")
    )
    monkeypatch.setitem(sys.modules, "theirs", theirs)
    entry = EntryPoint("theirs", "theirs", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda *, group: [entry])
    monkeypatch.setattr(run, "run_gate", lambda *_, **__: Verdict((), (), "simulated"))
    registry.registered.cache_clear()
    try:
        ended = memfix("gate", "--no-lock", "theirs")
    finally:
        registry.registered.cache_clear()
    assert ended.exit_code == 2
    assert "two contracts are named 'rope'" in ended.out


def test_a_gate_of_all_ops_ends_with_2_where_a_package_is_broken(
    memfix: Any, broken_package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "run_gate", lambda *_, **__: Verdict((), (), "simulated"))
    ended = memfix("gate", "--no-lock")
    assert ended.exit_code == 2
    assert f"theirs: {broken_package}; repair it, or name the ops and packages to judge without it" in ended.out
    assert memfix("gate", "--no-lock", "embedding").exit_code == 0


@pytest.mark.usefixtures("_no_measuring")
def test_a_lock_is_not_updated_while_a_package_is_broken(memfix: Any, broken_package: str) -> None:
    ended = memfix("gate", "--update")
    assert ended.exit_code == 4
    assert ended.err.startswith(
        f"memfix: --update would drop the lock entries of ops that were left out: {broken_package}; repair it"
    )


def test_a_command_that_reproduces_a_failure_names_the_files_of_from(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Finding("equality", "loss", "chunked", "fail", "unequal", reproduce="memfix check loss --at N=1")
    passed = Finding("equality", "loss", "other", "pass", "equal")
    assert with_from_option([failed, passed]) == (failed, passed)
    monkeypatch.setenv(FILES_VARIABLE, os.pathsep.join(["my tests", "b.py"]))
    again, same = with_from_option([failed, passed])
    assert again.reproduce == "memfix check loss --at N=1 --from 'my tests' --from b.py"
    assert same == passed
