"""Where contracts come from: our own folders, and other packages' entry points."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any

import pytest

from memfix import registry
from memfix.contract import Contract, Dim, TensorSpec
from memfix.errors import EXIT_USAGE, FormulaError, UsageError


def contract_named(name: str) -> Contract:
    return Contract(
        name,
        naive=lambda x: x,
        forms={"same": lambda x: x},
        dims={"N": Dim(1, 3)},
        inputs=[TensorSpec("x", "N")],
        cases={"small": {"N": 2}},
    )


ONE = contract_named("one")
SEVERAL = [contract_named("zebra"), contract_named("ant")]
CLASH = contract_named("embedding")
NO_CONTRACT = {"name": "one"}


def __getattr__(name: str) -> Any:
    """An attribute that fails in the way in which a broken package does, when the entry point asks for it."""
    if name == "BROKEN":
        raise RuntimeError("no GPU today")
    if name == "EXITS":
        sys.exit(0)
    if name == "BROKEN_FORMULA":
        raise FormulaError("cannot parse the formula 'N*'")
    raise AttributeError(name)


@pytest.fixture(autouse=True)
def _nothing_remembered() -> Iterator[None]:
    registry.registered.cache_clear()
    yield
    registry.registered.cache_clear()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend that a package with these entry points is installed: name -> value."""

    def install(**entries: str) -> None:
        found = [EntryPoint(name, value, registry.ENTRY_POINT_GROUP) for name, value in entries.items()]
        monkeypatch.setattr(registry, "entry_points", lambda *, group: [e for e in found if e.group == group])

    install()
    return install


def test_our_own_ops_are_found_in_alphabetical_order(install: Any) -> None:
    names = list(registry.all_contracts())
    assert names == sorted(names)
    assert {"embedding", "linear_cross_entropy"} <= set(names)


def test_a_file_of_ours_is_named_after_the_op_that_it_declares(install: Any) -> None:
    for name in registry.all_contracts():
        module = registry.source_of(name).module
        assert registry.op_declared_in(PurePath(*module.split(".")).with_suffix(".py")) == name


def test_a_folder_declares_one_op_or_several(install: Any) -> None:
    homes = {name: registry.source_of(name).module for name in ("kda", "kda_packed", "decode_kda")}
    assert homes == {
        "kda": "memfix.ops.kda.contract",
        "kda_packed": "memfix.ops.kda.kda_packed_contract",
        "decode_kda": "memfix.ops.kda.decode_kda_contract",
    }


@pytest.mark.parametrize(
    ("file", "op"),
    [
        ("kda/contract.py", "kda"),
        ("memfix/ops/kda/decode_kda_contract.py", "decode_kda"),
        ("kda/naive.py", None),
        ("kda/contracts.py", None),
        ("kda/contract.pyc", None),
    ],
)
def test_the_name_of_a_file_says_what_it_declares(file: str, op: str | None) -> None:
    assert registry.op_declared_in(PurePath(file)) == op


def test_contracts_of_other_packages_join_ours_one_or_a_list(install: Any) -> None:
    install(single=f"{__name__}:ONE", several=f"{__name__}:SEVERAL")
    found = registry.all_contracts()
    assert (found["one"], found["zebra"], found["ant"]) == (ONE, *SEVERAL)
    assert list(found) == sorted(found)
    assert "embedding" in found


def test_an_entry_point_may_be_a_module_with_contracts(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("their_contracts")
    vars(module).update(first=ONE, again=ONE, second=SEVERAL[0], no_contract=NO_CONTRACT)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    install(mine=module.__name__)
    assert registry.contracts(["mine"]) == [ONE, SEVERAL[0]]
    assert registry.source_of("one").declared() == [ONE, SEVERAL[0]]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (f"{__name__}:CLASH", "two contracts are named 'embedding': in memfix.ops.embedding.contract and in HERE; "
                              "the second is left out until one has another name"),
        (f"{__name__}:BROKEN", "HERE cannot be loaded: RuntimeError: no GPU today"),
        (f"{__name__}:EXITS", "HERE cannot be loaded: SystemExit: 0"),
        (f"{__name__}:BROKEN_FORMULA", "HERE cannot be loaded: cannot parse the formula 'N*'"),
        (f"{__name__}:NO_CONTRACT", "HERE must be a Contract, a list of them, or a module that holds some, got dict"),
        ("json", "HERE must be a Contract, a list of them, or a module that holds some, got none"),
        ("nowhere:contract", "HERE cannot be loaded: ModuleNotFoundError: No module named 'nowhere'"),
        ("no module: !", "HERE cannot be loaded: ModuleNotFoundError: No module named 'no module'"),
    ],
)  # fmt: skip
def test_a_broken_entry_point_is_left_out_with_its_reason_and_others_go_on(
    install: Any, value: str, reason: str
) -> None:
    install(mine=value, good=f"{__name__}:ONE")
    assert {"one", "embedding"} <= registry.all_contracts().keys()
    assert registry.all_contracts()["embedding"] is not CLASH
    assert registry.registered().left_out == [("mine", reason.replace("HERE", f"the entry point 'mine' ({value})"))]


def test_an_op_of_a_broken_package_is_refused_with_the_reason(install: Any) -> None:
    install(mine=f"{__name__}:BROKEN", other="nowhere:x")
    told = f"the entry point 'mine' ({__name__}:BROKEN) cannot be loaded: RuntimeError: no GPU today"
    with pytest.raises(UsageError) as refused:
        registry.contracts(["mine"])
    assert str(refused.value) == f"no op 'mine': {told}"
    with pytest.raises(UsageError) as refused:
        registry.contracts(["their_loss"])
    assert f"\n  left out: {told}\n" in str(refused.value)
    assert "No module named 'nowhere'" in str(refused.value)


def test_the_name_of_an_entry_point_stands_for_its_ops_unless_an_op_has_it(install: Any) -> None:
    install(theirs=f"{__name__}:SEVERAL", zebra=f"{__name__}:ONE")
    assert [c.name for c in registry.contracts(["theirs"])] == ["ant", "zebra"]
    assert [c.name for c in registry.contracts(["zebra"])] == ["zebra"]


CONTRACT = """
from memfix import Contract, Dim, TensorSpec
from the_op import naive
contract = Contract({name!r}, naive=naive, forms={{"same": naive}}, dims={{"N": Dim(1, 3)}},
                    inputs=[TensorSpec("x", "N")], cases={{"small": {{"N": 2}}}})
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install: Any) -> Iterator[Path]:
    """The working directory, with an op and two files that declare contracts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "src").mkdir()
    (tmp_path / "src/the_op.py").write_text("def naive(x):\n    return x\n")
    (tmp_path / "tests/inner").mkdir(parents=True)
    (tmp_path / "tests/inner/__init__.py").touch()
    (tmp_path / "tests/test_named_here.py").write_text(CONTRACT.format(name="here"))
    (tmp_path / "tests/inner/test_named_there.py").write_text(CONTRACT.format(name="there"))
    (tmp_path / "tests/conftest.py").write_text("raise RuntimeError('no contract, so not imported')\n")
    (tmp_path / "tests/test_imported.py").write_text(
        "import memfix\nfrom test_named_here import contract as of_another\ntest_x = memfix.suite(of_another)\n"
        "del of_another\n"
    )
    before = {*sys.modules}
    yield tmp_path
    for name in {*sys.modules} - before:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("paths", "ops"),
    [
        ("tests", ["here", "there"]),
        ("tests/test_named_here.py", ["here"]),
        ("tests/inner:tests/test_named_here.py", ["here", "there"]),
        ("tests/test_imported.py", ["here"]),
    ],
)
def test_contracts_of_files_are_all_there_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch, paths: str, ops: list[str]
) -> None:
    monkeypatch.setenv(registry.FILES_VARIABLE, paths.replace(":", os.pathsep))
    assert [contract.name for contract in registry.contracts()] == ops


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere.py", "--from must be a file or a folder, got nowhere.py, which does not exist"),
        ("src", "--from src: no file in it has a Contract; name the file itself if it imports one"),
        ("src/the_op.py", "src/the_op.py must be a Contract, a list of them, or a module that holds some, got none"),
        ("tests/conftest.py", "tests/conftest.py cannot be loaded: RuntimeError: no contract, so not imported"),
        ("json.py", "--from json.py: a module 'json' is there already, JSON; rename the file"),
    ],
)
def test_a_file_without_contracts_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, path: str, message: str
) -> None:
    (folder / "json.py").write_text(CONTRACT.format(name="clash"))
    monkeypatch.setenv(registry.FILES_VARIABLE, path)
    sys.modules.pop("conftest", None)
    with pytest.raises(UsageError) as refused:
        registry.contracts()
    assert str(refused.value) == message.replace("JSON", json.__file__)


def test_an_unknown_op_suggests_the_nearest_and_ends_with_the_usage_code(install: Any) -> None:
    with pytest.raises(UsageError) as refused:
        registry.contracts(["embeding"])
    assert str(refused.value) == "no op 'embeding'; did you mean 'embedding'?"
    assert refused.value.exit_code == EXIT_USAGE


def test_ops_are_given_in_the_order_asked_and_once_each(install: Any) -> None:
    asked = ["linear_cross_entropy", "embedding", "linear_cross_entropy"]
    assert [c.name for c in registry.contracts(asked)] == ["linear_cross_entropy", "embedding"]


def test_no_names_are_all_ops(install: Any) -> None:
    assert registry.contracts() == list(registry.all_contracts().values())
