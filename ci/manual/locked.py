"""Tables of the lock: the bytes of every form."""

from __future__ import annotations

from collections.abc import Iterable

from memfix.gate.lock import Key, read_lock
from memfix.laws import NAIVE, PHASES
from memfix.units import format_bytes

from .stored import LOCK


def ops_table() -> list[str]:
    """Every form at its incident: simulated bytes, and the ratio to naive."""
    lock = read_lock(LOCK)
    lines = ["| op | form | forward | held | train | train below naive |", "|---|---|--:|--:|--:|--:|"]
    for op, form in dict.fromkeys((op, form) for op, form, case, _ in _naive_first(lock) if case == "incident"):
        lines.append(f"| `{op}` | `{form}` | {_sizes(lock, op, form, 'incident')} |")
    return lines


def best_table() -> list[str]:
    """Every op at its incident: naive, and the form with the smallest peak in training."""
    lock = read_lock(LOCK)
    train = {
        (op, form): size for (op, form, case, phase), size in lock.items() if (case, phase) == ("incident", "train")
    }
    lines = ["| op | naive, train | smallest form | its train step | below naive |", "|---|--:|---|--:|--:|"]
    for op in sorted({op for op, _ in train}):
        form, size = min(((f, size) for (o, f), size in train.items() if o == op), key=lambda found: found[1])
        naive = train[op, NAIVE]
        sizes = f"{format_bytes(naive)} | `{form}` | {format_bytes(size)}"
        lines.append(f"| [`{op}`](docs/ops/{op}.md) | {sizes} | {naive / size:.1f}x |")
    return lines


def npt_table() -> list[str]:
    """The modulated linear layer at both widths of a feed-forward layer."""
    return _cases_table("npt_linear", "columns F", {"11,008": "incident", "14,336": "llama_8b"})


def feed_forward_table() -> list[str]:
    """The gated feed-forward layer at its incident, in both dtypes."""
    return _cases_table("geglu_feed_forward", "dtype", {"float32": "incident", "bfloat16": "incident_bf16"})


def attention_table() -> list[str]:
    """Attention at its incident: with and without its map, in both dtypes, and with fewer keys."""
    cases = {
        "1,024 keys, float32": "incident",
        "with the map": "incident_with_map",
        "1,024 keys, bfloat16": "incident_bf16",
        "256 keys, float32": "cross",
    }
    return _cases_table("attention", "1,024 queries to", cases)


def _cases_table(op: str, heading: str, cases: dict[str, str]) -> list[str]:
    """Every form of an op at some of its cases; ``cases`` maps the names in the table to cases."""
    lock = read_lock(LOCK)
    lines = [f"| {heading} | form | forward | held | train | train below naive |", "|--:|---|--:|--:|--:|--:|"]
    forms = dict.fromkeys(form for o, form, *_ in _naive_first(lock) if o == op)
    for name, case in cases.items():
        lines += [f"| {name} | `{form}` | {_sizes(lock, op, form, case)} |" for form in forms]
    return lines


def _sizes(lock: dict[Key, int], op: str, form: str, case: str) -> str:
    """The cells of a row: the bytes of each phase, and the ratio of naive's train step to this one."""
    forward, train, held = (lock[op, form, case, phase] for phase in PHASES)
    below = "" if form == NAIVE else f"{lock[op, NAIVE, case, 'train'] / train:.1f}x"
    return " | ".join([*map(format_bytes, (forward, held, train)), below])


def one_hot_figure() -> list[str]:
    """The bytes of one-hot rows at the report's sizes: a bar for every form of the embedding and of the loss."""
    lock = read_lock(LOCK)
    largest = max(lock["embedding", NAIVE, "report", "train"], lock["one_hot_loss", NAIVE, "incident", "train"])
    lines = ["```text"]
    for words, cases in (("50,000", ("report", "incident")), ("10,000", ("capped", "capped"))):
        for phase in ("forward", "train"):
            lines.append(f"{words} words, {phase}")
            for op, case in zip(("embedding", "one_hot_loss"), cases, strict=True):
                for form in [form for o, form, c, p in _naive_first(lock) if (o, c, p) == (op, case, phase)]:
                    size = lock[op, form, case, phase]
                    bar = "█" * max(1, round(60 * size / largest))
                    lines.append(f"  {op:12} {form:6} {format_bytes(size):>11}  {bar}")
    return [*lines, "```"]


def _naive_first(keys: Iterable[Key]) -> list[Key]:
    return sorted(keys, key=lambda key: (key[0], key[1] != NAIVE, *key[1:]))
