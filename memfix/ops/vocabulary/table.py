"""A vocabulary: words by id and ids by word."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ...atomic_write import write_whole
from ...errors import CorpusError
from .ranking import Entry
from .text import Text, words_in

_FORMAT = "memfix vocabulary 1"


@dataclass(frozen=True)
class Vocabulary:
    """Words in the order of their ids, each with its count in the text that the vocabulary was made from.

    Id 0 is the unknown word: it stands for all words that have no id, and its count includes theirs.
    """

    entries: tuple[Entry, ...]

    def __len__(self) -> int:
        return len(self.entries)

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The words by id."""
        return tuple(word for word, _ in self.entries)

    @cached_property
    def ids(self) -> dict[str, int]:
        """The ids by word."""
        return {word: number for number, word in enumerate(self.words)}

    def encode(self, text: Text) -> list[int]:
        """The ids of all words of ``text``."""
        return [number for ids in self.encode_pieces(text) for number in ids]

    def encode_pieces(self, text: Text) -> Iterator[list[int]]:
        """Iterate over the words' ids, a piece of the text at a time, as :func:`memfix.ops.batches.write_tokens` takes
        them."""
        id_of = self.ids.get
        return ([id_of(word, 0) for word in words] for words in words_in(text))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the words of ``ids`` (also a tensor), joined by spaces."""
        numbers = [operator.index(number) for number in ids]
        for number in numbers:
            if not 0 <= number < len(self):
                raise CorpusError(f"token id {number} is not in the vocabulary of {len(self)}")
        return " ".join([self.words[number] for number in numbers])

    def unknown_rate(self, text: Text | None = None) -> float:
        """Return the fraction of words without an id in ``text`` (default: the text that the vocabulary comes from)."""
        if text is None:
            unknown, words = self.entries[0][1], sum(count for _, count in self.entries)
        else:
            unknown = words = 0
            for ids in self.encode_pieces(text):
                unknown, words = unknown + ids.count(0), words + len(ids)
        return unknown / words if words else 0.0

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the vocabulary as JSON."""
        content = {"format": _FORMAT, "entries": self.entries}
        write_whole(Path(path), json.dumps(content, indent=0) + "\n", "the vocabulary")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Vocabulary:
        """Read what :meth:`save` wrote."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            entries = tuple((word, count) for word, count in content["entries"])
            if content["format"] != _FORMAT or not entries or len(dict(entries)) < len(entries):
                raise ValueError(f"it must have the format {_FORMAT!r} and different words")
            if any(type(word) is not str or type(count) is not int for word, count in entries):
                raise ValueError("an entry is a word and a count")
        except OSError as error:
            raise CorpusError(f"cannot read the vocabulary {path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise CorpusError(f"{path} is not a vocabulary: {error}") from None
        return Vocabulary(entries)
