"""The claims kit: figures as reports print them, claims files, ``@check``, verdicts, and the shared evidence."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from memfix import incidents
from memfix.errors import UsageError
from memfix.incidents import claims as recording
from memfix.incidents.claims import HOLDS, NOT_TESTABLE, WRONG, ClaimsError, Quantity, chosen_claims, load_claims
from memfix.incidents.claims import parsed_claims as parsed
from memfix.incidents.evidence import Evidence, default_of, fixed_seed, raised
from memfix.incidents.judging import (
    CheckResult,
    ClaimCheck,
    NotMeasured,
    as_recorded,
    check,
    collected_checks,
    holds_if,
    judge_claim,
    judge_claims,
    load_checks,
    matches_figure,
    require_matching,
    sizes,
)
from memfix.units import GiB

CLAIM = """
[X-1]
source = "Summary, line 1"
statement = "It takes 1 GiB"
claimed = "1 GiB"
verdict = "holds"
formula = "GiB"
expected = { bytes = 1073741824 }
"""
CHECKED = CLAIM.replace('formula = "GiB"', "").replace("bytes", "taken")


# ---------------------------------------------------------------- figures as a report prints them
@pytest.mark.parametrize(
    ("claimed", "number", "is_met"),
    [
        ("37.09 GB", 37_090_000_000, True),
        ("37.09 GB", 37_094_999_999, True),
        ("37.09 GB", 37_096_000_000, False),
        ("37.09 GiB", int(37.09375 * GiB), True),
        ("~74 GB", 74_400_000_000, True),
        ("~74 GB", 74_600_000_000, False),
        ("37-74 GB", 74_000_000_000, True),
        ("37-74 GB", 36_400_000_000, False),
        ("640 MB", 640 << 20, False),
        ("640 MiB", 640 << 20, True),
        ("3.92B", 3_921_918_720, True),
        ("3.92B", 3_926_000_000, False),
        ("25.6M", 50_000 * 512, True),
        ("65K", 65_536, False),
        ("4x", 4.2, True),
        ("4x", 3.4, False),
        ("5-10 %", 0.104, True),
        ("5-10 %", 0.11, False),
    ],
)
def test_a_figure_is_met_to_the_digits_that_are_printed(claimed: str, number: float, is_met: bool) -> None:
    assert Quantity.parsed(claimed).is_met_by(number) == is_met


@pytest.mark.parametrize("text", ["", "37.09", "GB", "37.09 GBs", "about 37 GB", "3.92B params", "x"])
def test_what_is_no_figure_is_refused(text: str) -> None:
    with pytest.raises(ClaimsError, match="cannot read"):
        Quantity.parsed(text)


# ---------------------------------------------------------------- claims files
def test_a_claim_by_a_formula_is_read_and_judged() -> None:
    (claim,) = parsed(CLAIM)
    assert not judge_claim(claim, None, Evidence()).drifted


def test_a_formula_may_count_instead_of_sizing() -> None:
    text = CLAIM.replace('"GiB"', '"50000*512"').replace("1 GiB", "25.6M").replace("bytes = 1073741824", "count = 1")
    (claim,) = parsed(text)
    got = judge_claim(claim, None, Evidence())
    assert (got.figures, got.drift) == ({"count": 25_600_000}, ("count: recorded 1, now 25600000",))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("source =", "sources =", "X-1: unknown key 'sources'; did you mean 'source'?"),
        ('source = "Summary, line 1"\n', "", "X-1: source missing"),
        ("line 1", "1", "X-1: write source as 'Summary, line 3' or 'Summary, lines 3-5, 9'"),
        ('"holds"', '"hold"', "X-1: unknown verdict 'hold'; did you mean 'holds'?"),
        ('formula = "GiB"', 'formula = "GiB"\nreason = "so"', "X-1: has a formula and a reason why it cannot be"),
        ('formula = "GiB"', 'check = "so"', "X-1: remove check = 'so' and write @check(\"X-1\") over that function"),
        ("expected = { bytes = 1073741824 }", "", "X-1: expected is empty: name a figure"),
        ('claimed = "1 GiB"', "", "cannot read '' as a size"),
        ("[X-1]", CLAIM + "[X-1]", "claims.toml: Cannot declare ('X-1',) twice (at line 10"),
        ("[X-1]", "X-0 = 1\n[X-1]", "X-0: a claim is a table of keys; write [X-0] above them"),
    ],
)
def test_a_file_that_is_written_wrongly_is_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(ClaimsError) as error:
        parsed(CLAIM.replace(old, new))
    assert message in str(error.value)


def test_claims_are_chosen_by_name() -> None:
    everything = load_claims("long_context_loss")
    assert [claim.id for claim in chosen_claims(everything, ["LOG-12", "LOG-03", "LOG-12"])] == ["LOG-12", "LOG-03"]
    assert chosen_claims(everything) == everything
    with pytest.raises(UsageError, match="no claim 'LOG-1'; did you mean"):
        chosen_claims(everything, ["LOG-1"])


def test_an_incident_without_claims_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "CLAIMS_FILE", "nobody_wrote_them.toml")
    assert load_claims("long_context_loss") == []


# ---------------------------------------------------------------- which function checks which claim
def module_of(*functions: Any) -> ModuleType:
    module = ModuleType("checks")
    vars(module).update({function.__name__: function for function in functions})
    return module


def by_claim(*functions: Any) -> dict[str, ClaimCheck]:
    return collected_checks([module_of(*functions)])


def test_one_function_checks_several_claims_each_with_its_arguments() -> None:
    @check("X-1", "X-2", tokens=3)
    @check("X-3", tokens=5)
    def counted(evidence: Any, tokens: int) -> CheckResult:
        return holds_if(True, evidence, tokens=tokens)

    figures = {name: check("how").figures for name, check in by_claim(counted).items()}
    assert figures == {"X-1": {"tokens": 3}, "X-2": {"tokens": 3}, "X-3": {"tokens": 5}}


@pytest.mark.parametrize("names", [(), (print,), ("X-1", 2)])
def test_a_decorator_without_claims_is_refused(names: Any) -> None:
    with pytest.raises(ClaimsError, match=r'@check names the claims .*: @check\("LOG-12"\)'):
        check(*names)


def some(evidence: Any) -> CheckResult:
    return holds_if(True, "by hand", taken=1073741824)


def other(evidence: Any) -> CheckResult:
    return holds_if(True, "by hand")


@pytest.fixture(autouse=True)
def _unmarked() -> Iterator[None]:
    yield
    for function in (some, other):
        vars(function).clear()


def test_a_claim_is_checked_once() -> None:
    with pytest.raises(ClaimsError, match=r"test_judging\.py: some names X-1 twice"):
        check("X-1", "X-1")(some)
    with pytest.raises(ClaimsError, match=r"two checks of X-2: .*test_judging\.py: some and .*test_judging\.py: other"):
        by_claim(check("X-2")(some), check("X-2")(other))
    imported_twice = check("X-3")(other)
    assert collected_checks([module_of(imported_twice), module_of(imported_twice)])["X-3"].func is other


@pytest.mark.parametrize(
    ("text", "checked", "message"),
    [
        (CHECKED, [], "claims.toml: X-1 has no check: write a function under @check(\"X-1\") in checks.py, or give"),
        (CHECKED, ["X-1", "X-2"], "test_judging.py: some checks X-2, but claims.toml has no such claim; did you mean"),
        (CLAIM, ["X-1"], "claims.toml: X-1 has a formula and a check: "),
        (CLAIM.replace("formula", "reason"), ["X-1"], "claims.toml: X-1 has a reason why it cannot be tested and a"),
    ],
)  # fmt: skip
def test_claims_and_checks_must_match(text: str, checked: list[str], message: str) -> None:
    checks = by_claim(check(*checked)(some)) if checked else {}
    with pytest.raises(ClaimsError) as error:
        require_matching(parsed(text), checks, "claims.toml", "checks.py")
    assert message in str(error.value)


# ---------------------------------------------------------------- verdicts
def judged_by(function: Any, text: str = CHECKED, **changed: Any) -> Any:
    (claim,) = parsed(text)
    return judge_claim(dataclasses.replace(claim, **changed), ClaimCheck(function), None)


def test_a_result_decides_by_condition_by_the_claimed_figure_or_by_what_is_expected() -> None:
    assert judged_by(lambda _: holds_if(False, "", taken=1073741824)).drift == ("recorded holds, now wrong",)
    assert judged_by(lambda _: matches_figure("", 2 * GiB, GiB, taken=1073741824)).verdict == HOLDS
    assert judged_by(lambda _: matches_figure("", 2 * GiB, taken=1073741824)).verdict == WRONG
    assert judged_by(lambda _: as_recorded("", taken=1073741824, more=1)).verdict == HOLDS
    assert judged_by(lambda _: as_recorded("", taken=2)).drift == (
        "recorded holds, now wrong",
        "taken: recorded 1073741824, now 2",
    )
    assert judged_by(lambda _: as_recorded("")).verdict == WRONG
    assert sizes(held=3 * GiB, none=0) == {"held": "3.00 GiB", "none": "0 B"}


def test_a_check_that_breaks_is_drift_and_says_how() -> None:
    def broken(_: object) -> CheckResult:
        raise ZeroDivisionError("no tokens")

    got = judged_by(broken)
    assert (got.verdict, got.failed, got.drifted) == (None, "ZeroDivisionError: no tokens", True)
    assert got.as_dict()["check"] == "broken"


def test_what_only_a_gpu_gives_is_not_testable_and_no_drift() -> None:
    def unmeasured(_: object) -> CheckResult:
        raise NotMeasured("needs a GPU: python -m benchmarks")

    got = judged_by(unmeasured)
    assert (got.verdict, got.drifted, got.true) == (NOT_TESTABLE, False, "needs a GPU: python -m benchmarks")


def test_a_figure_that_nobody_computes_is_refused() -> None:
    with pytest.raises(ClaimsError, match="X-1: the correction names 'mean', which its check does not compute"):
        judged_by(some, correction="{mean}")


# ---------------------------------------------------------------- the shared evidence
class KdaEvidence(Evidence):
    op = "kda"


SMALL: dict[str, Any] = {"B": 1, "T": 8, "H": 1, "K": 4, "V": 4, "chunk_size": 4}


def test_what_is_measured_is_measured_once() -> None:
    said: list[str] = []
    evidence = KdaEvidence(say=said.append)
    train = evidence.reading("reported", "train", **SMALL)
    assert evidence.reading("reported", "train", **SMALL) is train
    assert evidence.peak("reported", "held", **SMALL) == evidence.reading("reported", "held", **SMALL).held_bytes
    assert said == ["kda/reported [incident, train] B=1 T=8 H=1 K=4 V=4 chunk_size=4"]
    assert evidence.peak("reported", "held", **SMALL | {"T": 16}) > evidence.peak("reported", "held", **SMALL)


def test_readings_are_those_of_each_phase_alone() -> None:
    from memfix.checks.form_call import FormCall
    from memfix.checks.inputs import Draw
    from memfix.checks.measuring import measure
    from memfix.checks.memory import bytes_of

    evidence = KdaEvidence()
    case = evidence.contract().case_of("incident", SMALL)
    for phase in ("forward", "held", "train"):
        alone = measure(FormCall(evidence.contract(), "wy", Draw(case)), phase, evidence.meter)
        assert evidence.peak("wy", phase, **SMALL) == bytes_of(alone, phase)


def test_evidence_reads_lines_and_ratios_of_a_form() -> None:
    evidence = KdaEvidence()
    full = 8 * 4 * 4 * 4
    (made,) = evidence.made_by("naive", "= decay_diag - forget_rank1", **SMALL)
    assert made.bytes == full
    assert sum(b.bytes == full for b in evidence.alive_after("naive", "= decay_diag - forget_rank1", **SMALL)) == 3
    assert evidence.largest("naive", **SMALL) >= full
    assert evidence.made_by("naive", function="no_such_function", **SMALL) == []
    assert evidence.times_below("naive", "forward", **SMALL) == 1
    naive, reported = (evidence.reading(form, "train", **SMALL).peak_bytes for form in ("naive", "reported"))
    assert evidence.times_below("reported", "train", **SMALL) == naive / reported


def test_formulas_know_the_dims_of_the_op_or_none() -> None:
    assert KdaEvidence().evaluate("B*T*e") == 16 * 256 * 4
    assert KdaEvidence().evaluate("B*T*e", T=1) == 64
    assert Evidence().dims == {}


def test_an_op_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match="no op 'kdaa'; did you mean 'kda'"):
        KdaEvidence().reading("naive", "train", op="kdaa")


def test_calls_on_the_cpu() -> None:
    assert (raised(int, "x"), raised(int, "1", base=8)) == ("ValueError", "nothing")
    assert default_of(check_default, "size") == 64
    with fixed_seed():
        first = torch.rand(1)
    state = torch.get_rng_state()
    with fixed_seed():
        assert torch.equal(torch.rand(1), first)
    assert torch.equal(torch.get_rng_state(), state)


def check_default(size: int = 64) -> None: ...


# ---------------------------------------------------------------- an incident's folder
CHECKS = """
from memfix.incidents.evidence import Evidence as Shared
from memfix.incidents.judging import ARITHMETIC, check, matches_figure

class Evidence(Shared):
    dims = {"T": 3}

@check("X-1")
def taken(evidence):
    return matches_figure(ARITHMETIC, evidence.evaluate("GiB"), taken=evidence.evaluate("GiB"))
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An incident ``toy`` beside the project's own."""
    monkeypatch.setattr(incidents, "__path__", [*incidents.__path__, str(tmp_path)])
    folder = tmp_path / "toy"
    folder.mkdir()
    for name in ("__init__.py", "incident.py"):
        (folder / name).touch()
    (folder / "claims.toml").write_text(CHECKED)
    (folder / "checks.py").write_text(textwrap.dedent(CHECKS))
    yield folder
    for name in [name for name in sys.modules if name.startswith("memfix.incidents.toy")]:
        del sys.modules[name]


def test_checks_are_found_in_a_file(toy: Path) -> None:
    (got,) = judge_claims(load_claims("toy"), load_checks("toy"))
    assert (got.verdict, got.drift, got.check) == (HOLDS, (), "taken")


def test_checks_need_no_evidence_of_their_own(toy: Path) -> None:
    without = CHECKS.replace('class Evidence(Shared):\n    dims = {"T": 3}\n', "")
    (toy / "checks.py").write_text(without)
    evidence = load_checks("toy").evidence()
    assert (evidence.incident_name, evidence.dims) == ("toy", {})


def test_checks_are_found_in_the_files_of_a_package(toy: Path) -> None:
    (toy / "checks").mkdir()
    (toy / "checks.py").rename(toy / "checks" / "sizes.py")
    (toy / "checks" / "__init__.py").write_text("from .sizes import Evidence\n")
    assert load_checks("toy").by_claim.keys() == {"X-1"}


def test_a_claim_without_a_check_names_both_files(toy: Path) -> None:
    (toy / "checks.py").write_text(CHECKS.replace("X-1", "X-2"))
    (toy / "claims.toml").write_text(CHECKED + CHECKED.replace("X-1", "X-2"))
    with pytest.raises(ClaimsError) as error:
        load_checks("toy")
    assert str(error.value).startswith(
        f'{toy / "claims.toml"}: X-1 has no check: write a function under @check("X-1") in {toy / "checks.py"}, or'
    )


def test_a_check_without_a_claim_names_both_files(toy: Path) -> None:
    (toy / "checks.py").write_text(CHECKS.replace('"X-1"', '"X-1", "X-9"'))
    with pytest.raises(ClaimsError) as error:
        load_checks("toy")
    place, claims = f"{toy / 'checks.py'}: taken", toy / "claims.toml"
    assert str(error.value) == f"{place} checks X-9, but {claims} has no such claim; did you mean 'X-1'?"


def test_claims_without_checks_py_are_refused(toy: Path) -> None:
    (toy / "checks.py").unlink()
    with pytest.raises(ClaimsError, match=r"claims\.toml: there is no checks\.py beside it; write one"):
        load_checks("toy")
