"""Text read in pieces, from strings and files, and cut into words; a word may span several pieces."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterable, Iterator

from ...errors import CorpusError

Text = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""A text, a file, or an iterable of text pieces and files. The end of a file ends a word; that of a piece does not."""

READ_BYTES = 256 * 2**10
PIECE_CHARACTERS = 2 * 2**10
"""Characters that are cut into words at once. Their words are still in the CPU's L1 cache when they are counted."""


def words_in(text: Text) -> Iterator[list[str]]:
    """Yield the words of ``text``, cut as by ``str.split``: one list for each piece, with the words that end in it."""
    begun: list[str] = []  # parts of a word that may continue in the next piece
    for piece in _pieces(text):
        words = piece.split()
        if begun and piece[0].isspace():
            words.insert(0, "".join(begun))
            begun = []
        elif begun:
            begun.append(words[0])
            if len(words) == 1 and not piece[-1].isspace():
                continue
            words[0], begun = "".join(begun), []
        if words and not piece[-1].isspace():
            begun = [words.pop()]
        yield words
    if begun:
        yield ["".join(begun)]


def _pieces(text: Text) -> Iterator[str]:
    """Yield pieces of text of 1 to ``PIECE_CHARACTERS`` characters."""
    if isinstance(text, str):
        yield from (text[at : at + PIECE_CHARACTERS] for at in range(0, len(text), PIECE_CHARACTERS))
    elif isinstance(text, os.PathLike):
        for block in _blocks_of_file(text):
            yield from _pieces(block)
        yield "\n"
    else:
        for part in text:
            if not isinstance(part, (str, os.PathLike)):
                raise TypeError(f"text must be a string, a path, or an iterable of them, got {type(part).__name__}")
            yield from _pieces(part)


def _blocks_of_file(path: os.PathLike[str]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        file = open(path, "rb", buffering=0)  # noqa: SIM115 - what is raised below is no failure to open it
    except OSError as error:
        raise CorpusError(f"cannot read the text {path}: {error.strerror}") from None
    with file:
        stamp = _stamp(file.fileno())
        position = 0
        while True:
            data = file.read(READ_BYTES)
            if _stamp(file.fileno()) != stamp:
                raise CorpusError(f"{path} changed while it was read; read it again")
            if (zero := data.find(0)) >= 0:
                raise CorpusError(f"{path} is a binary file: byte {position + zero:,} is zero")
            pending, _ = decoder.getstate()
            try:
                block = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                at = position - len(pending) + error.start
                raise CorpusError(f"{path} is not UTF-8: {error.reason} at byte {at:,}") from None
            yield block
            if not data:
                return
            position += len(data)


def _stamp(file: int) -> tuple[int, int]:
    status = os.fstat(file)
    return status.st_size, status.st_mtime_ns
