"""Counts of at most ``max_types`` different words are in memory; the others are in temporary files until the end.

When there are too many words, all counts are appended to 16 files, chosen by the words' hashes, and counting starts
anew. At the end all counts of a word are in one file, so that the files can be ranked one after the other. A file with
too many words is divided again.

Sketches such as Space-Saving or Misra-Gries need no files, but they err by up to ``N / max_types`` occurrences of ``N``
words and depend on the order of the text. Here the counts are exact and the order does not matter.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO
from zlib import crc32

from ..arguments import require_at_least_one
from .ranking import UNKNOWN, Entry, Ranking
from .text import Text, words_in

_BITS = 4  # bits of a hash that choose a file
_READ_CHARACTERS = 2 * 2**10  # characters of lines that are read at once
_LEVELS = 32 // _BITS  # all bits of the hash are used then: words in the same file cannot be divided further


def bounded_vocabulary(
    text: Text,
    *,
    cap: int | None = None,
    specials: tuple[str, ...] = (UNKNOWN,),
    max_types: int = 2**18,
    folder: str | os.PathLike[str] | None = None,
) -> list[Entry]:
    """Equals ``naive_vocabulary(text, cap=cap, specials=specials)``: the counts are exact, the error is 0.

    Peak: ``max_types`` different words, about 140 bytes each, twice ``cap`` entries, and the words of one piece,
    however many words the text has. On disk, in ``folder`` or the default folder of temporary files: the length of a
    word and a few digits, each time that its count is written.
    """
    require_at_least_one("max_types", max_types)
    ranking = Ranking(cap, specials)
    with tempfile.TemporaryDirectory(dir=folder, prefix="memfix-") as files:
        _rank(ranking, words_in(text), max_types, Path(files), level=0)
    return ranking.entries()


def _rank(ranking: Ranking, parts: Iterable[Iterable[str]], max_types: int, folder: Path, level: int) -> None:
    """Add the counts of ``parts`` to ``ranking``. A part is a list of words, or a mapping of words to counts."""
    counts: Counter[str] = Counter()
    files: list[Path] = []
    for part in parts:
        counts.update(part)
        if len(counts) > max_types and level < _LEVELS:
            files = files or [folder / f"{number:x}" for number in range(2**_BITS)]
            _append(counts, files, level)
            counts.clear()
    if files:
        _append(counts, files, level)
        counts.clear()
    else:
        ranking.add(counts)
    for file in files:
        divided = file.with_name(f"{file.name}-divided")
        divided.mkdir()
        _rank(ranking, _counts_in(file), max_types, divided, level + 1)
        divided.rmdir()
        file.unlink()


def _append(counts: Counter[str], files: list[Path], level: int) -> None:
    with ExitStack() as stack:
        opened = [stack.enter_context(_open(file, "a")) for file in files]
        writes = [file.write for file in opened]
        shift, mask = level * _BITS, 2**_BITS - 1
        for word, count in counts.items():
            # not Python's hash: it differs between processes, and with it the peak memory would
            writes[crc32(word.encode("utf-8", "surrogatepass")) >> shift & mask](f"{word} {count}\n")


def _counts_in(path: Path) -> Iterator[Counter[str]]:
    with _open(path, "r") as file:
        while lines := file.readlines(_READ_CHARACTERS):
            counts: Counter[str] = Counter()
            for line in lines:
                word, _, count = line.partition(" ")
                counts[word] += int(count)
            yield counts


def _open(path: Path, mode: str) -> IO[str]:
    # newline: only \n ends a line, since a word has no whitespace; surrogatepass: strings may have lone surrogates
    return path.open(mode, encoding="utf-8", errors="surrogatepass", newline="\n")
