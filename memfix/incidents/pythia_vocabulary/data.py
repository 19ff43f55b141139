"""The text of a run: the words of a file or of a seeded Zipf corpus, cut into examples of token ids."""

from __future__ import annotations

import functools
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from ...errors import UsageError
from ...ops.batches import TokenFile, Windows, ZipfCorpus, write_tokens
from ...ops.vocabulary import vocabulary
from ..config import DataConfig, RunConfig
from ..schema import setting

ZIPF = "zipf"


@dataclass(frozen=True)
class TextData(DataConfig):
    """The ``data`` section. An example is ``context_length`` words; the target of each is the word after it."""

    context_length: int = setting(128, low=1, about="tokens per example")
    path: str = setting(ZIPF, about="a text file; or zipf, a synthetic corpus by Zipf's law")
    tokens: int = setting(
        2_088_628, low=2, about="for zipf: number of words in the corpus; the default is that of WikiText-2"
    )
    types: int = setting(33_278, low=1, about="for zipf: number of different words; the default is that of WikiText-2")


def open_windows(config: RunConfig) -> Windows:
    """The examples of a run, by number."""
    data = config.data
    stamp: tuple[int, ...] = ()
    if data.path != ZIPF:
        try:
            status = os.stat(data.path)
        except OSError as error:
            raise UsageError(f"data.path: cannot read {data.path}: {error.strerror}") from None
        stamp = (status.st_size, status.st_mtime_ns)
    return _windows(data, config.model.vocab_size, stamp)


@functools.lru_cache(maxsize=1)
def _windows(data: TextData, vocab_size: int, stamp: tuple[int, ...]) -> Windows:
    corpus = CappedZipf(data, vocab_size) if data.path == ZIPF else _encoded(Path(data.path), vocab_size)
    return Windows(corpus, data.context_length, seed=data.seed)


def _encoded(path: Path, vocab_size: int) -> TokenFile:
    """The ids of a text by its most frequent words, in a temporary file that is gone when the result is."""
    words = vocabulary(path, cap=vocab_size)
    if not any(count for _, count in words.entries):
        raise UsageError(f"data.path: {path} has no words")
    with tempfile.TemporaryDirectory() as folder:
        return write_tokens(Path(folder) / "tokens.npy", words.encode_pieces(path), vocab_size)


class CappedZipf:
    """A Zipf corpus whose rare words are ``<unk>``, which is id 0; the most frequent word has id 1."""

    def __init__(self, data: TextData, vocab_size: int) -> None:
        self._corpus, self._vocab_size = ZipfCorpus(data.tokens, data.types, seed=data.seed), vocab_size

    def __len__(self) -> int:
        return len(self._corpus)

    def rows(self, starts_B: torch.Tensor, width: int) -> torch.Tensor:
        ids = self._corpus.rows(starts_B, width).add_(1)
        return ids.masked_fill_(ids >= self._vocab_size, 0)
