"""The contract of vocabulary. The incident: the report's 40,000 different words, cut to 10,000."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random

from ...contract import Contract, Dim, ObjectSpec
from ...laws import Scaling, SpeedBudget, at_most, below_naive
from ..bad_inputs import refused
from .bounded import bounded_vocabulary
from .naive import naive_vocabulary
from .streaming import streaming_vocabulary

_SPACES = (" ", "\n", "\t ", "\r\n", "\x0b", "\x1c", "\x85", "\u00a0", "\u2003", "\u3000")
_OTHERS = ("слово", "単語", "w\u0301", "<unk>", "<pad>")


@dataclass(frozen=True)
class SeededText:
    """A text that is generated while it is read: ``num_types`` different words, in pieces that may split a word."""

    num_types: int
    num_words: int
    seed: int

    def __iter__(self) -> Iterator[str]:
        random, text, left = Random(self.seed), "", self.num_words
        while left:
            numbers = random.choices(range(self.num_types), k=min(left, 60))
            words = [f"word{number}" if number % 16 else _OTHERS[number // 16 % 5] for number in numbers]
            text += random.choice(_SPACES).join(words) + random.choice(_SPACES)
            cut = max(0, len(text) - random.randrange(40))
            yield text[:cut]
            text, left = text[cut:], left - len(words)
        yield text.rstrip() if self.seed % 2 else text


def made_text(dims: Mapping[str, int], seed: int) -> SeededText:
    return SeededText(dims["types"], dims["types"] * dims["repeats"], seed)


contract = Contract(
    "vocabulary",
    naive=naive_vocabulary,
    forms={"streaming": streaming_vocabulary, "bounded": bounded_vocabulary},
    dims={"types": Dim(1, 200), "repeats": Dim(0, 6), "cap": Dim(3, 250), "max_types": Dim(4, 250)},
    inputs=[ObjectSpec("text", "types repeats", make=made_text)],
    choices={"specials": (("<unk>",), ("<unk>", "<pad>"), ("<pad>", "word1", "<unk>"))},
    cases={
        "incident": {"types": 40_000, "repeats": 1, "cap": 10_000, "max_types": 4096},
        "small": {"types": 1024, "repeats": 2, "cap": 100, "max_types": 128},
    },
    budgets=[
        *below_naive("streaming", "incident", forward=1.5),
        *below_naive("bounded", "incident", forward=3),
        *at_most("streaming", forward="260*types + 260*cap + 131072"),
        *at_most("bounded", forward="260*max_types + 520*cap + 262144"),
    ],
    scaling=[
        Scaling("streaming", dim="repeats", at_most=0, case="small", phase="forward", doublings=3),
        Scaling("streaming", dim="types", at_most=1, case="small", phase="forward", doublings=3),
        Scaling("bounded", dim="types", at_most=0, case="small", phase="forward", doublings=4),
        Scaling("bounded", dim="repeats", at_most=0, case="small", phase="forward", doublings=3),
    ],
    speed=[SpeedBudget("streaming", case="incident", phase="forward", times_naive=1.1)],
    bad_inputs=[
        refused("cap 0", "cap must be at least 1, got 0", cap=0),
        refused("fractional cap", "cap must be an int, got 1.5", TypeError, cap=1.5),
        refused(
            "more specials than the cap", "cap must be at least 2, the number of specials, got 1",
            cap=1, specials=("<unk>", "<pad>"),
        ),
        refused("no specials", "specials must be one or more different words", specials=()),
        refused("the same special twice", "specials must be one or more diff", specials=("<unk>", "<unk>")),
        refused("a special of two words", "words without whitespace, got ('<un k>',)", specials=("<un k>",)),
        refused("a number as text", "or an iterable of them, got bytes", TypeError, text=[b"bytes"]),
        refused("no types", "max_types must be at least 1, got 0", max_types=0),
    ],
    memory="host",
)  # fmt: skip
