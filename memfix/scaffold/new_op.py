"""``memfix new-op``: writes the folder of an op in a checkout of memfix, and its manual page."""

from __future__ import annotations

import importlib
from pathlib import Path

from ..checks.effort import Effort
from ..contract import Contract, parameters_of
from ..errors import UsageError
from ..laws import NAIVE
from ..meters import usable_meter
from ..progress import Say, silent
from .files import refuse_files_that_exist, write_files
from .first_contract import Asked, first_contract
from .function_source import as_a_file
from .source import contract_source, filled, names_used

CHECKOUT = Path(__file__).resolve().parents[2]
_LAWS = {"Budget", "Scaling"}


def new_op(
    asked: Asked, effort: Effort, *, force: bool, checkout: Path = CHECKOUT, say: Say = silent
) -> tuple[list[Path], tuple[str, ...]]:
    """Write the op, if its forms equal naive. Return the files and notes about the contract."""
    folder, page, index = (checkout / part for part in (
        f"memfix/ops/{asked.name}", f"docs/ops/{asked.name}.md", "docs/ops/index.md"
    ))  # fmt: skip
    if not index.exists():
        raise UsageError(f"memfix new-op writes into a checkout of memfix, and {checkout} is none; use memfix init")
    refuse_files_that_exist([folder, page], force)
    meter, _ = usable_meter("simulated")
    first = first_contract(asked, meter, effort, say)
    files = {folder / name: text for name, text in op_files(asked, first.contract).items()}
    files[page] = _page(asked, first.contract)
    listed = index.read_text(encoding="utf-8")
    if f"\n{asked.name}\n" not in listed:
        files[index] = listed.rstrip().removesuffix("```") + f"{asked.name}\n```\n"
    write_files(files)
    importlib.invalidate_caches()
    return [path.relative_to(checkout) for path in files], first.notes


def op_files(asked: Asked, contract: Contract) -> dict[str, str]:
    """Return the texts of the op's files by file name."""
    name, forms = asked.name, list(contract.forms)
    functions = {NAIVE: f"naive_{name}", **{form: f"{form}_{name}" for form in forms}}
    source = contract_source(contract, functions)
    used = names_used(source)
    modules = {"naive.py": as_a_file(contract.naive, functions[NAIVE])}
    modules |= {f"{form}.py": as_a_file(contract.function(form), functions[form]) for form in forms}
    titles = {"naive.py": f"The reference of {name}."} | {f"{form}.py": f"The form {form} of {name}." for form in forms}
    inputs = [spec.name for spec in contract.inputs]
    options = [p.name for p in parameters_of(contract.function(forms[0]))[len(inputs) :]]
    return {
        **{file: filled("op_file.py.txt", title=titles[file], source=text) for file, text in modules.items()},
        "contract.py": filled(
            "op_contract.py.txt", name=name, contract=source,
            contract_names=", ".join(sorted({*used} - _LAWS)), law_names=", ".join(sorted({*used} & _LAWS)),
            imports="\n".join(f"from .{form} import {functions[form]}" for form in sorted([NAIVE, *forms])),
        ),
        "__init__.py": filled(
            "op_init.py.txt", name=name, title=f"{name} in less memory.", form=forms[0],
            forms=", ".join(f'"{form}"' for form in forms) + ("," if len(forms) == 1 else ""), first=inputs[0],
            inputs=", ".join(f"{key}: torch.Tensor" for key in inputs),
            options="".join(f"{key}: int, " for key in options),
            arguments=", ".join([*inputs, *(f"{key}={key}" for key in options)]),
        ),
    }  # fmt: skip


def _page(asked: Asked, contract: Contract) -> str:
    rows = "\n".join(f"| `{form}` | {_first_line(contract, form)} |" for form in contract.forms)
    title = _first_line(contract, NAIVE)
    return filled("op_page.md.txt", name=asked.name, title=title, rows=rows, form=next(iter(contract.forms)))


def _first_line(contract: Contract, form: str) -> str:
    said = (contract.function(form).__doc__ or "").strip().partition("\n")[0]
    return said or f"The function {contract.function(form).__name__}."
