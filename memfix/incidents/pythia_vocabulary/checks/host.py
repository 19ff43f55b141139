"""Checks of claims about batches and the vocabulary, which are in host memory."""

from __future__ import annotations

from collections import Counter

import torch

from ....laws import NAIVE
from ....ops.batches import ZipfCorpus, batches
from ....ops.vocabulary import UNKNOWN, vocabulary
from ...judging import ON_CPU, CheckResult, check, decimal, holds_if
from . import Evidence

HOST = "host meter"
TOKENS = (32_768, 65_536)  # in a corpus, and in one that is twice as long
WIKITEXT_TOKENS = 2_088_628  # of WikiText-2, as published


def _text(num_words: int, num_types: int) -> list[str]:
    """``num_words`` words by Zipf's law, then each of the types once, so that all occur."""
    ids = ZipfCorpus(num_words, num_types, seed=1).rows(torch.tensor([0]), num_words)[0]
    return [f"word{number}" for number in [*ids.tolist(), *range(num_types)]]


@check("PYT-01")
def every_word(evidence: Evidence) -> CheckResult:
    """Count the entries of the naive vocabulary, which has no cap."""
    text = _text(3000, 400)
    entries = evidence.contract("vocabulary").naive(" ".join(text))
    return holds_if(len(entries) == len(set(text)) + 1, ON_CPU, words=len(text), entries=len(entries), specials=1)


@check("PYT-09")
def top_words(evidence: Evidence) -> CheckResult:
    """Cap a vocabulary below the number of words, for a text and for its reverse; and above the number of words."""
    text = _text(20_000, 12_000)
    counts = Counter(text)
    made = vocabulary(" ".join(text), cap=10_000)
    kept, left = set(made.words) - {UNKNOWN}, set(counts) - set(made.words)
    are_top = min(counts[word] for word in kept) >= max(counts[word] for word in left)
    same = made == vocabulary(" ".join(reversed(text)), cap=10_000)
    all_kept = len(vocabulary(" ".join(text), cap=20_000)) == len(counts) + 1
    return holds_if(
        len(made) == 10_000 and are_top and same and all_kept,
        ON_CPU, entries=len(made), kept=len(kept), types=len(counts),
    )  # fmt: skip


@check("PYT-10")
def rare_words_are_unknown(evidence: Evidence) -> CheckResult:
    """Encode and decode a text: words within the cap must come back as they were, the others as <unk>."""
    text = _text(2000, 300)
    made = vocabulary(" ".join(text), cap=100)
    returned = made.decode(made.encode(" ".join(text))).split()
    expected = [word if word in made.ids else UNKNOWN for word in text]
    unknown = round(made.unknown_rate() * len(text))
    holds = returned == expected and unknown == returned.count(UNKNOWN) > 0
    return holds_if(holds, ON_CPU, unknown=unknown, words=len(text))


@check("PYT-11")
def whole_data_set(evidence: Evidence) -> CheckResult:
    """Measure what each token adds to the naive list of batches."""
    small, large = (evidence.peak(NAIVE, "forward", op="batches", N=number) for number in TOKENS)
    a_token = _bytes_a_token(large - small, TOKENS[1] - TOKENS[0])
    return holds_if(a_token >= 16, HOST, bytes_a_token=a_token, of_wikitext=decimal(a_token * WIKITEXT_TOKENS, "MB"))


@check("PYT-12")
def streamed(evidence: Evidence) -> CheckResult:
    """Compare the batches of both forms, and measure what a corpus of twice the length adds."""
    corpus = ZipfCorpus(5000, 100)
    naive = evidence.contract("batches").naive(corpus, batch_size=3, length=16, seed=1)
    made = list(batches(corpus, batch_size=3, length=16, seed=1))
    same = len(naive) == len(made) and all(
        torch.equal(torch.stack(one), torch.stack(other)) for one, other in zip(made, naive, strict=True)
    )
    # more examples than one block of the shuffled order
    shape, sizes = {"length": 8, "batch_size": 512}, [4 * number for number in TOKENS]
    small, large = (evidence.peak("streaming", "forward", op="batches", N=number, **shape) for number in sizes)
    more = _bytes_a_token(large - small, sizes[1] - sizes[0])
    return holds_if(same and not more, f"{HOST}, {ON_CPU}", larger=TOKENS[1] // TOKENS[0], more=more)


def _bytes_a_token(more_bytes: int, more_tokens: int) -> int:
    """The bytes per token, rounded to whole int64 ids: other processes move a reading by a few pages."""
    return 8 * round(more_bytes / more_tokens / 8)
