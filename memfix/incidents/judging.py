"""Judges claims: a function decorated with ``@check("LOG-12")`` computes whether the claim holds, and what is true.

An incident keeps these functions in ``checks.py``, or in the files of a package ``checks/``. They measure with the
shared ``Evidence`` (``evidence.py``), or with the incident's own subclass, also called ``Evidence``. A claim with a
formula or a reason needs no function. Imports no torch.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from types import ModuleType
from typing import Any, TypeVar

from ..errors import FormulaError, MemfixError, did_you_mean
from ..formula import Formula
from ..progress import Say, silent
from ..units import format_bytes
from .claims import (
    DECIMAL_UNITS,
    HOLDS,
    NOT_TESTABLE,
    WRONG,
    Claim,
    ClaimsError,
    ClaimVerdict,
    Figures,
    claims_file,
    load_claims,
)

# how a figure was computed, as reports print it
METER, ARITHMETIC, ON_CPU, ON_H200 = "simulated meter", "arithmetic", "run on the CPU", "measured on the H200"


class NotMeasured(MemfixError):
    """A check needs a tool that is not here, such as a GPU: its claim is not testable here, and has not drifted."""


# ---------------------------------------------------------------- what a check returns
@dataclass(frozen=True)
class CheckResult:
    """The result of a check, and ``how`` it was computed. ``figures`` are named as in the claim's correction.

    ``holds`` says whether the claim holds. If it is None, the claim holds if one of ``numbers`` equals its figure;
    without ``numbers``, if ``figures`` equal the recorded ones.
    """

    holds: bool | None
    how: str
    figures: Figures = field(default_factory=dict)
    numbers: tuple[float, ...] = ()

    def verdict(self, claim: Claim) -> ClaimVerdict:
        holds = self.holds
        if claim.reason:
            return NOT_TESTABLE
        if self.numbers:
            holds = any(map(claim.quantity.is_met_by, self.numbers))
        elif holds is None:
            holds = all(self.figures.get(name) == value for name, value in claim.expected.items())
        return HOLDS if holds else WRONG


def holds_if(holds: bool, how: str, **figures: int | str) -> CheckResult:
    """The result for a claim that holds if ``holds`` is true."""
    return CheckResult(holds, how, figures)


def matches_figure(how: str, *numbers: float, **figures: int | str) -> CheckResult:
    """The result for a claim that holds if one of ``numbers`` prints as the claimed figure.

    ``numbers`` are bytes for a figure in ``GB``, and ratios for one in ``x``.
    """
    return CheckResult(None, how, figures, numbers)


def as_recorded(how: str, **figures: int | str) -> CheckResult:
    """The result for a claim about behaviour, which holds if the figures equal the recorded ones."""
    return CheckResult(None, how, figures)


def sizes(**counts: int) -> dict[str, str]:
    """Figures that are bytes, printed: ``{"held": "37.09 GiB"}``."""
    return {name: format_bytes(count) for name, count in counts.items()}


def decimal(count: int, unit: str = "GB") -> str:
    """``39.83 GB``: bytes in the decimal units that reports use."""
    return f"{count / DECIMAL_UNITS[unit]:.2f} {unit}"


# ---------------------------------------------------------------- which function checks which claim
Function = TypeVar("Function", bound=Callable[..., CheckResult])
_ARGUMENTS_BY_CLAIM = "arguments_by_claim"


def check(*claim_ids: str, **arguments: Any) -> Callable[[Function], Function]:
    """Name the claims that a function checks, and the keyword arguments to call it with for these claims.

    The function gets the incident's evidence and these arguments. Decorators stack::

        @check("LOG-52", number=1, tokens=4096)
        @check("LOG-53", number=2, tokens=40_000)
        def prints(evidence: Evidence, number: int, tokens: int) -> CheckResult: ...
    """
    if not claim_ids or not all(isinstance(name, str) for name in claim_ids):
        raise ClaimsError('@check names the claims that the function checks: @check("LOG-12")')

    def mark(function: Function) -> Function:
        by_claim = vars(function).setdefault(_ARGUMENTS_BY_CLAIM, {})
        for name in claim_ids:
            if name in by_claim:
                raise ClaimsError(f"{_place(function)} names {name} twice")
            by_claim[name] = arguments
        return function

    return mark


ClaimCheck = functools.partial[CheckResult]
"""The function that checks a claim, with its keyword arguments for that claim. It takes the evidence."""


@dataclass(frozen=True)
class IncidentChecks:
    """The checks of an incident by claim, and the class of their evidence."""

    by_claim: Mapping[str, ClaimCheck]
    evidence: Callable[..., Any]


def load_checks(incident: str) -> IncidentChecks:
    """Load the checks of the incident. A claim without a check and a check without a claim are errors."""
    claims, file, name = load_claims(incident), claims_file(incident), f"{__package__}.{incident}.checks"
    if importlib.util.find_spec(name) is None:
        raise ClaimsError(f"{file}: there is no checks.py beside it; write one, or a package checks/")
    checks = importlib.import_module(name)
    files = [
        importlib.import_module(f"{name}.{own.name}") for own in pkgutil.iter_modules(getattr(checks, "__path__", ()))
    ]
    by_claim = collected_checks([checks, *files])
    require_matching(claims, by_claim, str(file), str(checks.__file__))
    shared = importlib.import_module(f"{__package__}.evidence").Evidence
    own = type("Evidence", (getattr(checks, "Evidence", shared),), {"incident_name": incident})
    return IncidentChecks(by_claim, own)


def collected_checks(modules: Iterable[ModuleType]) -> dict[str, ClaimCheck]:
    """The functions of ``modules`` that are decorated with ``@check``, by claim."""
    found: dict[str, ClaimCheck] = {}
    for function in [value for module in modules for value in vars(module).values() if inspect.isfunction(value)]:
        for name, arguments in vars(function).get(_ARGUMENTS_BY_CLAIM, {}).items():
            other = found.setdefault(name, ClaimCheck(function, **arguments))
            if other.func is not function:
                raise ClaimsError(f"two checks of {name}: {_place(other.func)} and {_place(function)}")
    return found


def require_matching(
    claims: Iterable[Claim], checks: Mapping[str, ClaimCheck], claims_file: str, checks_file: str
) -> None:
    """Refuse a claim without a formula, reason or check, a claim with two of them, and a check without a claim."""
    by_name = {claim.id: claim for claim in claims}
    for name, check in checks.items():
        if name not in by_name:
            raise ClaimsError(
                f"{_place(check.func)} checks {name}, but {claims_file} has no such claim{did_you_mean(name, by_name)}"
            )
    for name, claim in by_name.items():
        is_decided = bool(claim.formula or claim.reason)
        if is_decided and name in checks:
            other = "a formula" if claim.formula else "a reason why it cannot be tested"
            raise ClaimsError(f"{claims_file}: {name} has {other} and a check: {_place(checks[name].func)}")
        if not is_decided and name not in checks:
            raise ClaimsError(
                f'{claims_file}: {name} has no check: write a function under @check("{name}") in {checks_file}, '
                "or give the claim a formula or a reason why it cannot be tested"
            )


def _place(function: Callable[..., object]) -> str:
    return f"{inspect.getsourcefile(function)}: {function.__name__}"


# ---------------------------------------------------------------- the verdict
@dataclass(frozen=True)
class JudgedClaim:
    """A claim with the verdict computed now. ``failed`` is the error message of a check that raised."""

    claim: Claim
    check: str
    verdict: ClaimVerdict | None
    true: str = ""
    how: str = ""
    figures: Figures = field(default_factory=dict)
    drift: tuple[str, ...] = ()
    failed: str = ""

    @property
    def drifted(self) -> bool:
        """Whether the result differs from the recorded one."""
        return bool(self.drift or self.failed)

    def as_dict(self) -> dict[str, Any]:
        computed = {"computed_verdict" if name == "verdict" else name: value for name, value in asdict(self).items()}
        return computed.pop("claim") | computed


def judge_claims(claims: Iterable[Claim], checks: IncidentChecks, *, say: Say = silent) -> Iterator[JudgedClaim]:
    """Judge each claim, with one evidence for all checks. ``say`` is called with progress messages."""
    evidence = checks.evidence(say=say)
    for claim in claims:
        say(f"{claim.id}: {claim.statement}")
        yield judge_claim(claim, checks.by_claim.get(claim.id), evidence)


def judge_claim(claim: Claim, check: ClaimCheck | None, evidence: Any) -> JudgedClaim:
    """Judge one claim by its ``check``, or without one by its formula or its reason."""
    name = check.func.__name__ if check else ""
    try:
        found = check(evidence) if check else _without_check(claim, evidence.dims)
        return compared_with_record(claim, found, name)
    except (ClaimsError, FormulaError):
        raise  # an error in the claims file, not in the check
    except NotMeasured as error:
        return JudgedClaim(claim, name, NOT_TESTABLE, str(error))
    except Exception as error:
        return JudgedClaim(claim, name, None, failed=f"{type(error).__name__}: {error}")


def _without_check(claim: Claim, dims: Mapping[str, int]) -> CheckResult:
    if claim.reason:
        return CheckResult(None, "")
    count, unit = Formula(claim.formula).evaluate(dims), claim.quantity.unit.replace("i", "")
    if unit not in DECIMAL_UNITS:
        return matches_figure(claim.formula, count, count=count)
    return matches_figure(claim.formula, count, bytes=count, binary=format_bytes(count), decimal=decimal(count, unit))


def compared_with_record(claim: Claim, found: CheckResult, check: str = "") -> JudgedClaim:
    """The verdict that follows from ``found``, and its differences from the recorded one."""
    verdict = found.verdict(claim)
    drift = [f"recorded {claim.verdict}, now {verdict}"] if verdict != claim.verdict else []
    drift += [
        f"{name}: recorded {value}, now {found.figures.get(name, 'not computed')}"
        for name, value in claim.expected.items()
        if found.figures.get(name) != value
    ]
    true = claim.reason or _filled(claim, found.figures)
    return JudgedClaim(claim, check, verdict, true, found.how, found.figures, tuple(drift))


def _filled(claim: Claim, figures: Figures) -> str:
    printed = {name: f"{value:,}" if isinstance(value, int) else value for name, value in figures.items()}
    try:
        return claim.correction.format_map(printed)
    except KeyError as error:
        raise ClaimsError(
            f"{claim.id}: the correction names {error.args[0]!r}, which its check does not compute"
        ) from None
