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
from .first_contract import Request, first_contract
from .function_source import standalone_source
from .source import contract_source, filled_template, names_used

CHECKOUT = Path(__file__).resolve().parents[2]
_LAWS = {"Budget", "Scaling"}


def new_op(
    request: Request, effort: Effort, *, force: bool, checkout: Path = CHECKOUT, say: Say = silent
) -> tuple[list[Path], tuple[str, ...]]:
    """Write the op, if its forms equal naive. Return the files and notes about the contract."""
    folder, page, index = (checkout / part for part in (
        f"memfix/ops/{request.name}", f"docs/ops/{request.name}.md", "docs/ops/index.md"
    ))  # fmt: skip
    if not index.exists():
        raise UsageError(f"memfix new-op writes into a checkout of memfix, and {checkout} is none; use memfix init")
    refuse_files_that_exist([folder, page], force)
    meter = usable_meter("simulated")
    first = first_contract(request, meter, effort, say)
    files = {folder / name: text for name, text in op_files(request, first.contract).items()}
    files[page] = _page(request, first.contract)
    listed = index.read_text(encoding="utf-8")
    if f"\n{request.name}\n" not in listed:
        files[index] = listed.rstrip().removesuffix("```") + f"{request.name}\n```\n"
    write_files(files)
    importlib.invalidate_caches()
    return [path.relative_to(checkout) for path in files], first.notes


def op_files(request: Request, contract: Contract) -> dict[str, str]:
    """Return the texts of the op's files by file name."""
    name, forms = request.name, list(contract.forms)
    functions = {NAIVE: f"naive_{name}", **{form: f"{form}_{name}" for form in forms}}
    source = contract_source(contract, functions)
    used = names_used(source)
    modules = {"naive.py": standalone_source(contract.naive, functions[NAIVE])}
    modules |= {f"{form}.py": standalone_source(contract.function(form), functions[form]) for form in forms}
    titles = {"naive.py": f"The reference of {name}."} | {f"{form}.py": f"The form {form} of {name}." for form in forms}
    inputs = [spec.name for spec in contract.inputs]
    options = [p.name for p in parameters_of(contract.function(forms[0]))[len(inputs) :]]
    return {
        **{file: filled_template("op_file.py.txt", title=titles[file], source=text) for file, text in modules.items()},
        "contract.py": filled_template(
            "op_contract.py.txt", name=name, contract=source,
            contract_names=", ".join(sorted({*used} - _LAWS)), law_names=", ".join(sorted({*used} & _LAWS)),
            imports="\n".join(f"from .{form} import {functions[form]}" for form in sorted([NAIVE, *forms])),
        ),
        "__init__.py": filled_template(
            "op_init.py.txt", name=name, title=f"{name} in less memory.", form=forms[0],
            forms=", ".join(f'"{form}"' for form in forms) + ("," if len(forms) == 1 else ""), first=inputs[0],
            inputs=", ".join(f"{key}: torch.Tensor" for key in inputs),
            options="".join(f"{key}: int, " for key in options),
            arguments=", ".join([*inputs, *(f"{key}={key}" for key in options)]),
        ),
    }  # fmt: skip


def _page(request: Request, contract: Contract) -> str:
    rows = "\n".join(f"| `{form}` | {_first_line(contract, form)} |" for form in contract.forms)
    title = _first_line(contract, NAIVE)
    return filled_template("op_page.md.txt", name=request.name, title=title, rows=rows, form=next(iter(contract.forms)))


def _first_line(contract: Contract, form: str) -> str:
    said = (contract.function(form).__doc__ or "").strip().partition("\n")[0]
    return said or f"The function {contract.function(form).__name__}."
