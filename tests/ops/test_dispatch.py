"""The dispatcher and the shape of a form, which ops of other packages share."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch

from memfix.checks.bad_inputs import check_bad_input
from memfix.ops import dispatch
from memfix.ops.dispatch import Dispatcher, require_kernels
from memfix.registry import all_contracts

FOREIGN = {
    "__init__.py": """
from memfix.ops.dispatch import Dispatcher

DISPATCHER = Dispatcher("doubled", __name__, ("whole", "chunked", "triton"), otherwise="chunked", kernels="triton")
FORMS = DISPATCHER.names


def doubled(x, *, rows_per_chunk=4, form="auto"):
    return DISPATCHER.function(form, x)(x, rows_per_chunk=rows_per_chunk)
""",
    "call.py": """
from dataclasses import dataclass
from typing import NamedTuple

import torch

from memfix.ops.arguments import require_at_least_one, require_floating, require_shape
from memfix.ops.call import takes


@dataclass(frozen=True, kw_only=True)
class Options:
    rows_per_chunk: int = 4

    def __post_init__(self):
        require_at_least_one("rows_per_chunk", self.rows_per_chunk)


class Tensors(NamedTuple):
    x_N: torch.Tensor

    @classmethod
    def checked(cls, *tensors, **by_name):
        made = cls(*tensors, **by_name)
        require_floating(x=require_shape("x", made.x_N, "N"))
        return made


form = takes(Tensors, Options)
""",
    "whole.py": '''
from .call import form


@form
def whole_doubled(tensors, options):
    """All rows at once."""
    return tensors.x_N * 2
''',
    "chunked.py": """
import torch

from .call import form


@form
def chunked_doubled(tensors, options):
    return torch.cat([rows * 2 for rows in tensors.x_N.split(options.rows_per_chunk)])
""",
    "contract.py": """
from memfix import Contract, Dim, TensorSpec
from memfix.ops.bad_inputs import bad_chunk_sizes, not_floating

from .chunked import chunked_doubled
from .whole import whole_doubled

contract = Contract(
    "doubled",
    naive=lambda x: x + x,
    forms={"whole": whole_doubled, "chunked": chunked_doubled},
    dims={"N": Dim(1, 9), "rows_per_chunk": Dim(1, 9)},
    inputs=[TensorSpec("x", "N", grad=True)],
    cases={"small": {"N": 8, "rows_per_chunk": 2}},
    bad_inputs=[*bad_chunk_sizes("rows_per_chunk"), *not_floating("x")],
)
""",
}


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A package of somebody else with an op of three forms, one of which has no module yet."""
    for name, text in FOREIGN.items():
        (tmp_path / "foreign_op").mkdir(exist_ok=True)
        (tmp_path / "foreign_op" / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    import foreign_op  # type: ignore[import-not-found]

    yield foreign_op
    for name in [name for name in sys.modules if name.partition(".")[0] == "foreign_op"]:
        del sys.modules[name]


def test_an_op_of_another_package_follows_the_same_shape(foreign: ModuleType) -> None:
    from foreign_op.contract import contract  # type: ignore[import-not-found]

    assert foreign.FORMS == ("auto", "whole", "chunked", "triton")
    x = torch.arange(5.0)
    for form in ("auto", "whole", "chunked"):
        assert torch.equal(foreign.doubled(x, form=form), x * 2)
    for form in contract.forms:
        assert contract.options(form, contract.cases["small"]) == {"rows_per_chunk": 2}
        assert [check_bad_input(contract, form, bad).status for bad in contract.bad_inputs] == 5 * ["pass"]


def test_forms_are_imported_when_they_are_called(foreign: ModuleType) -> None:
    assert "foreign_op.chunked" not in sys.modules
    foreign.doubled(torch.ones(3))
    assert "foreign_op.chunked" in sys.modules
    assert "foreign_op.whole" not in sys.modules


def test_a_form_shows_the_signature_that_it_is_called_by(foreign: ModuleType) -> None:
    from foreign_op.whole import whole_doubled

    assert list(inspect.signature(whole_doubled).parameters) == ["x_N", "rows_per_chunk"]
    assert whole_doubled.__doc__ == "All rows at once."
    assert torch.equal(whole_doubled(x_N=torch.ones(2), rows_per_chunk=1), torch.full((2,), 2.0))
    with pytest.raises(TypeError, match="unexpected keyword argument 'rows'"):
        whole_doubled(torch.ones(2), rows=3)
    with pytest.raises(ValueError, match="rows_per_chunk must be at least 1, got 0"):
        whole_doubled(torch.ones(2), rows_per_chunk=0)
    with pytest.raises(TypeError, match="x must be a tensor, got list"):
        whole_doubled([1.0])


# ---------------------------------------------------------------- which form
def tensor(device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    class Elsewhere:
        is_cuda = device == "cuda"

    Elsewhere.dtype = dtype  # type: ignore[attr-defined]
    return cast("torch.Tensor", Elsewhere())


KDA = Dispatcher(
    "kda", "package", forms=("wy", "triton"), otherwise="wy", kernels="triton", not_for=(torch.float64,)
)  # fmt: skip


@pytest.mark.parametrize(
    ("device", "dtype", "has_triton", "chosen"),
    [
        ("cuda", torch.float32, True, "triton"),
        ("cuda", torch.bfloat16, True, "triton"),
        ("cuda", torch.float64, True, "wy"),
        ("cuda", torch.float32, False, "wy"),
        ("cpu", torch.float32, True, "wy"),
    ],
)
def test_auto_takes_kernels_where_they_can_run(
    device: str, dtype: torch.dtype, has_triton: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "triton_is_installed", lambda: has_triton)
    assert KDA.chosen("auto", tensor(device, dtype)) == chosen
    assert KDA.chosen("triton", tensor(device, dtype)) == "triton", "what is named is taken"


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("dense", "form must be one of auto, wy, triton, got 'dense'"),
        ("tritn", "form must be one of auto, wy, triton, got 'tritn'; did you mean 'triton'?"),
        (None, "form must be one of auto, wy, triton, got None"),
        (3, "form must be one of auto, wy, triton, got 3"),
    ],
)
def test_an_unknown_form_is_refused_with_the_nearest(form: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        KDA.chosen(form, tensor("cpu"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"otherwise": "standard"}, "otherwise must be one of wy, triton, got 'standard'"),
        ({"otherwise": "wy", "kernels": "trtion"}, "kernels must be one of wy, triton, got 'trtion'; did you mean"),
    ],
)
def test_a_dispatcher_of_forms_that_are_not_there_is_refused(wrong: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Dispatcher("kda", "package", forms=("wy", "triton"), **wrong)  # type: ignore[arg-type]


def test_kernels_that_cannot_run_are_refused_with_the_form_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "is_interpreted", lambda: False)
    message = "form 'triton' runs on a GPU, and the tensors are on the CPU; take form='wy', or set TRITON_INTERPRET=1"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        require_kernels(torch.ones(1), instead="wy")
    monkeypatch.setattr(dispatch, "triton_is_installed", lambda: False)
    with pytest.raises(RuntimeError, match="needs the package triton, which is not installed; take form='wy'"):
        require_kernels(torch.ones(1), instead="wy")


def test_every_chunked_op_refuses_the_same_chunk_sizes() -> None:
    chunked = {"chunk_size", "rows_per_chunk", "queries_per_chunk", "positions_per_chunk"}
    for contract in all_contracts().values():
        if chunked & contract.dims.keys():
            names = {bad.name for bad in contract.bad_inputs}
            assert {"zero chunk", "negative chunk", "fractional chunk", "boolean chunk"} <= names, contract.name
