"""``memfix list``: lists ops with their forms, cases and laws."""

from __future__ import annotations

from typing import Any

import click

from ..contract import Contract
from .options import contracts_of, json_option, ops_argument
from .output import Output


@click.command("list")
@ops_argument
@json_option
def list_ops(ops: tuple[str, ...], output: Output) -> int:
    """List ops with their forms, cases and laws."""
    chosen = contracts_of(ops)
    output.write_json(lambda: {"ops": [_described(contract) for contract in chosen]})
    if output.json_path != "-":
        for contract in chosen:
            output.line(contract.name, "bold")
            for key, law in contract.laws().items():
                output.line(f"  {key:<44} {law}")
    return 0


def _described(contract: Contract) -> dict[str, Any]:
    return {
        "name": contract.name,
        "forms": ["naive", *contract.forms],
        "cases": list(contract.cases),
        "laws": contract.laws(),
    }
