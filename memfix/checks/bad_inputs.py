"""Bad inputs: every form must refuse each of them, with the message that the contract states."""

from __future__ import annotations

from typing import Any

from ..contract import BadInput, Contract, parameters_of
from .finding import Finding, Status
from .form_call import FormCall, read_to_end
from .inputs import Draw


def check_bad_input(contract: Contract, form: str, bad: BadInput) -> Finding:
    """Change a good call into the bad one, run it, and compare what it raises with the contract."""
    case = contract.case_of("bad input", {dim: spec.nearest(5) for dim, spec in contract.dims.items()})
    arguments: dict[str, Any] = {**FormCall(contract, form, Draw(case)).inputs("cpu"), **contract.options(form, case)}
    bad.change(arguments)
    tensors = [arguments.pop(spec.name, None) for spec in contract.inputs]

    def finding(status: Status, message: str) -> Finding:
        return Finding("bad input", contract.name, form, status, f"{bad.name}: {message}")

    unknown = arguments.keys() - {parameter.name for parameter in parameters_of(contract.function(form))}
    if unknown:
        return finding("note", f"the form takes no {', '.join(sorted(unknown))}")
    try:
        read_to_end(contract.function(form)(*tensors, **arguments))  # a generator raises when it is read
    except bad.error as error:
        if bad.message in str(error):
            return finding("pass", "refused")
        return finding("fail", f"the message must contain {bad.message!r}, got {str(error)!r}")
    except Exception as error:
        return finding("fail", f"must raise {bad.error.__name__}, raised {type(error).__name__}: {error}")
    return finding("fail", f"must raise {bad.error.__name__} with {bad.message!r}, and was accepted")
