"""Where contracts come from: our own folders, and other packages' entry points."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import PurePath
from typing import Any

import pytest

from memfix import registry
from memfix.contract import Contract, Dim, TensorSpec
from memfix.errors import EXIT_USAGE, ContractError, FormulaError, UsageError


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
    if name == "BROKEN_FORMULA":
        raise FormulaError("cannot parse the formula 'N*'")
    raise AttributeError(name)


@pytest.fixture(autouse=True)
def _nothing_remembered() -> Iterator[None]:
    registry.all_contracts.cache_clear()
    yield
    registry.all_contracts.cache_clear()


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


def test_two_contracts_of_one_name_are_refused_naming_both_sources(install: Any) -> None:
    install(mine=f"{__name__}:CLASH")
    with pytest.raises(ContractError) as refused:
        registry.all_contracts()
    assert str(refused.value) == (
        "two contracts are named 'embedding': in memfix.ops.embedding.contract "
        f"and in the entry point 'mine' ({__name__}:CLASH)"
    )


def test_an_entry_point_that_cannot_be_loaded_is_named_with_its_error(install: Any) -> None:
    install(mine=f"{__name__}:BROKEN")
    with pytest.raises(ContractError) as refused:
        registry.all_contracts()
    assert str(refused.value) == (
        f"the entry point 'mine' ({__name__}:BROKEN) cannot be loaded: RuntimeError: no GPU today"
    )


def test_an_entry_point_whose_module_is_gone_is_named(install: Any) -> None:
    install(mine="no_such_module_anywhere:contract")
    with pytest.raises(ContractError) as refused:
        registry.all_contracts()
    assert str(refused.value) == (
        "the entry point 'mine' (no_such_module_anywhere:contract) cannot be loaded: "
        "ModuleNotFoundError: No module named 'no_such_module_anywhere'"
    )


def test_what_memfix_says_of_a_foreign_contract_is_passed_on_as_it_is(install: Any) -> None:
    install(mine=f"{__name__}:BROKEN_FORMULA")
    with pytest.raises(FormulaError, match=r"^cannot parse the formula 'N\*'$"):
        registry.all_contracts()


def test_an_entry_point_that_is_no_contract_is_refused(install: Any) -> None:
    install(mine=f"{__name__}:NO_CONTRACT")
    with pytest.raises(ContractError) as refused:
        registry.all_contracts()
    assert str(refused.value) == (
        f"the entry point 'mine' ({__name__}:NO_CONTRACT) must be a Contract or a list of them, got dict"
    )


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
