from memfix.incidents.evidence import Evidence
from memfix.incidents.judging import METER, CheckResult, check, matches_figure, sizes
from memfix.incidents.profile import INPUTS, PARAMETERS


@check("IMG-02", batch_size=8)
@check("IMG-03", batch_size=16)
def batch_bytes(evidence: Evidence, batch_size: int) -> CheckResult:
    taken = evidence.rows(f"training.batch_size={batch_size}")[PARAMETERS].kinds[INPUTS]
    return matches_figure(METER, taken, **sizes(taken=taken))
