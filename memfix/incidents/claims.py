"""Claims: the sentences of a report, as an incident's ``claims.toml`` records them. Imports no torch.

Each claim records the expected verdict and figures; ``judging.py`` computes both again.
"""

from __future__ import annotations

import importlib.resources
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from importlib.resources.abc import Traversable
from typing import Literal, get_args

from ..errors import MemfixError, UsageError, did_you_mean
from ..units import BYTE_UNITS
from . import require_incident

ClaimVerdict = Literal["holds", "wrong", "not testable"]
VERDICTS: tuple[ClaimVerdict, ...] = get_args(ClaimVerdict)
HOLDS, WRONG, NOT_TESTABLE = VERDICTS

Figures = Mapping[str, int | str]

CLAIMS_FILE = "claims.toml"

# in reports GB means 10**9 bytes
DECIMAL_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
# B is 10**9, as in 3.92B parameters; no report counts single bytes
_UNITS: dict[str, float] = {**BYTE_UNITS, **DECIMAL_UNITS, "K": 10**3, "M": 10**6, "B": 10**9, "x": 1, "%": 0.01}
_QUANTITY = re.compile(r"~?(\d+(?:\.(\d+))?)(?:-(\d+(?:\.\d+)?))? ?([KMGT]i?B|[KMBx%])")
_SOURCE = re.compile(r"(.+), lines? (.+)")


class ClaimsError(MemfixError):
    """A claims file contradicts itself or its checks."""


@dataclass(frozen=True)
class Quantity:
    """A figure as a report prints it: ``37.09 GB``, ``~74 GB``, ``37-74 GB``, ``3.92B``, ``4x``, ``5-10 %``."""

    low: Fraction
    high: Fraction
    decimals: int
    unit: str

    @staticmethod
    def parsed(text: str) -> Quantity:
        match = _QUANTITY.fullmatch(text)
        if match is None:
            raise ClaimsError(
                f"cannot read {text!r} as a size or a number; write it as '37.09 GB', '~74 GB', '37-74 GB' or '3.92B'"
            )
        low, decimals, high, unit = match.groups()
        return Quantity(Fraction(low), Fraction(high or low), len(decimals or ""), unit)

    def is_met_by(self, number: float) -> bool:
        """Whether ``number``, printed with as many digits as the report uses, equals the report's figure."""
        printed = Fraction(f"{number / _UNITS[self.unit]:.{self.decimals}f}")
        return self.low <= printed <= self.high


@dataclass(frozen=True)
class Claim:
    """One sentence of a report, decided by a ``formula``, by a check, or by a ``reason`` why it cannot be tested.

    docs/add-an-incident.md explains the fields.
    """

    id: str
    section: str
    lines: str
    statement: str
    verdict: ClaimVerdict
    claimed: str = ""
    formula: str = ""
    reason: str = ""
    correction: str = ""
    expected: Figures = field(default_factory=dict)
    slow: bool = False

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ClaimsError(f"{self.id}: unknown verdict {self.verdict!r}{did_you_mean(self.verdict, VERDICTS)}")
        if self.formula and self.reason:
            raise ClaimsError(f"{self.id}: has a formula and a reason why it cannot be tested: leave one out")
        if not self.reason and not self.expected:
            raise ClaimsError(f"{self.id}: expected is empty: name a figure that the check must come to")
        if self.formula:
            _ = self.quantity

    @property
    def quantity(self) -> Quantity:
        """The claimed figure."""
        return Quantity.parsed(self.claimed)


def claims_file(incident: str) -> Traversable:
    return importlib.resources.files(f"{__package__}.{require_incident(incident)}") / CLAIMS_FILE


def load_claims(incident: str) -> list[Claim]:
    """The claims of the incident's report, in order; empty if the incident has no claims file."""
    file = claims_file(incident)
    return parsed_claims(file.read_text(encoding="utf-8")) if file.is_file() else []


def parsed_claims(text: str) -> list[Claim]:
    """The claims of a file. A claim is a table, whose name is the claim's id."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ClaimsError(f"{CLAIMS_FILE}: {error}") from None
    known = Claim.__dataclass_fields__.keys() - {"id", "section", "lines"} | {"source"}
    claims = []
    for name, data in tables.items():
        if not isinstance(data, dict):
            raise ClaimsError(f"{name}: a claim is a table of keys; write [{name}] above them")
        if "check" in data:
            raise ClaimsError(f'{name}: remove check = {data["check"]!r} and write @check("{name}") over that function')
        for key in data.keys() - known:
            raise ClaimsError(f"{name}: unknown key {key!r}{did_you_mean(key, known)}")
        missing = [key for key in ("source", "statement", "verdict") if key not in data]
        if missing:
            raise ClaimsError(f"{name}: {', '.join(missing)} missing")
        source = _SOURCE.fullmatch(data.pop("source"))
        if source is None:
            raise ClaimsError(f"{name}: write source as 'Summary, line 3' or 'Summary, lines 3-5, 9'")
        claims.append(Claim(name, section=source[1], lines=source[2], **data))
    return claims


def chosen_claims(claims: Sequence[Claim], names: Iterable[str] = ()) -> list[Claim]:
    """The claims called ``names``, or all claims if there are no names."""
    by_name = {claim.id: claim for claim in claims}
    for name in names:
        if name not in by_name:
            raise UsageError(f"no claim {name!r}{did_you_mean(name, by_name)}")
    return [by_name[name] for name in dict.fromkeys(names)] or list(claims)


def counts(verdicts: Iterable[ClaimVerdict | None]) -> dict[ClaimVerdict, int]:
    """The number of claims with each verdict, in the order of ``VERDICTS``."""
    seen = list(verdicts)
    return {verdict: seen.count(verdict) for verdict in VERDICTS}
