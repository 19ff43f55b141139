"""``memfix list``: lists ops with their forms, cases and laws."""

from __future__ import annotations

from typing import Any

import click
from rich.text import Text

from ..contract import Contract
from .options import contracts_of, json_option, ops_argument, report_console


@click.command("list")
@ops_argument
@json_option
def list_ops(ops: tuple[str, ...], json_path: str | None) -> int:
    """List ops with their forms, cases and laws."""
    from ..gate import report

    report.require_writable(json_path)
    chosen = contracts_of(ops)
    if json_path is not None:
        report.write_report(json_path, report.as_json({"ops": [_described(contract) for contract in chosen]}))
    if json_path != "-":
        console = report_console(to_stderr=False)
        for contract in chosen:
            console.print(Text(contract.name, style="bold"))
            for key, law in contract.laws().items():
                console.print(Text(f"  {key:<44} {law}"), soft_wrap=True)
    return 0


def _described(contract: Contract) -> dict[str, Any]:
    return {
        "name": contract.name,
        "forms": ["naive", *contract.forms],
        "cases": list(contract.cases),
        "laws": contract.laws(),
    }
