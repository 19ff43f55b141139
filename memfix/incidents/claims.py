"""Claims: sentences of a report, each with a check that computes whether it holds and what is true.

An incident keeps them in ``claims.toml``, and the checks that are more than a formula in ``claim_checks``. A claim is
judged anew each time. What ``claims.toml`` records, a verdict and figures, is what the replay must come to: where it
comes to something else, it has drifted. Imports no torch.
"""

from __future__ import annotations

import importlib
import importlib.resources
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from ..errors import FormulaError, MemfixError, UsageError, did_you_mean
from ..formula import Formula
from ..units import BYTE_UNITS, format_bytes
from . import require_incident

ClaimVerdict = Literal["holds", "wrong", "not testable"]
VERDICTS: tuple[ClaimVerdict, ...] = get_args(ClaimVerdict)
HOLDS, WRONG, NOT_TESTABLE = VERDICTS

Figures = Mapping[str, int | str]

CLAIMS_FILE, CHECKS_MODULE = "claims.toml", "claim_checks"

# figures of a GPU: beside the package in a checkout, and not part of what is installed
H200_RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200"

# a report's GB are meant as what the letters say: 10**9 bytes
_DECIMAL_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS = {**_DECIMAL_UNITS, **BYTE_UNITS}
_QUANTITY = re.compile(r"~?(\d+(?:\.(\d+))?)(?:-(\d+(?:\.\d+)?))? ?([KMGT]i?B|B)")


class ClaimsError(MemfixError):
    """A claims file contradicts itself, or names a check that is not there."""


@dataclass(frozen=True)
class Found:
    """What a check found, and how that was got.

    ``holds`` says whether the claim does, None where that cannot be known here. Of a claim that is a size, ``counts``
    decide instead: it holds if one of these numbers of bytes is what the report says. ``figures`` are what was
    computed, by the names that the claim's correction uses. ``elsewhere`` says what would give an answer where there
    is none here; that is no drift.
    """

    holds: bool | None
    how: str
    figures: Figures = field(default_factory=dict)
    counts: tuple[int, ...] = ()
    elsewhere: str = ""

    @staticmethod
    def sized(how: str, figures: Figures, *counts: int) -> Found:
        """Of a claim that is a size."""
        return Found(None, how, figures, counts)

    def is_so(self, claimed: str) -> bool | None:
        """Whether the claim holds that says ``claimed``."""
        if not self.counts:
            return self.holds
        return any(map(Quantity.parsed(claimed).is_met_by, self.counts))


@dataclass(frozen=True)
class Claim:
    """One sentence of a report. Exactly one of ``formula``, ``check`` and ``reason`` decides it.

    ``expected`` are figures that the check must come to. ``correction`` says what is true; ``{name}`` in it stands for
    a computed figure. ``slow`` claims need a simulation of the whole model.
    """

    id: str
    section: str
    lines: str
    statement: str
    verdict: ClaimVerdict
    claimed: str = ""
    formula: str = ""
    check: str = ""
    reason: str = ""
    correction: str = ""
    expected: Figures = field(default_factory=dict)
    slow: bool = False

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ClaimsError(f"{self.id}: unknown verdict {self.verdict!r}{did_you_mean(self.verdict, VERDICTS)}")
        if sum(map(bool, (self.formula, self.check, self.reason))) != 1:
            raise ClaimsError(f"{self.id}: a claim has a formula, a check or a reason why it cannot be tested: one")
        if not self.reason and not self.expected:
            raise ClaimsError(f"{self.id}: expected is empty: name a figure that the check must come to")
        if self.formula:
            Quantity.parsed(self.claimed)


@dataclass(frozen=True)
class Quantity:
    """A size as a report prints it: ``37.09 GB``, ``~74 GB``, ``37-74 GB``."""

    low: Fraction
    high: Fraction
    decimals: int
    unit: str

    @staticmethod
    def parsed(text: str) -> Quantity:
        match = _QUANTITY.fullmatch(text)
        if match is None:
            raise ClaimsError(f"cannot read {text!r} as a size; write it as '37.09 GB', '~74 GB' or '37-74 GB'")
        low, decimals, high, unit = match.groups()
        return Quantity(Fraction(low), Fraction(high or low), len(decimals or ""), unit)

    def is_met_by(self, count: int) -> bool:
        """Whether ``count`` bytes, printed with as many digits, are what the report says."""
        printed = Fraction(f"{count / _UNITS[self.unit]:.{self.decimals}f}")
        return self.low <= printed <= self.high


def decimal(count: int, unit: str = "GB") -> str:
    """``39.83 GB``: bytes in the units that reports use, to be set beside theirs."""
    return f"{count / _DECIMAL_UNITS[unit]:.2f} {unit}"


@dataclass(frozen=True)
class Answer:
    """A claim as it was judged now. ``failed`` is the error of a check that did not come to its end."""

    claim: Claim
    verdict: ClaimVerdict | None
    true: str
    how: str
    figures: Figures = field(default_factory=dict)
    drift: tuple[str, ...] = ()
    failed: str = ""

    @property
    def drifted(self) -> bool:
        """Whether the replay no longer comes to what is recorded."""
        return bool(self.drift or self.failed)

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self.claim),
            "computed_verdict": self.verdict,
            "true": self.true,
            "how": self.how,
            "figures": dict(self.figures),
            "drift": list(self.drift),
            "failed": self.failed,
        }


Check = Callable[[Any], Found]


class Checks(Protocol):
    """``memfix/incidents/<incident>/claim_checks``: what the claims of an incident are judged by."""

    CHECKS: Mapping[str, Check]
    Evidence: Callable[..., Any]
    """Made once a run and handed to every check: what they measure is measured once. ``dims`` are for formulas."""


def load_claims(incident: str) -> list[Claim]:
    """The claims of the incident's report, in order; none where nobody has written them down."""
    file = importlib.resources.files(f"{__package__}.{require_incident(incident)}") / CLAIMS_FILE
    return parsed_claims(file.read_text(encoding="utf-8")) if file.is_file() else []


def parsed_claims(text: str) -> list[Claim]:
    known = set(Claim.__dataclass_fields__)
    claims: dict[str, Claim] = {}
    for data in tomllib.loads(text).get("claim", []):
        name = data.get("id", "a claim without an id")
        for key in data.keys() - known:
            raise ClaimsError(f"{name}: unknown key {key!r}{did_you_mean(key, known)}")
        missing = [key for key in ("id", "section", "lines", "statement", "verdict") if key not in data]
        if missing:
            raise ClaimsError(f"{name}: {', '.join(missing)} missing")
        if name in claims:
            raise ClaimsError(f"two claims are called {name}")
        claims[name] = Claim(**data)
    return list(claims.values())


def load_checks(incident: str) -> Checks:
    checks: Any = importlib.import_module(f"{__package__}.{require_incident(incident)}.{CHECKS_MODULE}")
    return checks


def chosen_claims(claims: Sequence[Claim], names: Iterable[str] = ()) -> list[Claim]:
    """The claims called ``names``, or all."""
    by_name = {claim.id: claim for claim in claims}
    for name in names:
        if name not in by_name:
            raise UsageError(f"no claim {name!r}{did_you_mean(name, by_name)}")
    return [by_name[name] for name in dict.fromkeys(names)] or list(claims)


def answers(
    claims: Iterable[Claim], checks: Checks, *, say: Callable[[str], object] = lambda doing: None
) -> Iterator[Answer]:
    """Each claim, judged now. ``say`` is told what is under way."""
    evidence = checks.Evidence(say=say)
    for claim in claims:
        say(f"{claim.id}: {claim.statement}")
        yield answer(claim, checks.CHECKS, evidence)


def answer(claim: Claim, checks: Mapping[str, Check], evidence: Any) -> Answer:
    """One claim, judged now by what ``evidence`` has."""
    if claim.check and claim.check not in checks:
        raise ClaimsError(f"{claim.id}: no check {claim.check!r}{did_you_mean(claim.check, checks)}")
    try:
        return judged(claim, _found(claim, checks, evidence))
    except (ClaimsError, FormulaError):
        raise  # the claim is written wrongly, whatever is measured
    except Exception as error:
        return Answer(claim, None, "", "", failed=f"{type(error).__name__}: {error}")


def _found(claim: Claim, checks: Mapping[str, Check], evidence: Any) -> Found:
    if claim.reason:
        return Found(None, "")
    if claim.check:
        return checks[claim.check](evidence)
    count, unit = Formula(claim.formula).evaluate(evidence.dims), Quantity.parsed(claim.claimed).unit
    in_tens = decimal(count, unit.replace("i", ""))
    figures: dict[str, int | str] = {"bytes": count, "binary": format_bytes(count), "decimal": in_tens}
    return Found.sized(claim.formula, figures, count)


def judged(claim: Claim, found: Found) -> Answer:
    """The verdict that follows from what was found, and where it is not what is recorded."""
    is_so = found.is_so(claim.claimed)
    verdict = NOT_TESTABLE if is_so is None else HOLDS if is_so else WRONG
    if found.elsewhere:
        return Answer(claim, verdict, found.elsewhere, found.how, found.figures)
    drift = [f"recorded {claim.verdict}, now {verdict}"] if verdict != claim.verdict else []
    drift += [
        f"{name}: recorded {value}, now {found.figures.get(name, 'not computed')}"
        for name, value in claim.expected.items()
        if found.figures.get(name) != value
    ]
    true = claim.reason or _filled(claim, found.figures)
    return Answer(claim, verdict, true, found.how, found.figures, tuple(drift))


def _filled(claim: Claim, figures: Figures) -> str:
    printed = {name: f"{value:,}" if isinstance(value, int) else value for name, value in figures.items()}
    try:
        return claim.correction.format_map(printed)
    except KeyError as error:
        raise ClaimsError(
            f"{claim.id}: the correction names {error.args[0]!r}, which its check does not compute"
        ) from None


def counts(verdicts: Iterable[ClaimVerdict | None]) -> dict[ClaimVerdict, int]:
    """How many of each, in the order of ``VERDICTS``."""
    seen = list(verdicts)
    return {verdict: seen.count(verdict) for verdict in VERDICTS}
